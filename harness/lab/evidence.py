"""The results of runs: `docs/evidence/lab.json` keeps them, `docs/reliability.md` shows them."""

from __future__ import annotations

import argparse
import fcntl
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from harness.lab.expectations import TABLE, Cell, NotApplicable, cells
from harness.lab.faults import FAULTS
from harness.lab.setups import SETUPS
from harness.lab.verdict import Recording, Verdict

EVIDENCE: Final = Path(__file__).parents[2] / "docs" / "evidence" / "lab.json"
Result = dict[str, Any]
_FIGURES: Final = (
    *("operations", "grants", "refusals", "stale", "lost_updates", "overlaps", "losses", "longest_gap"),
    *("refused_in_gap", "longest_wait", "requests_per_grant", "faults", "violations", "late"),
)


def result(setup: str, fault: str, version: str, arguments: argparse.Namespace, verdict: Verdict) -> Result:
    return {
        "setup": setup,
        "fault": fault,
        "plain": arguments.plain,
        "seed": arguments.seed,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "version": version,
        "seconds": arguments.seconds,
        "tasks": arguments.crowd if fault == "crowd" else None,
        **{name: getattr(verdict, name) for name in _FIGURES},
    }


def identity(found: Result) -> tuple[str, str, bool, int]:
    return found["setup"], found["fault"], found["plain"], found["seed"]


def load() -> list[Result]:
    found: list[Result] = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else []
    return found


