"""Several locks as one: all or nothing, in one order, before one deadline, with one word of loss."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
from functools import partial

import pytest

from leasehold import (
    AsyncClient,
    AsyncMultiLock,
    Client,
    ConfigError,
    LeaseLost,
    MultiLock,
    NotAcquired,
    SelfDeadlock,
    Unavailable,
)
from leasehold.recipes.entries import Entries


def names_held(bench) -> list[str]:
    return sorted(name for (_, name), line in bench.store.lines.items() if line.occupiers)


def test_all_of_them_are_held_in_the_body_and_none_after(bench) -> None:
    with bench.client().multilock(["b", "a", "c"]) as leases:
        assert names_held(bench) == ["a", "b", "c"]
        assert list(leases) == ["b", "a", "c"]
        assert len(leases) == 3
        assert leases["a"].token < leases["b"].token < leases["c"].token, "sorted, whatever order was given"
        assert leases.held
        assert 0 < leases.remaining <= 30
        assert leases.lost_reason is None
        leases.check()
        with pytest.raises(KeyError):
            leases["d"]
    assert names_held(bench) == []
    assert not leases.held


def test_a_name_given_twice_is_one_lock(bench) -> None:
    with bench.client().multilock(["a", "b", "a"]) as leases:
        assert list(leases) == ["a", "b"]


def test_what_cannot_work_is_refused_when_built(bench) -> None:
    client, other = bench.client(), AsyncClient("memory://")
    for wrong, says in (
        (lambda: client.multilock([]), "at least one"),
        (lambda: client.multilock("ab"), "not one text"),
        (lambda: client.multilock([7]), "is text"),
        (lambda: MultiLock([client.lock("a"), client.semaphore("a", 2)]), "once"),
        (lambda: MultiLock([other.lock("a")]), "takes objects of Lock"),
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


def test_what_was_taken_before_a_failure_is_given_back_at_once(bench) -> None:
    held = bench.client().lock("c", holder="web-3").acquire()
    many = bench.client().multilock(["a", "b", "c"], wait=0, min_hold=1000)
    with pytest.raises(NotAcquired, match="c is held by web-3"):
        many.acquire()
    assert names_held(bench) == ["c"], "nothing is kept for min_hold: nobody worked under it"
    assert many.try_acquire() is None
    with pytest.raises(NotAcquired), many:
        pass
    assert names_held(bench) == ["c"]
    assert held.release()
    leases = many.try_acquire()
    assert leases is not None
    assert leases.release()
    assert names_held(bench) == ["a", "b", "c"], "cooling now"


def test_rolling_back_waits_for_no_silent_engine(bench) -> None:
    client = bench.client()
    many = client.multilock(["a", "b"])
    call = bench.link.call

    def silent_after_the_first(verb, args, deadline):
        if verb == "attempt" and args[0].name == "b":
            bench.link.silent = True
        return call(verb, args, deadline)

    bench.link.call = silent_after_the_first
    with pytest.raises(Unavailable):
        many.acquire()
    assert {owed.claim.name for owed in client._desk.book.owed.values()} == {"a", "b"}


def test_one_deadline_for_all_of_them() -> None:
    with Client("memory://") as client:
        held = client.multilock(["a", "b"]).acquire()
        threading.Timer(0.8, held["a"].release).start()
        began = time.monotonic()
        with pytest.raises(NotAcquired, match=r"^b is held"):
            client.multilock(["a", "b"], wait=1.0).acquire()
        assert 0.95 < time.monotonic() - began < 1.7, "not a second for each"
        held.release()


def test_its_wait_is_the_shortest_of_its_locks(bench) -> None:
    client = bench.client()
    locks = [client.lock("a", wait=5), client.lock("b", wait=3), client.lock("c")]
    assert MultiLock(locks).wait == 3
    assert MultiLock(locks[2:]).wait is None
    assert MultiLock(locks, wait=None).wait is None


def test_a_name_held_by_this_thread_is_a_self_deadlock(bench) -> None:
    client = bench.client()
    many = client.multilock(["a", "b"])
    with client.lock("b") as outer:
        with pytest.raises(SelfDeadlock), many:
            pass
        assert names_held(bench) == ["b"]
        assert outer.held
    with many as leases:
        for inner in (client.lock("a"), many):
            with pytest.raises(SelfDeadlock), inner:
                pass
        assert leases.held
    assert names_held(bench) == []


def test_reentrant_locks_are_entered_again_and_given_back_once_each(bench) -> None:
    client = bench.client()
    outer, inner = client.lock("a", reentrant=True), client.multilock(["a", "b"], reentrant=True, wait=0)
    with outer as lease:
        with inner as leases:
            assert leases["a"] is lease
        assert names_held(bench) == ["a"]
        held = bench.client().lock("b").acquire()
        with pytest.raises(NotAcquired), inner:
            pass
        assert lease.held
        held.release()
        again = inner.acquire()
        assert again.release()
        assert lease.held
    assert names_held(bench) == []


def test_one_that_is_lost_is_told_once_and_by_leaving(bench, wait_until) -> None:
    client = bench.client()
    told: list[object] = []
    with pytest.raises(LeaseLost, match=r"the lease of b .* broke"), client.multilock(["a", "b", "c"]) as leases:
        leases.on_lost(told.append)
        assert not leases.wait_lost(0)
        for name in "bc":
            client.break_lock(name, token=leases[name].token)
        assert leases.wait_lost(10)
        assert leases["a"].held
        assert not leases.held
        assert leases.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            leases.check()
        wait_until(lambda: told)
    assert told == [leases]
    assert names_held(bench) == []
    leases.on_lost(told.append)
    wait_until(lambda: len(told) == 2)


def test_a_loss_is_a_note_on_the_error_of_the_body(bench) -> None:
    client = bench.client()
    with pytest.raises(ZeroDivisionError) as caught, client.multilock(["a", "b"]) as leases:
        leases["b"]._lose("broken")
        1 / 0  # noqa: B018
    assert "the lease of b" in caught.value.__notes__[0]


def test_one_lost_while_it_stands_in_line_for_the_next_never_begins(bench, wait_until) -> None:
    client = bench.client()
    held = bench.client().lock("b").acquire()
    caught: list[BaseException] = []

    def take() -> None:
        try:
            client.multilock(["a", "b"]).acquire()
        except LeaseLost as lost:
            caught.append(lost)

    thread = threading.Thread(target=take)
    thread.start()
    wait_until(lambda: any(line.waiters for line in bench.store.lines.values()))
    (mine,) = [one for one in client.inspect("a") if one.state == "held"]
    client.break_lock("a", token=mine.token)
    held.release()
    thread.join(20)
    assert "the lease of a" in str(caught[0])
    wait_until(lambda: names_held(bench) == [])


def test_leases_by_hand_end_by_release(bench) -> None:
    leases = bench.client().multilock(["a", "b"]).acquire()
    assert leases.release()
    assert not leases.release()
    assert not leases.wait_lost(0)
    assert "RELEASED" in repr(leases)
    leases = bench.client().multilock(["a", "b"]).acquire()
    bench.clock.turn(100)
    assert not leases.release()


def test_a_silent_engine_is_asked_once(bench) -> None:
    client = bench.client()
    leases = client.multilock(["a", "b", "c"]).acquire()
    bench.link.silent, before = True, bench.link.calls
    assert not leases.release()
    assert bench.link.calls - before <= 2  # and one by the watchdog
    assert {owed.claim.name for owed in client._desk.book.owed.values()} | {
        claim.name for claim in client._desk.dog._dropped
    } == {"a", "b", "c"}


def test_locks_of_several_shapes_and_clients(bench) -> None:
    client = bench.client()
    with Client("memory://") as elsewhere:
        here, there = client.lock("job"), elsewhere.lock("job")
        permit, reader = client.semaphore("pool", 2), client.rwlock("doc").read()
        with MultiLock([there, permit, here, reader]) as leases:
            assert list(leases) == ["job", "pool", "doc"]
            assert leases["job"] is leases.of(there)
            assert leases.of(here) is not leases.of(there)
            assert leases.of(permit).slot == 0
            assert elsewhere.inspect()[0].token == leases.of(there).token
        assert elsewhere.inspect() == []
        busy = elsewhere.lock("job").acquire()
        with pytest.raises(NotAcquired):
            MultiLock([here, there]).acquire(wait=0)
        assert names_held(bench) == []
        busy.release()


def test_one_name_by_two_clients_of_one_engine_is_refused() -> None:
    with Client("memory://one") as one, Client("memory://one") as again, Client("memory://two") as two:
        with pytest.raises(ConfigError, match="wait for itself"):
            MultiLock([one.lock("a"), again.rwlock("a").read()])
        for locks in (
            [one.lock("a"), two.lock("a")],
            [one.lock("a"), again.lock("b")],
            [one.rwlock("a").read(), again.rwlock("a").read()],
            [one.semaphore("a", 2), again.semaphore("a", 2)],
        ):
            MultiLock(locks, wait=0).acquire().release()


def test_the_order_is_by_name_first_and_does_not_show_how_an_engine_is_spelt() -> None:
    one, two = Client("memory://one"), Client("memory://two", namespace="n")
    locks = [two.lock("b"), one.lock("b"), two.lock("a"), one.lock("c")]
    orders = {tuple(map(id, MultiLock(given)._order)) for given in (locks, locks[::-1])}
    assert orders == {tuple(map(id, [locks[2], locks[1], locks[0], locks[3]]))}
    one.close()
    two.close()


def test_it_pickles_as_its_locks() -> None:
    with Client("memory://pickled") as client:
        many = pickle.loads(pickle.dumps(client.multilock(["a", "b"], wait=3)))
        assert (type(many), [lock.name for lock in many.locks], many.wait) == (MultiLock, ["a", "b"], 3)
        assert repr(many) == "<MultiLock a, b wait=3>"
        with many as leases:
            assert leases.held


# ---------------------------------------------------------------- asyncio


def test_async_a_loss_cancels_the_body_once_also_when_two_are_lost() -> None:
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


def test_async_a_loss_while_in_line_ends_the_waiting() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            held = await client.lock("b").acquire()

            async def take() -> None:
                async with client.multilock(["a", "b"]):
                    pytest.fail("it began")

            task = asyncio.create_task(take())
            while len(seen := await client.inspect()) < 3:
                await asyncio.sleep(0.001)
            await client.break_lock("a", token=seen[0].token)
            with pytest.raises(LeaseLost, match="the lease of a"):
                await task
            assert [one.name for one in await client.inspect()] == ["b"]
            await held.release()

    asyncio.run(main())


def test_async_a_cancellation_from_outside_stays_one() -> None:
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


# ------------------------------------------------------------------ Ctrl-C


def test_ctrl_c_between_two_of_them_while_leaving_gives_up_both(bench, wait_until, monkeypatch) -> None:
    client = bench.client()
    pop, popped = Entries.pop, []

    def second_interrupted(self, name, *args):
        popped.append(name)
        if len(popped) == 2:
            raise KeyboardInterrupt
        return pop(self, name, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), client.multilock(["a", "b"]):
        patch.setattr(Entries, "pop", second_interrupted)
    client._desk.dog.stir(-1.0)
    wait_until(lambda: names_held(bench) == [])
    assert not client._desk.entries._entries


def test_ctrl_c_while_rolling_back_is_no_excuse(bench, monkeypatch) -> None:
    client, held = bench.client(), bench.client().lock("b").acquire()
    forget, torn = client._desk.forget, []

    def interrupted(claim) -> None:
        if not torn:
            torn.append(claim)
            raise KeyboardInterrupt
        forget(claim)

    monkeypatch.setattr(client._desk, "forget", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.multilock(["a", "b"], wait=0).acquire()
    assert names_held(bench) == ["b"]
    held.release()


def given_back(bench, expected: list[str]) -> bool:
    return names_held(bench) == expected


@pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["with", "hand", "busy"])
def test_ctrl_c_at_every_place_leaves_nothing(bench, wait_until, ctrl_c, how) -> None:
    client = bench.client(ttl=600)
    many = client.multilock(["a", "b"], wait=0)
    held = bench.client().lock("b").acquire() if how == "busy" else None
    with many if how != "busy" else client.lock("a"):  # everything imported, every thread started
        pass

    def work() -> None:
        if how == "hand":
            many.acquire().release()
        elif how == "with":
            with many as leases:
                leases.check()
        else:
            with pytest.raises(NotAcquired), many:
                pass

    number = 0
    while ctrl_c(number := number + 1, work, "many_blocking.py", "multilock.py"):
        expected = ["b"] if how == "busy" else []
        if names_held(bench) != expected:  # to be released by the watchdog, or by whoever collects the lease
            gc.collect()
            client._desk.dog.stir(-1.0)
            bench.clock.at += 0.001
        try:
            wait_until(partial(given_back, bench, expected), 5)
        except AssertionError:
            pytest.fail(f"left after Ctrl-C at place {number}: {names_held(bench)}")
    assert number > 60
    assert not client._desk.entries._entries
    assert held is None or held.held
