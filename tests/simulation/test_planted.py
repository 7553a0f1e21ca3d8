"""Every planted bug is found within 50 seeds: what finds nothing elsewhere is known to look."""

from pathlib import Path

import pytest

from leasehold.testing import simulation

PLANTED = simulation.bugs(str(Path(__file__).with_name("planted.py")))
SEEDS = 50

# What each of them breaks. A bug may show as something else first; these are what it must never look like.
OTHER = {"unfinished", "left running"}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.usefixtures("untraced")
def test_it_is_found_within_50_seeds(name):
    with PLANTED[name]():
        for seed in range(SEEDS):
            report = simulation.simulate(seed)
            if report.complaints:
                print(report)
                assert {complaint.rule for complaint in report.complaints} - OTHER
                return
    pytest.fail(f"{name} was not found in {SEEDS} seeds")


def test_there_are_at_least_16():
    assert len(PLANTED) >= 16


def test_the_command_shows_one_and_how_to_replay_it(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    assert simulation.main(["--seeds", "0..3", "--bug", "last_come_first_served", "-v"]) == 1
    shown = capsys.readouterr().out
    assert '"record": "invoked"' in shown
    assert "replay: python -m leasehold.testing.simulation --seed" in shown
