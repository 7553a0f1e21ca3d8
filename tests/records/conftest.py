"""Fixtures of the client tests, shared with the records tests."""

from tests.support.client_fixtures import *  # noqa: F403
