"""Fences on the lock's own key: no mark is stored, and what ends the lock ends the right to write, in the same step."""

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
from record import recorded

from leasehold import Client, ConfigError, StaleToken, Unavailable, fences
from leasehold.fences import Pass
from leasehold.testing.fencing import check_fence
from leasehold.testing.history import History

ENGINES = ("etcd", "zookeeper")
each_engine = pytest.mark.parametrize("engine", ENGINES)


class Guarded:
    """A number in an engine, with the lock beside it."""

    def __init__(self, number: Any, engine: str, **more: Any) -> None:
        self.number, self.engine, self.url = number, engine, f"{engine}://127.0.0.1:{number.spec[engine]}"
        self.name, self.events = f"acct/{number.spec['run']}", []
        self.client = Client(self.url, ttl=30, on_event=self.events.append)
        self.fence = self.fenced()

    def fenced(self, **more: Any) -> Any:
        told = {"lock": self.name, **more}
        if self.engine == "etcd":
            return fences.EtcdLockFence(f"http://127.0.0.1:{self.number.spec['etcd']}", self.number.key, **told)
        return fences.ZooKeeperLockFence(self.number.client, self.number.path, **told)

    def lock(self, **more: Any) -> Any:
        return self.client.lock(self.name, **more)


@pytest.fixture
def guarded(resource) -> Iterator[Callable[[str], Guarded]]:
    made: list[Guarded] = []

    def make(engine: str) -> Guarded:
        made.append(Guarded(resource(engine), engine))
        return made[-1]

    yield make
    for one in made:
        one.client.close()


@each_engine
def test_the_holder_writes_and_nobody_else(engine, guarded):
    it = guarded(engine)
    with it.lock() as lease:
        it.fence.claim(lease)
        for value in range(1, 4):
            it.fence.write(lease, str(value))
        assert it.fence.read(lease) == b"3"
        it.fence.write(lease.token, "4")  # its token will do
        with pytest.raises(StaleToken):
            it.fence.write(lease.token - 1, "99")
        with pytest.raises(StaleToken):
            it.fence.write(lease.token + 1, "99")  # nor one that nobody was given
    for call in (lambda: it.fence.write(lease, "99"), lambda: it.fence.read(lease), lambda: it.fence.claim(lease)):
        with pytest.raises(StaleToken) as refused:  # though nobody has come yet
            call()
        assert refused.value.highest > lease.token
    assert [event.kind for event in it.events].count("stale_token") == 3
    with it.lock() as newer:
        with pytest.raises(StaleToken) as refused:
            it.fence.write(lease, "99")
        assert (refused.value.token, refused.value.highest) == (lease.token, newer.token)
        it.fence.write(newer, "5")
    assert it.number.peek() == 5


@each_engine
def test_a_lock_that_was_broken_is_over_for_its_holder_at_once(engine, guarded):
    it = guarded(engine)
    lease = it.lock().acquire()
    it.fence.write(lease, "1")
    it.client.break_lock(it.name, token=lease.token)
    with pytest.raises(StaleToken):
        it.fence.write(lease, "2")
    assert it.number.peek() == 1


@each_engine
def test_what_ends_between_look_and_write_is_seen(engine, guarded, monkeypatch):
    """The comparison is in the step that writes: here the lock goes over to another right before it."""
    it = guarded(engine)
    lease, newer = it.lock().acquire(), []

    def take_over() -> None:
        it.client.break_lock(it.name, token=lease.token)
        newer.append(it.lock().acquire(wait=30))
        it.fenced().write(newer[0], "5")

    if engine == "etcd":
        it.fence.claim(lease)  # its key is known from here on
        real = it.fence._gateway.txn
        turns = iter([take_over])
        monkeypatch.setattr(it.fence._gateway, "txn", lambda *words: (next(turns, lambda: None)(), real(*words))[1])
    else:
        real = it.fence._own

        def found(*words: Any) -> str:
            path = real(*words)
            if not newer:
                take_over()
            return path

        monkeypatch.setattr(it.fence, "_own", found)
    with pytest.raises(StaleToken) as refused:
        it.fence.write(lease, "99")
    assert refused.value.highest == newer[0].token
    assert it.number.peek() == 5


@each_engine
def test_the_next_claim_of_the_same_client_is_another(engine, guarded):
    """At etcd it may stand under the very same key, created anew."""
    it = guarded(engine)
    old = it.lock().acquire()
    it.fence.write(old, "1")  # the key is known from here on
    old.release()
    with it.lock() as lease:
        with pytest.raises(StaleToken) as refused:
            it.fence.write(old, "99")
        assert refused.value.highest == lease.token
    assert it.number.peek() == 1


