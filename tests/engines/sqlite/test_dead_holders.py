"""A holder whose process has ended is followed at once, and one that may live is not."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest

from leasehold import Client, NotAcquired
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.engine import open_with_clock
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from tests.support import probe, probe_sqlite
from tests.support.timing import check_elapsed

LONG = 600  # a ttl that ends no lease of these tests


def kill_socket(client: Client) -> None:
    """As the kernel does when the client's process ends: close its socket, and leave the file."""
    path = str(probe_sqlite.wakeup_path(client))
    probe_sqlite.stop_listener(client)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(ConnectionRefusedError):
        while True:  # until the listener has left the kernel
            sender.connect(path)
            time.sleep(0.001)


def attempt(client: Client, **fields: object) -> Grant | Busy:
    """Of a claim of this client, which is the same each time. Without a lease, which would be released when dropped."""
    engine, id_hash = probe.engine(client), probe.client_id(client)
    claim = Claim("", "a", f"secret {id_hash}", id_hash, Holder(id_hash), LONG, process_bound=True)
    return run_sync(engine.attempt(claim._replace(**fields), probe.runtime(client).now() + 60))


# ------------------------------------------------------------------ processes


def test_killed_holder_is_followed_at_once(url, child, wait_until) -> None:
    holder = child("hold", url, "a", LONG)
    token = holder.read_message()["token"]
    got = []

    def wait() -> None:
        with Client(url) as client, client.lock("a", wait=120) as lease:
            got.extend((lease.token, time.monotonic()))

    with Client(url) as client:
        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until(lambda: len(client.inspect("a")) == 2)
        os.kill(holder.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        waiter.join(120)
    check_elapsed(killed + time.monotonic() - got[1], 0.1)
    assert got[0] > token


def test_killed_holder_without_waiters_does_not_block_an_attempt(url, child) -> None:
    holder = child("hold", url, "a", LONG)
    holder.read_message()
    holder.kill()
    with Client(url) as client:
        assert isinstance(attempt(client), Grant)


def test_stopped_holder_is_not_dead(url, child) -> None:
    holder = child("hold", url, "a", LONG)
    holder.read_message()
    holder.signal(signal.SIGSTOP)
    with Client(url) as client, pytest.raises(NotAcquired):
        client.lock("a").acquire(wait=0.3)  # probes several times
    holder.signal(signal.SIGCONT)
    holder.send_newline()
    assert holder.read_message() == {"held": True, "reason": None, "released": True}


def test_children_of_a_killed_holder_do_not_keep_its_lock(url, child) -> None:
    """One was forked, one runs another program. Both live on."""
    holder = child("fork", url, "a", LONG)
    pids = holder.read_message()
    try:
        holder.process.kill()
        holder.process.wait()
        with Client(url) as client, client.lock("a", wait=60):
            pass
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


# --------------------------------------------- what is bound to its process


@pytest.mark.parametrize(
    ("options", "freed"),
    [({}, True), ({"delay": 60.0}, False), ({"min_hold": 60.0}, False), ({"require": {"outlives"}}, False)],
    ids=["plain", "delay", "min_hold", "outlives"],
)
def test_death_frees_only_grants_that_are_bound_to_the_process(url, options, freed) -> None:
    with Client(url) as holder, Client(url) as client:
        _lease = holder.lock("a", ttl=LONG, **options).acquire()
        kill_socket(holder)
        assert isinstance(attempt(client), Grant) is freed
        (holding,) = client.inspect()
        assert holding.state == ("cooling" if "delay" in options else "held")


def test_death_frees_readers_and_permits(url) -> None:
    with Client(url) as holder, Client(url) as other_holder, Client(url) as client:
        permit = {"name": "s", "kind": "semaphore", "limit": 2}
        attempt(holder, mode="shared")
        attempt(holder, id_hash="other", **permit)
        attempt(other_holder, **permit)
        assert isinstance(attempt(client, **permit), Busy)
        kill_socket(holder)
        assert isinstance(attempt(client), Grant)
        assert isinstance(attempt(client, id_hash="third", **permit), Grant)
        assert isinstance(attempt(client, id_hash="fourth", **permit), Busy)  # the other holder lives


def test_waiter_behind_a_dead_head_follows_a_dead_holder(url) -> None:
    with Client(url) as holder, Client(url) as head, Client(url) as client:
        attempt(holder)
        for each in (head, client):
            assert isinstance(attempt(each, queue=True), Busy)
        (waiter,) = probe.waiters(client)
        assert not probe_sqlite.should_attempt(client, waiter)
        kill_socket(holder)
        kill_socket(head)
        assert probe_sqlite.should_attempt(client, waiter)
        assert isinstance(attempt(client, queue=True), Grant)


def test_new_client_keeps_the_socket_of_a_dead_holder(url, monkeypatch) -> None:
    """The socket is old, so a new client would remove it, and with it the proof."""
    monkeypatch.setattr(*probe_sqlite.STALE_AFTER, -1.0)
    with Client(url) as holder:
        attempt(holder)
        kill_socket(holder)
        path = probe_sqlite.wakeup_path(holder)
        with Client(url) as other:
            attempt(other, name="b")
            assert path.exists()
        with Client(url) as client:
            assert isinstance(attempt(client), Grant)
            assert not path.exists()  # it proves nothing any more


# ------------------------------------------------------ what proves nothing


def test_holder_with_a_removed_socket_is_not_dead(url) -> None:
    with Client(url) as holder, Client(url) as client:
        attempt(holder)
        bound = probe_sqlite.wakeups(holder)
        bound.unlink_socket()
        assert isinstance(attempt(client), Busy)
        probe_sqlite.wakeup_path(holder).write_text("not a socket")
        assert isinstance(attempt(client), Busy)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EAGAIN, errno.ENOENT, errno.EPROTOTYPE])
