"""Attacks that once gave two holders of a lock, or a lease that was not theirs. Comments name the mechanism."""

from __future__ import annotations

import asyncio

import pytest

from leasehold import AsyncClient, LeaseLost, NotAcquired, SelfDeadlock
from leasehold.client.held_locks import HeldLocks

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_new_thread_with_reused_ident_does_not_inherit_reentrant_lease(bench, in_new_thread) -> None:
    # Entries are keyed by get_ident(), which the system gives to the next thread once the first has ended. The lease
    # itself may have been handed on. TWO HOLDERS of one lease, by plain use.
    lock = bench.client().lock("a", reentrant=True)
    handed = in_new_thread(lock.acquire)
    for _ in range(10):
        assert in_new_thread(lock.try_acquire) is None
    assert handed.held


def test_new_thread_with_reused_ident_gets_no_self_deadlock(bench, in_new_thread) -> None:
    # The same reuse of idents: a generator left suspended inside a `with` by a thread that ended.
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
    assert not any(in_new_thread(lambda: lock._core.held_locks.find("a")) for _ in range(10))


def test_interleaved_generators_release_their_own_permits(bench) -> None:
    # Entries.pop takes the *newest* entry of the lock: two generators (or ExitStacks) not left in reverse order
    # release each other's lease. The second body goes on with a released permit, whose slot goes to somebody else.
    permits = bench.client().semaphore("s", 2)

    def body():
        with permits as lease:
            yield lease

    first, second = body(), body()
    first_lease, second_lease = next(first), next(second)
    first.close()
    assert (first_lease.held, second_lease.held) == (False, True)


def test_failed_inner_with_block_keeps_outer_lease(bench) -> None:
    # What a failed `with` gave up was found by lock and frame: that of the `with` around it in the same function. The
    # outer body went on unlocked, and its end raised RuntimeError. TWO HOLDERS by plain use.
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
            inner._end_lost("broken")
        assert permit.held
    assert not permit.held


def test_cancelled_inner_with_block_raises_cancelled_error() -> None:
    # The same: leaving the outer `with` raised RuntimeError in place of the cancellation.
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
    # It popped the newest lease, whoever called: after a loss the first thread's release() freed the second's.
    lock = bench.client().lock("a", ttl=10).as_threading()
    assert lock.acquire()
    bench.clock.advance(11)
    assert in_new_thread(lock.acquire) is True
    second = lock.lease
    lock.release()
    assert second.held


def test_reentrant_enter_ignores_lease_released_during_lookup(bench, monkeypatch, in_new_thread) -> None:
    # `find` says held, another thread releases, `_depth += 1` follows: the body of a `with` runs unlocked.
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
    # release() and the inner exit both count down: two exits for one entry, the outer body runs unlocked.
    lock = bench.client().lock("a", reentrant=True)
    with lock as outer:
        with lock as inner:
            inner.release()
        assert outer.held
