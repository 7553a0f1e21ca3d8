"""What the tables are made of, and what they share: cases of pairs, and the parts of which a report is put together."""

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
    """Cases measured side by side: the first is the base."""

    title: str
    results: Sequence[BenchResult]

    def __str__(self) -> str:
        return format_results(self.title, self.results)

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "results": [asdict(result) for result in self.results]}


@dataclass(frozen=True, slots=True)
class Notes:
    """What does not fit into such a table: counts, sizes, crowds."""

    title: str
    lines: Sequence[str]

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {line}" for line in self.lines)])

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "lines": list(self.lines)}


Part: TypeAlias = Table | Notes


def part_from_json(data: dict[str, Any]) -> Part:
    """The other way round."""
    if "lines" in data:
        return Notes(data["title"], data["lines"])
    return Table(data["title"], [BenchResult(**result) for result in data["results"]])


@contextmanager
def one_core() -> Iterator[None]:
    """Client and server on one core: what both cost is counted, and nothing is won by waking another core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def usable_peers(
    makers: Mapping[str, Callable[[], Any]], while_held: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Any]]:
    """Other packages' locks, as they come: those that work here. The others are named, with the reason. `while_held` is
    called while one is held, and may object."""
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
    """A lock taken and given back so many times."""

    def pair(times: int) -> None:
        for _ in range(times):
            with lock:
                pass

    return pair
