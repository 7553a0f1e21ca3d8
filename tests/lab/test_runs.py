"""Runs of the fault lab with real servers: representative cells, and a lock that does not exclude."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.lab.expectations import Expectation
from harness.lab.faults import FAULTS
from harness.lab.run import Run
from harness.lab.setups import Link, Sqlite
from harness.servers.process import scratch
from tests.support.paths import child_environment

ROOT = Path(__file__).parents[2]

SECOND_TIER = (  # one per engine, about three seconds of processor time each
    *("sqlite client-kill", "redis lost-answers", "redis-aof server-kill", "redlock server-pause"),
    *("zookeeper client-cut", "etcd all-restart", "postgresql server-kill", "mysql server-pause"),
    *("server partition", "sentinel-confirmed server-kill"),
)
CELLS = (
    *SECOND_TIER,
    *("sqlite client-pause", "sqlite disk-full", "redis client-kill", "redis server-kill", "redis clock-forward"),
    *("redlock clocks-apart", "zookeeper server-kill", "etcd partition", "postgresql client-pause"),
    *("server server-kill", "redlock site-cut", "zookeeper site-cut", "etcd site-cut"),
)
NEEDS_ROOT = ("disk-full", "partition", "site-cut")


def run_lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.lab", *arguments]
    return subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=600)


def test_unknown_cell_is_refused_with_the_names_that_exist():
    finished = run_lab("redis", "no-such-fault")
    assert finished.returncode == 2
    assert "client-kill" in finished.stderr


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


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.extended if cell in SECOND_TIER else pytest.mark.faults) for cell in CELLS],
)
def test_representative_cell_keeps_its_promises(cell):
    setup, fault = cell.split()
    if fault in NEEDS_ROOT and os.getuid() != 0:
        pytest.skip("needs root, for namespaces of its own")
    finished = run_lab(setup, fault, "--seconds", "1" if cell in SECOND_TIER else "5", "--json")
    assert finished.returncode in (0, 1), finished.stderr
    assert json.loads(finished.stdout)["violations"] == [], finished.stderr
