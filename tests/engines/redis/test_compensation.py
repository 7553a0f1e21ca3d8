"""Attempts that arrive after the client gave up: a release follows on the same connection."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress

import pytest

from harness.servers.process import poll
from harness.servers.proxy import Proxy
from leasehold import AsyncClient, Client, Unavailable
from leasehold.config import EngineConfig
from leasehold.engines.redis.protocol import lock_keys
from leasehold.model import Alive, Claim
from leasehold.runtime.base import run_sync
from leasehold.server.service import Service
from tests.support import probe
from tests.support.bare_engine import BareEngineDriver
from tests.support.redis_servers import url


class DelayingProxy:
    """Forwards everything. After `hold` it keeps back the requests of the open connections until `deliver`.

    `garble_next`: the next reply is replaced by what no Redis sends. Later requests of that connection are kept back:
    they are `sent_after_garbling`, complete once the client has closed the connection (`garbled_is_closed`).
    """

    def __init__(self, port: int) -> None:
        self._port, self._may_forward, self._sockets = port, [], []
        self.garble_next, self.sent_after_garbling, self.garbled_is_closed = False, b"", threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start_thread(self._run)

    def _start_thread(self, target, *args) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                client_side, _ = self._listener.accept()
                server_side = socket.create_connection(("127.0.0.1", self._port))
                may_forward = threading.Event()
                may_forward.set()
                self._may_forward.append(may_forward)
                self._sockets += [client_side, server_side]
                self._start_thread(self._forward, client_side, server_side, may_forward)
                self._start_thread(self._forward, server_side, client_side, None)

    def _forward(self, source, target, may_forward) -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(65_536)
            except OSError:
                data = b""
            if may_forward is None and data and self.garble_next:
                self.garble_next, data = False, b"?no reply of a Redis server\r\n"
                self.hold()
            if may_forward is not None and not may_forward.is_set():
                self.sent_after_garbling += data
                if not data:
                    self.garbled_is_closed.set()
            if may_forward is not None:
                may_forward.wait()
            with suppress(OSError):
                target.sendall(data) if data else target.shutdown(socket.SHUT_WR)

    def hold(self) -> None:
        for may_forward in self._may_forward:
            may_forward.clear()

    def deliver(self) -> None:
        for may_forward in self._may_forward:
            may_forward.set()

    def close(self) -> None:
        self.deliver()
        self._listener.shutdown(socket.SHUT_RDWR)
        for sock in (self._listener, *self._sockets):
            sock.close()


@pytest.fixture(params=["", "?min_replicas=1"], ids=["plain", "min_replicas"])
def delayed_server(request, start_redis):
    """A server, a proxy that can hold back requests, and a URL through the proxy."""
    server = start_redis()
    if request.param:
        start_redis(primary=server)
        poll(
            lambda: "state=online" in server.info("replication").get("slave0", ""), 30, lambda: "the replica is online"
        )
        Client(url(server, request.param), call_timeout=10).lock("warm").acquire().release()  # the replica confirms
    proxy = DelayingProxy(server.port)
    yield server, proxy, f"redis://127.0.0.1:{proxy.port}{request.param}"
    proxy.close()


def check_attempt_is_undone(server, proxy) -> None:
    counter = lock_keys("", "job")[0]
    assert not server.ask("EXISTS", counter), "the attempt has not arrived yet"
    proxy.deliver()
    with Client(url(server)) as other:
        poll(lambda: server.ask("EXISTS", counter), 60, lambda: "the late attempt has arrived")
        poll(lambda: not other.inspect(), 60, lambda: "the late attempt is released, long before its ttl is over")


def test_late_attempt_is_followed_by_its_release(delayed_server) -> None:
    server, proxy, proxy_url = delayed_server
    with Client(proxy_url, call_timeout=0.3) as client:
        client.lock("warm").acquire().release()
        proxy.hold()
        with pytest.raises(Unavailable):
            client.lock("job", ttl=600).acquire(wait=0)
        poll(
            lambda: not probe.pending_releases(client),
            10,
            lambda: "the release is confirmed on another connection",
        )
        check_attempt_is_undone(server, proxy)


def test_repetition_through_another_instance_is_not_released(delayed_server) -> None:
    """A server's caller repeats an unanswered attempt at another server, with the same id."""
    server, proxy, proxy_url = delayed_server
    first, second = BareEngineDriver(proxy_url), BareEngineDriver(url(server))
    first.registry.undo_unanswered = False
    first.release(first.acquire(first.claim("warm")))
    proxy.hold()
    claim = first.claim("job")
    with pytest.raises(Unavailable):
        run_sync(first.engine.attempt(claim, first.deadline(0.3)))
    held = second.acquire(claim)
    run_sync(first.engine.close())
    assert proxy.garbled_is_closed.wait(30)
    proxy.deliver()
    assert proxy.sent_after_garbling.count(b"EVALSHA") == 1, "only the attempt was sent"
    assert isinstance(second.renew(held), Alive)
    run_sync(second.engine.close())


