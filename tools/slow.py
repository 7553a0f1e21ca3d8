"""A pytest plug-in that reports where a run's time goes: `make slow`, `make slow ARGS=tests/core`.

A run is limited by the processors, or by its workers: most of a test with a server is waiting, for a ttl, say. So this
plug-in measures for each test the processor time of its worker and of all processes below it, running or ended, and the
wall time; the rest of the wall time is waiting. On a busy machine that includes waiting for a processor, so it says
little there. What the shared servers of the run use is reported by program, because tests of several workers use them
at the same time.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from harness.servers.process import descendants

ROWS: Final = 40
_TICK: Final = os.sysconf("SC_CLK_TCK")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder() if hasattr(config, "workerinput") else Reporter())


class Recorder:
    """In each worker: adds the costs of a test, with setup and teardown, to its report. The processes are only counted
    once per test, because that takes milliseconds where many run."""

    def __init__(self) -> None:
        self._cpu = self._wall = 0.0  # when the last test ended

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._cpu, self._wall = tree_cpu(os.getpid()), time.monotonic()
        session.config.workeroutput["collected"] = self._cpu  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            cpu, wall = tree_cpu(os.getpid()), time.monotonic()
            item.user_properties.append(("cost", (cpu - self._cpu, wall - self._wall)))
            self._cpu, self._wall = cpu, wall


class Reporter:
    """In the controller: sums up what the workers reported."""

    def __init__(self) -> None:
        self._cpu: Counter[str] = Counter()
        self._wall: Counter[str] = Counter()
        self._collection: list[float] = []  # of each worker
        self._servers: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        for name, value in report.user_properties:
            if name == "cost":
                self._cpu[report.nodeid], self._wall[report.nodeid] = value  # type: ignore[misc]

    def pytest_testnodedown(self, node: Any) -> None:
        self._collection.append(getattr(node, "workeroutput", {}).get("collected", 0.0))

    def pytest_sessionfinish(self) -> None:
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                program = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
                self._servers[Path(program).name] += process_cpu(pid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("processor time, and waiting")
        waited = self._wall.total() - self._cpu.total()
        write(f"{self._cpu.total():9.1f} s  in {len(self._cpu)} tests, which waited {waited:.1f} s in all")
        write(f"{sum(self._collection):9.1f} s  to collect them, in {len(self._collection)} workers")
        write(f"{self._servers.total():9.1f} s  in shared servers: {_listed(self._servers)}")
        for title, group in {"file": _file, "function": _function, "test": str}.items():
            cpu, waits, count = Counter[str](), Counter[str](), Counter[str]()
            for name in self._cpu:
                cpu[group(name)] += self._cpu[name]
                waits[group(name)] += self._wall[name] - self._cpu[name]
                count[group(name)] += 1
            for order, by in (("processor time", cpu), ("waiting", waits)):
                write(f"\nprocessor s  waited s  tests  {title}, by {order}")
                for name, _ in by.most_common(ROWS):
                    write(f"{cpu[name]:11.1f} {waits[name]:9.1f} {count[name]:6}  {name}")


def _listed(seconds: Counter[str]) -> str:
    return ", ".join(f"{name} {cpu:.1f}" for name, cpu in seconds.most_common())


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]


def _function(nodeid: str) -> str:
    return re.sub(r"\[.*", "", nodeid)


def tree_cpu(pid: int) -> float:
    """Processor seconds of a process, and of all that it started."""
    return process_cpu(pid) + sum(process_cpu(child) for child in descendants(pid))


def process_cpu(pid: int) -> float:
    """Processor seconds of a process and of its children that ended; 0 if it has ended itself."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICK
    return 0.0
