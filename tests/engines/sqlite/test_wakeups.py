"""Wake-ups: the socket of each client, its folder, and waiters that die or cannot be notified."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

from leasehold import Client
from leasehold.core.timing import RESERVATION_TTL
from leasehold.engines.sqlite.wakeup_socket import WakeupSocket
from tests.support import probe, probe_sqlite
from tests.support.timing import check_elapsed, check_seconds

MAX_HANDOFF_SECONDS = 1.5


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_deleted_wakeup_socket_is_replaced(url, path, wait_until) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a").acquire()
        grants = []
        thread = threading.Thread(target=lambda: grants.append(two.lock("a").acquire()))
        thread.start()
        wait_until(lambda: len(one.inspect("a")) == 2)
        for socket_path in Path(f"{path}-wakeup").iterdir():
            socket_path.unlink()
        wait_until(
            lambda: (
                probe_sqlite.wakeups(two).address and Path(f"{path}-wakeup", probe_sqlite.wakeups(two).address).exists()
            )
        )
        released_at = time.monotonic()
        lease.release()
        thread.join(30)
        check_elapsed(released_at, 2)
        grants[0].release()


def test_waiter_that_dies_before_its_notification_is_passed_over(url, path, wait_until, child, monkeypatch) -> None:
    with Client(url) as client:
        lease = client.lock("a").acquire()
        dead_waiter = child("wait", url, "a", 60)
        assert dead_waiter.read_message() == "waiting"
        next_waiter = child("wait", url, "a", 60)
        assert next_waiter.read_message() == "waiting"
        dead_waiter.kill()
        addresses = []
        original = WakeupSocket.is_reachable

        def reachable(self, address: str, **options) -> bool:
            addresses.append(address)
            return len(addresses) == 1 or original(self, address, **options)  # reachable when the name was reserved

        monkeypatch.setattr(WakeupSocket, "is_reachable", reachable)
        began = time.monotonic()
        lease.release()
        next_waiter.read_message()
        check_elapsed(began, RESERVATION_TTL / 2)


def test_waiter_without_wakeup_socket_still_acquires(url, monkeypatch) -> None:
    def refuse(self) -> None:
        raise PermissionError("no place for a socket")

    monkeypatch.setattr(*probe_sqlite.OPEN_FOLDER, refuse)
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a").acquire()
        threading.Timer(0.3, lease.release).start()
        began = time.monotonic()
        with two.lock("a"):
            check_elapsed(began, 4)


def test_wakeup_socket_works_with_a_long_path(tmp_path, wait_until) -> None:
    folder = tmp_path / ("deep" * 20) / ("er" * 20)
    folder.mkdir(parents=True)
    with Client(f"sqlite://{folder}/locks.db?durable=no") as one:
        lease = one.lock("a", ttl=600).acquire()
        assert one.break_lock("a", token=lease.token)
        assert lease.wait_lost(60)


def test_stale_sockets_of_killed_processes_are_removed(url, path, child, monkeypatch) -> None:
    process = child("hold", url, "a", 1)
    process.read_message()
    process.kill()
    socket_folder = Path(f"{path}-wakeup")
    assert len(list(socket_folder.iterdir())) == 1
    monkeypatch.setattr(*probe_sqlite.STALE_AFTER, -1.0)
    with Client(url) as client, client.lock("a"):
        assert len(list(socket_folder.iterdir())) == 1  # this client's own
    assert not list(socket_folder.iterdir())


def test_garbage_collected_client_leaves_no_thread_or_socket(url, path, wait_until) -> None:
    earlier_threads, client = set(threading.enumerate()), Client(url)
    with client.lock("a"):
        pass
    assert len(list(Path(f"{path}-wakeup").iterdir())) == 1
    del client
    wait_until(lambda: gc.collect() >= 0 and not list(Path(f"{path}-wakeup").iterdir()))  # reference cycles
    wait_until(lambda: not any("leasehold" in each.name for each in set(threading.enumerate()) - earlier_threads))


def test_waiter_through_linked_folder_is_woken(url, path, tmp_path, child) -> None:
    """The socket folder was named after the link: other clients took its waiters for dead and passed them over."""
    with Client(url) as client:
        lease = client.lock("a").acquire()
        os.symlink(os.path.dirname(path), tmp_path / "link")
        waiter = child("wait", f"sqlite://{tmp_path}/link/locks.db", "a", 60)
        assert waiter.read_message() == "waiting"
        released = boot_time()
        lease.release()
        check_seconds(waiter.read_message()["at"] - released, MAX_HANDOFF_SECONDS)


def test_socket_without_a_reader_is_replaced(url, path) -> None:
    """Only the socket's name was checked: a socket whose listener had died stayed, and its waiters were passed over."""
    with Client(url) as client:
        with client.lock("a"):
            pass
        wakeup_socket = probe_sqlite.wakeups(client)
        before, sock = wakeup_socket.address, probe_sqlite.listening_socket(client)
        sock.shutdown(socket.SHUT_RDWR)
        os.unlink(os.path.join(f"{path}-wakeup", before))
        Path(f"{path}-wakeup", before).touch()  # the name exists, but no socket
        lease = client.lock("a").acquire(wait=20)
        wakeup_socket.ensure_bound(probe.runtime(client))
        assert wakeup_socket.address != before
        lease.release()


