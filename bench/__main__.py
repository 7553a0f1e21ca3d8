"""Compare with other packages: `python -m bench [--rounds N] [--json] [TABLE ...]`.

For example: `python -m bench redis contention`, or `python -m bench --rounds 5 --json memory`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Final

from harness.servers.folders import keep_on_disk

TABLES: Final = (
    *("memory", "sqlite", "redis", "redlock", "postgresql", "mysql", "etcd", "zookeeper"),
    *("hand_offs", "contention", "renewals", "hooks", "imports", "server"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"any of: {', '.join(TABLES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds to measure (default: 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each part of a table")
    chosen = parser.parse_args()
    for name in chosen.tables or TABLES:
        if name not in TABLES:
            parser.error(f"no table {name!r}; there is: {', '.join(TABLES)}")
    keep_on_disk()
    for name in chosen.tables or TABLES:
        print(f"measuring {name} ...", file=sys.stderr)
        for part in importlib.import_module(f"bench.{name}").parts(chosen.rounds):
            print(json.dumps(part.as_json()) if chosen.json else part, flush=True)


if __name__ == "__main__":
    main()
