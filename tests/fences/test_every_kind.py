"""Every kind of fence on its real resource: a paused holder, many writes, the rules, and concurrent processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.checkers.fences import check_fence
from harness.checkers.history import History
from leasehold import Client, ConfigError, Lease, StaleToken, Unavailable
from leasehold.fences import TokenInfo
from tests.support.fence_kinds import KINDS
from tests.support.tiers import first_tier

each_kind = pytest.mark.parametrize("kind", [kind for kind in KINDS if "-at-" not in kind])
ISOLATION_LEVEL_KINDS = [kind for kind in KINDS if "-at-" in kind]  # the same at other isolation levels

# One kind per resource for the concurrency tests. The other kinds differ from these only in their API.
CONCURRENCY_KINDS = [
    *("file", "sqlite-row", "sqlite-column", "postgresql-row", "postgresql-column", "mysql-row", "mysql-column"),
    *("alchemy-postgresql-orm", "alchemy-mysql-column", "redis", "zookeeper", "etcd", "object", "object-in-metadata"),
    *("http-wsgi", "http-asgi"),
    *("postgresql-row-at-repeatable-read", "mysql-row-at-read-committed"),
]
# One kind per server, file and store, where a test starts processes.
FIRST_TIER = (
    "file",
    "sqlite-row",
    "postgresql-row",
    "mysql-column",
    "redis",
    "zookeeper",
    "etcd",
    "object",
    "http-asgi",
)


@contextmanager
def successor(client: Client, pid: int) -> Iterator[Lease]:
    """Stop the process `pid`, and yield the lease of the next holder."""
    for _ in range(20):
        os.kill(pid, signal.SIGSTOP)
        try:
            lease = client.lock("acct/1").acquire(wait=60)
            break
        except Unavailable:  # stopped while it renewed inside a transaction on the SQLite file
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)  # pause: it leaves the transaction
    yield lease
    lease.release()


@pytest.mark.parametrize("kind", first_tier([kind for kind in KINDS if "-at-" not in kind], FIRST_TIER))
def test_paused_holder_is_refused_and_value_of_successor_stays(kind, resource, child, tmp_path):
    number, url = resource(kind), f"sqlite://{tmp_path}/locks.db?durable=no"
    paused = child("hold", kind, json.dumps(number.spec), url, 0.5)
    first = paused.hear()
    assert first["read"] == 0
    with Client(url, ttl=30, call_timeout=2) as client, successor(client, paused.pid) as lease:
        assert lease.token > first["token"]
        assert number.read(lease) == 0
        number.write(lease, 2)
        os.kill(paused.pid, signal.SIGCONT)
        paused.send_newline()
        report = paused.hear()
        assert report["refused"] == [first["token"], lease.token], report
        assert report["told"] == [report["text"]]
        assert number.peek() == 2
        number.write(lease, 3)
        assert number.read(lease) == 3


@each_kind
def test_fence_refuses_lower_token_after_write_and_read(kind, resource):
    number = resource(kind)
    for value in range(1, 6):  # first use, and several writes with one token
        number.write(5, value)
    assert number.read(9) == 5  # a read raises the highest token
    for stale in (lambda: number.write(5, 99), lambda: number.read(8)):
        with pytest.raises(StaleToken) as refused:
            stale()
        assert refused.value.highest == 9
        assert str(refused.value.token) in str(refused.value)
    number.write(9, 6)
    number.write(2**53 - 1, 7)
    with pytest.raises(StaleToken) as refused:
        number.write(2**53 - 2, 8)  # compared as integers, exact to the last digit
    assert refused.value.highest == 2**53 - 1
    assert number.peek() == 7


def fence_of(kind: str) -> str:
    """The field `fence` of the events of this kind."""
    first_word = kind.partition("-")[0]
    return "sql" if first_word in ("alchemy", "sqlite", "postgresql", "mysql") else first_word


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "-at-" not in kind and not kind.startswith("http")])
def test_refused_plain_token_is_reported_to_the_hook_of_fences(kind, resource, refusals):
    number = resource(kind)
    number.write(9, 1)
    with pytest.raises(StaleToken) as refused:
        number.write(5, 2)
    (event,) = refusals
    assert (event.kind, event.fence, event.token, event.seen) == ("stale_token", fence_of(kind), 5, 9)
    assert (event.name, event.reason) == (refused.value.resource, str(refused.value))


@each_kind
def test_first_read_raises_the_highest_token(kind, resource):
    number = resource(kind)
    assert number.read(9) == 0
    with pytest.raises(StaleToken):
        number.write(8, 1)
    assert number.peek() == 0


@each_kind
def test_shared_lease_reads_without_raising_the_token_and_cannot_write(kind, resource):
    number = resource(kind)
    number.write(5, 1)
    assert number.read(TokenInfo(7, shared=True)) == number.read(TokenInfo(6, shared=True)) == 1  # in any order
    number.write(5, 2)  # readers do not raise the highest token
    with pytest.raises(ConfigError, match="shared"):
        number.write(TokenInfo(8, shared=True), 3)
    number.write(9, 4)
    with pytest.raises(StaleToken):
        number.read(TokenInfo(7, shared=True))
    assert number.read(TokenInfo(10, shared=True)) == 4


@each_kind
def test_semaphore_permits_are_fenced_by_slot(kind, resource):
    number = resource(kind)
    if "column" in kind:
        with pytest.raises(ConfigError, match="fence row"):
            number.write(TokenInfo(5, slot=0), 1)
        return
    number.write(TokenInfo(5, slot=0), 1)
    number.write(TokenInfo(9, slot=1), 2)
    number.write(TokenInfo(5, slot=0), 3)  # the other slot's token does not count
    assert number.read(TokenInfo(12, slot=0)) == 3
    with pytest.raises(StaleToken, match="slot 0, refused token 5"):
        number.write(TokenInfo(5, slot=0), 99)
    number.write(TokenInfo(9, slot=1), 4)
    assert number.read(TokenInfo(9, slot=1)) == number.peek() == 4


@each_kind
def test_invalid_token_is_refused(kind, resource):
    number = resource(kind)
    for bad in (0, -1, 2**53, True, "7", None, 1.5):
        with pytest.raises(ConfigError):
            number.write(bad, 1)
    assert number.peek() == 0


# ------------------------------------------------------------- concurrent processes


def run_processes(
    child: Callable[..., Any], number: Any, kind: str, tokens: Path, *, claims: bool, many: int, rounds: int
):
    """Return the calls that the processes report, as one history ordered by time."""
    tokens.write_text("0")
    return build_history(child("hammer", kind, json.dumps(number.spec), tokens, rounds, int(claims), many).hear())


def build_history(reports: Iterable[Iterable[list[Any]]]) -> History:
    moments = []
    for process, calls in enumerate(reports):
        for index, call in enumerate(calls):
            moments += [(call[0], 0, process, index, call), (call[1], 1, process, index, call)]
    now, ops = [0.0], {}
    history = History(lambda: now[0])
    for at, ends, process, index, (_, _, action, token, accepted, based_on) in sorted(moments, key=lambda m: m[:4]):
        now[0] = at
        detail = {} if based_on is None else {"based_on": based_on}
        if not ends:
            ops[process, index] = history.invoke(str(process), action, "acct/1", token=token, **detail)
        elif accepted:
            ops[process, index].ok(token=token)
        else:
            ops[process, index].fail("stale")
    return history


def count_accepted_writes(history: History) -> int:
    return sum(call.succeeded for call in history.calls() if call.began.action == "write")


@pytest.mark.extended
@pytest.mark.parametrize("kind", first_tier(dict.fromkeys([*CONCURRENCY_KINDS, *ISOLATION_LEVEL_KINDS]), FIRST_TIER))
def test_concurrent_processes_never_write_stale_and_lose_no_update(kind, resource, child, tmp_path):
    number = resource(kind)
    history = run_processes(child, number, kind, tmp_path / "tokens", claims=True, many=5, rounds=30)
    verdict = check_fence(history)
    assert verdict.result == "valid", verdict
    assert number.peek() == count_accepted_writes(history) > 0
    assert count_accepted_writes(history) < len(history.calls()), "no call was refused, so this test proves nothing"


@pytest.mark.parametrize("kind", first_tier(CONCURRENCY_KINDS, ["sqlite-row"]))
def test_updates_are_lost_when_reads_do_not_claim_the_fence(kind, resource, child, tmp_path):
    """Shows that the check can fail: if only writes are fenced, two of them can be based on the same value."""
    number = resource(kind)
    end = time.monotonic() + 60
    while True:
        history = run_processes(child, number, kind, tmp_path / "tokens", claims=False, many=5, rounds=30)
        rules = {violation.rule for violation in check_fence(history).violations}
        if rules:
            break
        number = resource(kind)
        assert time.monotonic() < end, "no update was lost, so the check cannot fail"
    assert rules == {"update"}  # stale writes are still refused
    assert number.peek() < count_accepted_writes(history)


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_processes_never_write_stale_and_lose_no_update(kind, resource, child, tmp_path):
    number = resource(kind)
    history = run_processes(child, number, kind, tmp_path / "tokens", claims=True, many=20, rounds=60)
    verdict = check_fence(history)
    assert verdict.result == "valid", verdict
    assert number.peek() == count_accepted_writes(history)
