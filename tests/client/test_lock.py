"""Locks, read-write locks and semaphores: `with`, `acquire` and the interface of `threading`."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
import types

import pytest

from leasehold import AsyncClient, Client, LeaseLost, Mismatch, NotAcquired, SelfDeadlock
from tests.support import probe

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_with_block_acquires_and_releases_lock(bench, in_new_thread) -> None:
    lock = bench.client().lock("a")
    with lock as lease:
        assert lock.locked()
        assert isinstance(in_new_thread(lambda: lock.acquire(wait=0)), NotAcquired)
    assert lease.state == "RELEASED"
    assert not lock.locked()
    assert not bench.server.lock_states


def test_with_block_raises_not_acquired_and_skips_body_when_busy(bench) -> None:
    held = bench.client().lock("a").acquire()
    with pytest.raises(NotAcquired), bench.client().lock("a", wait=0):
        pytest.fail("ran unlocked")
    held.release()


def test_with_block_exit_raises_lease_lost_when_lease_expired(bench) -> None:
    client = bench.client()
    with pytest.raises(LeaseLost) as lost, client.lock("a", ttl=30) as lease:
        bench.clock.at += 31
    assert (lost.value.reason, lost.value.token) == ("stalled", lease.token)
    assert not bench.server.lock_states  # released nevertheless


def test_body_error_is_raised_with_note_when_lease_is_lost(bench) -> None:
    with pytest.raises(KeyError) as error, bench.client().lock("a") as lease:
        bench.client().break_lock("a", token=lease.token)
        raise KeyError("mine")
    assert "is lost: an operator broke it" in error.value.__notes__[0]


def test_lease_released_inside_with_block_is_released_once(bench) -> None:
    with bench.client().lock("a") as lease:
        lease.release()
    assert lease.state == "RELEASED"


def test_lease_lost_from_check_inside_with_block_has_no_extra_note(bench) -> None:
    with pytest.raises(LeaseLost) as lost, bench.client().lock("a", ttl=30) as lease:
        bench.clock.at += 31
        lease.check()
    assert not hasattr(lost.value, "__notes__")


def test_not_acquired_error_describes_the_holder(bench) -> None:
    held = bench.client(holder="web-3").lock("orders/42", ttl=30, purpose="nightly").acquire()
    with pytest.raises(NotAcquired) as busy:
        bench.client().lock("orders/42").acquire(wait=0)
    error = busy.value
    assert isinstance(error, TimeoutError)
    assert (error.name, error.holder, error.purpose, error.left, error.position) == (
        "orders/42",
        "web-3",
        "nightly",
        30.0,
        None,
    )
    assert error.pid
    assert error.host
    assert str(error).startswith("orders/42 is held by web-3 (pid ")
    assert "30.0 s left unless renewed" in str(error)
    held.release()


def test_try_acquire_returns_none_when_busy(bench) -> None:
    first, second = bench.client().lock("a"), bench.client().lock("a")
    lease = first.try_acquire()
    assert lease is not None
    assert second.try_acquire() is None
    lease.release()
    assert second.try_acquire() is not None


def test_release_wakes_the_waiter(bench, wait_until) -> None:
    lease = bench.client().lock("a").acquire()
    other = bench.client()
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(other.lock("a").acquire(wait=60)))
    waiter.start()
    wait_until(lambda: [holding.state for holding in other.inspect()] == ["held", "waiting"])
    lease.release()
    waiter.join(60)
    assert got
    assert not probe.waiters(other)


def test_waiter_leaves_queue_when_its_wait_is_over(bench, wait_until, in_new_thread) -> None:
    held = bench.client().lock("a", ttl=100).acquire()
    other = bench.client()
    out: list[object] = []
    waiter = threading.Thread(target=lambda: out.append(in_new_thread(lambda: other.lock("a", wait=7).acquire())))
    waiter.start()
    wait_until(lambda: probe.waiters(other))
    bench.clock.at += 8
    next(iter(probe.waiters(other))).signal.set()
    wait_until(lambda: out or not [w.signal.set() for w in probe.waiters(other)])
    waiter.join(60)
    assert isinstance(out[0], NotAcquired)
    assert "gave up after 8.0 s at position 0 in the queue (next)" in str(out[0])
    assert held.held
    assert len(bench.client().inspect()) == 1


def test_acquire_of_lock_held_by_same_thread_raises_self_deadlock(bench) -> None:
    client = bench.client()
    with client.lock("a") as lease:
        with pytest.raises(SelfDeadlock, match=f"already held by this thread or task .token {lease.token}"):
            client.lock("a").acquire()
        with pytest.raises(RuntimeError), client.lock("a", wait=60):
            pass
        with pytest.raises(SelfDeadlock):
            client.rwlock("a").read().acquire()
        assert client.lock("a").try_acquire() is None  # a single attempt cannot deadlock


@pytest.mark.parametrize("reentrant", [False, True])
def test_write_inside_read_lock_does_not_advise_reentrant(bench, reentrant) -> None:
    client = bench.client()
    with client.rwlock("a").read():
        with pytest.raises(SelfDeadlock, match="a read lock cannot become a write lock") as refused:
            client.rwlock("a").write(reentrant=reentrant).acquire()
        assert "reentrant" not in str(refused.value)


def test_acquire_outside_with_block_does_not_raise_self_deadlock(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    with pytest.raises(NotAcquired):
        client.lock("a").acquire(wait=0.01 if bench.clock.advance(0) else 0)
    lease.release()


def test_lost_lease_does_not_cause_self_deadlock(bench) -> None:
    client = bench.client()
    with pytest.raises(LeaseLost), client.lock("a", ttl=30) as old:
        bench.clock.at += 31
        with client.lock("a") as new:
            assert new.token > old.token


def test_reentrant_lock_in_nested_with_blocks_shares_one_lease(bench, in_new_thread) -> None:
    client = bench.client()
    lock = client.lock("a", reentrant=True)
    with lock as outer:
        with lock as inner, client.lock("a", reentrant=True) as third:
            assert inner is third is outer
        assert outer.held
        assert isinstance(in_new_thread(lambda: lock.acquire(wait=0)), NotAcquired)
    assert outer.state == "RELEASED"


def test_reentrant_acquire_needs_one_release_per_acquire(bench) -> None:
    lock = bench.client().lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    assert inner is outer
    assert inner.release()
    assert outer.held
    assert outer.release()
    assert outer.state == "RELEASED"
    assert not probe.held_lock_entries(lock)


def test_reentrant_lease_that_ends_just_then_is_acquired_anew(bench, monkeypatch) -> None:
    client = bench.client()
    lock, held_locks = client.lock("a", reentrant=True), probe.held_locks(client)
    outer, find = lock.acquire(), held_locks.find

    def find_and_lose(name: str):
        found = find(name)
        bench.client().break_lock("a", token=outer.token)
        probe.end_lost(outer, "broken")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(held_locks, "find", find_and_lose)
        inner = lock.__enter__()
    assert inner.held
    assert inner.token > outer.token
    lock.__exit__(None, None, None)
    assert not inner.held
    assert bench.held_names() == []


def test_reentrant_read_inside_write_lock_returns_write_lease(bench) -> None:
    rwlock = bench.client().rwlock("a")
    with rwlock.write() as write, rwlock.read(reentrant=True) as read:
        assert read is write


def test_read_locks_are_shared_and_write_locks_exclusive(bench) -> None:
    first, second = bench.client().rwlock("a"), bench.client().rwlock("a")
    with first.read(), second.read():
        with pytest.raises(NotAcquired):
            bench.client().rwlock("a").write(wait=0).acquire()
        assert not second.read().locked()
        assert second.write().locked()
    with first.write():
        assert second.read().locked()


def test_second_read_lock_raises_self_deadlock_when_writer_is_queued(bench, wait_until) -> None:
    client, other = bench.client(), bench.client()
    with client.rwlock("a").read():
        with client.rwlock("a").read():
            pass
        writer = threading.Thread(target=lambda: other.rwlock("a").write().acquire().release())
        writer.start()
        wait_until(lambda: "waiting" in [holding.state for holding in other.inspect()])
        with pytest.raises(SelfDeadlock, match="a writer is queued behind its read lock"):
            client.rwlock("a").read().acquire()
    writer.join(60)


def test_semaphore_is_acquired_twice_in_one_thread_with_distinct_slots(bench) -> None:
    permits = bench.client().semaphore("s", 2)
    with permits as first, permits as second:
        assert {first.slot, second.slot} == {0, 1}
        assert permits.locked()
        with pytest.raises(NotAcquired):
            permits.acquire(wait=0)
    assert not permits.locked()


def test_acquire_with_other_kind_or_limit_raises_mismatch(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    with pytest.raises(Mismatch, match="a is in use as a lock, this call wants a semaphore of 2"):
        client.semaphore("a", 2).acquire()
    lease.release()
    with client.semaphore("a", 2), pytest.raises(Mismatch, match="semaphore of 3"):
        client.semaphore("a", 3).acquire()


def test_min_hold_and_delay_keep_the_name_reserved(bench) -> None:
    client = bench.client()
    client.lock("a", min_hold=10).acquire().release()
    assert client.lock("a").try_acquire() is None
    bench.clock.at += 10
    lease = client.lock("a", ttl=30, delay=5).try_acquire()
    assert lease is not None
    bench.clock.at += 31
    assert lease.state == "LOST"
    assert client.lock("a").try_acquire() is None
    bench.clock.at += 5
    assert client.lock("a").try_acquire() is not None


def test_as_threading_behaves_like_threading_lock(bench) -> None:
    lock = bench.client().lock("a").as_threading()
    assert lock.acquire()
    assert lock.lease is not None
    assert lock.locked()
    assert not bench.client().lock("a").as_threading().acquire(blocking=False)
    lock.release()
    with lock as held:
        assert held is True
    with pytest.raises(RuntimeError, match="release unlocked lock"):
        lock.release()
    with pytest.raises(ValueError, match="non-blocking"):
        lock.acquire(False, 3)
    assert lock.lease is None


def test_as_threading_of_reentrant_lock_behaves_like_rlock(bench) -> None:
    lock = bench.client().lock("a", reentrant=True).as_threading()
    with lock, lock:
        assert lock.locked()
    assert not lock.locked()


def test_with_block_exited_in_another_thread_releases_lease(bench, in_new_thread) -> None:
    lock = bench.client().lock("a")
    lease = lock.__enter__()
    assert in_new_thread(lambda: lock.__exit__(None, None, None)) is None
    assert lease.state == "RELEASED"


def test_ambiguous_semaphore_exit_in_another_thread_raises(bench, in_new_thread) -> None:
    permits = bench.client().semaphore("a", 5)
    entered, finish = threading.Barrier(3), threading.Event()

    def enter() -> None:
        permits.__enter__()
        entered.wait(60)
        finish.wait(60)  # stay alive: the ident of an ended thread may be reused

    for _ in range(2):
        threading.Thread(target=enter).start()
    entered.wait(60)
    error = in_new_thread(lambda: permits.__exit__(None, None, None))
    finish.set()
    assert isinstance(error, RuntimeError)
    assert "entered in another thread" in str(error)


def test_threading_lock_late_release_keeps_successor_lease(bench, in_new_thread) -> None:
    lock = bench.client().lock("a", ttl=30).as_threading()
    lock.acquire()
    bench.clock.at += 31
    assert in_new_thread(lock.acquire)
    successor_lease = lock.lease
    lock.release()
    assert successor_lease is not None
    assert successor_lease.held
    assert in_new_thread(lock.release) is None  # a thread that acquired nothing releases the remaining lease
    assert not successor_lease.held


@pytest.mark.parametrize("client_type", [Client, AsyncClient])
def test_lock_without_release_says_what_to_write(client_type) -> None:
    client = client_type("memory://")
    for lock in (client.lock("a"), client.multilock(["a", "b"])):
        with pytest.raises(AttributeError, match=r"with lock as lease:.*lock\.acquire\(\).*lease\.release") as caught:
            lock.release  # noqa: B018
        assert ("await" in str(caught.value)) is (client_type is AsyncClient)
        assert not hasattr(lock, "release")
        assert "release" not in dir(lock)
        assert not hasattr(lock, "no_such_thing")
        assert copy.copy(lock).__class__ is lock.__class__


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocking_lock_refuses_second_task_of_a_loop(bench, reentrant) -> None:
    # The tasks of a loop are one thread, so `reentrant` let both in.
    lock = bench.client().lock("a", reentrant=reentrant)
    inside = []

    async def enter() -> None:
        with lock as lease:
            inside.append(lease)
            await asyncio.sleep(0)  # the other task runs
            inside.remove(lease)

    async def both() -> list[object]:
        return await asyncio.gather(enter(), enter(), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None
    assert isinstance(second, SelfDeadlock)
    assert "AsyncClient" in str(second)
    assert "reentrant" not in str(second)


def test_lock_is_entered_while_another_thread_imports_asyncio(bench, monkeypatch) -> None:
    client = bench.client()
    monkeypatch.setitem(sys.modules, "asyncio", types.ModuleType("asyncio"))  # as it is until the import ends
    with client.lock("a", reentrant=True) as outer, client.lock("a", reentrant=True) as inner:
        assert inner is outer


def test_reentrant_blocking_lock_works_within_one_task(bench) -> None:
    lock = bench.client().lock("a", reentrant=True)

    async def nested() -> None:
        with lock as outer, lock as inner:
            assert inner is outer

    asyncio.run(nested())
    assert not bench.held_names()


def test_reentrant_lock_does_not_take_permit_of_semaphore(bench) -> None:
    client = bench.client()
    with client.semaphore("a", 2), pytest.raises(Mismatch):
        client.lock("a", reentrant=True).acquire()


def test_self_deadlock_advises_reentrant_only_where_it_helps(bench) -> None:
    client = bench.client()
    with client.lock("a"):
        with pytest.raises(SelfDeadlock, match="reentrant=True"):
            client.lock("a").acquire()
        with pytest.raises(SelfDeadlock, match="before you campaign") as campaign:
            client.election("a").campaign()
    with Client("memory://") as client, pytest.raises(SelfDeadlock, match="cannot wait for it") as nested:
        client.once("k", lambda: client.once("k", lambda: None))
    assert "reentrant" not in f"{campaign.value} {nested.value}"
