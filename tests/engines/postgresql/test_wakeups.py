"""The listener of the PostgreSQL engine: notifications, the connection they arrive on, breaks pushed to the holder."""

from __future__ import annotations

import socket
import threading
import time
from urllib.parse import quote
from weakref import ref

import pytest

from leasehold import Client, LeaseLost
from leasehold.core.timing import WAKEUP_SLACK
from leasehold.engines.postgresql.listener import PgListener
from leasehold.engines.postgresql.session import PgSession
from leasehold.engines.registry import ClaimRegistry
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Runtime, run_sync
from leasehold.runtime.threads import Threads
from tests.support import probe, probe_postgresql


def test_malformed_notifications_do_not_stop_the_listener(database, wait_until, background_waiter) -> None:
    payloads = [
        '["reserved", [], 0, "", ""]',
        '["broken", {}, 0, "", ""]',
        "[" * 7000,
        f'["recheck", "x", {"9" * 1000}, "", ""]',
        "{}",
        "\x01",
    ]
    with Client(database.url(), ttl=60) as client, Client(database.url(), ttl=60) as other:
        client.ping()
        address = probe.engine_state(client)["postgresql"].address
        assert address
        for payload in payloads:
            database.ask("select pg_notify(%s, %s)", f"lh_{address}", payload)
        lease = other.lock("job").acquire()
        with background_waiter(client, "job", wait=60) as got:
            wait_until(lambda: any(h.state == "waiting" for h in other.inspect()))
            lease.release()
        assert got[0].release()
        assert probe.engine_state(client)["postgresql"].address == address
        assert any(thread.name == "leasehold-listener" for thread in threading.enumerate())


class ScriptedSession(PgSession):
    """Receives one list of payloads after the other, and sets the clock before each. Then the connection is lost."""

    def __init__(self, clock: list[float], *received: tuple[float, list[bytes]]) -> None:
        self.waited: list[float] = []
        self._clock, self._received = clock, list(received)

    async def run(self, script: str, deadline: float) -> None:
        """Nothing to do."""

    def enable_shutdown(self) -> None:
        """Nothing to do."""

    def set_runtime(self, runtime: Runtime) -> None:
        """Nothing to do."""

    async def next_notifications(self, seconds: float) -> list[bytes]:
        self.waited.append(seconds)
        if not self._received:
            raise ConnectionResetError
        self._clock[0], payloads = self._received.pop(0)
        return payloads


@pytest.mark.parametrize(("now", "woken"), [(102.9, False), (103.1, True)])
def test_recheck_wakes_its_waiter_when_it_is_due_and_not_before(now, woken) -> None:
    """A reservation usually comes first, so the waiter is not woken to sleep again."""
    clock, payload = [100.0], b'["recheck", "' + b"ab" * 16 + b'", %b, "", "job"]'
    session = ScriptedSession(clock, (102.0, [payload % b"NaN", payload % b"1000000"]), (now, []))
    runtime = Threads(clock=lambda: clock[0])
    registry = ClaimRegistry(runtime, "client")
    waiter = registry.add_waiter(Claim("", "job", "", "ab" * 16, Holder("a"), 30.0), runtime)
    pg_listener = PgListener(None, registry, runtime)
    listen_loop = probe_postgresql.start_listening(pg_listener, session, "address", runtime, 200.0)
    with pytest.raises(ConnectionResetError):
        run_sync(listen_loop(runtime, ref(registry)))
    assert session.waited[1] == pytest.approx(1.0 + WAKEUP_SLACK)
    assert run_sync(waiter.signal.wait(0)) is woken


def test_listen_url_with_another_time_zone_is_the_same_server(database) -> None:
    listen = f"{database.server.url()}?options={quote('-c timezone=Asia/Tokyo')}"
    with Client(database.url(listen_url=listen)) as client:
        client.ping()
        assert client.traits.push


def test_silent_listen_url_does_not_block_a_free_name(database, wait_until) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_server, Client(database.url()) as first:
        first.inspect()
        listen = f"postgresql://postgres@127.0.0.1:{silent_server.getsockname()[1]}/postgres"
        with Client(database.url(listen_url=listen), call_timeout=30) as client:
            slow_thread = threading.Thread(target=lambda: client.lock("slow", ttl=60).acquire().release())
            slow_thread.start()
            silent_server.settimeout(60)
            silent_server.accept()[0].detach()  # the listener connects and gets no reply
            began = time.monotonic()
            wait_until(lambda: time.monotonic() - began > 6)
            assert client.lock("quick", ttl=60, wait=0).acquire().release()
            slow_thread.join(60)


def test_break_is_pushed_to_the_holder(database, wait_until) -> None:
    with Client(database.url()) as client, Client(database.url()) as operator:
        lease = client.lock("job", ttl=300).acquire()
        assert operator.break_lock("job", token=lease.token)
        wait_until(lambda: not lease.held)
        with pytest.raises(LeaseLost, match="broke"):
            lease.check()
