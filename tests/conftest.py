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

import harness.rigs  # noqa: F401  # makes the rigs of real servers known by name
from harness.servers.shared import serve_workers
from tests.support.tiers import OneRuntimePerEngine
from tests.support.timing import MeasuredTests

# kazoo's threads draw from the global random generator at any time. Hypothesis checks whether a strategy uses that
# generator and would blame the strategy. So kazoo gets its own generator.
kazoo.protocol.connection.random = kazoo.retry.random = random.Random()

# A shell starts background jobs with SIGINT ignored, and children inherit that: no test could interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        serve_workers()


def pytest_collection_finish() -> None:
    """Freeze the thousands of collected tests so that the garbage collector skips them. Otherwise each
    `gc.collect()` takes 0.2 s, and some tests call it at every step."""
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
