"""The comparison page agrees with the tool in both directions: every row is on the page and has its results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
table = importlib.import_module("comparison.table")

FENCED = [name for name, row in table.ROWS.items() if row.approach == "fenced"]
UNFENCED = ["naive", "set-nx", "redlock", "unfenced"]


LOCKLESS = ["optimistic", "idempotent"]


def run(*rows: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "comparison", "--rounds", "1", "--json", *rows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_recorded_results_cover_every_row_and_fault():
    recorded = table.load_results()
    assert list(recorded) == list(table.ROWS)
    for name, row in table.ROWS.items():
        faults = [fault for fault in table.FAULTS if row.fails_over or fault != "failover"]
        assert list(recorded[name]) == [*faults, "cost"]


def counts_of(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By fault."""
    return {fault: count for fault, count in found.items() if fault in table.FAULTS}


def test_recorded_results_support_the_claims_of_the_page():
    recorded = table.load_results()
    for name in FENCED + LOCKLESS:
        assert not any(count["lost"] for count in counts_of(recorded[name]).values()), name
        assert recorded[name]["pause"]["refused"] == recorded[name]["pause"]["rounds"], name
    for name in UNFENCED:
        assert recorded[name]["pause"]["lost"] == recorded[name]["pause"]["rounds"], name
    for name in ("etcd", "zookeeper"):  # no other client was granted the lock
        assert recorded[name]["failover"]["refused"] == 0
    for name in ("set-nx", "redlock", "unfenced"):
        assert recorded[name]["failover"]["lost"] > 0
    assert recorded["row-lock"]["pause"]["lost"] == recorded["row-lock"]["failover"]["lost"] == 0
    assert recorded["naive"]["cost"] == 1.0
    assert recorded["optimistic"]["cost"] < min(recorded[name]["cost"] for name in FENCED)


@pytest.mark.extended
def test_tool_produces_results_shaped_as_recorded():
    results, recorded = run("naive", "sqlite", *LOCKLESS), table.load_results()
    for name, found in results.items():
        assert list(found) == list(recorded[name])
        assert all(list(count) == list(recorded[name][fault]) for fault, count in counts_of(found).items())
        assert found["cost"] > 0
    for name in LOCKLESS:
        assert (results[name]["pause"]["lost"], results[name]["pause"]["refused"]) == (0, 1)
    assert (results["naive"]["pause"]["lost"], results["naive"]["pause"]["written"]) == (1, 2)
    assert results["sqlite"]["pause"] | {"waited": 0} == {
        "rounds": 1, "written": 1, "lost": 0, "refused": 1, "failed": 0, "waited": 0,
    }  # fmt: skip
    assert all(count["lost"] == 0 for count in counts_of(results["sqlite"]).values())
    assert "1 of 2 lost" in table.table_rows(results)[0][1]


@pytest.mark.faults
@pytest.mark.parametrize("name", table.ROWS)
def test_new_results_agree_with_recorded_results(name):
    results, recorded = run(name)[name], table.load_results()[name]
    for fault, count in counts_of(recorded).items():
        for what in ("lost", "refused", "failed"):
            assert bool(results[fault][what]) == bool(count[what]), (fault, what, results)
