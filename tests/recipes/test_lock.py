"""Locks, read and write locks, semaphores: what `with` and `acquire` do, in the shapes of threading too."""

from __future__ import annotations

import threading

import pytest

from leasehold import LeaseLost, Mismatch, NotAcquired, SelfDeadlock

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_with_holds_and_releases(bench, aside) -> None:
    lock = bench.client().lock("a")
    with lock as lease:
        assert lock.locked()
        assert isinstance(aside(lambda: lock.acquire(wait=0)), NotAcquired)
    assert lease.state == "RELEASED"
    assert not lock.locked()
    assert not bench.store.lines


def test_with_never_runs_its_body_unlocked(bench) -> None:
    held = bench.client().lock("a").acquire()
    with pytest.raises(NotAcquired), bench.client().lock("a", wait=0):
        pytest.fail("ran unlocked")
    held.release()


def test_leaving_with_a_lost_lease_raises(bench) -> None:
    client = bench.client()
    with pytest.raises(LeaseLost) as lost, client.lock("a", ttl=30) as lease:
        bench.clock.at += 31
    assert (lost.value.reason, lost.value.token) == ("stalled", lease.token)
    assert not bench.store.lines  # it was given back all the same


def test_the_bodys_own_error_comes_first_and_notes_the_loss(bench) -> None:
    with pytest.raises(KeyError) as error, bench.client().lock("a") as lease:
        bench.client().break_lock("a", token=lease.token)
        raise KeyError("mine")
    assert "is lost: an operator broke it" in error.value.__notes__[0]


def test_a_lease_released_inside_with_is_released_once(bench) -> None:
    with bench.client().lock("a") as lease:
        lease.release()
    assert lease.state == "RELEASED"


def test_check_inside_with_is_not_noted_twice(bench) -> None:
    with pytest.raises(LeaseLost) as lost, bench.client().lock("a", ttl=30) as lease:
        bench.clock.at += 31
        lease.check()
    assert not hasattr(lost.value, "__notes__")


def test_a_busy_name_says_who_holds_it(bench) -> None:
    held = bench.client(holder="web-3").lock("orders/42", ttl=30, purpose="nightly").acquire()
    with pytest.raises(NotAcquired) as busy:
        bench.client().lock("orders/42").acquire(wait=0)
    error = busy.value
    assert isinstance(error, TimeoutError)
    assert (error.name, error.holder, error.purpose, error.left, error.place) == (
        "orders/42",
        "web-3",
        "nightly",
        30.0,
        None,
    )
    assert error.pid
    assert error.host
    assert str(error).startswith("orders/42 is held by web-3 (pid ")
    assert "30.0 s left" in str(error)
    held.release()


def test_try_acquire(bench) -> None:
    first, second = bench.client().lock("a"), bench.client().lock("a")
    lease = first.try_acquire()
    assert lease is not None
    assert second.try_acquire() is None
    lease.release()
    assert second.try_acquire() is not None


def test_a_waiter_is_woken_by_the_release(bench, wait_until) -> None:
    lease = bench.client().lock("a").acquire()
    other = bench.client()
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(other.lock("a").acquire(wait=60)))
    waiter.start()
    wait_until(lambda: [holding.state for holding in other.inspect()] == ["held", "waiting"])
    lease.release()
    waiter.join(10)
    assert got
    assert not other._desk.book.waiting


def test_a_waiter_gives_up_in_time_and_leaves_the_line(bench, wait_until, aside) -> None:
    held = bench.client().lock("a", ttl=100).acquire()
    other = bench.client()
    out: list[object] = []
    waiter = threading.Thread(target=lambda: out.append(aside(lambda: other.lock("a", wait=7).acquire())))
    waiter.start()
    wait_until(lambda: other._desk.book.waiting)
    bench.clock.at += 8
    next(iter(other._desk.book.waiting.values())).signal.set()
    wait_until(lambda: out or not [w.signal.set() for w in other._desk.book.waiting.values()])
    waiter.join(10)
    assert isinstance(out[0], NotAcquired)
    assert "gave up after 8.0 s at place 1 in line" in str(out[0])
    assert held.held
    assert len(bench.client().inspect()) == 1


def test_taking_it_again_in_the_same_thread_is_refused_at_once(bench) -> None:
    client = bench.client()
    with client.lock("a") as lease:
        with pytest.raises(SelfDeadlock, match=f"already held by this thread or task .token {lease.token}"):
            client.lock("a").acquire()
        with pytest.raises(RuntimeError), client.lock("a", wait=60):
            pass
        with pytest.raises(SelfDeadlock):
            client.rwlock("a").read().acquire()
        assert client.lock("a").try_acquire() is None  # trying once can never hang


