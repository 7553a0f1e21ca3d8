"""Ctrl-C at every call and return, while something runs once, by a schedule, or as a leader."""

from __future__ import annotations

import gc
from functools import partial

import pytest

from leasehold import Client

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

YEAR = 365 * 86400.0


@pytest.fixture
def pair():
    """Whoever is interrupted, and whoever looks on."""
    with Client("memory://ctrl-c", ttl=600) as client, Client("memory://ctrl-c") as other:
        yield client, other


@pytest.fixture
def at_every_place(pair, ctrl_c, wait_until):
    """`trial(number)` yields the work to be interrupted, and is asked to look once what is left has been given back."""
    client, other = pair

    def free() -> bool:
        if all(one.state == "cooling" for one in other.inspect()):
            return True
        gc.collect()
        client._desk.dog.stir(-1.0)
        return False

    def run(trial) -> None:
        number, again = 0, True
        while again:
            number += 1
            one = trial(number)
            again = ctrl_c(number, next(one))
            wait_until(free)
            assert next(one, "looked") == "looked"
        assert number > 150

    return run


def test_a_key_has_one_result_and_no_lock_is_left(pair, at_every_place) -> None:
    client, other = pair

    def trial(number):
        runs: list[int] = []

        def work() -> int:
            runs.append(1)
            return len(runs)

        yield partial(client.once, f"key {number}", work)
        assert other.once(f"key {number}", work) == len(runs), f"place {number}: what was recorded is not run again"
        assert other.outcome(f"key {number}").result == len(runs) <= 2

    at_every_place(trial)


def test_a_tick_is_run_by_the_next_to_look(pair, at_every_place) -> None:
    def trial(number):
        runs: list[int] = []
        mine, theirs = (one.schedule(f"job {number}", YEAR, late=YEAR) for one in pair)
        yield partial(mine.run_due, lambda: runs.append(1))
        theirs.run_due(lambda: runs.append(1))
        assert len(runs) in (1, 2), f"place {number}"

    at_every_place(trial)


def test_a_start_that_returned_is_followed_by_a_stop(pair, at_every_place) -> None:
    def trial(number):
        said: list[str] = []
        election = pair[0].election(f"boss {number}", ttl=600)

        def start(term) -> None:
            election.resign()
            said.append("started")

        yield partial(election.serve, start, lambda term: said.append("stopped"))
        assert said in ([], ["started", "stopped"]), f"place {number}"

    at_every_place(trial)
