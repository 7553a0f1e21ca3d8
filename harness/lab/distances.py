"""How long acquiring takes when servers and clients are at three sites: python -m harness.lab.distances [ENGINE]...

For root. Keeps the results in `docs/evidence/sites.json`, from which docs/how-to/three-sites.md is drawn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any, Final

from harness.lab.contender import now
from harness.lab.setups import SETUPS, Link, Setup
from harness.servers.sites import DELAYS, NAMES
from leasehold import Client

EVIDENCE: Final = Path(__file__).parents[2] / "docs" / "evidence" / "sites.json"
ENGINES: Final = ("etcd", "zookeeper", "redlock")
_PAIRS: Final = 20  # acquires and releases without contention, per site
_HANDOFFS: Final = 5  # per pair of sites
_ISOLATED: Final = "LEASEHOLD_LAB_ISOLATED"


class Visitor:
    """A client at a site, in a process of its own. It does what it reads from standard input."""

    def __init__(self, link: Link) -> None:
        assert link.site is not None
        command = [sys.executable, "-m", "harness.lab.distances", "--visitor", link.url]
        self.site = link.site.name
        self._process = subprocess.Popen(
            link.site.netns_command(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def order(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def ask(self, word: str) -> float:
        self.order(word)
        return self.answer()

    def end(self) -> None:
        self._process.communicate()


def visit(url: str) -> None:
    """What a visitor does: `pair` prints seconds, `acquire` its end, `release` its beginning."""
    with Client(url, ttl=30.0, call_timeout=20.0) as client:
        lock, lease = client.lock("distance", wait=60), None
        for word in sys.stdin:
            began = now()
            if word == "pair\n":
                with client.lock("alone"):
                    pass
                answer = now() - began
            elif word == "acquire\n":
                lease = lock.acquire()
                answer = now()
            else:
                assert lease is not None
                lease.release()
                answer = began
            print(answer, flush=True)  # noqa: T201


def measure(setup: Setup) -> dict[str, Any]:
    setup.start()
    visitors = [Visitor(setup.link()) for _ in NAMES]
    try:
        for visitor in visitors:  # connections are opened, scripts are loaded
            for _ in range(3):
                visitor.ask("pair")
        pairs = {visitor.site: median(visitor.ask("pair") for _ in range(_PAIRS)) for visitor in visitors}
        handoffs = {
            f"{one.site} to {other.site}": median(hand_off(one, other) for _ in range(_HANDOFFS))
            for one, other in permutations(visitors, 2)
        }
        leader = getattr(setup.leader(), "netns_host", None)
        leading = leader.name if leader and type(setup).__name__ != "Redlock" else None
    finally:
        for visitor in visitors:
            visitor.end()
        setup.close()
    return {"leader": leading, "pairs": pairs, "handoffs": handoffs, "version": setup.version()}


def hand_off(one: Visitor, other: Visitor) -> float:
    one.ask("acquire")
    other.order("acquire")
    one.order("pair")  # meanwhile the other one has joined the queue
    one.answer()
    one.ask("pair")
    released_at = one.ask("release")
    granted_at = other.answer()
    other.ask("release")
    return granted_at - released_at


def main(engines: Sequence[str]) -> None:
    if _ISOLATED not in os.environ:
        for engine in engines:  # each in namespaces of its own
            command = ["unshare", "-n", "-m", sys.executable, "-m", "harness.lab.distances", engine]
            subprocess.run(command, env={**os.environ, _ISOLATED: "1"}, check=True)
        return
    (engine,) = engines
    found = measure(SETUPS[engine](frozenset({"sites"})))
    kept = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else {}
    kept[engine] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), **found}
    EVIDENCE.write_text(json.dumps(kept, indent=1) + "\n")


# ------------------------------------------------------------------ the table of the page


def latencies_table() -> list[tuple[str, ...]]:
    kept = json.loads(EVIDENCE.read_text())
    rows: list[tuple[str, ...]] = [
        ("engine", *(f"acquire and release at {name}" for name in NAMES), "hand-off between two sites")
    ]
    for engine in ENGINES:
        found = kept[engine]
        handoffs = sorted(found["handoffs"].values())
        pairs = (f"{_ms(found['pairs'][name])}{' (leader)' * (found['leader'] == name)}" for name in NAMES)
        rows.append((engine, *pairs, f"{_ms(handoffs[0])} to {_ms(handoffs[-1])}"))
    return rows


def round_trips_table() -> list[tuple[str, ...]]:
    return [("between", "round trip"), *((" and ".join(sorted(pair)), _ms(2 * each)) for pair, each in DELAYS.items())]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--visitor"]:
        visit(sys.argv[2])
    else:
        main(sys.argv[1:] or ENGINES)
