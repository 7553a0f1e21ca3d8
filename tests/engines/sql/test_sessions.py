"""The life of a session: which calls may use it, what becomes of it when its caller gives up, and of replies that are
none."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from sys import getsizeof
from typing import Any

import pytest

from leasehold import AsyncClient, Unavailable
from leasehold.core.names import hash_id
from leasehold.engines.sql.abandoned import AbandonedSessions
from leasehold.engines.sql.fair_mutex import ON_BEHALF_OF, FairMutex
from leasehold.engines.sql.session import (
    BUSY,
    CLOSED,
    DRAINING,
    IDLE,
    UNANSWERED,
    DrainingSocket,
    Listing,
    Row,
    SessionState,
    SqlSession,
    Values,
)
from leasehold.errors import ListingTooLong
from leasehold.model import Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import Threads, boot_clock
from tests.support import probe_sql


class StubSession(SqlSession):
    """Records what is sent. Its server closes its side at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def usable(self) -> bool:
        return self.state is IDLE

    async def execute(self, statement: bytes, values: Values, deadline: float) -> list[Row]:
        return []

    async def list_rows(self, statement: bytes, values: Values, deadline: float) -> list[bytes]:
        return []

    def _send_last(self, statement: bytes, values: Values) -> None:
        self.sent.append(statement)

    def _close_our_side(self) -> DrainingSocket | None:
        return None

    def shutdown(self) -> None: ...

    def close(self) -> None:
        self.transition(CLOSED)

    def after_fork(self) -> None: ...


@pytest.mark.parametrize(
    ("before", "after"),
    [(UNANSWERED, IDLE), (UNANSWERED, BUSY), (DRAINING, IDLE), (DRAINING, BUSY), (DRAINING, UNANSWERED)],
)
def test_session_without_its_reply_is_never_used_again(before: SessionState, after: SessionState) -> None:
    session = StubSession()
    session.state = before
    with pytest.raises(AssertionError, match="cannot become"):
        session.transition(after)


@pytest.mark.parametrize("state", [IDLE, BUSY, UNANSWERED, DRAINING])
def test_closed_session_stays_closed(state: SessionState) -> None:
    session = StubSession()
    session.close()
    session.transition(state)
    assert session.state is CLOSED


def test_only_the_claim_that_attempted_is_compensated() -> None:
    abandoned, session = AbandonedSessions(Threads(), "postgresql", "PostgreSQL"), StubSession()
    session.transition(BUSY)
    abandoned.add(session, "first")
    assert session.state is UNANSWERED
    abandoned.compensate("second", b"release", ())
    assert session.sent == []
    abandoned.compensate("first", b"release", ())
    abandoned.compensate("first", b"release", ())
    assert (session.sent, session.state) == ([b"release"], CLOSED)


def test_earlier_unanswered_session_hangs_up() -> None:
    abandoned = AbandonedSessions(Threads(), "postgresql", "PostgreSQL")
    earlier, later = StubSession(), StubSession()
    for session, id_hash in ((earlier, "earlier"), (later, "later")):
        session.transition(BUSY)
        abandoned.add(session, id_hash)
    assert (earlier.state, later.state) == (CLOSED, UNANSWERED)


def test_caller_that_gives_up_waiting_does_not_end_the_call_before_it(sql, wait_until) -> None:
    """A caller in the queue for the connection once hung up the session that another caller was using."""

    async def both() -> None:
        async with AsyncClient(sql.named_url("both"), call_timeout=30) as client:
            await (await client.lock("job").acquire()).release()
            with sql.lock_all_buckets():
                first = asyncio.create_task(client.lock("job", wait=0).acquire())
                await asyncio.to_thread(wait_until, lambda: sql.is_blocked("both"), every=0.2)
                second = asyncio.create_task(client.lock("second", wait=0).acquire())
                while not probe_sql.calls_waiting(client):
                    await asyncio.sleep(0.01)
                second.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await second
            assert await (await first).release()

    asyncio.run(both())


