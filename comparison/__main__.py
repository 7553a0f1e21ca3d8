"""Run the comparison: `python -m comparison [--rounds N] [--only WHAT] [--json] [ROW ...]`. docs/evidence keeps the
results."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from comparison.cost import measure_cost
from comparison.faults import count_faults
from comparison.table import FAULTS, ROWS, save_results
from leasehold.testing import Absent


def measure(name: str, rounds: int, only: str | None) -> dict[str, Any]:
    row = ROWS[name]
    faults = [fault for fault in FAULTS if (row.fails_over or fault != "failover") and only in (None, fault)]
    report = lambda text: print(f"{name}, {text}", file=sys.stderr, flush=True)  # noqa: E731
    found: dict[str, Any] = {
        fault: count_faults(row.approach, row.setup, fault, rounds, report)._asdict() for fault in faults
    }
    if only in (None, "cost"):
        found["cost"] = round(measure_cost(row.approach, row.setup), 2)
        report(f"an update costs {found['cost']} times as much as without a lock")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m comparison", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"any of: {', '.join(ROWS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="of each fault (default: 5)")
    parser.add_argument("--only", choices=(*FAULTS, "cost"), help="measure nothing else")
    parser.add_argument("--json", action="store_true", help="print what was measured, and keep nothing")
    chosen = parser.parse_args()
    for name in chosen.rows:
        if name not in ROWS:
            parser.error(f"no row {name!r}; there is: {', '.join(ROWS)}")
    results: dict[str, dict[str, Any]] = {}
    for name in chosen.rows or ROWS:
        try:
            results[name] = measure(name, chosen.rounds, chosen.only)
        except Absent as missing:
            print(f"{name} is left as it was: {missing}", file=sys.stderr)
        if not chosen.json:
            save_results(results)
    if chosen.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
