"""Regressions: two holders of one lock, or a caller with the lease of another. Comments give the cause."""

from __future__ import annotations

import asyncio

import pytest

from leasehold import AsyncClient, LeaseLost, NotAcquired, SelfDeadlock
from leasehold.client.held_locks import HeldLocks
from tests.support import probe

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_new_thread_with_reused_ident_does_not_inherit_reentrant_lease(bench, in_new_thread) -> None:
    # Held locks were keyed by get_ident(), which the system reuses for the next thread once the first has ended. The
    # lease itself may have been passed to another thread. TWO HOLDERS of one lease, by plain use.
    lock = bench.client().lock("a", reentrant=True)
    handed = in_new_thread(lock.acquire)
    for _ in range(10):
        assert in_new_thread(lock.try_acquire) is None
    assert handed.held


def test_new_thread_with_reused_ident_gets_no_self_deadlock(bench, in_new_thread) -> None:
    # The same reuse of idents, by a generator that an ended thread left suspended inside a `with`.
    lock = bench.client().lock("a")
    generators = []

    def body():
        with lock:
            yield

    def enter() -> None:
        generators.append(body())
        next(generators[0])

    in_new_thread(enter)
    for _ in range(10):
        refused = in_new_thread(lambda: lock.acquire(wait=0))
        assert isinstance(refused, NotAcquired), refused
    assert not any(in_new_thread(lambda: probe.held_locks(lock).find("a")) for _ in range(10))


def test_interleaved_generators_release_their_own_permits(bench) -> None:
    # HeldLocks.pop took the *newest* entry of the lock, so two generators (or ExitStacks) not exited in reverse order
    # released each other's lease. The second body continued with a released permit, whose slot went to another client.
    permits = bench.client().semaphore("s", 2)

    def body():
        with permits as lease:
            yield lease

    first, second = body(), body()
    first_lease, second_lease = next(first), next(second)
    first.close()
    assert (first_lease.held, second_lease.held) == (False, True)


def test_failed_inner_with_block_keeps_outer_lease(bench) -> None:
    # A failed `with` removed its entry by lock and frame, and found that of the enclosing `with` in the same function.
    # The outer body continued unlocked, and its exit raised RuntimeError. TWO HOLDERS by plain use.
    lock, permits = bench.client().lock("a"), bench.client().semaphore("s", 2, wait=0)
    with lock as lease:
        with pytest.raises(SelfDeadlock), lock:
            pass
        assert lease.held
    other = bench.client().semaphore("s", 2).acquire()
    with permits as permit:
        with pytest.raises(NotAcquired), permits:
            pass
        with pytest.raises(NotAcquired):
            permits.call(print)
        assert permit.held
        other.release()
        with pytest.raises(LeaseLost), permits as inner:
            probe.end_lost(inner, "broken")
        assert permit.held
    assert not permit.held


def test_cancelled_inner_with_block_raises_cancelled_error() -> None:
    # The same cause: the exit of the outer `with` raised RuntimeError instead of the cancellation.
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            permits = client.semaphore("s", 2)
            other = await permits.acquire()

            async def twice() -> None:
                async with permits, permits:
                    pass

            task = asyncio.create_task(twice())
            while not any(holding.state == "waiting" for holding in await client.inspect()):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await other.release()
            assert await client.inspect() == []

    asyncio.run(main())


def test_as_threading_release_keeps_lease_of_another_thread(bench, in_new_thread) -> None:
    # release() popped the newest lease of any thread: after a loss, the first thread's release() freed the second's.
    lock = bench.client().lock("a", ttl=10).as_threading()
    assert lock.acquire()
    bench.clock.advance(11)
    assert in_new_thread(lock.acquire) is True
    second = lock.lease
    lock.release()
    assert second.held


def test_reentrant_enter_ignores_lease_released_during_lookup(bench, monkeypatch, in_new_thread) -> None:
    # If another thread released between `find` and `_depth += 1`, the body of the `with` ran unlocked.
    lock = bench.client().lock("a", reentrant=True)
    lease = lock.acquire()
    find = HeldLocks.find

    def found_then_released(self, name):
        found = find(self, name)
        if found is not None and lease.held:
            in_new_thread(lease.release)
        return found

    monkeypatch.setattr(HeldLocks, "find", found_then_released)
    with lock as entered:
        assert entered.held


def test_explicit_release_of_inner_lease_keeps_outer_lease(bench) -> None:
    # release() and the inner exit both counted down: two exits for one entry, so the outer body ran unlocked.
    lock = bench.client().lock("a", reentrant=True)
    with lock as outer:
        with lock as inner:
            inner.release()
        assert outer.held
