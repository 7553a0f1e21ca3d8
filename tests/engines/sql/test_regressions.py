"""Attacks on the engines on SQL servers that once succeeded on one of them."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

import pytest

from harness.servers.proxy import Proxy
from leasehold import AsyncClient, Client, ConfigError, Unavailable
from leasehold.core.names import hash_id
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.base import run_sync


def make_claim(secret: str, name: str = "job", **fields) -> Claim:
    return Claim("", name, secret, hash_id(secret), Holder(secret), 60.0, **fields)


# --------------------------------------------------------- claims left behind


def test_release_of_an_expired_reservation_leaves_nothing(sql, make_driver) -> None:
    driver = make_driver(sql.url())
    assert isinstance(driver.attempt(make_claim("first")), Grant)
    assert isinstance(driver.attempt(make_claim("second", queue=True)), Busy)
    assert driver.release(make_claim("first"))
    sql.ask("update {s}.lh_grant set until = 1 where state = 1")  # the waiter did not use its reservation in time
    assert not driver.release(make_claim("second"))
    assert sql.ask("select name from {s}.lh_waiter union select name from {s}.lh_queue") == []


def test_attempt_that_landed_before_the_role_was_locked_is_released(sql, wait_until) -> None:
    """The answer is lost, and the server refuses the retry. The refusal says nothing about the first attempt."""
    with Client(sql.url()) as owner:
        owner.inspect()
    proxy = Proxy(sql.server.port)
    try:
        with Client(sql.create_granted_role("shut", proxy.port), ttl=600, call_timeout=20) as client:
            client.ping()
            client._core.registry.shared["contended"] = True  # so the client queues with its first attempt

            def drop_answers(outward: bool, data: bytes) -> None:
                if outward and b"lh_attempt" in data:
                    proxy.watch = None
                    proxy._forward_answers = False

            proxy.watch = drop_answers
            errors: list[BaseException] = []

            def take() -> None:
                try:
                    client.lock("job", wait=20).acquire()
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=take)
            thread.start()
            wait_until(lambda: sql.ask("select 1 from {s}.lh_grant"))
            sql.set_role_locked("shut", True)
            proxy.restore()
            thread.join(30)
            assert len(errors) == 1
            sql.set_role_locked("shut", False)
            wait_until(lambda: not sql.ask("select 1 from {s}.lh_grant"), 20)
    finally:
        proxy.close()
        sql.drop_role("shut")


def test_only_the_head_of_a_long_queue_is_woken_to_recheck(sql, make_driver) -> None:
    driver = make_driver(sql.url())
    driver.attempt(make_claim("holder"))
    queue = [make_claim(f"waiter {number}", queue=True) for number in range(4)]
    for claim in queue:
        driver.attempt(claim)
    replies = run_sync(driver.engine.renew(queue, driver.deadline()))
    assert [bool(reply.position) for reply in replies] == [
        False,
        True,
        True,
        True,
    ]  # the watchdog wakes a waiter at position 0


# -------------------------------------------------------------------- errors


def test_schema_that_cannot_be_created_is_an_error_each_time(sql) -> None:
    url = sql.create_login_role("maker")
    try:
        with Client(url) as client:
            for _ in range(4):
                with pytest.raises(ConfigError, match="leasehold schema"):
                    client.lock("job").try_acquire()
    finally:
        sql.drop_role("maker")


def test_huge_call_timeout_is_accepted(sql) -> None:
    with Client(sql.url(), call_timeout=1e12, ttl=1e12) as client, client.lock("job") as lease:
        lease.renew()
        assert len(client.inspect()) == 1


# --------------------------------------------------------------- connections


def test_cancelled_calls_do_not_exhaust_the_connections(sql, wait_until) -> None:
    async def impatient() -> None:
        async with AsyncClient(sql.named_url("impatient"), call_timeout=5) as client:
            await client.ping()
            for number in range(40):
                with suppress(TimeoutError, Unavailable):
                    await asyncio.wait_for(client.lock("job", wait=5).acquire(), 0.05)
                if number % 10 == 9:
                    assert (
                        len(await asyncio.to_thread(sql.sessions, "impatient")) <= sql.max_connections + 2 * 4
                    )  # plus sessions that the server has not ended yet

    with Client(sql.url()) as client:
        client.lock("job").acquire().release()
    with sql.lock_all_buckets():
        asyncio.run(impatient())
    wait_until(lambda: not sql.sessions("impatient"))
    wait_until(lambda: not sql.ask("select 1 from {s}.lh_grant union select 1 from {s}.lh_queue"), 60)


def test_client_closed_during_a_call_takes_the_call_back(sql, wait_until) -> None:
    with Client(sql.url()) as first:
        first.lock("job").acquire().release()
    client = Client(sql.named_url("closing"), ttl=600, call_timeout=20)
    client.ping()
    errors: list[BaseException] = []

    def take() -> None:
        try:
            client.lock("job", wait=0).acquire()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    with sql.lock_all_buckets():
        thread.start()
        wait_until(lambda: sql.is_blocked("closing"), every=0.2)
        closing = threading.Thread(target=client.close)  # close() waits a while for calls in flight
        closing.start()
        wait_until(lambda: client._core.closed)
    thread.join(30)
    closing.join(30)
    assert [type(error) for error in errors] == [ConfigError]
    wait_until(lambda: not sql.ask("select 1 from {s}.lh_grant"))
    wait_until(lambda: not sql.sessions("closing"))


def test_silent_address_leaves_time_for_the_next(sql, monkeypatch) -> None:
    getaddrinfo, port = socket.getaddrinfo, sql.server.port

    def resolve_two(host, *args, **kwargs):
        if host != "two.example":
            return getaddrinfo(host, *args, **kwargs)
        return [(2, 1, 6, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    with Client(sql.url()) as first:
        first.inspect()
    monkeypatch.setattr(socket, "getaddrinfo", resolve_two)
    url = sql.url().replace("127.0.0.1", "two.example")
    with socket.create_server(("127.0.0.2", port)), Client(url, call_timeout=8) as client:  # accepts, never replies
        assert client.lock("job", wait=0).acquire().release()


# --------------------------------------------------------------- unusual input


def test_deleted_schema_version_is_recreated(sql) -> None:
    with Client(sql.url()) as client:
        client.inspect()
        sql.ask("truncate {s}.lh_meta")
        sql.drop_verb("inspect")
        assert client.inspect() == []


@pytest.mark.parametrize("prefix", ["a\0b", "\ud800"])
def test_prefix_with_invalid_characters_is_refused(sql, prefix) -> None:
    with Client(sql.url()) as client, pytest.raises(ConfigError):
        client.inspect(prefix)
