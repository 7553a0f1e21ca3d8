"""One seed, one story: a few programs, a few names, a server, and whatever can go wrong between them.

    python -m leasehold.testing.simulation --seed 4711 -v

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

from leasehold.testing.story import Report, Story

PLANTED: Final = "tests/simulation/planted.py"


class _Ears(logging.Handler):
    """The library logs an error only when it met what it holds to be impossible."""

    def __init__(self, story: Story) -> None:
        super().__init__(logging.ERROR)
        self._story = story

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._story.complain("logged", f"{record.getMessage()}: {error!r}")


@contextmanager
def _listening(story: Story) -> Iterator[None]:
    log, ears = logging.getLogger("leasehold"), _Ears(story)
    before = (log.level, log.propagate)
    log.addHandler(ears)
    log.setLevel(logging.ERROR)
    log.propagate = False
    collecting = gc.isenabled()
    gc.disable()  # when cycles are collected depends on the interpreter: finalisers would differ from run to run
    try:
        yield
    finally:
        log.removeHandler(ears)
        log.setLevel(before[0])
        log.propagate = before[1]
        if collecting:
            gc.enable()


def simulate(seed: int) -> Report:
    """Play the story of a seed. The same seed gives the same report, in every interpreter."""
    story = Story(seed)
    with _listening(story):
        return story.play()


def bugs(path: str = PLANTED) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """The bugs that can be planted: they are no part of the package, but of its tests."""
    spec = spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Callable[[], AbstractContextManager[None]]] = module.PLANTED
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m leasehold.testing.simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="one seed")
    parser.add_argument("--seeds", metavar="A..B", help="all seeds from A up to and without B")
    parser.add_argument("--bug", metavar="NAME", help=f"plant a bug of {PLANTED} first, in a checkout")
    parser.add_argument("-v", "--verbose", action="store_true", help="say something about each, and show its history")
    options = parser.parse_args(arguments)
    first, _, last = (options.seeds or f"{options.seed}..{options.seed + 1}").partition("..")
    began, bad, events = time.perf_counter(), 0, 0
    with bugs()[options.bug]() if options.bug else nullcontext():
        for seed in range(int(first), int(last)):
            report = simulate(seed)
            events += report.events
            bad += bool(report.complaints)
            if report.complaints or options.verbose:
                sys.stdout.write(f"{report.history * options.verbose}{report}\n")
    took = time.perf_counter() - began
    sys.stderr.write(f"{int(last) - int(first)} seeds, {bad} with complaints, {events} events, {took:.1f} s\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
