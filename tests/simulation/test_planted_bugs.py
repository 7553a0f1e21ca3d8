"""The simulation finds every planted bug within 50 seeds, so its clean runs elsewhere mean something."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from harness.simulator import seeds
from tests.support import planted_bugs
from tests.support.paths import SUPPORT

PLANTED = seeds.load_bugs(str(SUPPORT / "planted_bugs.py"))
SEEDS = 50
HARSH = {
    name: (planted_bugs.PLANTED | planted_bugs.HARSH_ONLY)[name]
    for name in (
        "longer_ttl_answered_than_granted",
        "break_refused",
        "renewal_counted_from_the_answer",
        *planted_bugs.HARSH_ONLY,
    )
}

# A bug may break several rules, but it does not count as found if it breaks only these.
INSUFFICIENT_RULES = {"unfinished", "left running"}


@pytest.mark.extended
@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.usefixtures("untraced")
def test_planted_bug_is_found_within_50_seeds(name):
    check_found(name, PLANTED[name]())


@pytest.mark.extended
@pytest.mark.parametrize("name", HARSH)
@pytest.mark.usefixtures("untraced")
def test_planted_bug_is_found_within_50_harsh_seeds(name):
    check_found(name, HARSH[name](), harsh=True)


def check_found(name: str, planted: AbstractContextManager[object], harsh: bool = False) -> None:
    with planted:
        for seed in range(SEEDS):
            report = seeds.simulate(seed, harsh=harsh)
            if report.findings:
                print(report)
                assert {finding.rule for finding in report.findings} - INSUFFICIENT_RULES
                return
    pytest.fail(f"{name} was not found in {SEEDS} seeds")


def test_at_least_16_bugs_are_planted():
    assert len(PLANTED) >= 16


def test_command_shows_planted_bug_and_its_replay_command(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    assert seeds.main(["--seeds", "0..3", "--bug", "last_come_first_served", "-v"]) == 1
    shown = capsys.readouterr().out
    assert '"record": "invoked"' in shown
    assert "replay: python -m harness.simulator.seeds --seed" in shown
