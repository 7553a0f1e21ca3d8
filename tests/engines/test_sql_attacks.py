"""Attacks on the engines on SQL servers that once succeeded on one of them."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

import pytest

from leasehold import AsyncClient, Client, ConfigError, Unavailable
from leasehold.core.names import mark
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.base import step
from leasehold.testing.servers.proxy import Proxy


def claim_of(word: str, name: str = "job", **more) -> Claim:
    return Claim("", name, word, mark(word), Holder(word), 60.0, **more)


# -------------------------------------------------------------------- ghosts


def test_a_turn_that_lapsed_and_is_then_given_up_leaves_nothing(sql, bare) -> None:
    one = bare(sql.url())
    assert isinstance(one.attempt(claim_of("first")), Grant)
    assert isinstance(one.attempt(claim_of("second", queue=True)), Busy)
    assert one.release(claim_of("first"))
    sql.ask("update {s}.lh_grant set until = 1 where state = 1")  # its turn was not taken in time
    assert not one.release(claim_of("second"))
    assert sql.ask("select name from {s}.lh_waiter union select name from {s}.lh_line") == []


def test_what_landed_before_the_role_was_shut_out_is_still_owed(sql, until) -> None:
    """The answer is lost, and whoever asks again is refused: that says nothing of the first attempt."""
    with Client(sql.url()) as owner:
        owner.inspect()
    proxy = Proxy(sql.server.port)
    try:
        with Client(sql.role("shut", proxy.port), ttl=600, call_timeout=20) as client:
            client.ping()
            client._desk.book.shelf["contended"] = True  # it has met others: it stands in line from the start

            def hear(outward: bool, data: bytes) -> None:
                if outward and b"lh_attempt" in data:
                    proxy.watch = None
                    proxy._answers = False

            proxy.watch = hear
            errors: list[BaseException] = []

            def take() -> None:
                try:
                    client.lock("job", wait=20).acquire()
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=take)
            thread.start()
            until(lambda: sql.ask("select 1 from {s}.lh_grant"))
            sql.shut("shut", True)
            proxy.mend()
            thread.join(30)
            assert len(errors) == 1
            sql.shut("shut", False)
            until(lambda: not sql.ask("select 1 from {s}.lh_grant"), 20)
    finally:
        proxy.close()
        sql.drop_role("shut")


def test_only_the_head_of_a_long_line_asks_again_when_nothing_happens(sql, bare) -> None:
    one = bare(sql.url())
    one.attempt(claim_of("holder"))
    line = [claim_of(f"waiter {number}", queue=True) for number in range(4)]
    for claim in line:
        one.attempt(claim)
    replies = step(one.engine.renew(line, one.by()))
    assert [bool(reply.place) for reply in replies] == [False, True, True, True]  # the watchdog wakes who has no place


# -------------------------------------------------------------------- errors


def test_tables_that_cannot_be_made_are_the_answer_each_time(sql) -> None:
    url = sql.newcomer("maker")
    try:
        with Client(url) as client:
            for _ in range(4):
                with pytest.raises(ConfigError, match="leasehold schema"):
                    client.lock("job").try_acquire()
    finally:
        sql.drop_role("maker")


def test_a_call_timeout_beyond_what_the_server_can_count(sql) -> None:
    with Client(sql.url(), call_timeout=1e12, ttl=1e12) as client, client.lock("job") as lease:
        lease.renew()
        assert len(client.inspect()) == 1


# --------------------------------------------------------------- connections


def test_cancelled_calls_do_not_use_up_the_connections(sql, until) -> None:
    async def impatient() -> None:
        async with AsyncClient(sql.named("impatient"), call_timeout=5) as client:
            await client.ping()
            for number in range(40):
                with suppress(TimeoutError, Unavailable):
                    await asyncio.wait_for(client.lock("job", wait=5).acquire(), 0.05)
                if number % 10 == 9:
                    assert (
                        len(await asyncio.to_thread(sql.sessions, "impatient")) <= sql.most + 2 * 4
                    )  # with what the server has not ended yet

    with Client(sql.url()) as client:
        client.lock("job").acquire().release()
    with sql.frozen():
        asyncio.run(impatient())
    until(lambda: not sql.sessions("impatient"))
    until(lambda: not sql.ask("select 1 from {s}.lh_grant union select 1 from {s}.lh_line"), 60)


def test_a_client_closed_in_the_midst_of_a_call_takes_the_call_back(sql, until) -> None:
    with Client(sql.url()) as first:
        first.lock("job").acquire().release()
    client = Client(sql.named("closing"), ttl=600, call_timeout=20)
    client.ping()
    errors: list[BaseException] = []

    def take() -> None:
        try:
            client.lock("job", wait=0).acquire()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    with sql.frozen():
        thread.start()
        until(lambda: sql.blocked("closing"), every=0.2)
        closing = threading.Thread(target=client.close)  # it waits a while for calls in their midst
        closing.start()
        until(lambda: client._desk.closed)
    thread.join(30)
    closing.join(30)
    assert [type(error) for error in errors] == [ConfigError]
    until(lambda: not sql.ask("select 1 from {s}.lh_grant"))
    until(lambda: not sql.sessions("closing"))


def test_an_address_that_is_silent_leaves_time_for_the_next(sql, monkeypatch) -> None:
    look_up, port = socket.getaddrinfo, sql.server.port

    def two(host, *rest, **more):
        if host != "two.example":
            return look_up(host, *rest, **more)
        return [(2, 1, 6, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    with Client(sql.url()) as first:
        first.inspect()
    monkeypatch.setattr(socket, "getaddrinfo", two)
    url = sql.url().replace("127.0.0.1", "two.example")
    with socket.create_server(("127.0.0.2", port)), Client(url, call_timeout=8) as client:  # accepts, and says nothing
        assert client.lock("job", wait=0).acquire().release()


# ------------------------------------------------------------------ odd things


def test_a_version_that_somebody_deleted_is_made_again(sql) -> None:
    with Client(sql.url()) as client:
        client.inspect()
        sql.ask("truncate {s}.lh_meta")
        sql.forget("inspect")
        assert client.inspect() == []


@pytest.mark.parametrize("prefix", ["a\0b", "\ud800"])
def test_a_prefix_that_no_name_has_is_refused(sql, prefix) -> None:
    with Client(sql.url()) as client, pytest.raises(ConfigError):
        client.inspect(prefix)