def test_socket_that_cannot_be_asked_proves_nothing(url, monkeypatch, number) -> None:
    with Client(url) as holder, Client(url) as client:
        attempt(holder)
        bound = probe_sqlite.wakeups(client)
        client.ping()

        def refuse(path: str) -> None:
            raise OSError(number, os.strerror(number), path)

        class Sender:
            connect = staticmethod(refuse)

        monkeypatch.setattr(*probe_sqlite.SENDER_SOCKETS.of(probe_sqlite.wakeups(client)), lambda: (Sender(), Sender()))
        assert not bound.is_dead(probe_sqlite.wakeups(holder).address)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_holder_whose_wakeup_thread_ended_is_not_dead(url, monkeypatch, wait_until) -> None:
    with Client(url) as holder, Client(url) as client:
        attempt(holder)
        ended = []

        def end(*_: object) -> None:
            ended.append(threading.current_thread())
            raise BaseException  # nothing in the engine catches it

        monkeypatch.setattr(*probe_sqlite.DISPATCH, end)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"x", str(probe_sqlite.wakeup_path(holder)))
        wait_until(lambda: ended)
        ended[0].join(60)
        monkeypatch.undo()
        assert isinstance(attempt(client), Busy)


def test_holder_whose_replaced_socket_comes_back_is_not_dead(url) -> None:
    """It was moved away and back, as its folder may be, and the holder has bound a new one in between."""
    with Client(url) as holder, Client(url) as client:
        attempt(holder)
        bound = probe_sqlite.wakeups(holder)
        first = probe_sqlite.wakeup_path(holder)
        moved = first.rename(first.with_suffix(".moved"))
        assert bound.ensure_bound(probe.runtime(holder)) != first.name
        moved.rename(first)
        assert isinstance(attempt(client), Busy)


def test_client_whose_socket_is_removed_again_and_again_keeps_few_open(url, monkeypatch) -> None:
    monkeypatch.setattr(*probe_sqlite.MAX_RETIRED, 3)
    with Client(url) as client:
        bound = probe_sqlite.wakeups(client)
        client.ping()
        for _ in range(8):
            bound.ensure_bound(probe.runtime(client))
            bound.unlink_socket()
        assert probe_sqlite.retired_sockets(client) == 3


def test_nothing_is_proved_if_the_boot_is_unknown(url) -> None:
    clock = BootClock("machine", "", "")
    options = {"engine": lambda config, *args: open_with_clock(config, *args, clock)}
    with Client(url, **options) as holder, Client(url, **options) as client:
        attempt(holder)
        kill_socket(holder)
        assert isinstance(attempt(client), Busy)
