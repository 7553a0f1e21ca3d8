"""What one session reads: replies and notifications in several parts, and what a hostile server sends instead."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from psycopg import pq

from leasehold import Client, Unavailable
from leasehold.config import EngineConfig
from leasehold.engines.postgresql import connect
from leasehold.engines.postgresql.relay import MIN_LEFT, Relay
from leasehold.engines.postgresql.session import PgSession
from leasehold.engines.postgresql.url import parse_url
from leasehold.engines.sql.session import SqlConnectionLost
from leasehold.errors import ListingTooLong
from leasehold.runtime.base import Runtime, run_sync
from leasehold.runtime.threads import Threads
from tests.support import probe_sql

RECORD = 10  # bytes
NEVER = 1e12
ENOUGH = 100_000  # calls of a loop that would never end


@dataclass
class StubResult:
    status: int
    value: bytes = b""
    nfields: int = 1
    ntuples: int = 1

    def get_value(self, _row: int, _column: int) -> bytes:
        return self.value


@dataclass
class StubNotification:
    extra: bytes
    relname: bytes = b"channel"


class StubLibpq:
    """libpq as it behaves with TLS: each call of `consume_input` reads one record, and a reply or notification is known
    once its record was read."""

    status = pq.ConnStatus.OK
    pipeline_status = pq.PipelineStatus.ON

    def __init__(self, own: socket.socket, results: Iterator[StubResult], records: int = 1) -> None:
        self._own, self._results, self._records, self._read, self._taken = own, results, records, 0, 0
        self.socket = own.fileno()
        self._calls = 0

    def consume_input(self) -> None:
        self._calls += 1
        assert self._calls < ENOUGH, "this would never end"
        with suppress(BlockingIOError):
            self._read += bool(self._own.recv(RECORD))

    def is_busy(self) -> bool:
        return self._read < self._records

    def get_result(self) -> StubResult:
        self._calls += 1
        assert self._calls < ENOUGH, "this would never end"
        return next(self._results)

    def notifies(self) -> StubNotification | None:
        if self._taken == self._read:
            return None
        self._taken += 1
        return StubNotification(b"%d" % self._taken)

    def flush(self) -> int:
        return 0

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args: None  # sends something, or sets a mode


class CountingRuntime(Threads):
    """Never waits; counts how often it would. Its clock goes on with each reading."""

    def __init__(self) -> None:
        super().__init__(clock=map(float, count()).__next__)
        self.waits = 0

    async def wait_fd(self, descriptor: int, seconds: float, *, read: bool = True, write: bool = False) -> bool:
        self.waits += 1
        return True


@pytest.fixture
def make_session() -> Iterator[Callable[..., tuple[PgSession, socket.socket]]]:
    """A session on a stub of libpq, and the server's end of its connection."""
    opened: list[socket.socket] = []

    def make(runtime: Runtime, *args: Any) -> tuple[PgSession, socket.socket]:
        server, own = socket.socketpair()
        opened.extend((server, own))
        session = PgSession(cast(pq.abc.PGconn, StubLibpq(own, *args)), runtime)
        session.relay.attach()
        return session, server

    yield make
    for each in opened:
        each.close()


def sync() -> StubResult:
    return StubResult(pq.ExecStatus.PIPELINE_SYNC)


def test_reply_in_several_records_is_read_without_waiting_again(make_session) -> None:
    """Nothing more will come, so a call that waited between two records did so until its deadline."""
    runtime = CountingRuntime()
    session, server = make_session(runtime, iter([StubResult(pq.ExecStatus.TUPLES_OK, b"7"), sync()]), 3)
    server.sendall(bytes(3 * RECORD))
    assert run_sync(session.execute(b"select", (), NEVER)) == [("7",)]
    assert runtime.waits == 1


def test_notifications_in_several_records_are_all_received(make_session) -> None:
    runtime = CountingRuntime()
    session, server = make_session(runtime, iter(()))
    server.sendall(bytes(3 * RECORD))
    assert run_sync(session.next_notifications(3600.0)) == [b"1", b"2", b"3"]
    assert runtime.waits == 1
    server.sendall(bytes(RECORD))
    session.relay.receive()  # as an earlier reply did that ended with another record
    assert run_sync(session.next_notifications(3600.0)) == [b"4"]
    assert runtime.waits == 1


