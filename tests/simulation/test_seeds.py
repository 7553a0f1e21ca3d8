"""Seeds of the fault simulation: none may have findings.

`make test` runs 50 of them, `make extended` 450 more, and `make faults` further seeds, as many as `LEASEHOLD_SEEDS`
says. Of the harsh families it is 20, 180 more, and as many again.
"""

import os
import subprocess
import sys

import pytest

from harness.simulator.seeds import main, simulate

LAST_TIER = int(os.environ.get("LEASEHOLD_SEEDS", "1000"))


def chunks(size, first_tier, second_tier):
    """The seeds of all tiers, `size` to a test."""
    end = second_tier + LAST_TIER
    return [
        *(range(first, first + size) for first in range(0, first_tier, size)),
        *(
            pytest.param(range(first, min(first + size, end)), marks=mark)
            for start, stop, mark in (
                (first_tier, second_tier, pytest.mark.extended),
                (second_tier, end, pytest.mark.faults),
            )
            for first in range(start, stop, size)
        ),
    ]


@pytest.mark.parametrize("seeds", chunks(50, 50, 500), ids=lambda seeds: str(seeds.start))
def test_every_seed_has_no_findings(seeds, request):
    if seeds.start:
        request.getfixturevalue("untraced")
    reports = [simulate(seed) for seed in seeds]
    check_clean(reports)
    # Waiters may be passed over only in families with faults.
    assert {report.family for report in reports if report.passed_over} <= {"mishaps", "outages", "storm"}


@pytest.mark.parametrize("seeds", chunks(20, 20, 200), ids=lambda seeds: str(seeds.start))
@pytest.mark.usefixtures("untraced")
def test_every_harsh_seed_has_no_findings(seeds):
    check_clean([simulate(seed, harsh=True) for seed in seeds])


def check_clean(reports):
    """No findings; but the runs must have grants and losses, or they show nothing."""
    print(*reports, f"passed over in all: {sum(report.passed_over for report in reports)}", sep="\n")
    assert [str(report) for report in reports if report.findings] == []
    assert min(report.grants for report in reports) > 0
    assert sum(report.lost for report in reports) > 0


@pytest.mark.parametrize("seed", [69, 622, 1536, 3794, 22275])
def test_formerly_failing_seed_has_no_findings(seed):
    assert not simulate(seed).findings


@pytest.mark.parametrize("seed", [386, 439, 1087, 1474, 4799, 5255])
@pytest.mark.usefixtures("untraced")
def test_formerly_failing_harsh_seed_has_no_findings(seed):
    assert not simulate(seed, harsh=True).findings


def test_seed_gives_same_report_in_every_interpreter():
    command = (
        "from harness.simulator.seeds import simulate;"
        "print([(str(report), report.last_random) for report in map(simulate, range(4))])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", command],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in "123"
    }
    assert len(outputs) == 1


def test_command_replays_a_seed(capsys):
    assert main(["--seed", "5", "-v"]) == 0
    assert "seed 5 (calm): clean" in capsys.readouterr().out
