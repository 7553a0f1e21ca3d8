"""One seed, one simulated run: a few programs, a few names, a server, and faults.

    python -m harness.simulator.seeds --seed 4711 -v

runs one seed and prints its findings. The number of a seed determines its family: `calm` (no faults, so no waiter is
passed over), `mishaps` (processes are paused, crash, are cancelled; no message is lost, so hand-offs must be prompt),
`outages` (the server or part of the network stops) and `storm` (all of these, and messages that are lost, duplicated,
late and out of order). `--harsh` chooses among other families, with more of each fault and every clock at the edge of
the promised drift: `pauses`, `wake-ups`, `slow answers` and `losses` (see `harsh_plan` in faults.py). At the end of a
run all faults stop: every call must return, every pending release must be confirmed, and one ttl later the server must
have no claims left.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from typing import Final

from harness.simulator.run import Report, SimulationRun

BUGS_FILE: Final = "tests/support/planted_bugs.py"


class _ErrorLogHandler(logging.Handler):
    """Turns logged errors into findings: the library logs an error only for what should be impossible."""

    def __init__(self, run: SimulationRun) -> None:
        super().__init__(logging.ERROR)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._run.add_finding("logged", f"{record.getMessage()}: {error!r}")


@contextmanager
def _capturing_errors(run: SimulationRun) -> Iterator[None]:
    log, handler = logging.getLogger("leasehold"), _ErrorLogHandler(run)
    before = (log.level, log.propagate)
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    collecting = gc.isenabled()
    gc.disable()  # or finalisers would run at different times from run to run
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
        if collecting:
            gc.enable()


def simulate(seed: int, *, harsh: bool = False) -> Report:
    """Run one seed, of the harsh families if asked. The same seed gives the same report, in every interpreter."""
    run = SimulationRun(seed, harsh=harsh)
    with _capturing_errors(run):
        return run.run()


def load_bugs(path: str = BUGS_FILE) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """The bugs that can be planted, from a file of the tests."""
    spec = spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Callable[[], AbstractContextManager[None]]] = module.PLANTED
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.simulator.seeds", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="run one seed (default: 0)")
    parser.add_argument("--seeds", metavar="A..B", help="run the seeds from A up to but without B")
    parser.add_argument("--harsh", action="store_true", help="run the seeds of the harsh families")
    parser.add_argument("--bug", metavar="NAME", help=f"plant this bug of {BUGS_FILE} first (needs a checkout)")
    parser.add_argument("-v", "--verbose", action="store_true", help="report every seed; print failed histories")
    options = parser.parse_args(arguments)
    first, _, last = (options.seeds or f"{options.seed}..{options.seed + 1}").partition("..")
    began, bad, events = time.perf_counter(), 0, 0
    with load_bugs()[options.bug]() if options.bug else nullcontext():
        for seed in range(int(first), int(last)):
            report = simulate(seed, harsh=options.harsh)
            events += report.events
            bad += bool(report.findings)
            if report.findings or options.verbose:
                sys.stdout.write(f"{report.history * options.verbose}{report}\n")
    took = time.perf_counter() - began
    sys.stderr.write(f"{int(last) - int(first)} seeds, {bad} with findings, {events} events, {took:.1f} s\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
