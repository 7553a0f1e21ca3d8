"""Multilocks: all names or none, in one order, with one deadline and one loss notification."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time

import pytest

from leasehold import (
    AsyncClient,
    Client,
    ConfigError,
    LeaseLost,
    MultiLock,
    NotAcquired,
    SelfDeadlock,
    Unavailable,
)
from tests.support import probe
from tests.support.timing import check_elapsed


def test_multilock_holds_all_names_in_body_and_none_after(bench) -> None:
    with bench.client().multilock(["b", "a", "c"]) as leases:
        assert bench.held_names() == ["a", "b", "c"]
        assert list(leases) == ["b", "a", "c"]
        assert len(leases) == 3
        assert leases["a"].token < leases["b"].token < leases["c"].token, "names are acquired in sorted order"
        assert leases.held
        assert 0 < leases.remaining <= 30
        assert leases.lost_reason is None
        leases.check()
        with pytest.raises(KeyError):
            leases["d"]
    assert bench.held_names() == []
    assert not leases.held


def test_multilock_duplicate_name_is_locked_once(bench) -> None:
    with bench.client().multilock(["a", "b", "a"]) as leases:
        assert list(leases) == ["a", "b"]


def test_multilock_invalid_arguments_are_refused_when_built(bench) -> None:
    client, other = bench.client(), AsyncClient("memory://")
    for wrong, says in (
        (lambda: client.multilock([]), "at least one"),
        (lambda: client.multilock("ab"), "not one string"),
        (lambda: client.multilock([7]), "must be text"),
        (lambda: MultiLock([client.lock("a"), client.semaphore("a", 2)]), "once"),
        (lambda: MultiLock([other.lock("a")]), "takes Lock objects"),
        (lambda: MultiLock([client.lock("a")], wait=-1), "0 or more"),
        (lambda: client.multilock(["a"]).acquire(wait=-1), "0 or more"),
    ):
        with pytest.raises(ConfigError, match=says):
            wrong()
    with pytest.raises(TypeError, match=r"ttl= .* wait="):
        client.multilock(["a"], timeout=3)
    with pytest.raises(TypeError, match=r"ttl= .* wait="):
        client.multilock(["a"]).acquire(timeout=3)
    asyncio.run(other.close())


def test_multilock_rolls_back_acquired_names_on_failure(bench) -> None:
    held = bench.client().lock("c", holder="web-3").acquire()
    multilock = bench.client().multilock(["a", "b", "c"], wait=0, min_hold=1000)
    with pytest.raises(NotAcquired, match="c is held by web-3"):
        multilock.acquire()
    assert bench.held_names() == ["c"], "min_hold does not apply to a lease that was rolled back"
    assert multilock.try_acquire() is None
    with pytest.raises(NotAcquired), multilock:
        pass
    assert bench.held_names() == ["c"]
    assert held.release()
    leases = multilock.try_acquire()
    assert leases is not None
    assert leases.release()
    assert bench.held_names() == ["a", "b", "c"], "released names cool for min_hold"


def test_multilock_rollback_does_not_wait_for_unresponsive_engine(bench) -> None:
    client = bench.client()
    multilock = client.multilock(["a", "b"])
    call = bench.transport.call

    def silent_after_the_first(verb, args, deadline):
        if verb == "attempt" and args[0].name == "b":
            bench.transport.silent = True
        return call(verb, args, deadline)

    bench.transport.call = silent_after_the_first
    with pytest.raises(Unavailable):
        multilock.acquire()
    assert {pending.claim.name for pending in probe.registry(client).pending_releases.values()} == {"a", "b"}


def test_multilock_wait_is_one_deadline_for_all_names() -> None:
    with Client("memory://") as client:
        held = client.multilock(["a", "b"]).acquire()
        threading.Timer(0.8, held["a"].release).start()
        began = time.monotonic()
        with pytest.raises(NotAcquired, match=r"^b is held"):
            client.multilock(["a", "b"], wait=1.0).acquire()
        assert time.monotonic() - began > 0.95, "wait is not applied per name"
        check_elapsed(began, 1.7, "wait is not applied per name")
        held.release()


def test_multilock_wait_is_shortest_wait_of_its_locks(bench) -> None:
    client = bench.client()
    locks = [client.lock("a", wait=5), client.lock("b", wait=3), client.lock("c")]
    assert MultiLock(locks).wait == 3
    assert MultiLock(locks[2:]).wait is None
    assert MultiLock(locks, wait=None).wait is None


def test_multilock_of_name_held_by_same_thread_raises_self_deadlock(bench) -> None:
    client = bench.client()
    multilock = client.multilock(["a", "b"])
    with client.lock("b") as outer:
        with pytest.raises(SelfDeadlock), multilock:
            pass
        assert bench.held_names() == ["b"]
        assert outer.held
    with multilock as leases:
        for inner in (client.lock("a"), multilock):
            with pytest.raises(SelfDeadlock), inner:
                pass
        assert leases.held
    assert bench.held_names() == []


def test_multilock_reenters_and_releases_reentrant_locks(bench) -> None:
    client = bench.client()
    outer, inner = client.lock("a", reentrant=True), client.multilock(["a", "b"], reentrant=True, wait=0)
    with outer as lease:
        with inner as leases:
            assert leases["a"] is lease
        assert bench.held_names() == ["a"]
        held = bench.client().lock("b").acquire()
        with pytest.raises(NotAcquired), inner:
            pass
        assert lease.held
        held.release()
        again = inner.acquire()
        assert again.release()
        assert lease.held
    assert bench.held_names() == []


def test_multilock_loss_calls_on_lost_once_and_exit_raises(bench, wait_until) -> None:
    client = bench.client()
    notified: list[object] = []
    with pytest.raises(LeaseLost, match=r"the lease of b .* broke"), client.multilock(["a", "b", "c"]) as leases:
        leases.on_lost(notified.append)
        assert not leases.wait_lost(0)
        for name in "bc":
            client.break_lock(name, token=leases[name].token)
        assert leases.wait_lost(60)
        assert leases["a"].held
        assert not leases.held
        assert leases.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            leases.check()
        wait_until(lambda: notified)
    assert notified == [leases]
    assert bench.held_names() == []
    leases.on_lost(notified.append)
    wait_until(lambda: len(notified) == 2)


def test_multilock_loss_is_a_note_on_the_body_error(bench) -> None:
    client = bench.client()
    with pytest.raises(ZeroDivisionError) as caught, client.multilock(["a", "b"]) as leases:
        probe.end_lost(leases["b"], "broken")
        1 / 0  # noqa: B018
    assert "the lease of b" in caught.value.__notes__[0]


def test_multilock_raises_if_first_lease_is_lost_while_waiting(bench, wait_until) -> None:
    client = bench.client()
    held = bench.client().lock("b").acquire()
    caught: list[BaseException] = []

    def acquire_both() -> None:
        try:
            client.multilock(["a", "b"]).acquire()
        except LeaseLost as lost:
            caught.append(lost)

    thread = threading.Thread(target=acquire_both)
    thread.start()
    wait_until(lambda: any(lock_state.waiters for lock_state in bench.server.lock_states.values()))
    (mine,) = [holding for holding in client.inspect("a") if holding.state == "held"]
    client.break_lock("a", token=mine.token)
    held.release()
    thread.join(60)
    assert "the lease of a" in str(caught[0])
    wait_until(lambda: bench.held_names() == [])


def test_multilock_leases_from_acquire_end_on_release(bench) -> None:
    leases = bench.client().multilock(["a", "b"]).acquire()
    assert leases.release()
    assert not leases.release()
    assert not leases.wait_lost(0)
    assert "RELEASED" in repr(leases)
    leases = bench.client().multilock(["a", "b"]).acquire()
    bench.clock.advance(100)
    assert not leases.release()


def test_multilock_release_calls_unresponsive_engine_once(bench) -> None:
    client = bench.client()
    leases = client.multilock(["a", "b", "c"]).acquire()
    bench.transport.silent, before = True, bench.transport.calls
    assert not leases.release()
    assert bench.transport.calls - before <= 2  # one by release() and one by the watchdog
    assert probe.unreleased_names(client) == {"a", "b", "c"}


def test_multilock_combines_lock_kinds_and_clients(bench) -> None:
    client = bench.client()
    with Client("memory://") as other_client:
        own_lock, other_lock = client.lock("job"), other_client.lock("job")
        permit, reader = client.semaphore("pool", 2), client.rwlock("doc").read()
        with MultiLock([other_lock, permit, own_lock, reader]) as leases:
            assert list(leases) == ["job", "pool", "doc"]
            assert leases["job"] is leases.of(other_lock)
            assert leases.of(own_lock) is not leases.of(other_lock)
            assert leases.of(permit).slot == 0
            assert other_client.inspect()[0].token == leases.of(other_lock).token
        assert other_client.inspect() == []
        busy = other_client.lock("job").acquire()
        with pytest.raises(NotAcquired):
            MultiLock([own_lock, other_lock]).acquire(wait=0)
        assert bench.held_names() == []
        busy.release()


def test_multilock_refuses_same_name_from_two_clients_of_one_engine() -> None:
    with (
        Client("memory://one") as first_client,
        Client("memory://one") as same_engine_client,
        Client("memory://two") as other_client,
    ):
        with pytest.raises(ConfigError, match="wait for itself"):
            MultiLock([first_client.lock("a"), same_engine_client.rwlock("a").read()])
        for locks in (
            [first_client.lock("a"), other_client.lock("a")],
            [first_client.lock("a"), same_engine_client.lock("b")],
            [first_client.rwlock("a").read(), same_engine_client.rwlock("a").read()],
            [first_client.semaphore("a", 2), same_engine_client.semaphore("a", 2)],
        ):
            MultiLock(locks, wait=0).acquire().release()


def test_multilock_order_is_by_name_then_engine() -> None:
    first_client, second_client = Client("memory://one"), Client("memory://two", namespace="n")
    locks = [second_client.lock("b"), first_client.lock("b"), second_client.lock("a"), first_client.lock("c")]
    orders = {tuple(map(id, probe.sorted_locks(MultiLock(given)))) for given in (locks, locks[::-1])}
    assert orders == {tuple(map(id, [locks[2], locks[1], locks[0], locks[3]]))}
    first_client.close()
    second_client.close()


def test_multilock_pickles_with_its_locks_and_wait() -> None:
    with Client("memory://pickled") as client:
        multilock = pickle.loads(pickle.dumps(client.multilock(["a", "b"], wait=3)))
        assert (type(multilock), [lock.name for lock in multilock.locks], multilock.wait) == (MultiLock, ["a", "b"], 3)
        assert repr(multilock) == "<MultiLock a, b wait=3>"
        with multilock as leases:
            assert leases.held
