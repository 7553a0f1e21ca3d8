"""Fences on the lock's own key: they store no highest token. Whatever ends the lock also ends the right to write,
atomically."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.checkers.fences import check_fence
from harness.checkers.history import History
from leasehold import Client, ConfigError, StaleToken, Unavailable, fences
from leasehold.fences import TokenInfo
from tests.support import probe_fences
from tests.support.fence_history import recorded

ENGINES = ("etcd", "zookeeper")
each_engine = pytest.mark.parametrize("engine", ENGINES)


class LockedNumber:
    """A number stored in the engine, next to the lock."""

    def __init__(self, number: Any, engine: str, **more: Any) -> None:
        self.number, self.engine, self.url = number, engine, f"{engine}://127.0.0.1:{number.spec[engine]}"
        self.name, self.events = f"acct/{number.spec['run']}", []
        self.client = Client(self.url, ttl=30, on_event=self.events.append)
        self.fence = self.make_fence()

    def make_fence(self, **more: Any) -> Any:
        options = {"lock": self.name, **more}
        if self.engine == "etcd":
            return fences.EtcdLockFence(f"http://127.0.0.1:{self.number.spec['etcd']}", self.number.key, **options)
        return fences.ZooKeeperLockFence(self.number.client, self.number.path, **options)

    def lock(self, **more: Any) -> Any:
        return self.client.lock(self.name, **more)


@pytest.fixture
def locked_number(resource) -> Iterator[Callable[[str], LockedNumber]]:
    made: list[LockedNumber] = []

    def make(engine: str) -> LockedNumber:
        made.append(LockedNumber(resource(engine), engine))
        return made[-1]

    yield make
    for locked in made:
        locked.client.close()


@each_engine
def test_lock_fence_accepts_only_the_current_holder(engine, locked_number):
    locked = locked_number(engine)
    with locked.lock() as lease:
        locked.fence.claim(lease)
        for value in range(1, 4):
            locked.fence.write(lease, str(value))
        assert locked.fence.read(lease) == b"3"
        locked.fence.write(lease.token, "4")  # a bare token is accepted too
        with pytest.raises(StaleToken):
            locked.fence.write(lease.token - 1, "99")
        with pytest.raises(StaleToken):
            locked.fence.write(lease.token + 1, "99")  # nor a token that was never granted
    for call in (
        lambda: locked.fence.write(lease, "99"),
        lambda: locked.fence.read(lease),
        lambda: locked.fence.claim(lease),
    ):
        with pytest.raises(StaleToken) as refused:  # even though there is no new holder yet
            call()
        assert refused.value.highest > lease.token
    assert [event.kind for event in locked.events].count("stale_token") == 3
    with locked.lock() as newer:
        with pytest.raises(StaleToken) as refused:
            locked.fence.write(lease, "99")
        assert (refused.value.token, refused.value.highest) == (lease.token, newer.token)
        locked.fence.write(newer, "5")
    assert locked.number.peek() == 5


@each_engine
def test_lock_fence_refuses_holder_as_soon_as_lock_is_broken(engine, locked_number):
    locked = locked_number(engine)
    lease = locked.lock().acquire()
    locked.fence.write(lease, "1")
    locked.client.break_lock(locked.name, token=lease.token)
    with pytest.raises(StaleToken):
        locked.fence.write(lease, "2")
    assert locked.number.peek() == 1
    lease.release()


@each_engine
def test_lock_fence_refuses_write_when_lock_changes_hands_before_it(engine, locked_number, monkeypatch):
    """The comparison is part of the write: here the lock changes hands right before it."""
    locked = locked_number(engine)
    lease, newer = locked.lock().acquire(), []

    def take_over() -> None:
        locked.client.break_lock(locked.name, token=lease.token)
        newer.append(locked.lock().acquire(wait=30))
        locked.make_fence().write(newer[0], "5")

    if engine == "etcd":
        locked.fence.claim(lease)  # the fence knows the lock's key from here on
        real = probe_fences.gateway(locked.fence).txn
        pending = iter([take_over])
        monkeypatch.setattr(
            probe_fences.gateway(locked.fence), "txn", lambda *args: (next(pending, lambda: None)(), real(*args))[1]
        )
    else:
        real = getattr(*probe_fences.LOCK_NODE_PATH.of(locked.fence))

        def find_then_take_over(*args: Any) -> str:
            path = real(*args)
            if not newer:
                take_over()
            return path

        monkeypatch.setattr(*probe_fences.LOCK_NODE_PATH.of(locked.fence), find_then_take_over)
    with pytest.raises(StaleToken) as refused:
        locked.fence.write(lease, "99")
    assert refused.value.highest == newer[0].token
    assert locked.number.peek() == 5
    for held in (lease, newer[0]):  # a lease that is dropped while it is held warns
        held.release()


@each_engine
def test_lock_fence_refuses_earlier_lease_of_the_same_client(engine, locked_number):
    """In etcd the new lease may use the very same key, created again."""
    locked = locked_number(engine)
    old = locked.lock().acquire()
    locked.fence.write(old, "1")  # the fence knows the lock's key from here on
    old.release()
    with locked.lock() as lease:
        with pytest.raises(StaleToken) as refused:
            locked.fence.write(old, "99")
        assert refused.value.highest == lease.token
    assert locked.number.peek() == 1


@each_engine
def test_lock_fence_with_readers_and_semaphore_permits(engine, locked_number):
    locked = locked_number(engine)
    rwlock = locked.client.rwlock(locked.name)
    with rwlock.read() as first, rwlock.read() as second:
        assert locked.fence.read(first) == locked.fence.read(second) == b"0"
        for bearer in (first, TokenInfo(first.token, shared=True)):
            with pytest.raises(ConfigError, match="shared"):
                locked.fence.write(bearer, "1")
        with pytest.raises(ConfigError, match="shared"):
            locked.fence.write(first.token, "1")  # a bare token is not marked shared, but the lock's key is
    with pytest.raises(StaleToken):
        locked.fence.read(first)
    with locked.client.semaphore(locked.name, 2) as first:
        second = locked.client.semaphore(locked.name, 2).acquire()
        for permit in (second, first, second, first):
            locked.fence.write(permit, str(permit.token % 1000))
        second.release()
        with pytest.raises(StaleToken):
            locked.fence.write(second, "99")
        locked.fence.write(first, "7")
    assert locked.number.peek() == 7


@each_engine
def test_lock_fence_refuses_token_of_reader_after_its_read(engine, locked_number):
    """The etcd fence remembers the key of the last lock, and once forgot that it was shared."""
    locked = locked_number(engine)
    with locked.client.rwlock(locked.name).read() as reader:
        for _ in range(2):
            assert locked.fence.read(reader) == b"0"
            for call in (
                lambda: locked.fence.write(reader.token, "1"),
                lambda: locked.fence.claim(reader.token),
                lambda: locked.fence.read(reader.token),
                lambda: locked.fence.write(TokenInfo(reader.token, slot=0), "1"),
            ):
                with pytest.raises(ConfigError, match="shared"):
                    call()
    assert locked.number.peek() == 0


@each_engine
def test_lock_fence_is_thread_safe_with_changing_tokens(engine, locked_number):
    """The etcd fence remembers the key of one token. Another thread may replace it at any moment."""
    locked = locked_number(engine)
    permits = [locked.client.semaphore(locked.name, 4).acquire() for _ in range(4)]
    errors: list[BaseException] = []

    def write(permit: Any) -> None:
        try:
            for _ in range(30):
                locked.fence.write(permit, "7")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=[permit]) for permit in permits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    for permit in permits:
        permit.release()


@each_engine
def test_lock_fence_distinguishes_namespaces_prefixes_and_names(engine, locked_number):
    locked = locked_number(engine)
    name, root = 'a/b:%" ü', f"my/app{locked.number.spec['run']}"
    with Client(f"{locked.url}/{root}", namespace="shop/1") as client, client.lock(name, ttl=30) as lease:
        location = {"prefix": root} if engine == "etcd" else {"chroot": root}
        locked.make_fence(lock=name, namespace="shop/1", **location).write(lease, "1")
        for wrong in (
            {"lock": name, **location},
            {"lock": name, "namespace": "shop/1"},
            {"namespace": "shop/1", **location},
        ):
            with pytest.raises(StaleToken):
                locked.make_fence(**wrong).write(lease, "2")
    for bad in ({"lock": ""}, {"lock": "a\0"}, {"lock": None}, {"namespace": 7}):
        with pytest.raises(ConfigError):
            locked.make_fence(**bad)
    assert locked.number.peek() == 1


def test_etcd_lock_fence_txn_writes_several_keys_or_none(locked_number):
    locked = locked_number("etcd")
    fence, key = locked.fence, locked.number.key
    with locked.lock() as lease:
        assert len(fence.txn(lease, fence.put(f"{key}-a", "1"), fence.put(key, "7"))) == 2
    with pytest.raises(StaleToken):
        fence.txn(lease, fence.delete(key), fence.put(f"{key}-a", "2"))
    assert locked.number.tool("get", "--print-value-only", "--prefix", key).split() == ["7", "1"]


def test_zookeeper_lock_fence_multi_checks_the_lock_node(locked_number):
    locked = locked_number("zookeeper")
    path = locked.number.path
    with locked.lock() as lease:
        made = locked.fence.multi(lease, lambda transaction: transaction.create(f"{path}-a", b"1"))
        assert made == [f"{path}-a"]
    with pytest.raises(StaleToken):
        locked.fence.multi(lease, lambda transaction: transaction.delete(path))


@each_engine
def test_lock_fence_refuses_paused_holder(engine, locked_number, child):
    locked = locked_number(engine)
    late = child("hold_by_key", engine, json.dumps(locked.number.spec), locked.url, locked.name)
    first = late.hear()
    os.kill(late.pid, signal.SIGSTOP)
    with locked.lock(wait=60) as lease:
        assert lease.token > first["token"]
        locked.fence.write(lease, "2")
        os.kill(late.pid, signal.SIGCONT)
        late.send_newline()
        assert late.hear() == {"refused": [first["token"], lease.token]}
        assert locked.number.peek() == 2


@each_engine
def test_lock_fence_loses_no_update_when_locks_are_broken(engine, locked_number, resource):
    """Locks are broken while their holders work, and the holders continue as if they had not noticed."""
    locked = locked_number(engine)
    history, end, tokens = History(time.monotonic), time.monotonic() + 4, [0]

    def call(who: str, action: str, token: int, work: Any, **detail: Any) -> Any:
        return recorded(history, who, action, "acct/1", token, work, **detail)

    def work(who: str) -> None:
        fence = locked.make_fence()
        with Client(locked.url, ttl=10, holder=who) as client:
            while time.monotonic() < end:
                try:
                    lease = client.lock(locked.name).acquire(wait=20)
                except (Unavailable, TimeoutError):
                    continue
                tokens[0] = lease.token
                for _ in range(3):
                    value = call(who, "read", lease.token, lambda lease=lease: int(fence.read(lease)))
                    time.sleep(random.random() * 0.01)  # pause: others may come in between
                    if value is not None:
                        write = lambda lease=lease, value=value: fence.write(lease, str(value + 1)) or True  # noqa: E731
                        call(who, "write", lease.token, write, based_on=value)
                lease.release()

    threads = [threading.Thread(target=work, args=[str(n)]) for n in range(5)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        time.sleep(0.02)
        locked.client.break_lock(locked.name, token=tokens[0])
    for thread in threads:
        thread.join(60)
    calls = history.calls()
    verdict = check_fence(history)
    # A break ends the lock at once, even if there is no next holder. Such a refusal has no newer token to explain it.
    assert {violation.rule for violation in verdict.violations} <= {"refusal"}, verdict
    accepted = sum(call.succeeded for call in calls if call.began.action == "write")
    assert locked.number.peek() == accepted > 0
    assert any(not call.succeeded for call in calls), "no call was refused, so this test proves nothing"
