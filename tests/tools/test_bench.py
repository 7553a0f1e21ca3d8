"""The benchmarks work when they are needed: what they import exists, and their results become a page."""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
cases = importlib.import_module("bench.cases")
report = importlib.import_module("bench.report")
MODULES = sorted((ROOT / "bench").glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_bench_imports_only_names_that_exist(module) -> None:
    """Their other packages are in an environment of its own, so they cannot be imported here."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("leasehold", "harness")):
            found = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(found, alias.name)]
            assert [name for name in missing if find_spec(f"{node.module}.{name}") is None] == [], node.module


def test_every_table_is_a_module() -> None:
    assert {path.stem for path in MODULES} >= set(report.TABLES)


@pytest.mark.parametrize(
    ("aim", "texts"),
    [
        (cases.Aim("pair", 0.9, 0.9), ("pair", "0.9", "at most 0.9", "yes")),
        (cases.Aim("pair", 0.91, 0.9), ("pair", "0.91", "at most 0.9", "no")),
        (cases.Aim("crowd", 0.2, 0.2, at_least=True), ("crowd", "0.2", "at least 0.2", "yes")),
        (cases.Aim("crowd", 0.1, 0.2, at_least=True), ("crowd", "0.1", "at least 0.2", "no")),
        (cases.Aim("kill", float("inf"), 0.1, unit=" s"), ("kill", "inf s", "at most 0.1 s", "no")),
    ],
)
def test_aim_is_met_up_to_its_limit(aim, texts) -> None:
    assert aim.texts() == texts


def test_results_begin_with_the_aims_of_all_tables() -> None:
    parts = [cases.Aims(f"{name}: aims", [cases.Aim(name, 1.0, limit)]) for name, limit in (("a", 2.0), ("b", 0.5))]
    results = {
        table: {"parts": [part.as_json()], "left_out": []} for table, part in zip(report.TABLES, parts, strict=False)
    }
    assert report.aim_rows(results) == [("a", "1", "at most 2", "yes"), ("b", "1", "at most 0.5", "no")]
    assert "1 of 2 are met." in report.aims_section(results)
