"""The rules, in-process fences, the event of a refusal, and the lease of `leasehold run` in its child."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import leasehold
from harness.checkers.fences import check_fence
from harness.checkers.history import History
from leasehold import (
    AsyncClient,
    Client,
    ConfigError,
    CurrentLease,
    Event,
    StaleToken,
    current_lease,
    fences,
)
from leasehold.fences import TokenInfo, rules
from tests.support import probe_fences
from tests.support.fence_history import recorded

# ----------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("token", "highest_token", "new_highest"),
    [(1, 0, 1), (5, 5, 5), (6, 5, 6), (4, 5, None), (2**53 - 1, 2**53 - 2, 2**53 - 1), (2**53 - 2, 2**53 - 1, None)],
)
def test_check_token_refuses_lower_and_accepts_equal_and_higher(token, highest_token, new_highest):
    if new_highest is None:
        with pytest.raises(StaleToken):
            rules.check_token(token, TokenInfo(token), highest_token, "r", "local")
    else:
        assert rules.check_token(token, TokenInfo(token), highest_token, "r", "local") == new_highest
        assert rules.check_token(token, TokenInfo(token, shared=True), highest_token, "r", None) == highest_token


def test_stale_token_names_both_tokens_and_survives_pickling():
    stale = pickle.loads(pickle.dumps(StaleToken("stock/teapot", token=33, highest=34, slot=2)))
    assert (stale.resource, stale.token, stale.highest, stale.slot) == ("stock/teapot", 33, 34, 2)
    assert (
        str(stale) == "stock/teapot, slot 2, refused token 33: it has seen 34; the lease with the lower token is over"
    )


def test_local_fence_refuses_invalid_resource_name():
    for bad in ("", "x" * 256, "a\0b", 7, None):
        with pytest.raises(ConfigError):
            fences.Local(bad, 0)


@pytest.mark.parametrize("token", [5.0, 5.5, float("nan"), "5", None, True, b"5", 2**53, 0, -3])
@pytest.mark.parametrize(
    "bearer", [lambda token: token, TokenInfo, lambda token: SimpleNamespace(token=token, slot=None, shared=False)]
)
def test_fence_refuses_token_that_is_not_a_valid_int(token, bearer, tmp_path):
    """A float would pass the comparison and be truncated or rounded later."""
    local, file = fences.Local("a", 0), fences.File(tmp_path / "a")
    for call in (lambda: local.write(bearer(token), 1), lambda: file.write(bearer(token), "1")):
        with pytest.raises(ConfigError):
            call()
    assert local.peek() == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("slot", [-1, -2, 2**31, True, 1.0, "0", "a/../b"])
def test_fence_refuses_invalid_slot(slot, resource, tmp_path):
    """-1 means the lock itself in a fence row, and an offset before the start of a token file."""
    number = resource("sqlite-row")
    number.write(9, 1)
    for fence in (number, fences.File(tmp_path / "a")):
        with pytest.raises(ConfigError, match="slot"):
            fence.write(TokenInfo(10, slot=slot), 2 if fence is number else "2")
    assert number.peek() == 1
    number.write(9, 3)


@pytest.mark.parametrize("shared", [0, 1, None, "", "no", "0"])
def test_fence_refuses_shared_that_is_not_a_bool(shared):
    """An empty text from a message would make a reader's token that of a writer."""
    with pytest.raises(ConfigError, match="shared must be True or False"):
        fences.Local("a", 0).write(TokenInfo(5, shared=shared), 1)


@pytest.mark.parametrize("name", ["\ud800", "a\udcff"])
def test_fence_refuses_resource_name_that_cannot_be_encoded(name):
    with pytest.raises(ConfigError):
        fences.Local(name, 0)


def test_every_public_name_of_fences_has_a_docstring():
    assert sorted(fences.__all__) == sorted(
        {*probe_fences.PUBLIC_NAMES, "HasToken", "TokenInfo", "LeaseLike", "on_event"}
    )
    for name in set(fences.__all__) - {"LeaseLike"}:
        thing = getattr(fences, name)
        assert thing.__doc__ if callable(thing) and not isinstance(thing, type) else vars(thing).get("__doc__"), name
        public = [method for verb, method in vars(thing).items() if inspect.isfunction(method) and verb[0] != "_"]
        assert [method for method in public if not method.__doc__] == []
    with pytest.raises(AttributeError, match="no attribute 'SQLite'"):
        fences.SQLite  # noqa: B018


