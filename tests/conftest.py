"""For all tests."""

import gc
import os
import random
import sys
from collections.abc import Iterator

import kazoo.protocol.connection
import kazoo.retry
import pytest

import harness.rigs  # noqa: F401  # makes the rigs of real servers known by name

# kazoo's threads draw from the program's own generator, whenever they like. Hypothesis looks whether a strategy does,
# and would take them for one: they get a generator of their own.
kazoo.protocol.connection.random = kazoo.retry.random = random.Random()

# Coverage finds the workers of xdist by this. The processes that their tests start are not measured: there are two
# thousand, each would take twice as long, and what is gated is shown without them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: looked through each time, a `gc.collect()` takes 0.2 s, and some
    tests call it at every step."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def untraced() -> Iterator[None]:
    """Without coverage, which makes pure Python four times slower: for what runs the same lines a thousand times over,
    where a smaller sibling has shown them."""
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)
