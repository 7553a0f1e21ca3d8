"""Several locks as one: all or nothing, in one order, before one deadline, with one word of loss."""

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


def test_all_of_them_are_held_in_the_body_and_none_after(bench) -> None:
    with bench.client().multilock(["b", "a", "c"]) as leases:
        assert bench.names() == ["a", "b", "c"]
        assert list(leases) == ["b", "a", "c"]
        assert len(leases) == 3
        assert leases["a"].token < leases["b"].token < leases["c"].token, "sorted, whatever order was given"
        assert leases.held
        assert 0 < leases.remaining <= 30
        assert leases.lost_reason is None
        leases.check()
        with pytest.raises(KeyError):
            leases["d"]
    assert bench.names() == []
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
    assert bench.names() == ["c"], "nothing is kept for min_hold: nobody worked under it"
    assert many.try_acquire() is None
    with pytest.raises(NotAcquired), many:
        pass
    assert bench.names() == ["c"]
    assert held.release()
    leases = many.try_acquire()
    assert leases is not None
    assert leases.release()
    assert bench.names() == ["a", "b", "c"], "cooling now"


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
        assert bench.names() == ["b"]
        assert outer.held
    with many as leases:
        for inner in (client.lock("a"), many):
            with pytest.raises(SelfDeadlock), inner:
                pass
        assert leases.held
    assert bench.names() == []


def test_reentrant_locks_are_entered_again_and_given_back_once_each(bench) -> None:
    client = bench.client()
    outer, inner = client.lock("a", reentrant=True), client.multilock(["a", "b"], reentrant=True, wait=0)
    with outer as lease:
        with inner as leases:
            assert leases["a"] is lease
        assert bench.names() == ["a"]
        held = bench.client().lock("b").acquire()
        with pytest.raises(NotAcquired), inner:
            pass
        assert lease.held
        held.release()
        again = inner.acquire()
        assert again.release()
        assert lease.held
    assert bench.names() == []


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
    assert bench.names() == []
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
    wait_until(lambda: bench.names() == [])


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
        assert bench.names() == []
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