@each_engine
def test_readers_and_permits(engine, guarded):
    it = guarded(engine)
    rwlock = it.client.rwlock(it.name)
    with rwlock.read() as one, rwlock.read() as two:
        assert it.fence.read(one) == it.fence.read(two) == b"0"
        for shown in (one, Pass(one.token, shared=True)):
            with pytest.raises(ConfigError, match="shared"):
                it.fence.write(shown, "1")
        with pytest.raises(ConfigError, match="shared"):
            it.fence.write(one.token, "1")  # a bare token does not say so, but the lock's key does
    with pytest.raises(StaleToken):
        it.fence.read(one)
    with it.client.semaphore(it.name, 2) as one:
        two = it.client.semaphore(it.name, 2).acquire()
        for permit in (two, one, two, one):
            it.fence.write(permit, str(permit.token % 1000))
        two.release()
        with pytest.raises(StaleToken):
            it.fence.write(two, "99")
        it.fence.write(one, "7")
    assert it.number.peek() == 7


@each_engine
def test_namespaces_prefixes_and_odd_names(engine, guarded):
    it = guarded(engine)
    name, below = 'a/b:%" ü', f"my/app{it.number.spec['run']}"
    with Client(f"{it.url}/{below}", namespace="shop/1") as client, client.lock(name, ttl=30) as lease:
        where = {"prefix": below} if engine == "etcd" else {"chroot": below}
        it.fenced(lock=name, namespace="shop/1", **where).write(lease, "1")
        for wrong in ({"lock": name, **where}, {"lock": name, "namespace": "shop/1"}, {"namespace": "shop/1", **where}):
            with pytest.raises(StaleToken):
                it.fenced(**wrong).write(lease, "2")
    for bad in ({"lock": ""}, {"lock": "a\0"}, {"lock": None}, {"namespace": 7}):
        with pytest.raises(ConfigError):
            it.fenced(**bad)
    assert it.number.peek() == 1


def test_any_keys_of_etcd_in_the_same_step(guarded):
    it = guarded("etcd")
    fence, key = it.fence, it.number.key
    with it.lock() as lease:
        assert len(fence.txn(lease, fence.put(f"{key}-a", "1"), fence.put(key, "7"))) == 2
    with pytest.raises(StaleToken):
        fence.txn(lease, fence.delete(key), fence.put(f"{key}-a", "2"))
    assert it.number.tool("get", "--print-value-only", "--prefix", key).split() == ["7", "1"]


def test_any_nodes_of_zookeeper_in_the_same_step(guarded):
    it = guarded("zookeeper")
    path = it.number.path
    with it.lock() as lease:
        made = it.fence.multi(lease, lambda transaction: transaction.create(f"{path}-a", b"1"))
        assert made == [f"{path}-a"]
    with pytest.raises(StaleToken):
        it.fence.multi(lease, lambda transaction: transaction.delete(path))


@each_engine
def test_a_paused_holder_is_refused(engine, guarded, child):
    it = guarded(engine)
    late = child("hold_by_key", engine, json.dumps(it.number.spec), it.url, it.name)
    first = late.hear()
    os.kill(late.pid, signal.SIGSTOP)
    with it.lock(wait=60) as lease:
        assert lease.token > first["token"]
        it.fence.write(lease, "2")
        os.kill(late.pid, signal.SIGCONT)
        late.go()
        assert late.hear() == {"refused": [first["token"], lease.token]}
        assert it.number.peek() == 2


@each_engine
def test_a_crowd_of_real_locks_loses_nothing(engine, guarded, resource):
    """Holders are broken in the middle of their work, and go on as if they had not noticed."""
    it = guarded(engine)
    history, end, tokens = History(time.monotonic), time.monotonic() + 4, [0]

    def call(who: str, action: str, token: int, work: Any, **detail: Any) -> Any:
        return recorded(history, who, action, "acct/1", token, work, **detail)

    def work(who: str) -> None:
        fence = it.fenced()
        with Client(it.url, ttl=10, holder=who) as client:
            while time.monotonic() < end:
                try:
                    lease = client.lock(it.name).acquire(wait=20)
                except (Unavailable, TimeoutError):
                    continue
                tokens[0] = lease.token
                for _ in range(3):
                    value = call(who, "read", lease.token, lambda lease=lease: int(fence.read(lease)))
                    time.sleep(random.random() * 0.01)
                    if value is not None:
                        write = lambda lease=lease, value=value: fence.write(lease, str(value + 1)) or True  # noqa: E731
                        call(who, "write", lease.token, write, based_on=value)
                lease.release()

    threads = [threading.Thread(target=work, args=[str(n)]) for n in range(5)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        time.sleep(0.02)
        it.client.break_lock(it.name, token=tokens[0])
    for thread in threads:
        thread.join(60)
    calls = history.calls()
    verdict = check_fence(history)
    # A lock broken before anybody followed is over at once: such a refusal has no newer token to show for it.
    assert {violation.rule for violation in verdict.violations} <= {"refusal"}, verdict
    accepted = sum(call.yes for call in calls if call.began.action == "write")
    assert it.number.peek() == accepted > 0
    assert any(not call.yes for call in calls), "nobody was refused: the test tests nothing"
