"""Run the benchmarks: `python -m bench [--rounds N] [--json] [TABLE ...]`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict

from leasehold.speed.rounds import table

TABLES = ("memory", "sqlite", "redis", "redlock", "postgresql", "mysql", "etcd", "zookeeper")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"any of: {', '.join(TABLES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds to measure (default: 15)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per table")
    chosen = parser.parse_args()
    for name in chosen.tables or TABLES:
        if name not in TABLES:
            parser.error(f"no table {name!r}; there is: {', '.join(TABLES)}")
        module = importlib.import_module(f"bench.{name}")
        print(f"measuring {name} ...", file=sys.stderr)
        results = module.run(chosen.rounds)
        if chosen.json:
            print(json.dumps({"title": module.TITLE, "results": [asdict(result) for result in results]}))
        else:
            print(table(module.TITLE, results))


if __name__ == "__main__":
    main()
