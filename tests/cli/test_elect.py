"""`elect`: CMD runs on the leader alone, is stopped with its term, and is followed; `--listen` sees every term."""

import json
import signal
import sqlite3
import subprocess

import pytest

TERM = {
    "at": str,
    "namespace": str,
    "name": str,
    "token": int,
    "holder": str,
    "host": str,
    "pid": int,
    "purpose": str,
    "age": float,
    "missed": bool,
}


def candidate(shell, *options, script="echo $LEASEHOLD_TOKEN; exec cat"):
    return shell.start("elect", *options, "boss", "--", "sh", "-c", script)


def leader(shell):
    holders = shell.json("get", "boss")["holders"]
    return holders[0] if holders and holders[0]["state"] == "held" else None


def test_the_code_of_cmd_is_passed_on_and_the_leader_resigns(shell):
    done = shell("elect", "boss", "--", "sh", "-c", "echo $LEASEHOLD_LOCK; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "boss\n", "")
    assert leader(shell) is None


def test_one_leads_and_the_next_follows_when_it_is_done(shell, wait_until):
    first = candidate(shell)
    token = int(first.stdout.readline())
    second = candidate(shell)
    wait_until(lambda: len(shell.json("get", "boss")["waiters"]) == 1)
    first.stdin.close()
    assert first.wait(60) == 0
    assert int(second.stdout.readline()) > token
    second.stdin.close()
    assert second.wait(60) == 0


def test_cmd_is_drained_before_the_leader_resigns(shell, wait_until, tmp_path):
    done = tmp_path / "done"
    drain = f"while [ ! -e {done} ]; do sleep 0.05; done; echo drained; exit 0"
    first = candidate(shell, script=f"trap '{drain}' TERM; echo on; while :; do sleep 0.1; done")
    assert first.stdout.readline() == "on\n"
    second = candidate(shell, script="date +%s.%N")
    wait_until(lambda: len(shell.json("get", "boss")["waiters"]) == 1)
    token = leader(shell)["token"]
    first.send_signal(signal.SIGTERM)
    assert leader(shell)["token"] == token, "it still leads while CMD drains"
    done.touch()
    assert first.stdout.readline() == "drained\n"
    assert first.wait(60) == 0
    assert second.stdout.readline()


def test_a_lost_term_stops_cmd_and_it_stands_again(shell):
    one = candidate(shell)
    token = int(one.stdout.readline())
    assert shell("break", "boss", "--token", str(token)).returncode == 0
    again = int(one.stdout.readline())
    assert again > token
    one.send_signal(signal.SIGTERM)
    assert one.wait(60) == 128 + signal.SIGTERM
    said = one.stderr.read()
    assert "killed sh" in said
    assert "standing for election again" in said
    assert said.count("is lost: ") == 1, "said once, by the command"


def test_a_longest_term_ends_and_another_leads(shell, wait_until):
    both = [candidate(shell, "--max-hold", "1", "--ttl", "3", script="exec sleep 60") for _ in range(2)]
    leaders = set()
    wait_until(lambda: leaders.add((leader(shell) or {}).get("pid")) or leaders >= {one.pid for one in both})
    for one in both:
        one.send_signal(signal.SIGTERM)
        assert one.wait(60) == 128 + signal.SIGTERM


def test_a_killed_leader_is_followed(shell):
    first = candidate(shell, "--ttl", "1")
    first.stdout.readline()
    second = candidate(shell, "--ttl", "1")
    first.kill()
    assert second.stdout.readline()
    second.stdin.close()
    assert second.wait(60) == 0


def test_an_engine_that_does_not_answer_at_the_start_is_69(shell, tmp_path):
    shell("ls")
    with sqlite3.connect(tmp_path / "locks.db", isolation_level=None) as other:
        other.execute("begin immediate")
        done = shell("elect", "boss", "--", "true")
        assert done.returncode == 69
        other.execute("rollback")
    other.close()


@pytest.mark.faults
def test_an_engine_that_falls_silent_later_is_asked_again(shell, tmp_path, wait_until):
    one = candidate(shell, "--ttl", "2")
    token = int(one.stdout.readline())
    other = sqlite3.connect(tmp_path / "locks.db", isolation_level=None)
    wait_until(lambda: other.execute("begin immediate"))
    line = ""
    while "standing for election again in" not in line:
        line = one.stderr.readline()
        assert line
    other.execute("rollback")
    other.close()
    assert int(one.stdout.readline()) > token
    one.send_signal(signal.SIGINT)
    assert one.wait(60) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["boss"], "nothing to run"),
        (["boss", "--", "-x"], "cannot begin with a dash"),
        (["--listen", "boss", "--", "true"], "exclude each other"),
        (["--for", "3", "boss", "--", "true"], "--for is for --listen"),
        (["--kill-after", "20", "boss", "--", "true"], "more than a third"),
        (["--ttl", "0.001", "boss", "--", "true"], "too short"),
    ],
)
def test_what_cannot_work_is_64(alone, arguments, says):
    done = alone("elect", *arguments)
    assert done.returncode == 64
    assert says in done.stderr


def test_a_command_that_is_not_there_is_127(shell):
    assert shell("elect", "boss", "--", "no-such-program").returncode == 127
    assert leader(shell) is None


def test_whoever_listens_sees_every_term(shell):
    listener = shell.start("-o", "json", "elect", "--listen", "boss")
    table = shell.start("elect", "--listen", "boss", stderr=subprocess.DEVNULL)
    tokens = []
    for _ in range(3):
        done = shell("elect", "--holder", "web-3", "boss", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN")
        tokens.append(int(done.stdout))
    seen = [json.loads(listener.stdout.readline()) for _ in tokens]
    assert [term["token"] for term in seen] == tokens
    for term in seen:
        assert list(term) == list(TERM)
        assert all(isinstance(term[key], kind) for key, kind in TERM.items())
        assert (term["name"], term["holder"], term["purpose"], term["missed"]) == ("boss", "web-3", "sh", False)
    lines = [table.stdout.readline() for _ in tokens]
    assert [f"token {token}  web-3" in line for token, line in zip(tokens, lines, strict=True)] == [True] * 3
    for one in (listener, table):
        one.send_signal(signal.SIGINT)
        assert one.wait(60) == 128 + signal.SIGINT


def test_listening_may_end_by_itself(shell):
    done = shell("elect", "--listen", "--for", "0.2", "boss")
    assert (done.returncode, done.stdout) == (0, "")
