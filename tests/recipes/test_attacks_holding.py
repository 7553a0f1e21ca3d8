"""Attacks that once gave two holders of a lock, or a lease that was not theirs. Comments name the mechanism."""

from __future__ import annotations

import asyncio

import pytest

from leasehold import AsyncClient, LeaseLost, NotAcquired, SelfDeadlock
from leasehold.recipes.entries import Entries

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_a_new_thread_does_not_inherit_a_reentrant_lease_by_its_ident(bench, aside) -> None:
    # Entries are keyed by get_ident(), which the system gives to the next thread once the first has ended. The lease
    # itself may have been handed on. TWO HOLDERS of one lease, by plain use.
    lock = bench.client().lock("a", reentrant=True)
    handed = aside(lock.acquire)
    for _ in range(10):
        assert aside(lock.try_acquire) is None
    assert handed.held


def test_a_new_thread_is_not_told_of_a_self_deadlock_that_is_not_its_own(bench, aside) -> None:
    # The same reuse of idents: a generator left suspended inside a `with` by a thread that ended.
    lock = bench.client().lock("a")
    kept = []

    def body():
        with lock:
            yield

    def enter() -> None:
        kept.append(body())
        next(kept[0])

    aside(enter)
    for _ in range(10):
        refused = aside(lambda: lock.acquire(wait=0))
        assert isinstance(refused, NotAcquired), refused
    assert not any(aside(lambda: lock._desk.entries.find("a")) for _ in range(10))


def test_interleaved_bodies_in_one_thread_release_their_own_permits(bench) -> None:
    # Entries.pop takes the *newest* entry of the lock: two generators (or ExitStacks) not left in reverse order
    # release each other's lease. The second body goes on with a released permit, whose slot goes to somebody else.
    permits = bench.client().semaphore("s", 2)

    def body():
        with permits as lease:
            yield lease

    first, second = body(), body()
    one, two = next(first), next(second)
    first.close()
    assert (one.held, two.held) == (False, True)


def test_an_inner_with_that_fails_leaves_the_outer_one_alone(bench) -> None:
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
            inner._lose("broken")
        assert permit.held
    assert not permit.held


def test_an_inner_with_that_is_cancelled_leaves_the_cancellation_as_it_is() -> None:
    # The same: leaving the outer `with` raised RuntimeError in place of the cancellation.
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            permits = client.semaphore("s", 2)
            other = await permits.acquire()

            async def twice() -> None:
                async with permits, permits:
                    pass

            task = asyncio.create_task(twice())
            while not any(one.state == "waiting" for one in await client.inspect()):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await other.release()
            assert await client.inspect() == []

    asyncio.run(main())


def test_the_threading_shape_never_releases_the_lease_of_another_thread(bench, aside) -> None:
    # It popped the newest lease, whoever called: after a loss the first thread's release() freed the second's.
    lock = bench.client().lock("a", ttl=10).as_threading()
    assert lock.acquire()
    bench.clock.turn(11)
    assert aside(lock.acquire) is True
    second = lock.lease
    lock.release()
    assert second.held


def test_a_lease_ended_between_finding_it_and_entering_it_again_is_not_entered(bench, monkeypatch, aside) -> None:
    # `find` says held, another thread releases, `_depth += 1` follows: the body of a `with` runs unlocked.
    lock = bench.client().lock("a", reentrant=True)
    lease = lock.acquire()
    find = Entries.find

    def found_then_released(self, name):
        found = find(self, name)
        if found is not None and lease.held:
            aside(lease.release)
        return found

    monkeypatch.setattr(Entries, "find", found_then_released)
    with lock as entered:
        assert entered.held


def test_releasing_an_inner_hold_by_hand_does_not_open_the_outer_body(bench) -> None:
    # release() and the inner exit both count down: two exits for one entry, the outer body runs unlocked.
    lock = bench.client().lock("a", reentrant=True)
    with lock as outer:
        with lock as inner:
            inner.release()
        assert outer.held
