"""How the cost of a lock grows with the number of held locks and with the number of waiters.

`python -m bench.growth [ENGINE ...]` stores its results in `docs/evidence/growth.json`, from which the tables of
docs/growth.md are generated, and draws two plots next to it. It calls the engine interface directly, so that a thousand
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

from bench.server_setups import SETUPS
from harness import probe
from harness.servers.folders import keep_on_disk
from leasehold import Client
from leasehold.cli.bench.plot import svg
from leasehold.engines.base import Engine
from leasehold.model import Claim, Grant
from leasehold.runtime.base import run_sync

HELD: Final = (10, 100, 1_000, 10_000, 100_000)
WAITING: Final = (1, 10, 100, 1_000)
PAIRS: Final = 200
FILL_LIMIT: Final = 20.0  # seconds to set up: an engine that needs longer is not measured with more
TTL: Final = 3600.0

EVIDENCE: Final = Path(__file__).parents[1] / "docs" / "evidence"

Series = list[tuple[float, float]]  # number of locks or waiters, microseconds


class EngineDriver:
    """Calls the verbs of one client's engine."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._core = probe.core(client)
        self.engine: Engine = self._core.engine()

    def claim(self, name: str, *, queue: bool = False) -> Claim:
        return probe.new_claim(self._client.lock(name, ttl=TTL))._replace(queue=queue)

    def attempt(self, claim: Claim) -> bool:
        return isinstance(run_sync(self.engine.attempt(claim, self._core.deadline())), Grant)

    def release(self, claim: Claim) -> None:
        run_sync(self.engine.release(claim, self._core.deadline()))

    def heartbeat(self, claims: list[Claim]) -> None:
        for start in range(0, len(claims), 500):
            run_sync(self.engine.renew(claims[start : start + 500], self._core.deadline()))


def measure_held(url: str) -> Iterator[tuple[float, float]]:
    """A pair of acquire and release of another name, while a given number of locks is held."""
    with Client(url, ttl=TTL) as client:
        driver = EngineDriver(client)
        taken = 0
        for count in HELD:
            began = time.monotonic()
            while taken < count and time.monotonic() < began + FILL_LIMIT:
                assert driver.attempt(driver.claim(f"held/{taken}"))
                taken += 1
            if taken < count:
                return
            yield count, _median(_pair, driver)


def measure_waiting(url: str) -> Iterator[tuple[float, float]]:
    """A hand-off while a given number of claims wait: release, grant to the next, and queueing again."""
    for count in WAITING:
        with Client(url, ttl=TTL, namespace=f"line-{count}") as client:
            driver = EngineDriver(client)
            queue = [driver.claim("hot", queue=True) for _ in range(count + 1)]
            began = time.monotonic()
            for number, claim in enumerate(queue):
                assert driver.attempt(claim) == (number == 0)
                if number % 100 == 99:
                    driver.heartbeat(queue[1:number])
            if time.monotonic() > began + FILL_LIMIT:
                return
            yield count, _median(_hand_off, driver, queue)


def _pair(driver: EngineDriver) -> None:
    claim = driver.claim("pair")
    assert driver.attempt(claim)
    driver.release(claim)


def _hand_off(driver: EngineDriver, queue: list[Claim]) -> None:
    holder = queue.pop(0)
    driver.release(holder)
    while not driver.attempt(queue[0]):  # it is next; a watch may need a moment to report that
        time.sleep(0)
    requeued = driver.claim("hot", queue=True)
    assert not driver.attempt(requeued)
    queue.append(requeued)


def _median(work: Callable[..., None], *args: object) -> float:
    times = []
    for _ in range(PAIRS):
        began = time.perf_counter()
        work(*args)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"any of: {', '.join(SETUPS)} (default: all)")
    engines = parser.parse_args().engines
    keep_on_disk()
    for name in engines or SETUPS:
        print(f"measuring {name} ...", file=sys.stderr)
        with SETUPS[name]() as url:
            save_results(name, {"held": list(measure_held(url)), "waiting": list(measure_waiting(url))})
    for what, (across, title) in {"held": ("locks held", "a pair"), "waiting": ("waiters", "a hand-off")}.items():
        lines = {name: found[what] for name, found in load_results().items()}
        plot = svg(f"{title}, microseconds", across, "microseconds", lines)
        (EVIDENCE / f"growth-{what}.svg").write_text(plot, encoding="utf-8")


def load_results() -> dict[str, dict[str, Series]]:
    """By engine and by what grows."""
    path = EVIDENCE / "growth.json"
    found: dict[str, dict[str, Series]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def save_results(name: str, lines: dict[str, Series]) -> None:
    rounded = {what: [(count, round(micros, 1)) for count, micros in series] for what, series in lines.items()}
    found = {**load_results(), name: rounded}
    text = json.dumps({each: found[each] for each in SETUPS if each in found}, indent=1)
    (EVIDENCE / "growth.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
