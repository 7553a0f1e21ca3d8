"""The soak of the lab: how much load it offers, and what it calls a leak."""

from __future__ import annotations

import json

import pytest

from harness.lab.setups import Sqlite
from harness.lab.soak import SHARE, Load, Sample, drift, growth_of, interval, residue
from leasehold import Client
from leasehold.cli.bench.ramp import RateStep
from tests.lab.test_runs import run_lab

FLAT = [Sample(30.0, 10, 4)] * 20


def step(p50: float) -> RateStep:
    return RateStep(100.0, 100.0, p50, p50, p50, 0.0, None, 0.1, 0.1, 0.0)


@pytest.fixture
def load(monkeypatch):
    """A load without processes, which has ended."""
    made = Load.__new__(Load)
    made.steps, made.failure = [step(2.0)] * 4, ""
    return made


def judge(load, samples):
    return residue(Sqlite(), {"server 1": samples}, 1000.0, load)


def test_flat_soak_has_no_finding(load):
    found = judge(load, FLAT)
    assert (found.violations, found.late, found.claims) == ([], [], 0)
    assert (found.capacity, found.rate) == (1000, 700)
    assert found.growth == {"server 1": {"memory": [30.0, 30.0], "descriptors": [10, 10], "threads": [4, 4]}}


@pytest.mark.parametrize("figure", Sample._fields)
def test_growth_of_any_figure_is_found(load, figure):
    samples = [each._replace(**{figure: getattr(each, figure) * (1 + number / 10)}) for number, each in enumerate(FLAT)]
    (violation,) = judge(load, samples).violations
    assert f"the {figure} of the server 1 grew" in violation


def test_single_peak_is_no_growth():
    samples = [*FLAT[:19], Sample(60.0, 50, 9)]
    assert growth_of(samples)["memory"] == [30.0, 30.0]


def test_claim_that_is_left_is_found(load, monkeypatch):
    monkeypatch.setattr("harness.lab.soak._CLAIM_SECONDS", 0.1)
    setup = Sqlite()
    with Client(setup.direct_url(), namespace="soak-load") as client:
        lease = client.lock("load/0/1").acquire()
        assert "1 claims or keys are left" in residue(setup, {}, 1000.0, load).violations[0]
        lease.release()


def test_load_that_ends_early_is_found(load):
    load.failure = "the load ended early"
    assert judge(load, FLAT).violations == ["the load ended early"]


def test_latency_that_grows_is_reported_as_late():
    assert drift([step(2.0)] * 8) == []
    assert drift([step(2.0), step(500.0), step(2.0), step(2.0)]) == [], "a fault delays the pairs of one step"
    assert "2.0 to 9.0 ms" in drift([step(2.0)] * 4 + [step(9.0)] * 4)[0]


def test_short_soak_has_as_many_faults_as_it_has_quarters():
    assert (interval(600.0), interval(12.0)) == (15.0, 3.0)


@pytest.mark.extended
def test_short_soak_offers_its_share_of_the_capacity():
    finished = run_lab("sqlite", "soak", "--seconds", "8", "--capacity", "40", "--json")
    assert finished.returncode in (0, 1), finished.stderr
    result = json.loads(finished.stdout)
    assert result["violations"] == [], finished.stderr
    soak = result["soak"]
    assert soak["rate"] == round(SHARE * 40)
    assert [each["rate"] for each in soak["load"]] == [28.0] * 4
    assert set(soak["growth"]) == {"client 1", "client 2", "contender"}
    assert result["faults"] >= 1


@pytest.mark.faults
def test_short_soak_measures_the_capacity_of_redis_first():
    finished = run_lab("soak", "--seconds", "15", "--json")
    assert finished.returncode in (0, 1), finished.stderr
    soak = json.loads(finished.stdout)["soak"]
    assert soak["capacity"] > 0
    assert set(soak["growth"]) == {"server 1", "client 1", "client 2", "contender"}
    assert soak["claims"] == 0
