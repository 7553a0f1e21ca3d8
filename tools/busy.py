"""Run the first tier again and again beside busy loops: `make busy`, `make busy ARGS="--runs 20 tests/core"`.

A verdict of the first tier must not depend on how fast the machine is, and a failure that needs a busy machine shows
only in some runs. The last lines count the failures of each run. The exit code is 1 if a run failed.

`--record FILE` appends a line of JSON to FILE after each run, and `--summary FILE` says in one line what the runs in
FILE have shown. The runs of this repository are in docs/evidence/busy.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

_LOOP: Final = [sys.executable, "-S", "-c", "while True: pass"]
_SUMMARY: Final = re.compile(r"\d+ \w+.* in [\d.]+s")  # "3 failed, 120 passed, 2 skipped in 12.34s"
_COUNT: Final = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
_FAILURE: Final = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


class Run(NamedTuple):
    """One run, as a line of the record."""

    date: str  # when it began, UTC
    commit: str
    loops: int
    arguments: list[str]  # of pytest
    code: int
    passed: int
    failed: int  # with errors in fixtures and in collecting
    skipped: int
    seconds: float
    load_at_start: float  # processes that wanted to run, on average over the last minute
    load_at_end: float
    failures: list[str]  # names of tests


def main() -> int:
    parser = argparse.ArgumentParser(prog="make busy")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--others", type=int, default=0, help="busy loops of another `make busy` beside this one")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append a line of JSON after each run")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="say what the recorded runs have shown, run none")
    options, pytest_arguments = parser.parse_known_args()
    if options.summary is not None:
        print(summary(read_record(options.summary)))
        return 0
    loops = [subprocess.Popen(_LOOP) for _ in range(options.loops)]
    results = []
    try:
        for _ in range(options.runs):
            run, last_line = run_tests(pytest_arguments, options.loops + options.others)
            results.append((run.code, last_line))
            if options.record is not None:
                append(options.record, run)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    for number, (code, last_line) in enumerate(results, 1):
        print(f"run {number}: exit code {code}, {last_line}")
    failed = sum(code != 0 for code, _ in results)
    print(f"{failed} of {len(results)} runs failed beside {options.loops + options.others} busy loops")
    return int(failed > 0)


def run_tests(arguments: list[str], loops: int) -> tuple[Run, str]:
    """One run, and pytest's last line. Its output is printed only if it fails."""
    date, began, load_at_start = datetime.now(UTC), time.monotonic(), os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-ra", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
    last_line = next((line for line in reversed(done.stdout.splitlines()) if _SUMMARY.search(line)), "no summary")
    count: Counter[str] = Counter()
    for number, outcome in _COUNT.findall(last_line):
        count["failed" if outcome.startswith("error") else outcome] += int(number)
    run = Run(
        date.strftime("%Y-%m-%dT%H:%M:%SZ"),
        _commit(),
        loops,
        arguments,
        done.returncode,
        count["passed"],
        count["failed"],
        count["skipped"],
        round(time.monotonic() - began, 1),
        round(load_at_start, 1),
        round(os.getloadavg()[0], 1),
        sorted(set(_FAILURE.findall(done.stdout.rpartition("short test summary info")[2]))),
    )
    return run, last_line


def _commit() -> str:
    """The commit, with `-dirty` if files were changed since; empty outside a repository."""
    with suppress(OSError, subprocess.CalledProcessError):
        described = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def append(record: Path, run: Run) -> None:
    with record.open("a") as file:
        file.write(json.dumps(run._asdict()) + "\n")


def read_record(record: Path) -> list[Run]:
    return [Run(**json.loads(line)) for line in record.read_text().splitlines()]


def summary(runs: list[Run]) -> str:
    """For example: `20 runs from 2026-11-01 to 2026-11-03 beside 4 busy loops, 9480 to 9593 tests passed in each: 1 run
    failed; tests/x.py::test_y 1`."""
    if not runs:
        return "no runs"
    failed = sum(run.code != 0 for run in runs)
    failures = Counter(name for run in runs for name in run.failures).most_common()
    unnamed = sum(run.code != 0 and not run.failures for run in runs)
    named: list[tuple[str, Any]] = [*failures, *([("without the name of a test", unnamed)] if unnamed else [])]
    return (
        f"{_counted(len(runs), 'run')} {_span('from', sorted(run.date[:10] for run in runs))} beside "
        f"{_span('', sorted({run.loops for run in runs}))} busy loops, "
        f"{_span('', sorted(run.passed for run in runs))} tests passed in each, in "
        f"{_span('', sorted(round(run.seconds) for run in runs))} s: "
        + (f"{_counted(failed, 'run')} failed" if failed else "none failed")
        + "".join(f"; {name} {times}" for name, times in named)
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _span(preposition: str, values: list[Any]) -> str:
    first, last = values[0], values[-1]
    if first == last:
        return f"on {first}" if preposition else f"{first}"
    return f"{preposition} {first} to {last}".strip()


if __name__ == "__main__":
    sys.exit(main())
