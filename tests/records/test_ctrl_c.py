"""Ctrl-C at every call and return during `once`, a schedule or an election."""

from __future__ import annotations

import gc
from functools import partial

import pytest

from leasehold import Client
from tests.support import probe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

YEAR = 365 * 86400.0


@pytest.fixture
def two_clients():
    """The client that is interrupted, and one that checks afterwards."""
    with Client("memory://ctrl-c", ttl=600) as client, Client("memory://ctrl-c") as other:
        yield client, other


@pytest.fixture
def interrupt_everywhere(two_clients, ctrl_c, wait_until):
    """`trial(number)` yields the work to interrupt. It resumes to check the result once all claims are released."""
    client, other = two_clients

    def is_released() -> bool:
        if all(holding.state == "cooling" for holding in other.inspect()):
            return True
        gc.collect()
        probe.watchdog(client).wake_by(-1.0)
        return False

    def run(trial) -> None:
        number, interrupted = 0, True
        while interrupted:
            number += 1
            steps = trial(number)
            interrupted = ctrl_c(number, next(steps))
            wait_until(is_released)
            assert next(steps, "looked") == "looked"
        assert number > 150

    return run


def test_ctrl_c_in_once_leaves_one_result_and_no_lock(two_clients, interrupt_everywhere) -> None:
    client, other = two_clients

    def trial(number):
        runs: list[int] = []

        def work() -> int:
            runs.append(1)
            return len(runs)

        yield partial(client.once, f"key {number}", work)
        assert other.once(f"key {number}", work) == len(runs), f"interrupt {number}: a recorded result must not rerun"
        assert other.outcome(f"key {number}").result == len(runs) <= 2

    interrupt_everywhere(trial)


def test_ctrl_c_in_schedule_leaves_tick_to_next_client(two_clients, interrupt_everywhere) -> None:
    def trial(number):
        runs: list[int] = []
        mine, theirs = (client.schedule(f"job {number}", YEAR, late=YEAR) for client in two_clients)
        yield partial(mine.run_due, lambda: runs.append(1))
        theirs.run_due(lambda: runs.append(1))
        assert len(runs) in (1, 2), f"interrupt {number}"

    interrupt_everywhere(trial)


def test_ctrl_c_in_election_calls_stop_after_every_start(two_clients, interrupt_everywhere) -> None:
    def trial(number):
        calls: list[str] = []
        election = two_clients[0].election(f"boss {number}", ttl=600)

        def start(term) -> None:
            election.resign()
            calls.append("started")

        yield partial(election.serve, start, lambda term: calls.append("stopped"))
        assert calls in ([], ["started", "stopped"]), f"interrupt {number}"

    interrupt_everywhere(trial)
