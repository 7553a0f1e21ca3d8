"""`elect`: CMD runs only on the leader, and is stopped when its term is lost. `--listen` prints every term."""

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


def test_elect_returns_exit_code_of_command_and_resigns(shell):
    done = shell("elect", "boss", "--", "sh", "-c", "echo $LEASEHOLD_LOCK; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "boss\n", "")
    assert leader(shell) is None


def test_next_candidate_leads_when_command_of_leader_ends(shell, wait_until):
    first = candidate(shell)
    token = int(first.stdout.readline())
    second = candidate(shell)
    wait_until(lambda: len(shell.json("get", "boss")["waiters"]) == 1)
    first.stdin.close()
    assert first.wait(60) == 0
    assert int(second.stdout.readline()) > token
    second.stdin.close()
    assert second.wait(60) == 0


def test_leader_resigns_only_after_command_has_drained(shell, wait_until, tmp_path):
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


def test_lost_term_stops_command_and_candidate_runs_again(shell):
    process = candidate(shell)
    token = int(process.stdout.readline())
    assert shell("break", "boss", "--token", str(token)).returncode == 0
    second_token = int(process.stdout.readline())
    assert second_token > token
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    messages = process.stderr.read()
    assert "killed sh" in messages
    assert "waiting to be elected again" in messages
    assert messages.count("is lost: ") == 1, "said once, by the command"


def test_term_ends_at_max_hold_and_other_candidate_leads(shell, wait_until):
    candidates = [candidate(shell, "--max-hold", "1", "--ttl", "3", script="exec sleep 60") for _ in range(2)]
    leaders = set()
    wait_until(
        lambda: leaders.add((leader(shell) or {}).get("pid")) or leaders >= {process.pid for process in candidates}
    )
    for process in candidates:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_next_candidate_leads_when_leader_is_killed(shell):
    first = candidate(shell, "--ttl", "1")
    first.stdout.readline()
    second = candidate(shell, "--ttl", "1")
    first.kill()
    assert second.stdout.readline()
    second.stdin.close()
    assert second.wait(60) == 0


def test_elect_is_69_when_engine_does_not_answer_at_start(shell, tmp_path):
    shell("ls")
    with sqlite3.connect(tmp_path / "locks.db", isolation_level=None) as blocker:
        blocker.execute("begin immediate")
        done = shell("elect", "boss", "--", "true")
        assert done.returncode == 69
        blocker.execute("rollback")
    blocker.close()


@pytest.mark.faults
def test_candidate_retries_when_engine_stops_answering_during_a_term(shell, tmp_path, wait_until):
    process = candidate(shell, "--ttl", "2")
    token = int(process.stdout.readline())
    blocker = sqlite3.connect(tmp_path / "locks.db", isolation_level=None)
    wait_until(lambda: blocker.execute("begin immediate"))
    line = ""
    while "retrying in" not in line:
        line = process.stderr.readline()
        assert line
    blocker.execute("rollback")
    blocker.close()
    assert int(process.stdout.readline()) > token
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["boss"], "nothing to run"),
        (["boss", "--", "-x"], "cannot begin with a dash"),
        (["--listen", "boss", "--", "true"], "cannot be combined"),
        (["--for", "3", "boss", "--", "true"], "--for can only be used with --listen"),
        (["--kill-after", "20", "boss", "--", "true"], "more than a third"),
        (["--ttl", "0.001", "boss", "--", "true"], "must be greater than 0.002 s"),
    ],
)
def test_elect_with_invalid_arguments_is_64(shell, arguments, message):
    done = shell("elect", *arguments)
    assert done.returncode == 64
    assert message in done.stderr


def test_elect_with_missing_command_is_127(shell):
    assert shell("elect", "boss", "--", "no-such-program").returncode == 127
    assert leader(shell) is None


def test_listener_sees_every_term(shell):
    listener = shell.start("-o", "json", "elect", "--listen", "boss")
    table = shell.start("elect", "--listen", "boss", stderr=subprocess.DEVNULL)
    leader = candidate(shell, "--holder", "web-3")
    tokens = [int(leader.stdout.readline())]
    terms, lines = [json.loads(listener.stdout.readline())], [table.stdout.readline()]  # now both listen
    leader.communicate()
    for _ in range(2):
        done = shell("elect", "--holder", "web-3", "boss", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN")
        tokens.append(int(done.stdout))
    terms += [json.loads(listener.stdout.readline()) for _ in tokens[1:]]
    assert [term["token"] for term in terms] == tokens
    for term in terms:
        assert list(term) == list(TERM)
        assert all(isinstance(term[key], kind) for key, kind in TERM.items())
        assert (term["name"], term["holder"], term["purpose"], term["missed"]) == ("boss", "web-3", "sh", False)
    lines += [table.stdout.readline() for _ in tokens[1:]]
    assert [f"token {token}  web-3" in line for token, line in zip(tokens, lines, strict=True)] == [True] * 3
    for process in (listener, table):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT


def test_listener_ends_after_the_given_seconds(shell):
    done = shell("elect", "--listen", "--for", "0.2", "boss")
    assert (done.returncode, done.stdout) == (0, "")
