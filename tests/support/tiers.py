"""Which combinations of a test run in the first two tiers. `make faults` runs the rest.

A test over several resources that starts processes keeps one resource of each kind: `first_tier`.

A test that would run on one engine in blocking mode and under asyncio runs in one of them, which a checksum of its name
chooses: over all engines it still meets both. What differs is below the engines, in `leasehold.runtime`. So do the
tests of the health probe, a file for each engine. The memory engine is quick and has both. A bug that is planted to
test the cases is looked for in one of them, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any, Final
from zlib import crc32

import pytest

from leasehold.testing.conformance.rig import RUNTIMES

_SAME_FOR_ALL_ENGINES: Final = re.compile(
    r"tests/(conformance/|engines/test_|engines/\w+/test_health\.py|records/stores/)"
)


def first_tier(values: Iterable[str], kept: Collection[str]) -> list[Any]:
    """Parameters of a test: those that are not `kept` are left to `make faults`."""
    return [pytest.param(value, marks=() if value in kept else pytest.mark.faults) for value in values]


class OneRuntimePerEngine:
    """The pytest plug-in: marks `faults` what runs in the other runtime too."""

    @pytest.hookimpl(tryfirst=True)  # before pytest chooses by mark
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        pairs: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
        for item in items:
            nodeid = item.nodeid  # put together at every access
            if not _SAME_FOR_ALL_ENGINES.match(nodeid):
                continue
            words = nodeid.partition("[")[2].rstrip("]").split("-")
            runtime = next((word for word in words if word in RUNTIMES), None)
            if runtime and ("memory" not in words or "http" in words):
                pairs[nodeid.replace(runtime, "", 1)][runtime] = item
        for name, pair in pairs.items():
            if len(pair) == len(RUNTIMES):
                pair[RUNTIMES[crc32(name.encode()) % 2]].add_marker(pytest.mark.faults)