def test_call_that_other_claims_wait_for_is_made_before_those_that_begin(sql, make_driver, wait_until) -> None:
    """Behind a hundred attempts to join the queue, a waiter came too late for its reservation."""
    driver, calls = make_driver(sql.url()), list[tuple[str, bool]]()
    holder, waiter = driver.acquire(driver.claim()), driver.claim(queue=True)
    call = probe_sql.connection(driver.engine).call

    def record(verb: str, *args: Any, first: bool = False) -> Any:
        calls.append((verb, first))
        return call(verb, *args, first=first)

    probe_sql.connection(driver.engine).call = record
    driver.attempt(waiter)
    driver.release(holder)
    wait_until(lambda: driver.registry.waiting[waiter.id_hash].woken)
    driver.acquire(waiter)
    assert calls == [("attempt", False), ("release", True), ("attempt", True)]
    calls.clear()
    behind = driver.claim(queue=True)
    driver.attempt(behind)
    driver.registry.on_notification("recheck", behind.id_hash, 0.0, None)
    driver.attempt(behind)
    run_sync(driver.engine.decline(behind, driver.deadline()))
    assert calls == [("attempt", False), ("attempt", True), ("decline", True)]


def test_connection_goes_first_to_callers_that_others_wait_for() -> None:
    async def main() -> list[str]:
        runtime, order = Loop(), list[str]()
        mutex = FairMutex(runtime, "engine")

        async def use(name: str, first: bool, seconds: float = 60.0) -> None:
            caller = mutex.new_caller()
            try:
                await mutex.acquire(caller, runtime.now() + seconds, first=first)
                order.append(name)
            finally:
                mutex.release(caller)

        current = mutex.new_caller()
        await mutex.acquire(current, runtime.now() + 60)
        callers = [("join", False), ("release", True), ("another join", False), ("claim", True)]
        tasks = [asyncio.create_task(use(name, first)) for name, first in callers]
        with pytest.raises(Unavailable):
            await asyncio.create_task(use("late", True, 0.01))
        mutex.release(current)
        await asyncio.gather(*tasks)
        assert mutex.is_free
        return order

    assert asyncio.run(main()) == ["release", "claim", "join", "another join"]


def test_callers_that_come_first_let_the_others_have_turns() -> None:
    """On a lock server, a client that released claims without end kept the renewals of all others from being sent."""

    async def main() -> list[str]:
        runtime, order = Loop(), list[str]()
        mutex = FairMutex(runtime, "engine")

        async def use(name: str, first: bool) -> None:
            caller = mutex.new_caller()
            try:
                await mutex.acquire(caller, runtime.now() + 60, first=first)
                order.append(name)
                await asyncio.sleep(0)
            finally:
                mutex.release(caller)

        async def flood() -> None:
            while order.count("renewal") < 2 and len(order) < 100:
                await use("release", True)

        floods = [asyncio.create_task(flood()) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.gather(*floods, use("renewal", False), use("renewal", False))
        assert mutex.is_free
        return order

    first, second = (number for number, name in enumerate(asyncio.run(main())) if name == "renewal")
    assert first < 10
    assert second == first + 5


@pytest.mark.parametrize("first", [False, True])
def test_calls_on_behalf_of_different_keys_take_turns(first) -> None:
    """On a lock server, one key with thousands of renewals kept those of all others from being sent."""

    async def main() -> list[str]:
        runtime, order = Loop(), list[str]()
        mutex = FairMutex(runtime, "engine")

        async def use(key: str, number: int) -> None:
            ON_BEHALF_OF.set(key)
            caller = mutex.new_caller()
            try:
                await mutex.acquire(caller, runtime.now() + (0.01 if number < 0 else 60), first=first)
                order.append(f"{key}{number}")
            finally:
                mutex.release(caller)

        current = mutex.new_caller()
        await mutex.acquire(current, runtime.now() + 60)
        tasks = [asyncio.create_task(use("a", number)) for number in range(100)]
        tasks += [asyncio.create_task(use("b", number)) for number in range(3)]
        for key in ("a", "c"):  # who does not wait for long leaves nothing behind
            with pytest.raises(Unavailable):
                await asyncio.create_task(use(key, -1))
        mutex.release(current)
        await asyncio.gather(*tasks)
        assert mutex.is_free
        return order

    order = asyncio.run(main())
    assert order[:7] == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]
    assert len(order) == 103


def test_lists_for_many_keys_hold_up_other_calls_as_little_as_one(sql) -> None:
    """On a lock server a list may take a second. With six keys that made lists, renewals waited for three seconds."""

    async def main() -> list[str]:
        order: list[str] = []
        async with AsyncClient(sql.url()) as client:
            async with client.lock("a"):
                connection, deadline = probe_sql.connection(client), boot_clock() + 60

            async def use(key: str, call: Coroutine[Any, Any, object]) -> None:
                ON_BEHALF_OF.set(key)
                await call
                order.append(key)

            calls = [use(f"web-{number}", connection.list_rows(("", "", False), deadline)) for number in range(10)]
            await asyncio.gather(*calls, use("cron", connection.ping(deadline)))
        return order

    order = asyncio.run(main())
    assert len(order) == 11
    assert order.index("cron") == 2


