"""`deadlocks`: the deadlocks of a namespace, as text and as JSON."""

import shlex
import threading

import pytest

from leasehold import Client, LeaseLost


@pytest.fixture
def deadlock_outcomes(url, shell, wait_until):
    """Two threads that wait for each other, until one of their grants is broken."""
    ready, outcomes = threading.Barrier(2), []

    def work(client, first, second):
        try:
            with client.lock(first):
                ready.wait(30)
                with client.lock(second, wait=60):
                    pass
            outcomes.append("done")
        except LeaseLost:
            outcomes.append("lost")

    with Client(url, holder="web-3") as client:
        threads = [threading.Thread(target=work, args=(client, *pair)) for pair in (("a", "b c"), ("b c", "a"))]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(holding["state"] == "waiting" for holding in shell.json("ls")) == 2)
        yield outcomes
        for thread in threads:
            thread.join(60)


def test_deadlocks_json_names_victim_whose_break_resolves_the_cycle(shell, deadlock_outcomes, wait_until):
    (deadlock,) = shell.json("deadlocks")
    assert list(deadlock) == ["waits", "victim"]
    first, second = deadlock["waits"]
    assert {first["name"], second["name"]} == {"a", "b c"}
    assert first["holder"]["owner"] == second["waiter"]["owner"] != second["holder"]["owner"]
    assert second["holder"]["owner"] == first["waiter"]["owner"]
    victim = deadlock["victim"]
    assert victim["token"] == max(wait["holder"]["token"] for wait in deadlock["waits"])
    assert shell("break", victim["name"], "--token", str(victim["token"])).returncode == 0
    wait_until(lambda: len(deadlock_outcomes) == 2)
    assert sorted(deadlock_outcomes) == ["done", "lost"]
    assert shell.json("deadlocks") == []


def test_deadlocks_text_ends_with_a_break_command_that_works(shell, deadlock_outcomes, wait_until):
    done = shell("deadlocks")
    assert done.returncode == 0
    head, first, second, hint = done.stdout.splitlines()
    assert head == "deadlock 1: 2 waiters in a cycle"
    for line in (first, second):
        assert "web-3 [" in line
        assert " waits for " in line
        assert "held by web-3 [" in line
    assert hint.startswith("  to resolve it: leasehold break ")
    command = hint.partition("leasehold ")[2]
    assert shell(*shlex.split(command)).returncode == 0
    wait_until(lambda: len(deadlock_outcomes) == 2)


def test_deadlocks_without_a_cycle_prints_nothing(shell):
    done = shell("deadlocks")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no deadlocks" in done.stderr
