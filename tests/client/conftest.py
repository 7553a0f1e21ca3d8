"""The fixtures of tests of clients and of what is built on them."""

from tests.support.client_fixtures import *  # noqa: F403
