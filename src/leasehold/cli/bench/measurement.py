"""Measure the cases of a table in interleaved rounds. Ratios are taken within a round, against the first case (base).

A machine's speed drifts during a run. Measuring all cases in each round, and rotating which one goes first, cancels
that: the values that are compared were measured in the same tenth of a second. If the base is much slower in a round
than before, other load disturbed the machine, and the round is repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

_DISTURBED_FACTOR: Final = 1.5  # times the median of the base: other load disturbed the round
_TARGET_SECONDS: Final = 0.05  # of one case in one round: long enough to time


@dataclass(frozen=True, slots=True)
class BenchCase:
    name: str
    run: Callable[[int], None]  # takes the number of repetitions
    times: int = 0  # repetitions per round; 0: calibrate it to `_TARGET_SECONDS`


@dataclass(frozen=True, slots=True)
class BenchResult:
    name: str
    micros: float  # median time of one operation, for orientation only
    ratio: float  # this case relative to the base: the median over rounds
    low: float  # 10th percentile of the rounds
    high: float  # 90th percentile


def _no_progress(_round: int, _rounds: int) -> None:
    """Report no progress."""


def measure(
    cases: Sequence[BenchCase], rounds: int = 15, progress: Callable[[int, int], None] = _no_progress
) -> list[BenchResult]:
    """Measure the cases; the first is the base. `progress(number, rounds)` is called when a round begins."""
    times = [case.times or _calibrate(case) for case in cases]
    for case, count in zip(cases, times, strict=True):
        case.run(max(1, count // 10))  # warm up
    round_times: list[list[float]] = []  # by round: seconds per operation of each case
    for tries in range(2 * rounds):
        if len(round_times) == rounds:
            break
        progress(len(round_times) + 1, rounds)
        measured = _measure_round(cases, times, tries % len(cases))
        # The last tries all count: a machine that is never quiet is measured as it is.
        last_chances = 2 * rounds - tries <= rounds - len(round_times)
        if (
            last_chances
            or not round_times
            or measured[0] < _DISTURBED_FACTOR * statistics.median(round_time[0] for round_time in round_times)
        ):
            round_times.append(measured)
    return [
        _result(case, [round_time[number] for round_time in round_times], [round_time[0] for round_time in round_times])
        for number, case in enumerate(cases)
    ]


def _calibrate(case: BenchCase) -> int:
    count = 1
    while True:
        began = time.perf_counter()
        case.run(count)
        seconds = time.perf_counter() - began
        if seconds >= _TARGET_SECONDS / 4 or count >= 100_000:
            return max(1, round(count * _TARGET_SECONDS / max(seconds, 1e-9)))
        count *= 4


def _measure_round(cases: Sequence[BenchCase], times: Sequence[int], first: int) -> list[float]:
    seconds = [0.0] * len(cases)
    for number in (*range(first, len(cases)), *range(first)):
        began = time.perf_counter()
        cases[number].run(times[number])
        seconds[number] = (time.perf_counter() - began) / times[number]
    return seconds


def _result(case: BenchCase, own_times: Sequence[float], base_times: Sequence[float]) -> BenchResult:
    ratios = [own / base for own, base in zip(own_times, base_times, strict=True)]
    low, *_, high = (
        statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else (ratios[0], ratios[0])
    )
    return BenchResult(case.name, statistics.median(own_times) * 1e6, statistics.median(ratios), low, high)


def format_results(title: str, results: Sequence[BenchResult]) -> str:
    lines = [title, f"  {'case':<44} {'time':>10} {'ratio':>8}   {'10 % .. 90 % of rounds'}"]
    for result in results:
        lines.append(
            f"  {result.name:<44} {result.micros:>7.2f} us {result.ratio:>8.2f}   {result.low:.2f} .. {result.high:.2f}"
        )
    return "\n".join(lines)
