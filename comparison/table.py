"""The rows of the comparison, their results, and the table on the page.

`docs/evidence/comparison.json` keeps the results; tests/docs/test_tables.py generates both tables from it.
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
    needs: str  # what it takes to run it and to write programs for it
    use: str  # when to choose it
    fails_over: bool = True


_FENCE: Final = "a token in each write"

ROWS: Final[dict[str, Row]] = {
    "naive": Row("no lock", "naive", "nothing", "nothing", "one writer, or updates that may be lost", False),
    "optimistic": Row(
        "optimistic update (a version column)",
        "optimistic",
        "nothing",
        "a version in each row, a retry in each program",
        "short work in one database, conflicts are rare, and it may be done again",
        False,
    ),
    "idempotent": Row(
        "idempotent execution (the request's id in its transaction)",
        "idempotent",
        "nothing",
        "an id of each request, a table of ids",
        "the same request may arrive twice; it does not order different requests",
        False,
    ),
    "set-nx": Row("`SET NX PX` on one Redis", "set-nx", "redis", "one server", "to save work, not to protect data"),
    "redlock": Row(
        "Redlock on five Redis, without tokens",
        "set-nx",
        "five-redis",
        "five servers, clocks that agree",
        "to save work if one server is not available enough",
    ),
    "row-lock": Row(
        "`SELECT ... FOR UPDATE`, PostgreSQL",
        "row-lock",
        "postgresql-account",
        "a connection and a transaction for as long as the work takes",
        "all that is protected is in that database, and the work is short",
    ),
    "unfenced": Row(
        "Leasehold on Redis, no fence at the account",
        "unfenced",
        "redis",
        "one server",
        "to save work, or a resource that cannot check tokens",
    ),
    "sqlite": Row(
        "Leasehold on SQLite, and a fence", "fenced", "file", f"a file; {_FENCE}", "processes of one machine", False
    ),
    "redis": Row(
        "Leasehold on Redis, and a fence",
        "fenced",
        "redis",
        f"one server; {_FENCE}",
        "many short locks; locks may be forgotten in a failover, the fence still holds",
    ),
    "etcd": Row(
        "Leasehold on etcd, three members, and a fence",
        "fenced",
        "etcd",
        f"three servers; {_FENCE}",
        "a lock must survive the loss of a server; leader election",
    ),
    "zookeeper": Row(
        "Leasehold on ZooKeeper, three members, and a fence",
        "fenced",
        "zookeeper",
        f"three servers; {_FENCE}",
        "as etcd, where ZooKeeper runs already",
    ),
    "leasehold-redlock": Row(
        "Leasehold on five Redis (`redlock://`), and a fence",
        "fenced",
        "redlock",
        f"five servers, clocks that agree; {_FENCE}",
        "Redis servers are there, and one of them may fail",
    ),
    "postgresql": Row(
        "Leasehold on PostgreSQL, and a fence",
        "fenced",
        "postgresql",
        f"the database you have; {_FENCE}",
        "work that is longer than a transaction should be, or outside the database",
    ),
    "mysql": Row(
        "Leasehold on MariaDB, and a fence",
        "fenced",
        "mysql",
        f"the database you have; {_FENCE}",
        "as PostgreSQL, where MariaDB or MySQL runs already",
        False,
    ),
}


def load_results() -> dict[str, dict[str, Any]]:
    """By row, and then by fault, or `cost`."""
    found: dict[str, dict[str, Any]] = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else {}
    return found


def save_results(results: dict[str, dict[str, Any]]) -> None:
    EVIDENCE.parent.mkdir(exist_ok=True)
    known = load_results()
    merged = known | {name: {**known.get(name, {}), **found} for name, found in results.items()}
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


def cost_rows(results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Title, cost, needs and use of every row whose cost was measured."""
    return [
        (row.title, f"{results[name]['cost']:.1f}", row.needs, row.use)
        for name, row in ROWS.items()
        if "cost" in results.get(name, {})
    ]
