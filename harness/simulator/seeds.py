"""One seed, one story: a few programs, a few names, a server, and whatever can go wrong between them.

    python -m harness.simulator.seeds --seed 4711 -v

runs the story of one seed and says what was found. Every seed belongs to a family, by its number: `calm` (nothing goes
wrong, so nobody is passed over), `mishaps` (processes are paused, crash, are cancelled; no message is lost, so that
hand-offs must be prompt), `outages` (the server stops, or part of the network does) and `storm` (all of that, and
messages that are lost, doubled, late and out of order). After the story all faults end: every call must come to its
end, every owed release be settled, and one ttl later the server must have nothing left.
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
    """The library logs an error only when it met what it holds to be impossible."""

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
    gc.disable()  # when cycles are collected depends on the interpreter: finalisers would differ from run to run
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
        if collecting:
            gc.enable()


def simulate(seed: int) -> Report:
    """Play the story of a seed. The same seed gives the same report, in every interpreter."""
    run = SimulationRun(seed)
    with _capturing_errors(run):
        return run.run()


def load_bugs(path: str = BUGS_FILE) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """The bugs that can be planted: they are no part of the package, but of its tests."""
    spec = spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Callable[[], AbstractContextManager[None]]] = module.PLANTED
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.simulator.seeds", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="one seed")
    parser.add_argument("--seeds", metavar="A..B", help="all seeds from A up to and without B")
    parser.add_argument("--bug", metavar="NAME", help=f"plant a bug of {BUGS_FILE} first, in a checkout")
    parser.add_argument("-v", "--verbose", action="store_true", help="say something about each, and show its history")
    options = parser.parse_args(arguments)
    first, _, last = (options.seeds or f"{options.seed}..{options.seed + 1}").partition("..")
    began, bad, events = time.perf_counter(), 0, 0
    with load_bugs()[options.bug]() if options.bug else nullcontext():
        for seed in range(int(first), int(last)):
            report = simulate(seed)
            events += report.events
            bad += bool(report.findings)
            if report.findings or options.verbose:
                sys.stdout.write(f"{report.history * options.verbose}{report}\n")
    took = time.perf_counter() - began
    sys.stderr.write(f"{int(last) - int(first)} seeds, {bad} with complaints, {events} events, {took:.1f} s\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
