"""Fixtures for tests of clients and of everything built on them."""

from tests.support.client_fixtures import *  # noqa: F403
