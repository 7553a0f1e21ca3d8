"""Which load to offer next, and whether and why the last one was too much: decisions without I/O.

The rate doubles until a step breaks. Then the limit is narrowed down between the highest rate that was sustained and
the lowest that was not. A step that breaks is repeated once: a pause of the machine is not the limit of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Final

FIRST_RATE: Final = 50.0  # pairs a second
MAX_STEPS: Final = 30  # so that the run ends however often steps break and recover

_MIN_RATE: Final = 1.0
_MAX_RATE: Final = 1_000_000.0
_NARROW: Final = 1.2  # the limit is known well enough: the broken rate is less than a fifth above the sustained one
_MAX_ERRORS: Final = 0.001  # of all pairs
_MIN_DONE: Final = 0.95  # of all pairs, within the step
_CLIENT_BUSY: Final = 0.85  # of one processor: a Python process cannot do much more
_MACHINE_BUSY: Final = 0.9  # of all processors
_DISK_WAIT: Final = 0.2  # of all processors


@dataclass(frozen=True, slots=True)
class RateStep:
    """What came of one offered rate. Latencies are in milliseconds, from when a pair was due to when it was done."""

    rate: float  # pairs due a second
    done: float  # pairs done a second
    p50: float
    p95: float
    p99: float
    errors: float  # share of all pairs that failed
    error: str | None  # the most frequent
    client_cpu: float  # of the busiest client process: share of one processor
    machine_cpu: float | None  # share of all processors of this machine; None: unknown
    disk_wait: float | None  # share of all processors that were idle because of a disk


def break_of(step: RateStep, p99_limit: float) -> str | None:
    """How the step broke; None if it did not. `p99_limit`: in milliseconds."""
    if step.errors > _MAX_ERRORS:
        return f"{step.errors:.1%} of the pairs failed: {step.error}"
    if step.done < step.rate * _MIN_DONE:
        return f"only {step.done:,.0f} of {step.rate:,.0f} pairs a second were done: the rest fell behind"
    if step.p99 > p99_limit:
        return f"p99 was {step.p99:,.0f} ms, more than {p99_limit:g} ms"
    return None


def cause_of(step: RateStep, processes: int) -> str:
    """What was used up, as far as this machine can tell."""
    clients = f"the busiest of {processes} client process{'es' if processes > 1 else ''}"
    if step.client_cpu >= _CLIENT_BUSY:
        return f"the clients: {clients} used {step.client_cpu:.0%} of a processor; try more --processes or machines"
    if step.disk_wait is not None and step.disk_wait >= _DISK_WAIT:
        return f"a disk of this machine: processors waited for it {step.disk_wait:.0%} of the time"
    if step.machine_cpu is not None and step.machine_cpu >= _MACHINE_BUSY:
        return (
            f"the processors of this machine, {step.machine_cpu:.0%} busy, while {clients} used {step.client_cpu:.0%} "
            "of one: the engine, if it runs here, or other programs use the rest"
        )
    return f"the engine or the network to it: {clients} used only {step.client_cpu:.0%} of a processor and waited"


@dataclass(slots=True)
class Ramp:
    """The steps so far, and the next one."""

    p99_limit: float
    steps: list[RateStep] = field(default_factory=list)
    sustained: RateStep | None = None  # the highest rate that did not break
    broken: RateStep | None = None  # the lowest rate that broke twice
    _retry: bool = False

    def add(self, step: RateStep) -> None:
        self.steps.append(step)
        if break_of(step, self.p99_limit) is None:
            self.sustained, self._retry = step, False
        elif self._retry:
            self.broken, self._retry = step, False
        else:
            self._retry = True

    def next_rate(self) -> float | None:
        """The rate of the next step; None: the limit is known, or cannot be found."""
        if len(self.steps) >= MAX_STEPS:
            return None
        if not self.steps or self._retry:
            return self.steps[-1].rate if self.steps else FIRST_RATE
        if self.broken is None:
            doubled = 2 * self.steps[-1].rate
            return doubled if doubled <= _MAX_RATE else None
        if self.sustained is None:
            quarter = self.broken.rate / 4
            return quarter if quarter >= _MIN_RATE else None
        between = sqrt(self.sustained.rate * self.broken.rate)
        return between if self.broken.rate / self.sustained.rate > _NARROW else None
