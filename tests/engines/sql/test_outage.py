"""The engines on SQL servers when a role is locked, an address stays silent, or a client is closed during a call."""

from __future__ import annotations

import socket
import threading

from harness.servers.proxy import Proxy
from leasehold import Client, ConfigError
from tests.support import probe


def test_attempt_that_landed_before_the_role_was_locked_is_released(sql, wait_until) -> None:
    """The answer is lost, and the server refuses the retry. The refusal says nothing about the first attempt."""
    with Client(sql.url()) as owner:
        owner.inspect()
    proxy = Proxy(sql.server.port)
    try:
        with Client(sql.create_granted_role("shut", proxy.port), ttl=600, call_timeout=20) as client:
            client.ping()
            probe.engine_state(client)["contended"] = True  # so the client queues with its first attempt

            def drop_answers(outward: bool, data: bytes) -> None:
                if outward and b"lh_attempt" in data:
                    proxy.watch = None
                    proxy.lose_answers()

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
            wait_until(lambda: not sql.ask("select 1 from {s}.lh_grant"), 60)
    finally:
        proxy.close()
        sql.drop_role("shut")


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
        wait_until(lambda: probe.is_closed(client))
    thread.join(30)
    closing.join(30)
    assert [type(error) for error in errors] == [ConfigError]
    wait_until(lambda: not sql.ask("select 1 from {s}.lh_grant"))
    wait_until(lambda: not sql.sessions("closing"))
