"""Fixtures for tests of telemetry."""

from tests.support.client_fixtures import *  # noqa: F403
