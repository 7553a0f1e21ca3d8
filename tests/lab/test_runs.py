"""Runs of the fault lab with real servers: representative cells, and a lock that does not exclude."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.lab import evidence
from harness.lab.__main__ import main, parse_arguments
from harness.lab.contender import now
from harness.lab.expectations import Expectation
from harness.lab.faults import FAULTS
from harness.lab.run import Run
from harness.lab.setups import SETUPS, Link, Sqlite
from harness.servers.folders import scratch
from tests.support.paths import child_environment

ROOT = Path(__file__).parents[2]

# Twenty cells in ten runs, one per setup: faults that share servers and contenders take seconds, the start of both
# takes as long. Each kind of crash, pause, cut and restart meets several engines, and each engine what it fears most.
SECOND_TIER = (
    *("sqlite client-kill,client-pause", "redis client-cut,lost-answers", "redis-aof server-kill,all-restart"),
    *("sentinel-confirmed client-kill,server-kill", "redlock server-pause,all-restart"),
    *("zookeeper client-cut,server-kill", "etcd partition,all-restart", "postgresql client-pause,server-kill"),
    *("mysql server-pause,server-kill", "server client-kill,partition"),
)
FAULTS_TIER = (
    *("sqlite disk-full", "redis client-kill", "redis server-kill", "redis clock-forward", "redlock clocks-apart"),
    *("mysql all-restart", "server server-kill", "redlock site-cut", "zookeeper site-cut", "etcd site-cut"),
)
NEEDS_ROOT = ("disk-full", "partition", "site-cut")


def run_lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.lab", *arguments]
    return subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=600)


def test_unknown_cell_is_refused_with_the_names_that_exist():
    finished = run_lab("redis", "no-such-fault")
    assert finished.returncode == 2
    assert "client-kill" in finished.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *("redis crowd --crowd 0", "redis crowd --crowd 10", "redis client-kill --seconds -1", "soak --capacity nan"),
        *("--jobs 0", "--seeds 0", "--only no-such-word", "--skip no-such-word", "--older-than yesterday"),
    ],
)
def test_argument_that_no_run_could_have_is_refused_at_once(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lab", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        parse_arguments()
    assert ended.value.code == 2
    assert arguments.split()[-2] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        *(("soak", True), ("soak --no-keep", False), ("soak --seconds 90", False), ("soak --seconds 90 --keep", True)),
        *(("redis client-kill", False), ("redis client-kill --keep", True)),
    ],
)
def test_result_of_a_whole_soak_is_kept_unless_told_otherwise(arguments, kept, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lab", *arguments.split()])
    assert parse_arguments().keep is kept


@pytest.mark.parametrize(("since", "again"), [("2026-11-18", False), ("2026-11-19", True)])
def test_matrix_runs_cells_again_that_are_older_than_a_date(since, again, monkeypatch, capsys):
    cell = ("sqlite", "client-kill", False, 1)
    kept = dict(zip(("setup", "fault", "plain", "seed"), cell, strict=True), date="2026-11-18")
    ran = []
    monkeypatch.setattr(evidence, "load", lambda: [kept])
    monkeypatch.setattr("harness.lab.__main__.matrix", lambda *arguments: [cell])
    monkeypatch.setattr("harness.lab.__main__.run_apart", lambda job, arguments: (ran.append(job), (2, None))[1])
    monkeypatch.setattr(sys, "argv", ["lab", "--older-than", since])
    assert main() == (2 if again else 0)
    assert ran == [cell] * again


def test_interrupted_matrix_says_that_its_results_are_kept(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["lab"])
    monkeypatch.setattr("harness.lab.__main__.run_matrix", interrupt)
    assert main() == 2
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.extended
def test_pause_without_fence_loses_updates():
    finished = run_lab("sqlite", "client-pause", "--plain", "--seconds", "1", "--json")
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert result["lost_updates"] > 0
    assert result["violations"] == []


@pytest.mark.extended
def test_cell_that_does_not_apply_could_not_run():
    finished = run_lab("sqlite", "server-kill")
    assert finished.returncode == 2
    assert "there is no server" in finished.stderr


@pytest.mark.extended
def test_lock_that_does_not_exclude_is_found():
    class Split(Sqlite):
        """Every contender has a file of its own."""

        def link(self) -> Link:
            return Link(f"sqlite://{os.path.join(scratch(), 'locks.db')}", [])

    verdict = Run(Split(), FAULTS["client-kill"], Expectation(), seconds=1.0).execute()
    assert any("exclusion" in violation for violation in verdict.violations)
    assert len({event.process for event in verdict.bad_part}) == 2


@pytest.mark.extended
def test_contender_that_was_killed_after_a_pause_broke_no_promise():
    """The lab took it for the holder, until it reported that its lease was lost."""

    def pause_and_kill(run: Run) -> float:
        victim, paused_at = run.long_holder(), now()
        with run.pause(victim):
            run.await_write(other_than=victim, since=paused_at)
        run.kill(run.long_holder(among=[victim]))
        run.start_contender()
        return now()

    fault = FAULTS["client-pause"]._replace(inject=pause_and_kill)
    verdict = Run(Sqlite(), fault, Expectation(), seconds=1.0).execute()
    assert verdict.violations == []


@pytest.mark.parametrize(
    "cells",
    [
        *(pytest.param(cells, marks=pytest.mark.extended) for cells in SECOND_TIER),
        *(pytest.param(cells, marks=pytest.mark.faults) for cells in FAULTS_TIER),
    ],
)
def test_representative_cells_keep_their_promises(cells):
    setup, faults = cells.split()
    if os.getuid() != 0 and any(fault in NEEDS_ROOT for fault in faults.split(",")):
        pytest.skip("needs root, for namespaces of its own")
    finished = run_lab(setup, faults, "--seconds", "1" if cells in SECOND_TIER else "5", "--json")
    assert finished.returncode in (0, 1), finished.stderr
    assert json.loads(finished.stdout)["violations"] == [], finished.stderr


def test_twenty_cells_run_in_the_second_tier():
    assert sum(len(cells.split()[1].split(",")) for cells in SECOND_TIER) == 20
    assert {cells.split()[0] for cells in SECOND_TIER} == SETUPS.keys() - {"sentinel", "redlock-empty"}
