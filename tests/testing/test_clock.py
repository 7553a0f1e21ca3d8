"""The clock that a test moves: it stands still, goes from instant to instant, and loses no instant on the way."""

import asyncio
import threading
import time

import pytest

import leasehold
from leasehold import LeaseState
from leasehold.engines import memory
from leasehold.testing import Clock, clock, expire, lose
from leasehold.testing.clock import ClockThreads


def until(what, seconds=5.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def beside(fn):
    """Run it in a thread; what it returns or raises is in the list."""
    outcome = []

    def run():
        try:
            outcome.append(fn())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def waiting(client):
    return [holding.name for holding in client.inspect() if holding.state == "waiting"]


# ------------------------------------------------------------------ standing still


def test_it_stands_still_whatever_the_machine_does(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", ttl=0.1).acquire()
    began, left = leasehold_clock.now(), lease.remaining
    time.sleep(0.15)  # longer than the ttl: this is what must not count
    assert leasehold_clock.now() == began
    assert lease.remaining == left == pytest.approx(0.098)
    lease.release()


def test_it_moves_by_exactly_what_it_is_told(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", ttl=30).acquire()
    began, wall = leasehold_clock.now(), leasehold_clock.wall()
    leasehold_clock.advance(5)
    assert leasehold_clock.now() == began + 5
    assert leasehold_clock.wall() == pytest.approx(wall + 5)
    assert lease.remaining == pytest.approx(30 - 0.3 - 5)
    lease.release()


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_it_does_not_go_back(leasehold_clock, seconds):
    with pytest.raises(ValueError, match="forward"):
        leasehold_clock.advance(seconds)


# -------------------------------------------------------------------- going along


def story():
    """What happens to a lease of 30 s in ten minutes, with the instants."""
    now, events = Clock(), []

    def note(event):
        events.append((event.kind, now.now()))

    client = leasehold.Client("memory://", engine=memory.open, runtime=ClockThreads(now), on_event=note)
    with client, client.lock("job", ttl=30):
        now.advance(600)
    return events


def test_the_same_test_sees_the_same_instants():
    first = story()
    assert first == story()
    assert [kind for kind, _ in first[:2]] == ["attempted", "granted"]
    renewals = [at for kind, at in first if kind == "renewed"]
    assert 60 <= len(renewals) <= 80
    assert renewals == sorted(set(renewals))


def test_a_healthy_lease_outlives_any_time(leasehold_client, leasehold_clock):
    with leasehold_client.lock("job", ttl=30) as lease:
        for _ in range(3):
            leasehold_clock.advance(3600)
            assert lease.state is LeaseState.HELD


def test_what_is_due_is_done_when_advance_returns(leasehold_client, leasehold_clock):
    told = []
    lease = leasehold_client.lock("job", max_hold=60).acquire()
    lease.on_lost(lambda lost: told.append((lost.lost_reason, leasehold_clock.now())))
    began = leasehold_clock.now()
    leasehold_clock.advance(59.9)
    assert lease.held
    assert told == []
    leasehold_clock.advance(100)
    assert told == [("max_hold", began + 60)], "told at its own instant, not at the end"
    lease.release()


def test_a_callback_may_move_the_clock_itself(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", max_hold=60).acquire()
    began = leasehold_clock.now()
    lease.on_lost(lambda _: leasehold_clock.advance(40))
    leasehold_clock.advance(61)
    until(lambda: leasehold_clock.now() >= began + 100)
    lease.release()


def test_a_callback_that_blocks_is_not_waited_for_for_ever(leasehold_client, leasehold_clock, monkeypatch):
    monkeypatch.setattr(clock, "_PATIENCE", 0.05)
    go = threading.Event()
    lease = leasehold_client.lock("job").acquire()
    lease.on_lost(lambda _: go.wait(30))
    lose(lease)
    assert not lease.held
    go.set()


# ------------------------------------------------------------------------ waiting


def test_it_runs_while_a_call_waits(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    before, began = leasehold_clock.now(), time.monotonic()
    with pytest.raises(leasehold.NotAcquired):
        leasehold_client.lock("job", wait=0.2).acquire()
    assert leasehold_clock.now() - before >= 0.2
    assert time.monotonic() - began >= 0.19
    after = leasehold_clock.now()
    time.sleep(0.02)
    assert leasehold_clock.now() == after, "and stands again"
    lease.release()


def test_leases_are_renewed_while_a_call_waits(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("short", ttl=0.3).acquire()
    held = leasehold_client.lock("job").acquire()
    with pytest.raises(leasehold.NotAcquired):
        leasehold_client.lock("job", wait=0.8).acquire()
    assert lease.held
    lease.release()
    held.release()


def test_a_release_wakes_who_waits(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    thread, outcome = beside(lambda: leasehold_client.lock("job", wait=60).acquire().release())
    until(lambda: waiting(leasehold_client))
    lease.release()
    thread.join(5)
    assert outcome == [True]


def test_advance_ends_the_wait_of_another_thread(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    thread, outcome = beside(lambda: leasehold_client.lock("job", wait=60).acquire())
    until(lambda: waiting(leasehold_client))
    leasehold_clock.advance(61)
    thread.join(5)
    assert isinstance(outcome[0], leasehold.NotAcquired)
    assert lease.held
    lease.release()


def test_skipping_a_wait_in_vain(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    before, began = leasehold_clock.now(), time.monotonic()
    with leasehold_clock.skipping(), pytest.raises(leasehold.NotAcquired):
        leasehold_client.lock("job", wait=3600).acquire()
    assert leasehold_clock.now() - before == pytest.approx(3600, abs=1)
    assert time.monotonic() - began < 60
    assert lease.held, "renewed all the while"
    lease.release()


def test_skipping_stops_where_the_wait_is_over(leasehold_client, leasehold_clock):
    with leasehold_client.lock("job", min_hold=60):
        pass
    before = leasehold_clock.now()
    with leasehold_clock.skipping(), leasehold_client.lock("job", wait=600):
        assert leasehold_clock.now() - before == pytest.approx(60, abs=0.1)


def test_waiting_to_be_told(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", max_hold=60).acquire()
    assert not lease.wait_lost(0.05)
    with leasehold_clock.skipping():
        assert lease.wait_lost(600)
    lease.release()


# -------------------------------------------------------------------- expire, lose


def test_expire_ends_one_lease_as_a_stall_would(leasehold_client, leasehold_clock):
    told = []
    lease, other = leasehold_client.lock("job").acquire(), leasehold_client.lock("other").acquire()
    lease.on_lost(told.append)
    before = leasehold_clock.now()
    expire(lease)
    assert (lease.state, lease.lost_reason) == (LeaseState.LOST, "stalled")
    assert told == [lease]
    assert leasehold_clock.now() == before
    assert other.state is LeaseState.HELD
    second = leasehold_client.lock("job").try_acquire()
    assert second is not None
    assert second.token > lease.token
    assert not lease.release()
    assert second.held
    for one in (second, other):
        assert one.release()


def test_expire_after_a_failed_renewal_and_twice(leasehold_client):
    lease = leasehold_client.lock("job").acquire()
    lease.renew()
    expire(lease)
    expire(lease)
    assert lease.lost_reason == "stalled"


def test_expire_leaves_the_delay(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", delay=10).acquire()
    expire(lease)
    assert leasehold_client.lock("job").try_acquire() is None
    leasehold_clock.advance(10.1)
    with leasehold_client.lock("job", wait=0):
        pass


def test_expire_lets_the_next_in_line_go(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    thread, outcome = beside(lambda: leasehold_client.lock("job", wait=60).acquire())
    until(lambda: waiting(leasehold_client))
    before = leasehold_clock.now()
    expire(lease)
    thread.join(5)
    (second,) = outcome
    assert second.token > lease.token
    assert leasehold_clock.now() - before < 60
    second.release()


@pytest.mark.parametrize("reason", ["broken", "lapsed", "unknown"])
def test_a_lease_lost_at_the_engine_is_free_there(leasehold_client, reason):
    told = []
    lease = leasehold_client.lock("job", min_hold=60).acquire()
    lease.on_lost(lambda lost: told.append(lost.lost_reason))
    lose(lease, reason)
    assert told == [reason]
    with leasehold_client.lock("job", wait=0):
        assert not lease.release()


@pytest.mark.parametrize("reason", ["unreachable", "stalled", "max_hold"])
def test_a_lease_lost_to_its_holder_alone_stands_at_the_engine(leasehold_client, reason):
    lease = leasehold_client.lock("job").acquire()
    lose(lease, reason)
    assert lease.lost_reason == reason
    assert leasehold_client.lock("job").locked()
    lease.release()
    assert not leasehold_client.lock("job").locked()


def test_released_is_no_way_to_lose_a_lease(leasehold_client):
    with leasehold_client.lock("job") as lease, pytest.raises(ValueError, match="release"):
        lose(lease, "released")


def test_only_leases_of_the_fixtures_can_be_lost():
    with leasehold.Client("memory://") as client, client.lock("job") as lease:
        for call in (expire, lose):
            with pytest.raises(TypeError, match="leasehold_client"):
                call(lease)


# ------------------------------------------------------------------------ asyncio


def test_asyncio_goes_by_the_same_clock(leasehold_client, leasehold_async_client, leasehold_clock):
    async def work():
        lease = await leasehold_async_client.lock("job", ttl=30).acquire()
        leasehold_clock.advance(3600)
        assert lease.state is LeaseState.HELD
        assert leasehold_client.lock("job").try_acquire() is None
        before = leasehold_clock.now()
        with pytest.raises(leasehold.NotAcquired):
            await leasehold_async_client.lock("job", wait=0.1).acquire()
        assert leasehold_clock.now() - before >= 0.1
        await lease.release()

    asyncio.run(work())


@pytest.mark.parametrize("end", [expire, lose])
def test_the_body_is_cancelled(leasehold_async_client, end):
    async def work():
        async with leasehold_async_client.lock("job") as lease:
            end(lease)
            await asyncio.sleep(60)

    with pytest.raises(leasehold.LeaseLost):
        asyncio.run(work())


def test_advance_inside_the_loop_ends_the_wait_of_a_task(leasehold_async_client, leasehold_clock):
    async def work():
        lease = await leasehold_async_client.lock("job").acquire()
        task = asyncio.create_task(leasehold_async_client.lock("job", wait=60).acquire())
        while not [one for one in await leasehold_async_client.inspect() if one.state == "waiting"]:
            await asyncio.sleep(0.005)
        began = time.monotonic()
        leasehold_clock.advance(61)
        with pytest.raises(leasehold.NotAcquired):
            await task
        assert time.monotonic() - began < 4, "not held up by a task that could not run meanwhile"
        await lease.release()

    asyncio.run(work())


def test_skipping_inside_the_loop(leasehold_async_client, leasehold_clock):
    async def work():
        async with leasehold_async_client.lock("job", min_hold=60):
            pass
        before = leasehold_clock.now()
        with leasehold_clock.skipping():
            async with leasehold_async_client.lock("job", wait=600):
                assert leasehold_clock.now() - before == pytest.approx(60, abs=0.1)

    asyncio.run(work())