@pytest.mark.parametrize("name", [name for name in fences.__all__ if name.startswith("Async")])
def test_async_fence_has_the_methods_of_the_blocking_fence(name):
    def calls(thing):
        methods = {verb: method for verb, method in vars(thing).items() if inspect.isfunction(method)}
        return {verb: str(inspect.signature(method)).replace("Async", "") for verb, method in methods.items()}

    blocking_class, async_class = getattr(fences, name.removeprefix("Async")), getattr(fences, name)
    assert calls(blocking_class) == calls(async_class)
    assert [verb for verb, method in vars(blocking_class).items() if inspect.iscoroutinefunction(method)] == []
    plain = [verb for verb, method in vars(async_class).items() if inspect.isfunction(method)]
    assert {verb for verb in plain if not inspect.iscoroutinefunction(vars(async_class)[verb])} <= {"transaction"}
    assert str(inspect.signature(blocking_class)) == str(inspect.signature(async_class))


def test_base_fences_import_only_the_standard_library():
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


def test_local_fence_refuses_broken_lease_and_sends_event():
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


def test_refused_lease_is_one_event_if_client_and_fences_share_a_hook(refusals):
    hook = refusals.append
    for hooks, expected in (((hook, hook), ["memory"]), ((lambda event: hook(event), hook), ["memory", ""])):
        fences.on_event(hooks[1])
        refusals.clear()
        with Client("memory://", on_event=hooks[0]) as client:
            value = fences.Local("stock/teapot", 10)
            value.claim(2**53 - 1)
            with client.lock("a") as lease, pytest.raises(StaleToken):
                value.write(lease, 9)
        events = [event for event in refusals if event.kind == "stale_token"]
        assert [event.engine for event in events] == expected
        assert {(event.fence, event.seen, event.token) for event in events} == {("local", 2**53 - 1, lease.token)}


def test_failing_hook_of_fences_does_not_change_the_refusal(refusals, caplog):
    def fails(_event: Event) -> None:
        raise RuntimeError("hook")

    fences.on_event(fails)
    value = fences.Local("stock/teapot", 10)
    value.claim(5)
    with pytest.raises(StaleToken):
        value.write(4, 9)
    assert "the on_event hook failed on stale_token of stock/teapot" in caplog.text


def test_hook_of_fences_must_be_callable():
    with pytest.raises(ConfigError, match="on_event takes a function"):
        fences.on_event(3)


def test_local_fence_refuses_broken_async_lease_and_sends_event():
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


def test_local_fence_with_semaphore_permits_and_readers():
    with Client("memory://") as client:
        value = fences.Local("pool", 0)
        with client.semaphore("pool", 2) as first, client.semaphore("pool", 2) as second:
            for permit in (first, second, first, second):
                value.write(permit, value.read(permit) + 1)
        with client.semaphore("pool", 2) as successor:
            assert successor.slot == 0
            value.read(successor)
            with pytest.raises(StaleToken):
                value.write(first, 0)
            value.write(second, 5)
        document = fences.Local("book", "text")
        rwlock = client.rwlock("book")
        with rwlock.write() as writer:
            document.write(writer, "new text")
        with rwlock.read() as early, client.rwlock("book").read() as later:
            assert early.shared
            assert not writer.shared
            assert document.read(later) == document.read(early) == "new text"
            with pytest.raises(ConfigError, match="write side"):
                document.write(early, "mine")
        with rwlock.write() as writer:
            document.claim(writer)
            with pytest.raises(StaleToken):
                document.read(early)


# -------------------------------------------------------------------------- in process


