"""Run the first tier again and again beside busy loops: `make busy`, `make busy ARGS="--runs 20 tests/core"`.

A verdict of the first tier must not depend on how fast the machine is, and a failure that needs a busy machine shows
only in some runs. The last lines count the failures of each run. The exit code is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import Final

_LOOP: Final = [sys.executable, "-S", "-c", "while True: pass"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make busy")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--loops", type=int, default=4)
    options, pytest_arguments = parser.parse_known_args()
    loops = [subprocess.Popen(_LOOP) for _ in range(options.loops)]
    try:
        results = [run_tests(pytest_arguments) for _ in range(options.runs)]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    for number, (code, summary) in enumerate(results, 1):
        print(f"run {number}: exit code {code}, {summary}")
    failed = sum(code != 0 for code, _ in results)
    print(f"{failed} of {len(results)} runs failed beside {options.loops} busy loops")
    return int(failed > 0)


def run_tests(arguments: list[str]) -> tuple[int, str]:
    """One run: its exit code and pytest's last line. Its output is printed only if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
    lines = [line for line in done.stdout.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    return done.returncode, lines[-1] if lines else "no summary"


if __name__ == "__main__":
    sys.exit(main())
