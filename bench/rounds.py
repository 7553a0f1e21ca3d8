"""Cases of one table, interleaved in rotating rounds, each ratio taken per round against its base.

A machine's speed drifts during a run. Measuring the cases side by side within a round, and rotating who goes first,
cancels that: what is compared was measured in the same tenth of a second.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[int], None]  # do it so many times
    times: int


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    micros: float  # median time of one, in microseconds: for orientation only
    ratio: float  # median over rounds of this case against the base
    low: float
    high: float


def measure(cases: Sequence[Case], rounds: int = 15) -> list[Result]:
    """The first case is the base."""
    for case in cases:
        case.run(max(1, case.times // 10))  # warm up
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(rounds):
        turn = number % len(cases)
        for case in (*cases[turn:], *cases[:turn]):
            began = time.perf_counter()
            case.run(case.times)
            times[case.name].append((time.perf_counter() - began) / case.times)
    base = times[cases[0].name]
    results = []
    for case in cases:
        ratios = [mine / its for mine, its in zip(times[case.name], base, strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=10)
        middle = statistics.median(times[case.name]) * 1e6
        results.append(Result(case.name, middle, statistics.median(ratios), low, high))
    return results


def table(title: str, results: Sequence[Result]) -> str:
    lines = [title, f"  {'case':<44} {'one':>10} {'ratio':>8}   {'10 % .. 90 % of rounds'}"]
    for result in results:
        lines.append(
            f"  {result.name:<44} {result.micros:>7.2f} us {result.ratio:>8.2f}   {result.low:.2f} .. {result.high:.2f}"
        )
    return "\n".join(lines)


def as_json(title: str, results: Sequence[Result]) -> str:
    return json.dumps({"title": title, "results": [asdict(result) for result in results]})