def test_forked_child_gives_the_connection_to_no_caller_of_its_parent() -> None:
    """Such a caller never releases it, so every later call of the child would wait until its deadline."""

    async def main() -> bool:
        runtime = Loop()
        mutex, deadline = FairMutex(runtime, "engine"), runtime.now() + 60

        async def wait(first: bool) -> None:
            await mutex.acquire(mutex.new_caller(), deadline, first=first)

        await wait(False)
        waiting = [asyncio.create_task(wait(first)) for first in (False, True)]
        await asyncio.sleep(0)
        mutex.after_fork()
        caller = mutex.new_caller()
        await mutex.acquire(caller, deadline)
        mutex.release(caller)
        for each in waiting:
            each.cancel()
        return mutex.is_free

    assert asyncio.run(main())


def make_claim(secret: str, token: int = 0) -> Claim:
    return Claim("", "job", secret, hash_id(secret), Holder(secret), 60.0, token=token)


@pytest.mark.parametrize("rows", [[], [("2", "1000000", None)], [("1",)], [("x", "1", None)], [(None, None, None)]])
def test_renewal_without_its_row_is_unavailable(sql, make_driver, rows, monkeypatch) -> None:
    """E5: such a reply says nothing about the claim. It once counted as lost."""
    driver = make_driver(sql.url())
    granted = driver.attempt(make_claim("holder"))
    assert isinstance(granted, Grant)

    async def call(*_args: object) -> list[Row]:
        return rows

    monkeypatch.setattr(probe_sql.connection(driver.engine), "call", call)
    for claim in (make_claim("holder", granted.token), make_claim("waiter")):
        (reply,) = run_sync(driver.engine.renew([claim], driver.deadline()))
        assert isinstance(reply, Unavailable)


BUSY_ROW = ("0", "7", "1000000", None, "1", "label", "host", "1", "", None, None)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [()],
        [("1",)],
        [("1", "x", "1", None)],
        [("1", None, "1", None)],
        [(None,) * 40],
        *([("1", token, "1", None)] for token in ("0", "-7", "9223372036854775808")),
        [("1", "7", "9" * 300, None)],
        [("1", "7", "1", "-1")],
        *([(*BUSY_ROW[:field], "9" * 300, *BUSY_ROW[field + 1 :])] for field in (1, 2, 4, 7)),
        [(*BUSY_ROW[:4], "-1", *BUSY_ROW[5:])],
        [("2", *BUSY_ROW[1:10], "9" * 300)],
    ],
)
def test_malformed_reply_is_unavailable(sql, make_driver, rows, monkeypatch) -> None:
    driver = make_driver(sql.url())

    async def call(*_args: object, **_options: object) -> list[Row]:
        return rows

    monkeypatch.setattr(probe_sql.connection(driver.engine), "call", call)
    monkeypatch.setattr(probe_sql.connection(driver.engine), "decode_reply", lambda row: row)
    with pytest.raises(Unavailable, match="not Leasehold's"):
        driver.attempt(make_claim("holder"))


@pytest.mark.parametrize(
    "row", [b"", b"x", b"[]", b"{}", b'["n"]', b"[" + b"[]," * 17 + b"[]]", b"[1.5]", b"\x01\xff\xfd"]
)
def test_malformed_listing_is_unavailable(sql, make_driver, row, monkeypatch) -> None:
    driver = make_driver(sql.url())

    async def list_rows(*_args: object) -> list[bytes]:
        return [row]

    monkeypatch.setattr(probe_sql.connection(driver.engine), "list_rows", list_rows)
    with pytest.raises(Unavailable, match="not Leasehold's"):
        run_sync(driver.engine.inspect("", "", False, driver.deadline()))


@pytest.mark.parametrize("row", [b"", b"x" * 200, b"x" * 60_000])
def test_listing_keeps_no_more_rows_than_fit_into_its_memory(row) -> None:
    listing = Listing("postgresql")
    with pytest.raises(ListingTooLong, match="ask for the names with one prefix"):
        for _ in range((32 << 20) // (len(row) + 64)):
            listing.add(bytes(bytearray(row)))
    assert sum(map(getsizeof, listing.rows)) + getsizeof(listing.rows) < 16 << 20


def test_listing_refuses_a_row_longer_than_any_claim() -> None:
    with pytest.raises(ConnectionAbortedError):
        Listing("mysql").add(b"x" * 100_000)
