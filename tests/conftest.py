"""Settings and fixtures for all tests."""

import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator

import kazoo.protocol.connection
import kazoo.retry
import pytest
from hypothesis import HealthCheck, settings

import harness.rigs  # noqa: F401  # makes the rigs of real servers known by name
from harness.servers.folders import sweep
from harness.servers.shared import serve_workers
from leasehold.client.base import BaseClient
from tests.support.tiers import OneRuntimePerEngine
from tests.support.timing import MeasuredTests, give_calls_more_time

SETTINGS_OF_TESTS = {"LEASEHOLD_MEASURE", "LEASEHOLD_SEEDS", "LEASEHOLD_PICTURES", "LEASEHOLD_TEST_SERVERS"}

# kazoo's threads draw from the global random generator at any time. Hypothesis checks whether a strategy uses that
# generator and would blame the strategy. So kazoo gets its own generator.
kazoo.protocol.connection.random = kazoo.retry.random = random.Random()

# Where a call's deadline is not the subject of a test, a busy machine must not reach it.
give_calls_more_time(BaseClient)

# A property holds however long the machine takes for an example or to make one up. By default 0.2 s is a failure.
settings.register_profile("any-machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

# A shell starts background jobs with SIGINT ignored, and children inherit that: no test could interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What a shell, or `leasehold run` around the tests, has set is for other programs; the tests set what they test.
for name in [name for name in os.environ if name.startswith("LEASEHOLD_") and name not in SETTINGS_OF_TESTS]:
    del os.environ[name]

# Coverage uses this variable to find the xdist workers. Remove it here, so that the processes that tests start are not
# measured: there are two thousand, each would take twice as long, and the coverage gate needs none of them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


@pytest.fixture(autouse=True)
def _loggers_stay_as_they_were() -> Iterator[None]:
    """Commands that run in the test's own process set up the loggers, and later tests would capture nothing."""
    loggers = [logging.getLogger(name) for name in ("leasehold", "leasehold.waiting", "leasehold.server.files")]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.propagate, logger.handlers[:] = propagate, handlers
        if logger.level != level:
            logger.setLevel(level)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(MeasuredTests())
    config.pluginmanager.register(OneRuntimePerEngine())
    if not hasattr(config, "workerinput"):
        sweep()
        if config.getoption("numprocesses", None):
            serve_workers()


def pytest_sessionstart() -> None:
    """Collecting makes millions of objects that stay: looking for garbage among them takes a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freeze the thousands of collected tests so that the garbage collector skips them. Otherwise each
    `gc.collect()` takes 0.2 s, and some tests call it at every step. What is garbage already stays: to look for it
    among so many objects takes 0.7 s, in every worker."""
    gc.enable()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze what the tests of a file have left: the frameworks they imported are as many objects as all tests."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def untraced() -> Iterator[None]:
    """Run a test without coverage, which makes pure Python four times slower. For tests that run the same lines a
    thousand times, when a smaller test already covers those lines."""
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)
