"""Interrupted multilocks: a loss or a cancellation under asyncio, and Ctrl-C at every point."""

from __future__ import annotations

import asyncio
import gc
from functools import partial

import pytest

from leasehold import (
    AsyncClient,
    AsyncMultiLock,
    LeaseLost,
    NotAcquired,
)
from leasehold.client.held_locks import HeldLocks
from tests.support import probe


def test_async_multilock_cancels_body_once_when_two_leases_are_lost() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            with pytest.raises(LeaseLost, match="the lease of a"):
                async with client.multilock(["a", "b"]) as leases:
                    for name in "ab":
                        await client.break_lock(name, token=leases[name].token)
                    await asyncio.sleep(30)
            assert asyncio.current_task().cancelling() == 0
            await asyncio.sleep(0)
            assert await client.inspect() == []

    asyncio.run(main())


def test_async_multilock_stops_waiting_when_held_lease_is_lost() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            held = await client.lock("b").acquire()

            async def acquire_both() -> None:
                async with client.multilock(["a", "b"]):
                    pytest.fail("it began")

            task = asyncio.create_task(acquire_both())
            while len(seen := await client.inspect()) < 3:
                await asyncio.sleep(0.001)
            await client.break_lock("a", token=seen[0].token)
            with pytest.raises(LeaseLost, match="the lease of a"):
                await task
            assert [holding.name for holding in await client.inspect()] == ["b"]
            await held.release()

    asyncio.run(main())


def test_async_multilock_external_cancellation_propagates() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:

            async def work() -> None:
                async with client.multilock(["a", "b"]) as leases:
                    await client.break_lock("a", token=leases["a"].token)
                    task.cancel()
                    await asyncio.sleep(30)

            task = asyncio.create_task(work())
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await client.inspect() == []
            leases = await AsyncMultiLock([client.lock("a"), client.lock("b")]).acquire()
            assert await leases.release()
            leases = await client.multilock(["a"]).try_acquire()
            assert leases is not None
            assert not await leases.wait_lost(0)

    asyncio.run(main())


def test_ctrl_c_during_multilock_exit_releases_all_names(bench, wait_until, monkeypatch) -> None:
    client = bench.client()
    pop, popped = HeldLocks.pop, []

    def second_interrupted(self, name, *args):
        popped.append(name)
        if len(popped) == 2:
            raise KeyboardInterrupt
        return pop(self, name, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), client.multilock(["a", "b"]):
        patch.setattr(HeldLocks, "pop", second_interrupted)
    probe.wake_watchdog(client)
    wait_until(lambda: bench.held_names() == [])
    assert not probe.held_lock_entries(client)


def test_ctrl_c_during_multilock_rollback_releases_all_names(bench, monkeypatch) -> None:
    client, held = bench.client(), bench.client().lock("b").acquire()
    forget, interrupted_claims = probe.core(client).forget, []

    def interrupted(claim) -> None:
        if not interrupted_claims:
            interrupted_claims.append(claim)
            raise KeyboardInterrupt
        forget(claim)

    monkeypatch.setattr(probe.core(client), "forget", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.multilock(["a", "b"], wait=0).acquire()
    assert bench.held_names() == ["b"]
    held.release()


def only_expected_names_held(bench, expected: list[str]) -> bool:
    return bench.held_names() == expected


@pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["with", "kept", "hand", "busy", "busy reentrant"])
def test_ctrl_c_at_every_point_of_multilock_leaves_nothing(bench, wait_until, ctrl_c, how) -> None:
    client = bench.client(ttl=600)
    multilock = client.multilock(["a", "b"], wait=0, reentrant=how == "busy reentrant")
    busy, kept = how.startswith("busy"), []
    held = bench.client().lock("b").acquire() if busy else None
    with client.lock("a") if busy else multilock:  # imports every module and starts every thread
        pass

    def work() -> None:
        if how == "hand":
            multilock.acquire().release()
        elif how == "with":
            with multilock as leases:
                leases.check()
        elif how == "kept":  # as by a variable of a notebook: the garbage collector releases nothing
            with multilock as leases:
                kept.append(leases)
        elif how == "busy reentrant":
            with pytest.raises(NotAcquired):
                multilock.acquire()
        else:
            with pytest.raises(NotAcquired), multilock:
                pass

    number = 0
    while ctrl_c(number := number + 1, work, "blocking/groups.py", "multilock.py"):
        expected = ["b"] if busy else []
        if bench.held_names() != expected:  # the watchdog or the garbage collector has yet to release
            gc.collect()
            probe.wake_watchdog(client)
            bench.clock.at += 0.001
        try:
            wait_until(partial(only_expected_names_held, bench, expected), 30)
        except AssertionError:
            pytest.fail(f"left after Ctrl-C at place {number}: {bench.held_names()}")
    assert number > 60
    assert not probe.held_lock_entries(client)
    assert held is None or held.held


@pytest.mark.parametrize("interrupts", [1, 2, 5])
@pytest.mark.parametrize("before", [False, True])
def test_rollback_releases_all_however_often_it_is_interrupted(bench, monkeypatch, interrupts, before) -> None:
    # Ctrl-C pressed again and again: each one interrupted the rollback, and the third left the other locks held.
    rollback, left = getattr(*probe.ROLLBACK), [KeyboardInterrupt] * interrupts

    def interrupted(lease, held_lock) -> None:
        if not before:
            rollback(lease, held_lock)
        if left:
            raise left.pop()
        rollback(lease, held_lock)

    held = bench.client().lock("d").acquire()
    client = bench.client()
    monkeypatch.setattr(*probe.ROLLBACK, interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.multilock(["a", "b", "c", "d"], wait=0).acquire()
    assert not left
    assert bench.held_names() == ["d"]
    held.release()


def test_rollback_continues_after_a_lease_that_cannot_be_released(bench, monkeypatch) -> None:
    rollback, left = getattr(*probe.ROLLBACK), []

    def fail_for_b(lease, held_lock) -> None:
        if lease.name == "b":
            left.append(lease)  # else the garbage collector may find it held, and warn
            raise MemoryError
        rollback(lease, held_lock)

    held = bench.client().lock("d").acquire()
    monkeypatch.setattr(*probe.ROLLBACK, fail_for_b)
    with pytest.raises(MemoryError):
        bench.client().multilock(["a", "b", "c", "d"], wait=0).acquire()
    monkeypatch.undo()
    assert {"a", "c"}.isdisjoint(bench.held_names())
    held.release()
    left[0].release()
