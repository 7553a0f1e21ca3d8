"""`leasehold run` and `rebase` on etcd, compared with `etcdctl lock` when the lease of a command is revoked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.servers.etcd import encode_base64
from harness.servers.process import program
from tests.support.timing import check_elapsed, check_seconds

LEASEHOLD = [sys.executable, "-m", "leasehold"]
# Logs its begin, a timestamp every 20 ms, and its end.
COMMAND = "echo begin >> {log}; for i in $(seq 150); do date +%s.%N >> {log}; sleep 0.02; done; echo done >> {log}"


@pytest.fixture
def start_process():
    """Starts processes and kills them after the test."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD")}
        running.append(
            subprocess.Popen(
                arguments, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env={**kept, **environment}
            )
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def wait_until(condition, seconds: float = 30.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.005)
    return found


def has_begun(log: Path) -> bool:
    return log.exists() and "begin" in log.read_text()


def last_timestamp(log: Path) -> float:
    return float([line for line in log.read_text().splitlines() if line[0].isdigit()][-1])


def test_etcdctl_lock_lets_both_commands_run_after_a_revoke(member, start_process, tmp_path) -> None:
    """etcdctl does not stop a command whose lease is revoked. The next test is the same with `leasehold run`."""
    etcdctl = program("etcdctl", package="etcd-client")
    name, first_log, second_log = f"ctl-{os.urandom(4).hex()}", tmp_path / "one", tmp_path / "two"
    lock = (etcdctl, "--endpoints", f"127.0.0.1:{member.port}", "lock", name, "--", "sh", "-c")
    first = start_process(*lock, COMMAND.format(log=first_log), ETCDCTL_API="3")
    wait_until(lambda: has_begun(first_log))
    second = start_process(*lock, COMMAND.format(log=second_log), ETCDCTL_API="3")
    wait_until(lambda: len(member.keys(f"{name}/")) == 2)
    member.revoke(holder_lease_of(member, name))
    wait_until(lambda: has_begun(second_log))
    assert "done" not in first_log.read_text(), "the first command had ended before the second began"
    assert first.wait(30) == 0, "etcdctl reported the loss"
    assert second.wait(30) == 0


def holder_lease_of(member, name: str) -> int:
    begin, end = f"{name}/".encode(), f"{name}0".encode()
    found = member.ask(
        "kv/range",
        key=encode_base64(begin),
        range_end=encode_base64(end),
        sort_order="ASCEND",
        sort_target="CREATE",
        limit=1,
    )
    return int(found["kvs"][0]["lease"])


@pytest.mark.extended
@pytest.mark.parametrize("delay", [0, pytest.param(5, marks=pytest.mark.faults)])
def test_leasehold_run_stops_its_command_before_the_next_begins(member, start_process, tmp_path, delay) -> None:
    prefix, first_log, second_log = f"run-{os.urandom(4).hex()}", tmp_path / "one", tmp_path / "two"
    url = f"etcd://127.0.0.1:{member.port}/{prefix}"
    run = (*LEASEHOLD, "-u", url, "run", "--ttl", "20", "--delay", str(delay), "job", "--", "sh", "-c")
    first = start_process(*run, COMMAND.format(log=first_log))
    wait_until(lambda: has_begun(first_log))
    (lease,) = [lease for key, lease in member.keys(f"{prefix}/").items() if "/q/" in key]
    second = start_process(*run, COMMAND.format(log=second_log))
    wait_until(lambda: len(member.keys(f"{prefix}/")) == 3)
    time.sleep(0.3)  # pause: long enough for the waiter to watch the holder; if not, it finds the change itself
    revoked, wall = time.monotonic(), time.time()
    member.revoke(lease)
    assert first.wait(30) == 79
    check_elapsed(revoked, 1.0)
    check_seconds(last_timestamp(first_log) - wall, 1.0)
    assert "done" not in first_log.read_text()
    wait_until(lambda: has_begun(second_log))
    waited = time.monotonic() - revoked
    if delay:
        assert waited >= delay
        check_seconds(waited, delay + 3)
        assert last_timestamp(first_log) < wall + delay
    assert second.wait(30) == 0


def test_rebase_command_raises_tokens(member, start_process, tmp_path) -> None:
    url = f"etcd://127.0.0.1:{member.port}/rebase-{os.urandom(4).hex()}"

    def run_leasehold(*arguments: str) -> tuple[int, str, str]:
        process = start_process(*LEASEHOLD, *arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    code, out, err = run_leasehold("-u", url, "-o", "json", "rebase", "--above", "5000000000000000")
    assert (code, out) == (0, '{"base":5000000000000000}\n'), err
    code, out, _ = run_leasehold("-u", url, "run", "job", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN")
    assert code == 0
    assert int(out) > 5000000000000000
    code, out, err = run_leasehold("-u", url, "rebase")
    assert code == 0
    assert "greater than 5000000000000001" in err
    code, _, err = run_leasehold("-u", f"sqlite://{tmp_path}/locks.db", "rebase")
    assert code == 78
    assert "needs no rebase" in err
