"""How the cost of a lock grows: with the number of locks held, and with the number of those who wait for one.

`python -m bench.growth [ENGINE ...]` keeps what it measured in `docs/evidence/growth.json`, from which the tables of
docs/growth.md are made, and draws two plots beside it. Everything is asked of the seam itself, so that a thousand
waiters need no thousand threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench.places import PLACES
from bench.plot import svg
from leasehold import Client
from leasehold.engine import Engine
from leasehold.model import Claim, Grant
from leasehold.runtime.base import step

HELD: Final = (10, 100, 1_000, 10_000, 100_000)
WAITING: Final = (1, 10, 100, 1_000)
PAIRS: Final = 200
PATIENCE: Final = 20.0  # seconds that filling up may take: an engine that needs longer is not asked for more
TTL: Final = 3600.0

EVIDENCE: Final = Path(__file__).parents[1] / "docs" / "evidence"

Line = list[tuple[float, float]]  # how many, microseconds


class Desk:
    """One client's engine, asked verb by verb."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._desk = client._desk
        self.engine: Engine = client._desk.engine()

    def claim(self, name: str, *, queue: bool = False) -> Claim:
        return self._client.lock(name, ttl=TTL)._claim()._replace(queue=queue)

    def attempt(self, claim: Claim) -> bool:
        return isinstance(step(self.engine.attempt(claim, self._desk.deadline())), Grant)

    def release(self, claim: Claim) -> None:
        step(self.engine.release(claim, self._desk.deadline()))

    def beat(self, claims: list[Claim]) -> None:
        for start in range(0, len(claims), 500):
            step(self.engine.renew(claims[start : start + 500], self._desk.deadline()))


def held(place: str) -> Iterator[tuple[float, float]]:
    """A pair of acquire and release of another name, while so many are held."""
    with Client(place, ttl=TTL) as client:
        desk = Desk(client)
        taken = 0
        for many in HELD:
            began = time.monotonic()
            while taken < many and time.monotonic() < began + PATIENCE:
                assert desk.attempt(desk.claim(f"held/{taken}"))
                taken += 1
            if taken < many:
                return
            yield many, _middle(_pair, desk)


def waiting(place: str) -> Iterator[tuple[float, float]]:
    """A hand-off, its release, its claim and the way back into line, while so many wait."""
    for many in WAITING:
        with Client(place, ttl=TTL, namespace=f"line-{many}") as client:
            desk = Desk(client)
            line = [desk.claim("hot", queue=True) for _ in range(many + 1)]
            began = time.monotonic()
            for number, claim in enumerate(line):
                assert desk.attempt(claim) == (number == 0)
                if number % 100 == 99:
                    desk.beat(line[1:number])
            if time.monotonic() > began + PATIENCE:
                return
            yield many, _middle(_hand_off, desk, line)


def _pair(desk: Desk) -> None:
    claim = desk.claim("pair")
    assert desk.attempt(claim)
    desk.release(claim)


def _hand_off(desk: Desk, line: list[Claim]) -> None:
    holder = line.pop(0)
    desk.release(holder)
    while not desk.attempt(line[0]):  # it is its turn; a watch may need a moment to say so
        time.sleep(0)
    back = desk.claim("hot", queue=True)
    assert not desk.attempt(back)
    line.append(back)


def _middle(work: Callable[..., None], *args: object) -> float:
    times = []
    for _ in range(PAIRS):
        began = time.perf_counter()
        work(*args)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"any of: {', '.join(PLACES)} (default: all)")
    for name in parser.parse_args().engines or PLACES:
        print(f"measuring {name} ...", file=sys.stderr)
        with PLACES[name]() as place:
            keep(name, {"held": list(held(place)), "waiting": list(waiting(place))})
    for what, (across, title) in {"held": ("locks held", "a pair"), "waiting": ("waiters", "a hand-off")}.items():
        lines = {name: found[what] for name, found in measured().items()}
        plot = svg(f"{title}, microseconds", across, "microseconds", lines)
        (EVIDENCE / f"growth-{what}.svg").write_text(plot, encoding="utf-8")


def measured() -> dict[str, dict[str, Line]]:
    """By engine and what grows."""
    place = EVIDENCE / "growth.json"
    found: dict[str, dict[str, Line]] = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    return found


def keep(name: str, lines: dict[str, Line]) -> None:
    rounded = {what: [(many, round(micros, 1)) for many, micros in line] for what, line in lines.items()}
    found = {**measured(), name: rounded}
    text = json.dumps({each: found[each] for each in PLACES if each in found}, indent=1)
    (EVIDENCE / "growth.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
