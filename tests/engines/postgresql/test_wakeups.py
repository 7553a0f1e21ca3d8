"""The listener of the PostgreSQL engine: notifications, the connection they arrive on, breaks pushed to the holder."""

from __future__ import annotations

import socket
import threading
import time
from urllib.parse import quote

import pytest

from leasehold import Client, LeaseLost
from tests.support import probe


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
            silent_server.settimeout(20)
            silent_server.accept()[0].detach()  # the listener connects and gets no reply
            began = time.monotonic()
            wait_until(lambda: time.monotonic() - began > 6)
            assert client.lock("quick", ttl=2, wait=0).acquire().release()
            slow_thread.join(60)


def test_break_is_pushed_to_the_holder(database, wait_until) -> None:
    with Client(database.url()) as client, Client(database.url()) as operator:
        lease = client.lock("job", ttl=300).acquire()
        assert operator.break_lock("job", token=lease.token)
        wait_until(lambda: not lease.held)
        with pytest.raises(LeaseLost, match="broke"):
            lease.check()
