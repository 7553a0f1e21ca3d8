"""What all tables share: cases that run acquire/release pairs, and the parts of a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from leasehold.cli.bench.measurement import BenchResult, format_results


@dataclass(frozen=True, slots=True)
class Table:
    """Cases measured in alternation: the first is the base."""

    title: str
    results: Sequence[BenchResult]

    def __str__(self) -> str:
        return format_results(self.title, self.results)

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "results": [asdict(result) for result in self.results]}


@dataclass(frozen=True, slots=True)
class Notes:
    """Results that do not fit into a ratio table: counts, sizes, contention."""

    title: str
    lines: Sequence[str]

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {line}" for line in self.lines)])

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "lines": list(self.lines)}


@dataclass(frozen=True, slots=True)
class Aim:
    """What was aimed at, and what was measured: a ratio, or a number with a unit."""

    what: str
    measured: float
    limit: float
    at_least: bool = False  # else at most
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def texts(self) -> tuple[str, str, str, str]:
        """For a row of a table: what, measured, aim, met or not."""
        limit = f"{'at least' if self.at_least else 'at most'} {self.limit:.3g}{self.unit}"
        return self.what, f"{self.measured:.3g}{self.unit}", limit, "yes" if self.is_met else "no"


@dataclass(frozen=True, slots=True)
class Aims:
    """The aims that a table decides."""

    title: str
    aims: Sequence[Aim]

    def __str__(self) -> str:
        rows = [aim.texts() for aim in self.aims]
        return "\n".join(
            [self.title, *(f"  {what:<90} {found:>9}   {limit:<16} {met}" for what, found, limit, met in rows)]
        )

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "aims": [asdict(aim) for aim in self.aims]}


Part: TypeAlias = Table | Notes | Aims


def part_from_json(data: dict[str, Any]) -> Part:
    """The inverse of `as_json`."""
    if "lines" in data:
        return Notes(data["title"], data["lines"])
    if "aims" in data:
        return Aims(data["title"], [Aim(**aim) for aim in data["aims"]])
    return Table(data["title"], [BenchResult(**result) for result in data["results"]])


def ratio_of(results: Sequence[BenchResult], name: str, base: str) -> float:
    """How many times as long the case `name` takes as the case `base`. Infinite if a case was left out."""
    ratios = {result.name: result.ratio for result in results}
    return ratios[name] / ratios[base] if name in ratios and base in ratios else float("inf")


@contextmanager
def one_core() -> Iterator[None]:
    """Pin client and server to one core: the cost of both is counted, and waking another core gains nothing."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def usable_peers(
    makers: Mapping[str, Callable[[], Any]], while_held: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Any]]:
    """Locks of other packages with their defaults. Those that fail here are reported with the reason. `while_held`
    is called while a lock is held, and may raise."""
    for name, make in makers.items():
        try:
            lock = make()
            with lock:
                while_held()
        except Exception as error:
            why = " ".join(str(error).split())
            print(f"left out: {name} ({type(error).__name__}: {why})", file=sys.stderr)
        else:
            yield name, lock


def repeat_with(lock: Any) -> Callable[[int], None]:
    """Return a function that acquires and releases `lock` a given number of times."""

    def pair(times: int) -> None:
        for _ in range(times):
            with lock:
                pass

    return pair