def test_call_ends_at_its_deadline_while_the_server_sends_on(make_session) -> None:
    session, _ = make_session(CountingRuntime(), iter(()), ENOUGH)
    with pytest.raises(Unavailable):
        run_sync(session.execute(b"select", (), 100.0))


def test_copy_instead_of_a_reply_ends_the_session(make_session) -> None:
    def copies() -> Iterator[StubResult]:
        while True:
            yield StubResult(pq.ExecStatus.COPY_OUT)

    session, server = make_session(CountingRuntime(), copies())
    server.sendall(bytes(RECORD))
    with pytest.raises(SqlConnectionLost, match="copy"):
        run_sync(session.execute(b"select", (), NEVER))


def test_listing_without_end_is_refused(make_session) -> None:
    def rows() -> Iterator[StubResult]:
        while True:
            yield StubResult(pq.ExecStatus.SINGLE_TUPLE, b"x" * 1000)

    session, server = make_session(CountingRuntime(), rows())
    server.sendall(bytes(RECORD))
    with pytest.raises(ListingTooLong):
        run_sync(session.list_rows(b"select", (), NEVER))


def test_no_reply_gives_back_more_bytes_than_were_sent(database) -> None:
    """Else a hostile server could make libpq keep more and more, and the session would never be replaced."""
    with Client(database.url(), ttl=300) as client:
        client.lock("job").acquire().release()
        relay = probe_sql.session(client).relay
        before, lease = relay.bytes_left, client.lock("job").acquire()
        assert before - 200 < relay.bytes_left < before
        for call in (lease.renew, client.inspect, client.ping, lease.release):
            before = relay.bytes_left
            call()
            assert before - 1000 < relay.bytes_left < before


def test_long_replies_are_given_back_like_short_ones(make_driver, database) -> None:
    driver = make_driver(database.url())
    claims = [driver.acquire(driver.claim(f"job-{number}")) for number in range(50)]
    relay = probe_sql.session(driver.engine).relay
    for call in (lambda: run_sync(driver.engine.renew(claims, driver.deadline())), driver.inspect):
        for _ in range(2):  # the first call also prepares the statement
            before = relay.bytes_left
            assert len(call()) == 50
        assert before - 200 < relay.bytes_left < before


def test_notifications_are_given_back_and_nothing_else(database) -> None:
    runtime = Threads()
    target = parse_url(EngineConfig.parse(database.url(), 5.0)).target
    session = run_sync(connect.open_session(target, runtime, runtime.now() + 20, 0.0))
    try:
        run_sync(session.run("listen lh_job", runtime.now() + 20))
        before, received = session.relay.bytes_left, list[bytes]()
        database.ask("select pg_notify('lh_job', repeat('x', 100) || n) from generate_series(1, 300) n")
        while len(received) < 300:
            received += run_sync(session.next_notifications(60.0))
        assert session.relay.bytes_left == before
        session.relay.bytes_left = MIN_LEFT - 1
        database.ask("select pg_notify('lh_job', '')")
        with pytest.raises(ConnectionResetError, match="no notification"):
            run_sync(session.next_notifications(60.0))
    finally:
        session.close()


def test_relay_is_done_only_when_all_of_a_request_is_sent() -> None:
    """If the network takes a large request in parts, the rest stayed behind: the server waited for it, and the client
    for the reply, until the deadline."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 30_000)  # takes a part of what the relay sends at once
    far.setblocking(False)
    request, received = bytes(range(256)) * 600, b""
    with near, far:
        stub = cast(Any, SimpleNamespace(socket=near.fileno()))
        relay = Relay(stub)
        relay.attach()
        written = 0
        while written < len(request) or not relay.send():
            with suppress(BlockingIOError):
                written += os.write(stub.socket, request[written:])
            with suppress(BlockingIOError):
                received += far.recv(9_000)
        with suppress(BlockingIOError):
            while data := far.recv(65_536):
                received += data
        assert received == request
        relay.close()