def save(new: Sequence[Result]) -> None:
    """Add results to those that are kept, also while other processes do. One that is there already is replaced."""
    columns = {name: number for number, name in enumerate(SETUPS)}
    rows = {name: number for number, name in enumerate([*TABLE, "soak"])}
    with open(EVIDENCE, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        merged = {identity(each): each for each in (*json.loads(file.read() or "[]"), *new)}
        kept = sorted(
            merged.values(),
            key=lambda each: (columns[each["setup"]], rows[each["fault"]], each["plain"], each["seed"]),
        )
        file.truncate(0)
        file.write("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")


def write_history(path: str, recording: Recording) -> None:
    """Write all events, one per line, and then when faults began and ended, for the reader who explains a finding."""
    kinds = ("crashes", "pauses", "silences", "waits", "failures")
    faults = {kind: getattr(recording, kind) for kind in kinds}
    with open(path, "w") as file:
        for line in (*sorted(recording.events, key=lambda event: event.at), faults):
            file.write(json.dumps(line, default=sorted) + "\n")


# ------------------------------------------------------------------ the tables of the page

Rows = list[tuple[str, ...]]  # the first is the head


def of_cell(results: Sequence[Result], setup: str, fault: str, *, plain: bool = False) -> list[Result]:
    return [each for each in results if (each["setup"], each["fault"], each["plain"]) == (setup, fault, plain)]


def setups_table(results: Sequence[Result]) -> Rows:
    """What the words of the other tables mean, and what was run."""
    rows: Rows = [("word", "servers", "version", "runs", "last run", "faults", "operations", "grants")]
    for name, setup in SETUPS.items():
        found = [each for each in results if each["setup"] == name]
        versions = ", ".join(sorted({each["version"] for each in found}))
        sums = (f"{sum(each[figure] for each in found):,}" for figure in ("faults", "operations", "grants"))
        last = max((each["date"] for each in found), default="—")
        rows.append((f"`{name}`", setup.title, versions or "—", str(len(found)), last, *sums))
    return rows


def matrix_table(results: Sequence[Result]) -> Rows:
    """Per fault and setup: what is promised, and how many runs kept it."""
    rows: Rows = [("fault", *SETUPS)]
    for fault, setups in TABLE.items():
        cells = (_cell(cell, of_cell(results, setup, fault)) for setup, cell in setups.items())
        rows.append((f"`{fault}`: {FAULTS[fault].title}", *cells))
    return rows


def _cell(cell: Cell, results: Sequence[Result]) -> str:
    if isinstance(cell, NotApplicable):
        return ""
    if not results:
        return f"{cell.letter}, not run"
    broken = sum(bool(each["violations"]) for each in results)
    late = sum(bool(each["late"]) for each in results)
    parts = [f"{cell.letter} {len(results)}"]
    parts += [f"**{broken} broken**"] if broken else []
    parts += [f"{late} late"] if late else []
    return ", ".join(parts)


def figures_table(results: Sequence[Result], setup: str) -> Rows:
    """The figures of one setup, over all runs of each fault."""
    head = ("fault", "faults", "operations", "grants", "refusals", "stale refused", "two holders", "longest gap")
    rows: Rows = [(*head, "requests per grant")]
    for fault in TABLE:
        found = of_cell(results, setup, fault)
        if found:
            sums = ("faults", "operations", "grants", "refusals", "stale", "overlaps")
            numbers = (f"{sum(each[figure] for each in found):,}" for figure in sums)
            gap = f"{max(each['longest_gap'] for each in found):.1f} s"
            costs = [each["requests_per_grant"] for each in found if each["requests_per_grant"] is not None]
            rows.append((f"`{fault}`", *numbers, gap, f"{max(costs):.1f}" if costs else "—"))
    return rows


def pauses_table(results: Sequence[Result]) -> Rows:
    """Updates that were lost when a holder was paused, without a fence and with one."""
    rows: Rows = [
        ("setup", "pauses without a fence", "updates lost", "pauses with a fence", "updates lost", "writes refused")
    ]
    for setup in SETUPS:
        plain = of_cell(results, setup, "client-pause", plain=True)
        fenced = of_cell(results, setup, "client-pause")
        if plain and fenced:
            numbers = [sum(each[figure] for each in plain) for figure in ("faults", "lost_updates")]
            numbers += [sum(each[figure] for each in fenced) for figure in ("faults", "lost_updates", "stale")]
            rows.append((f"`{setup}`", *map(str, numbers)))
    return rows


def quotes_table() -> Rows:
    """Where two holders are possible, and the sentence of the guarantees page that says so."""
    rows: Rows = [("fault", "setup", "the guarantees page says")]
    for setup, fault, expectation in cells():
        if expectation.overlaps:
            page = SETUPS[setup].engine
            rows.append((f"`{fault}`", f"`{setup}`", f'[{page}](guarantees/{page}.md): "{expectation.overlaps}"'))
    return rows


def blanks_table() -> Rows:
    """Why a cell of the matrix is empty."""
    rows: Rows = [("setup", "faults", "why there is no run")]
    for setup in SETUPS:
        reasons: dict[str, list[str]] = {}
        for fault, setups in TABLE.items():
            cell = setups[setup]
            if isinstance(cell, NotApplicable):
                reasons.setdefault(cell.why, []).append(f"`{fault}`")
        rows += [(f"`{setup}`", ", ".join(faults), why) for why, faults in reasons.items()]
    return rows


def soak_table(results: Sequence[Result]) -> Rows:
    head = ("setup", "seconds", "faults", "operations", "grants", "broken promises", "claims left")
    rows: Rows = [(*head, "load, pairs a second", "p50 of the load")]
    for each in results:
        if each["fault"] == "soak":
            numbers = [
                f"{each['seconds']:,.0f}",
                *(f"{each[figure]:,}" for figure in ("faults", "operations", "grants")),
            ]
            left = each["soak"]
            numbers += [str(len(each["violations"])), str(left["claims"])]
            medians = [step["p50"] for step in left["load"]]
            load = f"{left['rate']:,} of {left['capacity']:,}"
            rows.append((f"`{each['setup']}`", *numbers, load, f"{medians[0]:.1f} to {medians[-1]:.1f} ms"))
    return rows


def growth_table(results: Sequence[Result]) -> Rows:
    """What the processes of a soak used at its begin and at its end."""
    rows: Rows = [("setup", "process", "memory", "descriptors", "threads")]
    for each in results:
        for process, figures in each["soak"]["growth"].items() if each["fault"] == "soak" else ():
            texts = [f"{first:g} to {last:g}" for first, last in figures.values()]
            rows.append((f"`{each['setup']}`", process, f"{texts[0]} MB", *texts[1:]))
    return rows
