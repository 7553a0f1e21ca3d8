"""The rows of the comparison, their results, and the table on the page.

`docs/evidence/comparison.json` keeps the results; tests/docs/test_tables.py generates the table from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

EVIDENCE: Final = Path(__file__).parents[1] / "docs" / "evidence" / "comparison.json"
FAULTS: Final = ("pause", "crash", "failover")


class Row(NamedTuple):
    title: str
    approach: str  # a key of approaches.APPROACHES
    setup: str  # a key of server_setups.SETUPS
    fails_over: bool = True


ROWS: Final[dict[str, Row]] = {
    "naive": Row("no lock", "naive", "nothing", False),
    "set-nx": Row("`SET NX PX` on one Redis", "set-nx", "redis"),
    "redlock": Row("Redlock on five Redis, without tokens", "set-nx", "five-redis"),
    "row-lock": Row("`SELECT ... FOR UPDATE`, PostgreSQL", "row-lock", "postgresql-account"),
    "unfenced": Row("Leasehold on Redis, no fence at the account", "unfenced", "redis"),
    "sqlite": Row("Leasehold on SQLite, and a fence", "fenced", "file", False),
    "redis": Row("Leasehold on Redis, and a fence", "fenced", "redis"),
    "etcd": Row("Leasehold on etcd, three members, and a fence", "fenced", "etcd"),
    "zookeeper": Row("Leasehold on ZooKeeper, three members, and a fence", "fenced", "zookeeper"),
    "leasehold-redlock": Row("Leasehold on five Redis (`redlock://`), and a fence", "fenced", "redlock"),
    "postgresql": Row("Leasehold on PostgreSQL, and a fence", "fenced", "postgresql"),
    "mysql": Row("Leasehold on MariaDB, and a fence", "fenced", "mysql", False),
}


def load_results() -> dict[str, dict[str, Any]]:
    """By row and fault."""
    found: dict[str, dict[str, Any]] = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else {}
    return found


def save_results(results: dict[str, dict[str, Any]]) -> None:
    EVIDENCE.parent.mkdir(exist_ok=True)
    merged = {**load_results(), **results}
    EVIDENCE.write_text(json.dumps({name: merged[name] for name in ROWS if name in merged}, indent=1) + "\n")


def cell(fault: str, count: dict[str, Any] | None) -> str:
    if count is None:
        return "—"
    parts = [f"**{count['lost']} of {count['written']} lost**" if count["lost"] else "none lost"]
    parts += [f"{count['refused']} refused"] if count["refused"] else []
    parts += [f"{count['failed']} failed"] if count["failed"] else []
    if fault != "failover" and count["waited"] >= 0.1:
        parts.append(f"the next had to wait {count['waited']:.1f} s")
    return ", ".join(parts)


def table_rows(results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Title and cells of every row that has results."""
    known = [(row, results[name]) for name, row in ROWS.items() if name in results]
    return [(row.title, *(cell(fault, found.get(fault)) for fault in FAULTS)) for row, found in known]
