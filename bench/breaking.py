"""At which load each engine breaks, from this machine: `leasehold bench --until-breaks` on a new server of each kind.

`python -m bench.breaking [ENGINE ...]` stores its results in `docs/evidence/breaking.json`, and draws the curves next
to it. `redlock` has five nodes, `server` is a lock server over Redis. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.server_setups import SETUPS, redis
from harness.servers.folders import keep_on_disk
from harness.servers.lock_server import LockServer, url_of
from harness.servers.redlock import RedlockNodes
from leasehold.cli.bench import until_breaks
from leasehold.cli.bench.plot import svg

EVIDENCE: Final = Path(__file__).parents[1] / "docs" / "evidence"
P99_LIMIT: Final = 50.0  # milliseconds


@contextmanager
def redlock() -> Iterator[str]:
    nodes = RedlockNodes()
    try:
        yield nodes.url
    finally:
        nodes.close()


@contextmanager
def server() -> Iterator[str]:
    with redis() as url:
        lock_server = LockServer(url).start()
        try:
            yield url_of(lock_server)
        finally:
            lock_server.stop()


PLACES: Final = {**SETUPS, "redlock": redlock, "server": server}


def measure(name: str, seconds: float) -> dict[str, Any]:
    processes = 1 if name == "memory" else os.cpu_count() or 1
    with PLACES[name]() as url:
        ramp = until_breaks.run(
            url,
            "leasehold-bench",
            "",
            processes,
            seconds,
            P99_LIMIT,
            lambda step: print(until_breaks.format_step(step, P99_LIMIT), file=sys.stderr),
        )
    print(until_breaks.conclusion(ramp, processes), file=sys.stderr)
    return until_breaks.as_json(name, ramp, processes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.breaking", description=__doc__)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"any of: {', '.join(PLACES)} (default: all)")
    parser.add_argument("--step", type=float, default=2.0, metavar="SECS", help="how long to offer each load")
    options = parser.parse_args()
    keep_on_disk()
    path = EVIDENCE / "breaking.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in options.engines or PLACES:
        print(f"measuring {name} ...", file=sys.stderr)
        found[name] = measure(name, options.step)
        ordered = {each: _rounded(found[each]) for each in PLACES if each in found}
        path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    draw(found)


def draw(found: dict[str, dict[str, Any]]) -> None:
    lines = {
        name: sorted({step["rate"]: step["p99"] for step in found[name]["steps"]}.items())
        for name in PLACES
        if name in found
    }
    plot = svg(
        "p99 of a pair by offered load",
        "pairs of acquire and release a second",
        "milliseconds",
        lines,
        level=(f"limit: {P99_LIMIT:g} ms", P99_LIMIT),
    )
    (EVIDENCE / "breaking.svg").write_text(plot, encoding="utf-8")


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    steps = [
        {key: round(value, 3) if isinstance(value, float) else value for key, value in step.items()}
        for step in found["steps"]
    ]
    rates = {key: found[key] and round(found[key], 3) for key in ("sustained", "broke_at")}
    return {**found, **rates, "steps": steps}


if __name__ == "__main__":
    main()
