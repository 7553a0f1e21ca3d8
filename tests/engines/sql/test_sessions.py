"""The life of a session: which calls may use it, what becomes of it when its caller gives up, and of replies that are
none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from leasehold import AsyncClient, Unavailable
from leasehold.core.names import hash_id
from leasehold.engines.sql.abandoned import AbandonedSessions
from leasehold.engines.sql.session import (
    BUSY,
    CLOSED,
    DRAINING,
    IDLE,
    UNANSWERED,
    DrainingSocket,
    Row,
    SessionState,
    SqlSession,
    Value,
)
from leasehold.model import Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads
from tests.support import probe


class StubSession(SqlSession):
    """Records what is sent. Its server closes its side at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def usable(self) -> bool:
        return self.state is IDLE

    async def execute(
        self, statement: bytes, values: Sequence[Value], deadline: float, *, large: bool = False
    ) -> list[Row]:
        return []

    def _send_last(self, statement: bytes, values: Sequence[Value]) -> None:
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
            connection = probe.engine(client)._connection
            with sql.lock_all_buckets():
                first = asyncio.create_task(client.lock("job", wait=0).acquire())
                await asyncio.to_thread(wait_until, lambda: sql.is_blocked("both"), every=0.2)
                second = asyncio.create_task(client.lock("second", wait=0).acquire())
                while not connection._mutex._waiting:
                    await asyncio.sleep(0.01)
                second.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await second
            assert await (await first).release()

    asyncio.run(both())


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

    monkeypatch.setattr(driver.engine._connection, "call", call)
    for claim in (make_claim("holder", granted.token), make_claim("waiter")):
        (reply,) = run_sync(driver.engine.renew([claim], driver.deadline()))
        assert isinstance(reply, Unavailable)


@pytest.mark.parametrize(
    "rows", [[], [()], [("1",)], [("1", "x", "1", None)], [("1", None, "1", None)], [(None,) * 40]]
)
def test_malformed_reply_is_unavailable(sql, make_driver, rows, monkeypatch) -> None:
    driver = make_driver(sql.url())

    async def call(*_args: object) -> list[Row]:
        return rows

    monkeypatch.setattr(driver.engine._connection, "call", call)
    monkeypatch.setattr(driver.engine._connection, "decode_reply", lambda row: row)
    with pytest.raises(Unavailable, match="not Leasehold's"):
        driver.attempt(make_claim("holder"))
