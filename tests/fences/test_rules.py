"""The rules themselves, in-process fences, the event of a refusal, and what a child of `leasehold run` is told."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import subprocess
import sys
import threading
import time

import pytest
from record import recorded

import leasehold
from leasehold import AsyncClient, Client, ConfigError, CurrentLease, Event, StaleToken, current_lease, fences
from leasehold.fences import Pass, rules
from leasehold.testing.fencing import check_fence
from leasehold.testing.history import History

# ----------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("token", "mark", "after"),
    [(1, 0, 1), (5, 5, 5), (6, 5, 6), (4, 5, None), (2**53 - 1, 2**53 - 2, 2**53 - 1), (2**53 - 2, 2**53 - 1, None)],
)
def test_lower_is_refused_equal_and_higher_pass(token, mark, after):
    if after is None:
        with pytest.raises(StaleToken):
            rules.raised(token, Pass(token), mark, "r")
    else:
        assert rules.raised(token, Pass(token), mark, "r") == after
        assert rules.raised(token, Pass(token, shared=True), mark, "r") == mark


def test_the_error_names_both_and_survives_pickling():
    stale = pickle.loads(pickle.dumps(StaleToken("stock/teapot", token=33, highest=34, slot=2)))
    assert (stale.resource, stale.token, stale.highest, stale.slot) == ("stock/teapot", 33, 34, 2)
    assert str(stale) == "stock/teapot, slot 2, refused token 33: it has seen 34; the lease behind it is over"


def test_a_resource_needs_a_name():
    for bad in ("", "x" * 256, "a\0b", 7, None):
        with pytest.raises(ConfigError):
            fences.Local(bad, 0)


def test_every_public_name_is_there_and_says_what_it_is():
    assert sorted(fences.__all__) == sorted({*fences._HOMES, "Bearer", "Pass", "Shown"})
    for name in set(fences.__all__) - {"Shown"}:
        thing = getattr(fences, name)
        assert thing.__doc__ if callable(thing) and not isinstance(thing, type) else vars(thing).get("__doc__"), name
        public = [method for verb, method in vars(thing).items() if inspect.isfunction(method) and verb[0] != "_"]
        assert [method for method in public if not method.__doc__] == []
    with pytest.raises(AttributeError, match="no attribute 'SQLite'"):
        fences.SQLite  # noqa: B018


@pytest.mark.parametrize("name", [name for name in fences.__all__ if name.startswith("Async")])
def test_twins_have_the_same_calls(name):
    def calls(thing):
        methods = {verb: method for verb, method in vars(thing).items() if inspect.isfunction(method)}
        return {verb: str(inspect.signature(method)).replace("Async", "") for verb, method in methods.items()}

    face, twin = getattr(fences, name.removeprefix("Async")), getattr(fences, name)
    assert calls(face) == calls(twin)
    assert [verb for verb, method in vars(face).items() if inspect.iscoroutinefunction(method)] == []
    plain = [verb for verb, method in vars(twin).items() if inspect.isfunction(method)]
    assert {verb for verb in plain if not inspect.iscoroutinefunction(vars(twin)[verb])} <= {"transaction"}
    assert str(inspect.signature(face)) == str(inspect.signature(twin))


def test_the_fences_of_the_base_install_load_the_standard_library_alone():
    code = """