def test_a_lease_taken_by_acquire_may_move_and_is_not_counted(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    with pytest.raises(NotAcquired):
        client.lock("a").acquire(wait=0.01 if bench.clock.turn(0) else 0)
    lease.release()


def test_a_lost_lease_is_no_self_deadlock(bench) -> None:
    client = bench.client()
    with pytest.raises(LeaseLost), client.lock("a", ttl=30) as old:
        bench.clock.at += 31
        with client.lock("a") as new:
            assert new.token > old.token


def test_reentrant(bench, aside) -> None:
    client = bench.client()
    lock = client.lock("a", reentrant=True)
    with lock as outer:
        with lock as inner, client.lock("a", reentrant=True) as third:
            assert inner is third is outer
        assert outer.held
        assert isinstance(aside(lambda: lock.acquire(wait=0)), NotAcquired)
    assert outer.state == "RELEASED"


def test_reentrant_by_acquire(bench) -> None:
    lock = bench.client().lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    assert inner is outer
    assert inner.release()
    assert outer.held
    assert outer.release()
    assert outer.state == "RELEASED"
    assert not lock._desk.entries._entries


def test_a_write_lock_contains_its_read_lock_when_reentrant(bench) -> None:
    both = bench.client().rwlock("a")
    with both.write() as write, both.read(reentrant=True) as read:
        assert read is write


def test_readers_share_and_writers_do_not(bench) -> None:
    one, two = bench.client().rwlock("a"), bench.client().rwlock("a")
    with one.read(), two.read():
        with pytest.raises(NotAcquired):
            bench.client().rwlock("a").write(wait=0).acquire()
        assert not two.read().locked()
        assert two.write().locked()
    with one.write():
        assert two.read().locked()


def test_reading_again_is_fine_until_a_writer_stands_in_line(bench, wait_until) -> None:
    client, other = bench.client(), bench.client()
    with client.rwlock("a").read():
        with client.rwlock("a").read():
            pass
        writer = threading.Thread(target=lambda: other.rwlock("a").write().acquire().release())
        writer.start()
        wait_until(lambda: "waiting" in [holding.state for holding in other.inspect()])
        with pytest.raises(SelfDeadlock, match="a writer stands in line between"):
            client.rwlock("a").read().acquire()
    writer.join(10)


def test_a_semaphore_may_be_taken_again_and_numbers_its_permits(bench) -> None:
    permits = bench.client().semaphore("s", 2)
    with permits as one, permits as two:
        assert {one.slot, two.slot} == {0, 1}
        assert permits.locked()
        with pytest.raises(NotAcquired):
            permits.acquire(wait=0)
    assert not permits.locked()


def test_kinds_do_not_mix(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    with pytest.raises(Mismatch, match="a is in use as a lock, this call wants a semaphore of 2"):
        client.semaphore("a", 2).acquire()
    lease.release()
    with client.semaphore("a", 2), pytest.raises(Mismatch, match="semaphore of 3"):
        client.semaphore("a", 3).acquire()


def test_min_hold_and_delay(bench) -> None:
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


def test_the_shape_of_threading_lock(bench) -> None:
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


def test_the_shape_of_threading_rlock(bench) -> None:
    lock = bench.client().lock("a", reentrant=True).as_threading()
    with lock, lock:
        assert lock.locked()
    assert not lock.locked()


def test_a_with_left_in_another_thread_still_releases(bench, aside) -> None:
    lock = bench.client().lock("a")
    lease = lock.__enter__()
    assert aside(lambda: lock.__exit__(None, None, None)) is None
    assert lease.state == "RELEASED"


def test_a_with_left_in_another_thread_is_refused_when_it_cannot_be_told_apart(bench, aside) -> None:
    permits = bench.client().semaphore("a", 5)
    inside, enough = threading.Barrier(3), threading.Event()

    def enter() -> None:
        permits.__enter__()
        inside.wait(10)
        enough.wait(10)  # a thread that has ended may lend its identity to the next

    for _ in range(2):
        threading.Thread(target=enter).start()
    inside.wait(10)
    error = aside(lambda: permits.__exit__(None, None, None))
    enough.set()
    assert isinstance(error, RuntimeError)
    assert "left in another thread" in str(error)


def test_a_late_release_of_a_threading_lock_frees_no_successors_lease(bench, aside) -> None:
    lock = bench.client().lock("a", ttl=30).as_threading()
    lock.acquire()
    bench.clock.at += 31
    assert aside(lock.acquire)
    theirs = lock.lease
    lock.release()
    assert theirs is not None
    assert theirs.held
    assert aside(lock.release) is None  # by a thread that took nothing: what is left
    assert not theirs.held
