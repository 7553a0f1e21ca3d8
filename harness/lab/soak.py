"""A soak: most of the load that the servers can carry, for a long time, and what it leaves behind.

Beside the contenders, client processes offer pairs of acquire and release of other names in an open loop: 70 % of the
rate that the same processes sustained before the run (`leasehold bench --until-breaks`), or of the one that is given.
Judged are claims that are left, and growth of memory, descriptors and threads: of the servers, of these processes, and
of a contender that lives through the run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import ceil
from statistics import median
from typing import Any, Final, NamedTuple

from harness.lab.contender import NAME
from harness.lab.setups import Setup
from harness.servers.process import poll
from leasehold import Client, LeaseholdError
from leasehold.cli.bench import until_breaks
from leasehold.cli.bench.ramp import RateStep

SHARE: Final = 0.7  # of the capacity that is offered
INTERVAL: Final = 15.0  # seconds from one fault to the next

_PROCESSES: Final = 2  # that offer the load
_STEP: Final = 60.0  # seconds for which latencies are collected: a longer list of them would be memory that grows
_MIN_STEPS: Final = 4
_RAMP_STEP: Final = 2.0  # seconds at each rate while the capacity is measured
_P99_LIMIT: Final = 50.0  # milliseconds
_NAMESPACE: Final = "soak-load"
_WORKER: Final = "leasehold.cli.bench.load_worker"
_MAX_GROWTH: Final = 1.05
_SLACK: Final = {
    "memory": 1.0,
    "descriptors": 4,
    "threads": 1,
}  # a client opens some connections only when it needs them
_MAX_DRIFT: Final = 1.5
_CLAIM_SECONDS: Final = 30.0  # until the claims of killed contenders have expired, in the queue as well
_WARM_UP: Final = 0.2  # the share of the samples before all code has run once


def interval(seconds: float) -> float:
    """From one fault to the next: at least four faults in a run."""
    return min(INTERVAL, seconds / 4)


# ------------------------------------------------------------------ the load


class NoCapacity(Exception):
    """No rate was sustained, not even the lowest."""


def measure_capacity(url: str, report: Callable[[str], object]) -> float:
    """Pairs a second that the servers and the client processes sustain."""

    def show(step: RateStep) -> None:
        report(f"capacity: {until_breaks.format_step(step, _P99_LIMIT).strip()}")

    ramp = until_breaks.run(url, _NAMESPACE, "capacity/", _PROCESSES, _RAMP_STEP, _P99_LIMIT, show)
    if ramp.sustained is None:
        raise NoCapacity("no rate was sustained on this machine: wait until it is idle, or give --capacity")
    return ramp.sustained.rate


class Load:
    """Client processes that offer `rate` pairs a second from `start` on, for `seconds`."""

    def __init__(self, url: str, rate: float, seconds: float) -> None:
        count = max(_MIN_STEPS, ceil(seconds / _STEP))
        self.steps: list[RateStep] = []
        self.failure = ""
        self._rate, self._lengths = rate, [seconds / count] * count
        self._stack = ExitStack()
        # On the thread that ends last: processes that it has started end with it.
        self._run_step = self._stack.enter_context(
            until_breaks.client_processes(url, _NAMESPACE, "load/", _PROCESSES),
        )
        self.pids = children(_WORKER)
        self._thread = threading.Thread(target=self._offer, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _offer(self) -> None:
        try:
            for seconds in self._lengths:
                self.steps.append(self._run_step(self._rate, seconds))
        except Exception as error:
            self.failure = f"the load ended early: {error}"

    def end(self) -> None:
        """Wait until all of it was offered."""
        self._thread.join(2 * sum(self._lengths) + 60)
        if self._thread.is_alive():
            self.failure = "the load did not end"

    def close(self) -> None:
        self._stack.close()


def children(module: str) -> list[int]:
    """The processes that this one has started with `python -m MODULE`."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as command:
                parent = int(stat.read().rpartition(")")[2].split()[1])
                if parent == os.getpid() and module in command.read().split("\0"):
                    found.append(int(pid))
        except OSError:  # it has ended
            continue
    return sorted(found)


# ------------------------------------------------------------------ what is left behind


class Sample(NamedTuple):
    memory: float  # MB
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    with open(f"/proc/{pid}/statm") as statm:
        pages = int(statm.read().split()[1])
    descriptors, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
    return Sample(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, descriptors, threads)


Samples = dict[str, list[Sample]]  # by process, in the order of time


class Residue(NamedTuple):
    """`growth`: for each process and figure, at the begin and at the end. `load`: what came of it, step by step."""

    claims: int
    growth: dict[str, dict[str, list[float]]]
    capacity: float
    rate: float
    load: list[dict[str, Any]]
    violations: list[str]
    late: list[str]


def residue(setup: Setup, samples: Samples, capacity: float, load: Load) -> Residue:
    """Judge what is left when all contenders and the load have ended."""
    claims = claims_left(setup)
    violations = [f"{claims} claims or keys are left, though all contenders have ended"] if claims else []
    violations += [load.failure] if load.failure else []
    growth = {process: growth_of(found) for process, found in samples.items()}
    for process, figures in growth.items():
        for what, (first, last) in figures.items():
            if last > _MAX_GROWTH * first + _SLACK[what]:
                violations.append(f"the {what} of the {process} grew from {first:g} to {last:g}")
    return Residue(
        claims,
        growth,
        round(capacity),
        round(SHARE * capacity),
        [*map(shown, load.steps)],
        violations,
        drift(load.steps),
    )


def growth_of(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The median of the first and of the last quarter, after all code has run once."""
    warm = samples[int(_WARM_UP * len(samples)) :]
    size = ceil(len(warm) / 4)
    return {
        figure: [round(median(getattr(each, figure) for each in part), 1) for part in (warm[:size], warm[-size:])]
        for figure in Sample._fields
    }


def drift(steps: Sequence[RateStep]) -> list[str]:
    """Whether the usual pair took longer and longer. The median, because a server that is stopped delays some pairs."""
    size = ceil(len(steps) / 4)
    first, last = (median(step.p50 for step in part) for part in (steps[:size], steps[-size:])) if steps else (0, 0)
    if last > _MAX_DRIFT * first + 1:
        return [f"the median latency of the load grew from {first:.1f} to {last:.1f} ms"]
    return []


def shown(step: RateStep) -> dict[str, Any]:
    numbers = {name: value for name, value in asdict(step).items() if isinstance(value, float)}
    return {**{name: round(value, 4) for name, value in numbers.items()}, "error": step.error}


def claims_left(setup: Setup) -> int:
    """The claims of contenders and load, and the keys for claims, that are there when all must have expired."""
    count = 0

    def none_left() -> bool:
        nonlocal count
        try:
            count = len(client.inspect(NAME, exact=True)) + len(load.inspect()) + setup.temporary_keys()
        except LeaseholdError:  # the server has just come back
            count = -1
        return count == 0

    url = setup.direct_url()
    with Client(url) as client, Client(url, namespace=_NAMESPACE) as load:
        try:
            poll(none_left, _CLAIM_SECONDS, str)
        except TimeoutError:
            return count
    return 0
