"""What the tables are made of, and what they share: cases of pairs, and the parts of which a report is put together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from leasehold.speed.rounds import Result, table


@dataclass(frozen=True, slots=True)
class Table:
    """Cases measured side by side: the first is the base."""

    title: str
    results: Sequence[Result]

    def __str__(self) -> str:
        return table(self.title, self.results)

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


def part_of(said: dict[str, Any]) -> Part:
    """The other way round."""
    if "lines" in said:
        return Notes(said["title"], said["lines"])
    return Table(said["title"], [Result(**result) for result in said["results"]])


@contextmanager
def one_core() -> Iterator[None]:
    """Client and server on one core: what both cost is counted, and nothing is won by waking another core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def working(
    makers: Mapping[str, Callable[[], Any]], inside: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Any]]:
    """Other packages' locks, as they come: those that work here. The others are named, with the reason. `inside` is
    called while one is held, and may object."""
    for name, make in makers.items():
        try:
            lock = make()
            with lock:
                inside()
        except Exception as error:
            why = " ".join(str(error).split())
            print(f"left out: {name} ({type(error).__name__}: {why})", file=sys.stderr)
        else:
            yield name, lock


def repeated(lock: Any) -> Callable[[int], None]:
    """A lock taken and given back so many times."""

    def pair(times: int) -> None:
        for _ in range(times):
            with lock:
                pass

    return pair