def test_local_fence_loses_no_update_of_threads():
    number, tokens = fences.Local("n", 0), iter(range(1, 100_000))
    history, accepted = History(time.monotonic), []

    def call(who, action, token, work, **detail):
        return recorded(history, who, action, "n", token, work, **detail)

    def work(who):
        token = 0
        for round_number in range(60):
            if round_number % 3 == 0 or not token:
                token = next(tokens)
            value = call(who, "read", token, lambda token=token: number.read(token))
            if value is not None:
                time.sleep(0.0002)  # pause: another thread may come in between
                write = lambda token=token, value=value: number.write(token, value + 1) or True  # noqa: E731
                accepted.append(call(who, "write", token, write, based_on=value))

    threads = [threading.Thread(target=work, args=[str(n)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    verdict = check_fence(history)
    assert verdict.result == "valid", verdict
    assert number.peek() == sum(bool(result) for result in accepted)


def test_local_fence_write_waits_while_object_is_held():
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


# ------------------------------------------------------------------ the checker can fail


def violated_rules(*calls):
    """Check calls given as (began, ended, action, token, accepted, based_on)."""
    now, ops = [0.0], {}
    history = History(lambda: now[0])
    moments = [(call[0], 0, index) for index, call in enumerate(calls)]
    moments += [(call[1], 1, index) for index, call in enumerate(calls)]
    for at, ends, index in sorted(moments):
        now[0], call = at, calls[index]
        if not ends:
            detail = {} if call[5] is None else {"based_on": call[5]}
            ops[index] = history.invoke("p", call[2], "r", token=call[3], **detail)
        elif call[4]:
            ops[index].ok(token=call[3])
        else:
            ops[index].fail("stale")
    return {violation.rule for violation in check_fence(history).violations}


def test_fence_checker_finds_each_violation():
    assert violated_rules((0, 1, "write", 5, True, 0), (2, 3, "write", 4, True, 1)) == {"token"}
    assert violated_rules((0, 1, "read", 5, True, None), (2, 3, "write", 4, True, 0)) == {"token"}
    assert violated_rules((0, 2.5, "write", 5, True, 0), (2, 3, "write", 4, True, 1)) == set()  # the two calls overlap
    assert violated_rules((0, 1, "write", 5, True, 0), (2, 3, "write", 6, True, 0)) == {"update"}
    assert violated_rules((0, 1, "write", 5, True, 0), (2, 3, "write", 6, False, 1)) == {"refusal"}
    assert violated_rules((0, 1, "write", 5, True, 0), (2, 3, "write", 4, False, 1)) == set()
    assert violated_rules((0, 1, "write", 4, False, 0), (2, 3, "write", 5, True, 1)) == {"refusal"}
    # 7 waits for 5, so 6 is refused. Then 8 arrives, and 7 is refused as well.
    queued = (1, 5, "write", 7, False, 0), (2, 3, "write", 6, False, 0), (4, 8, "write", 8, True, 1)
    assert violated_rules((0, 6, "write", 5, True, 0), *queued) == set()
    assert violated_rules((0, 6, "write", 5, True, 0), *queued[:2]) == {"refusal"}  # 7: nothing newer arrived


# ------------------------------------------------------------------------- current_lease


def test_current_lease_requires_complete_environment_of_run(monkeypatch):
    for name in ("HELD", "LOCK", "TOKEN", "HOLDER", "TTL", "SLOT", "SHARED"):
        monkeypatch.delenv(f"LEASEHOLD_{name}", raising=False)
    with pytest.raises(ConfigError, match="leasehold run NAME"):
        current_lease()
    monkeypatch.setenv("LEASEHOLD_HELD", "1")
    monkeypatch.setenv("LEASEHOLD_LOCK", "a")
    monkeypatch.setenv("LEASEHOLD_TTL", "30")
    with pytest.raises(ConfigError, match="LEASEHOLD_TOKEN is not set"):
        current_lease()
    monkeypatch.setenv("LEASEHOLD_TOKEN", "many")
    with pytest.raises(ConfigError, match="LEASEHOLD_TOKEN is not valid"):
        current_lease()
    monkeypatch.setenv("LEASEHOLD_TOKEN", "7")
    monkeypatch.setenv("LEASEHOLD_HOLDER", "web-3:812")
    assert current_lease() == CurrentLease("a", 7, "web-3:812", 30.0, None, False)


CHILD = """
import os, leasehold
lease = leasehold.current_lease()
print(lease.name, lease.holder, lease.ttl, lease.slot, lease.shared, lease.token == int(os.environ["LEASEHOLD_TOKEN"]))
leasehold.fences.File("out").read(lease) if lease.shared else leasehold.fences.File("out").write(lease, "done")
"""


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ((), "job web-3 12.0 None False True"),
        (("--slots", "2"), "job web-3 12.0 0 False True"),
        (("-s",), "job web-3 12.0 None True True"),
    ],
)
def test_current_lease_in_child_of_run_passes_the_fence(tmp_path, options, output):
    (tmp_path / "out").write_text("old")
    command = [sys.executable, "-m", "leasehold", "-u", f"sqlite://{tmp_path}/locks.db", "run", "--ttl", "12"]
    arguments = [*command, "--holder", "web-3", *options, "job", "--", sys.executable, "-c", CHILD]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, output), done.stderr
    assert (tmp_path / "out").read_text() == ("old" if "-s" in options else "done")


def test_current_lease_has_no_secret_fields():
    assert CurrentLease._fields == ("name", "token", "holder", "ttl", "slot", "shared")
    assert leasehold.fences.HasToken
