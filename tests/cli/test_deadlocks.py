"""`deadlocks`: the circles of a namespace, as a text for people and as JSON."""

import shlex
import threading

import pytest

from leasehold import Client, LeaseLost


@pytest.fixture
def circle(url, shell, wait_until):
    """Two threads that wait for each other, until one of their grants is broken."""
    ready, ends = threading.Barrier(2), []

    def work(client, first, second):
        try:
            with client.lock(first):
                ready.wait(30)
                with client.lock(second, wait=60):
                    pass
            ends.append("done")
        except LeaseLost:
            ends.append("lost")

    with Client(url, holder="web-3") as client:
        threads = [threading.Thread(target=work, args=(client, *pair)) for pair in (("a", "b c"), ("b c", "a"))]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(one["state"] == "waiting" for one in shell.json("ls")) == 2)
        yield ends
        for thread in threads:
            thread.join(60)


def test_a_circle_as_json_and_its_way_out(shell, circle, wait_until):
    (deadlock,) = shell.json("deadlocks")
    assert list(deadlock) == ["waits", "victim"]
    first, second = deadlock["waits"]
    assert {first["name"], second["name"]} == {"a", "b c"}
    assert first["holder"]["owner"] == second["waiter"]["owner"] != second["holder"]["owner"]
    assert second["holder"]["owner"] == first["waiter"]["owner"]
    victim = deadlock["victim"]
    assert victim["token"] == max(wait["holder"]["token"] for wait in deadlock["waits"])
    assert shell("break", victim["name"], "--token", str(victim["token"])).returncode == 0
    wait_until(lambda: len(circle) == 2)
    assert sorted(circle) == ["done", "lost"]
    assert shell.json("deadlocks") == []


def test_a_circle_for_people(shell, circle, wait_until):
    done = shell("deadlocks")
    assert done.returncode == 0
    head, one, two, out = done.stdout.splitlines()
    assert head == "deadlock 1: 2 in a circle"
    for line in (one, two):
        assert "web-3 [" in line
        assert " waits for " in line
        assert "held by web-3 [" in line
    assert out.startswith("  way out: leasehold break ")
    command = out.partition("leasehold ")[2]
    assert shell(*shlex.split(command)).returncode == 0
    wait_until(lambda: len(circle) == 2)


def test_nothing_to_be_seen(shell):
    done = shell("deadlocks")
    assert (done.returncode, done.stdout) == (0, "")
    assert "nobody waits in a circle" in done.stderr