import sys
from leasehold import fences
assert not [name for name in sys.modules if name.startswith("leasehold.fences.") and name != "leasehold.fences.rules"]
fences.Local, fences.File, fences.SQLFence, fences.SQLColumn, fences.ObjectFence, fences.HTTPObjects
fences.WSGIFence, fences.ASGIFence, fences.HTTPFence, fences.RedisFence, fences.AsyncRedisFence
print(*{name.partition(".")[0] for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) & {"redis", "psycopg", "pymysql", "sqlalchemy", "kazoo", "grpc", "httpx"} == set()


# ------------------------------------------------------------------------- leases and events


def test_a_lease_is_shown_as_it_is():
    seen: list[Event] = []
    with Client("memory://", on_event=seen.append) as client:
        value = fences.Local("stock/teapot", 10)
        late = client.lock("stock/teapot").acquire()
        assert value.read(late) == 10
        client.break_lock("stock/teapot", token=late.token)
        with client.lock("stock/teapot") as lease:
            value.write(lease, value.read(lease) - 1)
            value.write(lease, value.read(lease) - 1)
            with pytest.raises(StaleToken) as refused:
                value.write(late, 9)
        assert (refused.value.token, refused.value.highest) == (late.token, lease.token)
        (event,) = [event for event in seen if event.kind == "stale_token"]
        assert (event.name, event.token, event.fingerprint) == ("stock/teapot", late.token, late.fingerprint)
        assert str(lease.token) in event.reason
        assert value.peek() == 8


def test_a_lease_of_asyncio_and_its_event():
    seen: list[Event] = []

    async def main() -> None:
        async with AsyncClient("memory://", on_event=seen.append) as client:
            value = fences.Local("a", 0)
            late = await client.lock("a").acquire()
            await client.break_lock("a", token=late.token)
            async with client.lock("a") as lease:
                value.write(lease, 1)
            with pytest.raises(StaleToken):
                value.write(late, 2)

    asyncio.run(main())
    assert [event.kind for event in seen].count("stale_token") == 1


def test_permits_and_readers_of_real_locks():
    with Client("memory://") as client:
        value = fences.Local("pool", 0)
        with client.semaphore("pool", 2) as one, client.semaphore("pool", 2) as two:
            for permit in (one, two, one, two):
                value.write(permit, value.read(permit) + 1)
        with client.semaphore("pool", 2) as next_one:
            assert next_one.slot == 0
            value.read(next_one)
            with pytest.raises(StaleToken):
                value.write(one, 0)
            value.write(two, 5)
        book = fences.Local("book", "text")
        rwlock = client.rwlock("book")
        with rwlock.write() as writer:
            book.write(writer, "new text")
        with rwlock.read() as early, client.rwlock("book").read() as later:
            assert early.shared
            assert not writer.shared
            assert book.read(later) == book.read(early) == "new text"
            with pytest.raises(ConfigError, match="write side"):
                book.write(early, "mine")
        with rwlock.write() as writer:
            book.claim(writer)
            with pytest.raises(StaleToken):
                book.read(early)


# -------------------------------------------------------------------------- in process


def test_threads_lose_nothing_at_a_local_fence():
    number, tokens = fences.Local("n", 0), iter(range(1, 100_000))
    history, done = History(time.monotonic), []

    def call(who, action, token, work, **detail):
        return recorded(history, who, action, "n", token, work, **detail)

    def work(who):
        token = 0
        for turn in range(60):
            if turn % 3 == 0 or not token:
                token = next(tokens)
            value = call(who, "read", token, lambda token=token: number.read(token))
            if value is not None:
                time.sleep(0.0002)  # long enough for another to come between
                write = lambda token=token, value=value: number.write(token, value + 1) or True  # noqa: E731
                done.append(call(who, "write", token, write, based_on=value))

    threads = [threading.Thread(target=work, args=[str(n)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    verdict = check_fence(history)
    assert verdict.result == "valid", verdict
    assert number.peek() == sum(bool(one) for one in done)


def test_nobody_comes_in_while_an_object_is_held():
    stack = fences.Local("stack", [])
    entered, go, order = threading.Event(), threading.Event(), []

    def newer():
        entered.wait(30)
        stack.write(9, [])
        order.append("newer")

    thread = threading.Thread(target=newer)
    thread.start()
    with stack.held(5) as items:
        entered.set()
        assert not go.wait(0.2)
        items.append(1)
        order.append("older")
    thread.join(30)
    assert order == ["older", "newer"]
    with pytest.raises(StaleToken), stack.held(5):
        pytest.fail("held by a stale token")


# -------------------------------------------------------------------- the judge can fail


def judged(*calls):
    """Calls as (began, ended, action, token, accepted, based_on)."""
    now, ops = [0.0], {}
    history = History(lambda: now[0])
    moments = [(call[0], 0, place) for place, call in enumerate(calls)]
    moments += [(call[1], 1, place) for place, call in enumerate(calls)]
    for at, ends, place in sorted(moments):
        now[0], call = at, calls[place]
        if not ends:
            detail = {} if call[5] is None else {"based_on": call[5]}
            ops[place] = history.invoke("p", call[2], "r", token=call[3], **detail)
        elif call[4]:
            ops[place].ok(token=call[3])
        else:
            ops[place].fail("stale")
    return {violation.rule for violation in check_fence(history).violations}


def test_the_judge_of_fences():
    assert judged((0, 1, "write", 5, True, 0), (2, 3, "write", 4, True, 1)) == {"token"}
    assert judged((0, 1, "read", 5, True, None), (2, 3, "write", 4, True, 0)) == {"token"}
    assert judged((0, 2.5, "write", 5, True, 0), (2, 3, "write", 4, True, 1)) == set()  # they overlap
    assert judged((0, 1, "write", 5, True, 0), (2, 3, "write", 6, True, 0)) == {"update"}
    assert judged((0, 1, "write", 5, True, 0), (2, 3, "write", 6, False, 1)) == {"refusal"}
    assert judged((0, 1, "write", 5, True, 0), (2, 3, "write", 4, False, 1)) == set()
    assert judged((0, 1, "write", 4, False, 0), (2, 3, "write", 5, True, 1)) == {"refusal"}
    # 7 waits behind 5, and so 6 is refused; then 8 comes, and 7 is refused as well.
    queued = (1, 5, "write", 7, False, 0), (2, 3, "write", 6, False, 0), (4, 8, "write", 8, True, 1)
    assert judged((0, 6, "write", 5, True, 0), *queued) == set()
    assert judged((0, 6, "write", 5, True, 0), *queued[:2]) == {"refusal"}  # of 7: nothing newer came


# ------------------------------------------------------------------------- current_lease


def test_outside_of_run_there_is_no_current_lease(monkeypatch):
    for name in ("HELD", "LOCK", "TOKEN", "HOLDER", "TTL", "SLOT", "SHARED"):
        monkeypatch.delenv(f"LEASEHOLD_{name}", raising=False)
    with pytest.raises(ConfigError, match="leasehold run NAME"):
        current_lease()
    monkeypatch.setenv("LEASEHOLD_HELD", "1")
    monkeypatch.setenv("LEASEHOLD_LOCK", "a")
    monkeypatch.setenv("LEASEHOLD_TTL", "30")
    with pytest.raises(ConfigError, match="in parts"):
        current_lease()
    monkeypatch.setenv("LEASEHOLD_TOKEN", "many")
    with pytest.raises(ConfigError, match="in parts"):
        current_lease()
    monkeypatch.setenv("LEASEHOLD_TOKEN", "7")
    assert current_lease() == CurrentLease("a", 7, "", 30.0, None, False)


CHILD = """
import os, leasehold
lease = leasehold.current_lease()
print(lease.name, lease.holder, lease.ttl, lease.slot, lease.shared, lease.token == int(os.environ["LEASEHOLD_TOKEN"]))
leasehold.fences.File("out").read(lease) if lease.shared else leasehold.fences.File("out").write(lease, "done")
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "job web-3 12.0 None False True"),
        (("--slots", "2"), "job web-3 12.0 0 False True"),
        (("-s",), "job web-3 12.0 None True True"),
    ],
)
def test_the_lease_of_a_child_of_run(tmp_path, options, said):
    (tmp_path / "out").write_text("old")
    command = [sys.executable, "-m", "leasehold", "-u", f"sqlite://{tmp_path}/locks.db", "run", "--ttl", "12"]
    words = [*command, "--holder", "web-3", *options, "job", "--", sys.executable, "-c", CHILD]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr
    assert (tmp_path / "out").read_text() == ("old" if "-s" in options else "done")


def test_nothing_secret_is_in_it():
    assert CurrentLease._fields == ("name", "token", "holder", "ttl", "slot", "shared")
    assert leasehold.fences.Bearer
