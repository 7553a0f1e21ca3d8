"""`leasehold run` and `rebase` on etcd, beside `etcdctl lock`: what becomes of a command whose lease was revoked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leasehold.testing.servers.etcd import coded
from leasehold.testing.servers.process import program

LEASEHOLD = [sys.executable, "-m", "leasehold"]
# Says when it begins, every 20 ms that it runs, and when it is done.
COMMAND = "echo begin >> {log}; for i in $(seq 150); do date +%s.%N >> {log}; sleep 0.02; done; echo done >> {log}"


@pytest.fixture
def started():
    """Processes that are gone after the test."""
    running: list[subprocess.Popen[str]] = []

    def start(*words: str, **environment: str) -> subprocess.Popen[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD")}
        running.append(
            subprocess.Popen(
                words, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env={**kept, **environment}
            )
        )
        return running[-1]

    yield start
    for one in running:
        one.kill()
        one.communicate()


def until(true, seconds: float = 30.0):
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)
    return found


def began(log: Path) -> bool:
    return log.exists() and "begin" in log.read_text()


def last_sign(log: Path) -> float:
    return float([line for line in log.read_text().splitlines() if line[0].isdigit()][-1])


def test_etcdctl_lets_both_run_and_says_nothing(member, started, tmp_path) -> None:
    """Why one would not use it. The next test is the same with `leasehold run`."""
    ctl = program("etcdctl", package="etcd-client")
    name, one, two = f"ctl-{os.urandom(4).hex()}", tmp_path / "one", tmp_path / "two"
    lock = (ctl, "--endpoints", f"127.0.0.1:{member.port}", "lock", name, "--", "sh", "-c")
    first = started(*lock, COMMAND.format(log=one), ETCDCTL_API="3")
    until(lambda: began(one))
    second = started(*lock, COMMAND.format(log=two), ETCDCTL_API="3")
    until(lambda: len(member.keys(f"{name}/")) == 2)
    member.revoke(holder_of(member, name))
    until(lambda: began(two))
    assert "done" not in one.read_text(), "the first still runs"
    assert first.wait(30) == 0, "and says nothing"
    assert second.wait(30) == 0


def holder_of(member, name: str) -> int:
    begin, end = f"{name}/".encode(), f"{name}0".encode()
    found = member.ask(
        "kv/range", key=coded(begin), range_end=coded(end), sort_order="ASCEND", sort_target="CREATE", limit=1
    )
    return int(found["kvs"][0]["lease"])


@pytest.mark.parametrize("delay", [0, pytest.param(5, marks=pytest.mark.faults)])
def test_leasehold_run_stops_its_command_before_the_next_begins(member, started, tmp_path, delay) -> None:
    prefix, one, two = f"run-{os.urandom(4).hex()}", tmp_path / "one", tmp_path / "two"
    url = f"etcd://127.0.0.1:{member.port}/{prefix}"
    run = (*LEASEHOLD, "-u", url, "run", "--ttl", "20", "--delay", str(delay), "job", "--", "sh", "-c")
    first = started(*run, COMMAND.format(log=one))
    until(lambda: began(one))
    (lease,) = [lease for key, lease in member.keys(f"{prefix}/").items() if "/q/" in key]
    second = started(*run, COMMAND.format(log=two))
    until(lambda: len(member.keys(f"{prefix}/")) == 3)
    time.sleep(0.3)  # it has looked, and follows the holder
    revoked, wall = time.monotonic(), time.time()
    member.revoke(lease)
    assert first.wait(30) == 79
    assert time.monotonic() - revoked < 1.0
    assert last_sign(one) - wall < 1.0
    assert "done" not in one.read_text()
    until(lambda: began(two))
    waited = time.monotonic() - revoked
    if delay:
        assert delay <= waited < delay + 3
        assert last_sign(one) < wall + delay
    assert second.wait(30) == 0


def test_rebase_from_the_shell(member, started) -> None:
    url = f"etcd://127.0.0.1:{member.port}/rebase-{os.urandom(4).hex()}"

    def tells(*words: str) -> tuple[int, str, str]:
        process = started(*LEASEHOLD, *words)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    code, out, err = tells("-u", url, "-o", "json", "rebase", "--above", "5000000000000000")
    assert (code, out) == (0, '{"base":5000000000000000}\n'), err
    code, out, _ = tells("-u", url, "run", "job", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN")
    assert code == 0
    assert int(out) > 5000000000000000
    code, out, err = tells("-u", url, "rebase")
    assert code == 0
    assert "greater than 5000000000000001" in err
    code, _, err = tells("-u", "memory://", "rebase")
    assert code == 78
    assert "needs no rebase" in err
