"""The table of the fault lab: it is complete, it quotes the guarantees pages, and its results support the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.lab import evidence
from harness.lab.__main__ import matrix
from harness.lab.expectations import TABLE, Expectation, cells
from harness.lab.faults import FAULTS, SOAK
from harness.lab.setups import SETUPS

DOCS = Path(__file__).parents[2] / "docs"


def test_every_fault_has_a_row_with_every_setup():
    assert list(TABLE) == list(FAULTS)
    assert all(list(row) == list(SETUPS) for row in TABLE.values())


@pytest.mark.parametrize("setup", SETUPS)
def test_possible_double_holders_are_quoted_from_guarantees_page(setup):
    page = " ".join((DOCS / "guarantees" / f"{SETUPS[setup].engine}.md").read_text(encoding="utf-8").split())
    quotes = {cell.overlaps for name, _, cell in cells() if name == setup and cell.overlaps}
    assert [quote for quote in quotes if quote not in page] == []


def test_matrix_has_every_cell_and_pauses_without_fence():
    runs = matrix(seeds=3)
    assert len(set(runs)) == len(runs)
    assert {(setup, fault) for setup, fault, plain, _ in runs if not plain} == {cell[:2] for cell in cells()}
    assert {fault for _, fault, plain, _ in runs if plain} == {name for name, fault in FAULTS.items() if fault.pauses}
    assert [seed for *_, seed in runs] == sorted(seed for *_, seed in runs)  # an early end leaves all cells


def test_part_of_the_matrix_can_be_chosen():
    assert {setup for setup, *_ in matrix(1, only=["etcd"])} == {"etcd"}
    assert "crowd" not in {fault for _, fault, *_ in matrix(1, skip=["crowd"])}


def test_soak_uses_faults_that_need_no_preparation():
    assert all(not FAULTS[name].needs and FAULTS[name].slow_ttl is None for name in SOAK)


def test_results_are_added_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "EVIDENCE", tmp_path / "lab.json")
    first = {"setup": "redis", "fault": "client-kill", "plain": False, "seed": 1, "grants": 1}
    evidence.save([first, {**first, "seed": 2}])
    evidence.save([{**first, "grants": 5}])
    assert [(each["seed"], each["grants"]) for each in evidence.load()] == [(1, 5), (2, 1)]


# ------------------------------------------------------------------ what was recorded


def test_recorded_runs_are_cells_of_the_table():
    recorded = [each for each in evidence.load() if each["fault"] != "soak"]
    assert recorded
    assert all(isinstance(TABLE[each["fault"]][each["setup"]], Expectation) for each in recorded)


def test_every_cell_was_run_with_three_seeds():
    recorded = {evidence.identity(each) for each in evidence.load()}
    assert [job for job in matrix(seeds=3) if job not in recorded] == []


def test_recorded_runs_broke_no_promise_of_safety():
    assert [each for each in evidence.load() if each["violations"]] == []


def test_recorded_fault_was_injected_and_lock_granted_in_every_run():
    assert [each for each in evidence.load() if not each["faults"] or not each["grants"]] == []


def test_recorded_pauses_without_fence_lost_updates_and_with_fence_none():
    pauses = [each for each in evidence.load() if each["fault"] == "client-pause"]
    assert {each["setup"] for each in pauses if each["plain"]} == {
        each["setup"] for each in pauses if not each["plain"]
    }
    assert all(bool(each["lost_updates"]) == each["plain"] for each in pauses)
    assert all(each["stale"] for each in pauses if not each["plain"])


def test_recorded_double_holders_are_in_cells_that_allow_them():
    for each in evidence.load():
        if each["overlaps"]:
            cell = TABLE[each["fault"]][each["setup"]]
            assert isinstance(cell, Expectation)
            assert cell.overlaps, each


def test_broken_run_is_shown_on_the_page():
    broken = {**json.loads(json.dumps(evidence.load()[0])), "violations": ["two holders"]}
    shown = [cell for row in evidence.matrix_table([broken]) for cell in row]
    assert sum("1 broken" in cell for cell in shown) == 1
    assert any("not run" in cell for cell in shown)