def test_empty_message_does_not_end_the_wakeup_thread(url, path) -> None:
    """The thread took an empty message for the end of the socket: the client's waiters were passed over."""
    with Client(url) as client:
        client.lock("a").acquire(wait=20).release()
        wakeup_socket = probe_sqlite.wakeups(client)
        address = wakeup_socket.ensure_bound(probe.runtime(client))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for _ in range(50):  # more than the socket buffers: all but the last few have been read
                sender.sendto(b"", os.path.join(f"{path}-wakeup", address))
        assert wakeup_socket.ensure_bound(probe.runtime(client)) == address


def test_child_forked_during_bind_does_not_inherit_the_socket(url, monkeypatch) -> None:
    """The socket was registered only after it was bound. A child forked in between kept it open, so a killed parent
    seemed alive for as long as the child lived."""
    forked, original = [], getattr(*probe_sqlite.SET_SOCKET_MODE)

    def set_mode(self, folder, address) -> None:
        pid = os.fork()
        if not pid:
            os._exit(1 if bound_sockets() else 0)
        forked.append(os.waitpid(pid, 0)[1])
        original(self, folder, address)

    monkeypatch.setattr(*probe_sqlite.SET_SOCKET_MODE, set_mode)
    with Client(url) as client, client.lock("a"):
        assert forked == [0]


def bound_sockets() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(fd)))
                name = sock.getsockname()
                sock.detach()
                found += [name] if isinstance(name, str) and "-wakeup/" in name else []
        except OSError:
            continue
    return found


def test_head_killed_after_its_reservation_does_not_delay_next_waiter(url, child) -> None:
    """The head is stopped, so it is reachable when the name is reserved for it but cannot claim it; then it is
    killed. Its reachability was not checked again until the reservation expired."""
    with Client(url) as client:
        lease = client.lock("a").acquire()
        head, second = child("wait", url, "a", 60), None
        assert head.read_message() == "waiting"
        second = child("wait", url, "a", 60)
        assert second.read_message() == "waiting"
        head.signal(signal.SIGSTOP)
        lease.release()
        released = boot_time()
        head.kill()
        check_seconds(second.read_message()["at"] - released, MAX_HANDOFF_SECONDS)


def test_client_without_socket_descriptor_still_acquires(url, monkeypatch) -> None:
    """The socket was created outside the `try`, so the engine raised OSError (E9)."""

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("leasehold.engines.sqlite.wakeup_socket.socket.socket", refuse)
    with Client(url) as client, client.lock("a", wait=0):
        assert not probe_sqlite.wakeups(client).address