def test_server_does_not_undo_an_attempt_that_timed_out(delayed_server) -> None:
    """Its caller may repeat the claim at another server, and hold it by the time that a release arrived."""
    server, proxy, proxy_url = delayed_server
    other = BareEngineDriver(url(server))
    claim = other.claim("job")

    async def attempt_in_vain() -> Claim:
        service = Service(EngineConfig.parse(proxy_url, 5.0))
        await service.start()
        await service.attempt(other.claim("warm"), ("anyone", "client"), service.runtime.now() + 5)
        proxy.hold()
        with pytest.raises(Unavailable):
            await service.attempt(claim, ("anyone", "client"), service.runtime.now() + 0.3)
        held = other.acquire(claim)
        await service.stop()
        return held

    held = asyncio.run(attempt_in_vain())
    assert proxy.garbled_is_closed.wait(30)
    proxy.deliver()
    poll(lambda: b"EVALSHA" in proxy.sent_after_garbling, 30, lambda: "the attempt was sent")
    assert proxy.sent_after_garbling.count(b"EVALSHA") == 1, "only the attempt was sent"
    assert isinstance(other.renew(held), Alive)
    run_sync(other.engine.close())


def test_repeated_attempt_is_not_released_by_its_first_connection(delayed_server) -> None:
    """After an unreadable reply the attempt is repeated with the same id on another connection. A release that the
    client sent behind the first attempt arrived later and ended the repeated grant, while its holder trusted it."""
    server, proxy, proxy_url = delayed_server
    with Client(proxy_url, call_timeout=5) as client, Client(url(server)) as other:
        client.lock("warm").acquire().release()
        proxy.garble_next = True
        lease = client.lock("job", ttl=60).acquire(wait=0)
        assert not proxy.garble_next
        assert proxy.garbled_is_closed.wait(30)
        assert proxy.sent_after_garbling == b""
        proxy.deliver()
        assert other.lock("job").try_acquire() is None
        lease.verify()


def test_retry_after_a_timeout_is_not_released_by_the_first_attempt(delayed_server) -> None:
    """With on_unavailable="wait" a timed-out attempt is followed by its release, and then retried: under a new id, or
    that release, which arrives later, would end the grant while its holder trusts it."""
    server, proxy, proxy_url = delayed_server
    counter = lock_keys("", "job")[0]
    with Client(proxy_url, call_timeout=0.3) as client, Client(url(server)) as other:
        client.lock("warm").acquire().release()
        proxy.hold()  # the requests of the open connection: the retry opens another one
        lease = client.lock("job", ttl=60, wait=30, on_unavailable="wait").acquire()
        assert server.ask("EXISTS", counter)
        before = server.calls()["evalsha"]
        proxy.deliver()
        poll(lambda: server.calls()["evalsha"] >= before + 2, 30, lambda: "the late attempt and its release arrived")
        assert other.lock("job").try_acquire() is None, "the late release ended the grant of the retry"
        lease.verify()


@pytest.mark.parametrize("cancelled", [False, True], ids=["timed out", "cancelled"])
def test_late_attempt_under_asyncio_is_followed_by_its_release(delayed_server, cancelled) -> None:
    server, proxy, proxy_url = delayed_server

    async def main() -> None:
        async with AsyncClient(proxy_url, call_timeout=2.0) as client:
            await (await client.lock("warm").acquire()).release()
            proxy.hold()
            with pytest.raises((Unavailable, TimeoutError)):
                async with asyncio.timeout(0.1 if cancelled else 10):
                    await client.lock("job", ttl=600).acquire(wait=0)
            end = time.monotonic() + 10
            while probe.pending_releases(client):
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            await asyncio.to_thread(check_attempt_is_undone, server, proxy)

    asyncio.run(main())


def test_repeated_release_cannot_tell_and_raises_no_loss(server, caplog) -> None:
    # The server carries the first request out, but the connection breaks before the reply: the second finds no grant.
    proxy = Proxy(server.port)

    def restore_after_release() -> None:
        poll(lambda: proxy.has_lost_bytes, 60, lambda: "the reply is lost")
        proxy.restore()

    try:
        with Client(f"redis://127.0.0.1:{proxy.port}") as client:
            client.lock("warm").acquire().release()  # the server knows the script from now on
            with client.lock("job") as lease:
                proxy.lose_answers()
                restoring = threading.Thread(target=restore_after_release)
                restoring.start()
            restoring.join(60)
            assert lease.state == "RELEASED"
            poll(lambda: "was over when its release arrived" in caplog.text, 60, lambda: caplog.text)
    finally:
        proxy.close()
