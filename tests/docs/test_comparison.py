"""The page of the comparison agrees with what the tool makes, in both directions: all rows are there, and hold."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
table = importlib.import_module("comparison.table")

FENCED = [name for name, row in table.ROWS.items() if row.maker == "fenced"]
UNFENCED = ["naive", "set-nx", "redlock", "unfenced"]


def run(*rows: str) -> dict[str, dict[str, dict[str, float]]]:
    words = [sys.executable, "-m", "comparison", "--rounds", "1", "--json", *rows]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_row_was_measured_at_every_fault():
    found = table.measured()
    assert list(found) == list(table.ROWS)
    for name, row in table.ROWS.items():
        assert list(found[name]) == [fault for fault in table.FAULTS if row.fails_over or fault != "fail-over"]


def test_what_was_measured_is_what_the_page_says_of_it():
    found = table.measured()
    for name in FENCED:
        assert [count["lost"] for count in found[name].values()] == [0] * len(found[name]), name
        assert found[name]["pause"]["refused"] == found[name]["pause"]["rounds"], name
    for name in UNFENCED:
        assert found[name]["pause"]["lost"] == found[name]["pause"]["rounds"], name
    for name in ("etcd", "zookeeper"):  # nobody else was let in
        assert found[name]["fail-over"]["refused"] == 0
    for name in ("set-nx", "redlock", "unfenced"):
        assert found[name]["fail-over"]["lost"] > 0
    assert found["row-lock"]["pause"]["lost"] == found["row-lock"]["fail-over"]["lost"] == 0


def test_the_tool_makes_such_rows():
    made, kept = run("naive", "sqlite"), table.measured()
    for name, faults in made.items():
        assert {fault: list(count) for fault, count in faults.items()} == {
            fault: list(count) for fault, count in kept[name].items()
        }
    assert (made["naive"]["pause"]["lost"], made["naive"]["pause"]["written"]) == (1, 2)
    assert made["sqlite"]["pause"] | {"waited": 0} == {
        "rounds": 1, "written": 1, "lost": 0, "refused": 1, "failed": 0, "waited": 0,
    }  # fmt: skip
    assert all(count["lost"] == 0 for count in made["sqlite"].values())
    assert "1 of 2 lost" in table.lines(made)[0][1]


@pytest.mark.faults
@pytest.mark.parametrize("name", table.ROWS)
def test_every_row_comes_out_as_it_did(name):
    made, kept = run(name)[name], table.measured()[name]
    for fault, count in kept.items():
        for what in ("lost", "refused", "failed"):
            assert bool(made[fault][what]) == bool(count[what]), (fault, what, made)