def test_socket_without_listener_thread_is_not_announced(url, path, monkeypatch) -> None:
    """The address was announced before its listener ran: without a thread, nothing read the wake-ups sent there."""
    with Client(url) as client:
        client.ping()
        runtime = probe.runtime(client)

        def refuse(start, name: str) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(runtime, "start_thread", refuse)
        assert probe_sqlite.wakeups(client).ensure_bound(runtime) == ""
        assert not list(Path(f"{path}-wakeup").iterdir())


def test_client_that_was_reached_is_remembered_until_a_probe_fails(url, monkeypatch) -> None:
    """A claim that joins need not probe the clients ahead of it each time."""
    monkeypatch.setattr(*probe_sqlite.MAX_REACHED, 3)
    with Client(url) as one, Client(url) as two:
        one.lock("a").acquire().release()
        two.lock("a").acquire().release()
        address, prober = probe_sqlite.wakeups(one).address, probe_sqlite.wakeups(two)
        assert prober.is_reachable(address)
        reached_at = probe_sqlite.reached_at(two)[address]
        probe_sqlite.wakeups(one).unlink_socket()
        assert prober.is_reachable(address, since=reached_at)
        assert not prober.is_reachable(address, since=reached_at + 0.001)
        assert not prober.is_reachable(address, since=reached_at)
        monkeypatch.setattr(*probe_sqlite.CALL_WITH_PATH.of(probe_sqlite.wakeups(two)), lambda *_: None)
        for number in range(10):
            assert prober.is_reachable(f"{number}")
        assert len(probe_sqlite.reached_at(two)) <= 3


def test_removed_socket_is_replaced_when_a_claim_queues(url, make_driver) -> None:
    """Else the claim would be queued with an address that no client can reach, and passed over."""
    holder, driver = make_driver(url), make_driver(url)
    held = holder.acquire(holder.claim())
    driver.attempt(driver.claim("other"))
    probe_sqlite.wakeups(driver.engine).unlink_socket()
    driver.attempt(driver.claim(queue=True))
    holder.release(held)
    assert [each.state for each in holder.inspect() if each.name == "job"] == ["reserved"]


def test_claims_that_join_remember_a_probe_for_a_moment_only(url, make_driver, monkeypatch) -> None:
    driver, other, now = make_driver(url), make_driver(url), [0.0]
    monkeypatch.setattr(driver.runtime, "now", lambda: now[0])
    driver.acquire(driver.claim())
    other.attempt(other.claim(queue=True))
    assert driver.attempt(driver.claim(queue=True)).position == 1
    probe_sqlite.wakeups(other.engine).unlink_socket()
    now[0] = 0.04
    assert driver.attempt(driver.claim(queue=True)).position == 2
    now[0] = 0.06
    assert driver.attempt(driver.claim(queue=True)).position == 2, "the head was not passed over"


def test_release_probes_the_next_client_that_was_just_reached(url, make_driver, monkeypatch) -> None:
    """Before it reserves the name for its waiter: that one would be passed over by another transaction."""
    driver, other, now, sent = make_driver(url), make_driver(url), [0.0], list[str]()
    monkeypatch.setattr(driver.runtime, "now", lambda: now[0])
    holder = driver.acquire(driver.claim())
    other.attempt(other.claim(queue=True))
    second = driver.claim(queue=True)
    driver.attempt(second)
    own, gone = probe_sqlite.wakeups(driver.engine), probe_sqlite.wakeups(other.engine).address
    probe_sqlite.wakeups(other.engine).unlink_socket()
    now[0] = 0.01
    monkeypatch.setattr(own, "send", lambda *args, **_: bool(sent.append(args[2].client)) or True)
    driver.release(holder)
    assert gone not in sent
    assert sent == [own.address]
