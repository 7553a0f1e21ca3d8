"""Promises in seconds: `make test` must pass on a busy machine, `make extended` checks the seconds themselves.

A test calls `check_elapsed(began, promised)`, or `check_seconds(measured, promised)`. In `make test` this only fails
after a minute, when something hangs. In `make extended`, which sets LEASEHOLD_MEASURE=1, it fails if the promise was
broken. There the plug-in below runs a failed test a second time and reports that. If the test fails again while the
machine is too busy to measure seconds, the plug-in skips the test with that reason.

Every test that calls one of them belongs to both tiers. A test that makes no sense without real seconds, such as one
with a ttl so short that a busy machine loses the lease, is marked `extended` and runs in the second tier only. The
plug-in marks those that give calls of a real server less than 3 seconds, or leases less than 2: on a busy machine such
a call may fail, and such a lease may be over when it is granted.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

MEASURING: Final = bool(os.environ.get("LEASEHOLD_MEASURE"))
_HANGS: Final = 60.0  # in `make test`: more than any promise of the tests
_MEASURES: Final = {"check_elapsed", "check_seconds"}
_CALL_TIMEOUT: Final = 20.0  # of clients in real time whose tests state none; by default it is 5.0
# What a test may state, and the seconds below which a busy machine may exceed it.
_STATED: Final = ((re.compile(r"\bcall_timeout=([0-9.]+)\b"), 3.0), (re.compile(r"\bttl=([0-9.]+)\b"), 2.0))
_REAL_SERVERS: Final = ("tests/engines/", "tests/fences/", "tests/records/stores/", "tests/server/", "tests/cli/")
_BUSY: Final = 0.002  # seconds that a thread waited for a processor, each time it was ready to run


def check_elapsed(began: float, promised: float, why: str = "") -> None:
    """Fail if more than `promised` seconds have passed since `began`, a time of `time.monotonic()`."""
    check_seconds(time.monotonic() - began, promised, why)


def check_seconds(elapsed: float, promised: float, why: str = "") -> None:
    """The same for seconds that the test has measured itself, for example in another process."""
    limit = promised if MEASURING else max(_HANGS, promised)
    assert elapsed < limit, f"took {elapsed:.2f} s, promised: {promised:.2f} s{why and ': '}{why}"


def give_calls_more_time(client_class: Any) -> None:
    """Give clients of this process a longer `call_timeout`, unless the test states one or simulates the time."""
    init = client_class.__init__

    @functools.wraps(init)
    def init_with_more_time(self: object, *args: Any, **options: Any) -> None:
        if options.get("runtime") is None:
            options.setdefault("call_timeout", _CALL_TIMEOUT)
        init(self, *args, **options)

    client_class.__init__ = init_with_more_time


class MeasuredTests:
    """The pytest plug-in: marks the tests that measure, and runs one that fails a second time."""

    @pytest.hookimpl(tryfirst=True)  # before pytest chooses by mark
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            function = getattr(item, "function", None)
            if function is None:
                continue
            if _measures(function):
                item.add_marker(pytest.mark.measured)
            if item.nodeid.startswith(_REAL_SERVERS) and any(map(_is_impatient, (function, *_fixtures(item)))):
                item.add_marker(pytest.mark.extended)

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not MEASURING:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if any(report.failed for report in reports):
            first = next(report for report in reports if report.failed)
            before = _cpu_waits()
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            waited = average_wait(before, _cpu_waits())
            for report in reports:
                report.sections.append(("The first run failed", first.longreprtext))
                if report.failed and waited > _BUSY:
                    report.outcome = "skipped"
                    reason = f"machine too busy: threads waited {1000 * waited:.0f} ms for a processor"
                    report.longrepr = (str(item.path), None, f"Skipped: {reason}")
                elif report.when == "call" and report.passed:
                    report.user_properties.append(("retried", first.longreprtext.splitlines()[-1]))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        retried = [
            (report.nodeid, why)
            for report in terminalreporter.stats.get("passed", ())
            for name, why in report.user_properties
            if name == "retried"
        ]
        if retried:
            terminalreporter.section("passed only in the second run")
            for nodeid, why in retried:
                terminalreporter.line(f"{nodeid}: {why}")


@functools.cache  # a test with parameters is one function for many items
def _measures(test: Any) -> bool:
    return not _MEASURES.isdisjoint(_names(test.__code__))


def _fixtures(item: Any) -> Iterator[Any]:
    """The functions of a test's fixtures, without those of pytest's plug-ins."""
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        if definitions[-1].func.__module__.startswith("tests"):
            yield definitions[-1].func


@functools.cache
def _is_impatient(test: Any) -> bool:
    """Whether a test or fixture, or a helper of ours that it calls, gives calls less time than a busy machine may
    need."""
    named = (test.__globals__.get(name) for name in set(_names(test.__code__)))
    helpers = [each for each in named if str(getattr(each, "__module__", "")).startswith("tests")]
    methods = [each for helper in helpers if inspect.isclass(helper) for each in vars(helper).values()]
    return any(_states_few_seconds(each) for each in (test, *helpers, *methods) if inspect.isfunction(each))


@functools.cache
def _states_few_seconds(function: Any) -> bool:
    code = inspect.unwrap(function).__code__  # inspect.getsource() takes a second for all tests, in every worker
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : _last_line(code)]
    source = "".join(lines)
    return any(float(seconds) < limit for stated, limit in _STATED for seconds in stated.findall(source))


def _last_line(code: CodeType) -> int:
    inner = (_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return max([line for *_, line in code.co_lines() if line is not None] + [*inner])


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _cpu_waits() -> dict[str, tuple[int, int]]:
    """For each thread of this process: nanoseconds it was ready but not running, and how often it ran (Linux)."""
    found: dict[str, tuple[int, int]] = {}
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{thread}/schedstat") as stat:
                _, waited, times = map(int, stat.read().split())
                found[thread] = (waited, times)
    return found


def average_wait(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> float:
    """Seconds that a thread waited for a processor, on average each time it was ready. 0 if that is unknown."""
    waited = times = 0
    for thread, (ended_waited, ended_times) in after.items():
        began_waited, began_times = before.get(thread, (0, 0))
        waited += ended_waited - began_waited
        times += ended_times - began_times
    return waited / times / 1e9 if times else 0.0
