"""The clock that a test moves: it stands still, advances from event to event, and skips none."""

import asyncio
import threading
import time

import pytest

import leasehold
from leasehold import LeaseState
from leasehold.engines import memory
from leasehold.testing import Clock, expire, lose
from leasehold.testing.clock import ClockThreads
from tests.support import probe, probe_runtime
from tests.support.timing import check_elapsed


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def start_in_thread(fn):
    """Run a function in a thread. The list gets what it returns or raises."""
    outcome = []

    def run():
        try:
            outcome.append(fn())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def queued_names(client):
    return [holding.name for holding in client.inspect() if holding.state == "waiting"]


# ------------------------------------------------------------------ standing still


def test_clock_stands_still_while_real_time_passes(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", ttl=0.1).acquire()
    began, left = leasehold_clock.now(), lease.remaining
    time.sleep(0.15)  # pause: longer than the ttl; real time must not count
    assert leasehold_clock.now() == began
    assert lease.remaining == left == pytest.approx(0.098)
    lease.release()


def test_clock_advances_by_exactly_the_given_seconds(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", ttl=30).acquire()
    began, wall = leasehold_clock.now(), leasehold_clock.wall()
    leasehold_clock.advance(5)
    assert leasehold_clock.now() == began + 5
    assert leasehold_clock.wall() == pytest.approx(wall + 5)
    assert lease.remaining == pytest.approx(30 - 0.3 - 5)
    lease.release()


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_clock_refuses_to_go_backwards(leasehold_clock, seconds):
    with pytest.raises(ValueError, match="0 or more"):
        leasehold_clock.advance(seconds)


# ---------------------------------------------------------------------- advancing


def record_lease_events():
    """Advance ten minutes with a lease of 30 s, and return its events with their times."""
    manual_clock, events = Clock(), []

    def record_event(event):
        events.append((event.kind, manual_clock.now()))

    client = leasehold.Client(
        "memory://", engine=memory.open, runtime=ClockThreads(manual_clock), on_event=record_event
    )
    with client, client.lock("job", ttl=30):
        manual_clock.advance(600)
    return events


def test_repeated_runs_see_the_same_event_times():
    first = record_lease_events()
    assert first == record_lease_events()
    assert [kind for kind, _ in first[:2]] == ["attempted", "granted"]
    renewals = [at for kind, at in first if kind == "renewed"]
    assert 60 <= len(renewals) <= 80
    assert renewals == sorted(set(renewals))


def test_renewed_lease_stays_held_when_clock_advances(leasehold_client, leasehold_clock):
    with leasehold_client.lock("job", ttl=30) as lease:
        for _ in range(3):
            leasehold_clock.advance(600)
            assert lease.state is LeaseState.HELD


def test_callbacks_that_are_due_have_run_when_advance_returns(leasehold_client, leasehold_clock):
    notified = []
    lease = leasehold_client.lock("job", max_hold=60).acquire()
    lease.on_lost(lambda lost: notified.append((lost.lost_reason, leasehold_clock.now())))
    began = leasehold_clock.now()
    leasehold_clock.advance(59.9)
    assert lease.held
    assert notified == []
    leasehold_clock.advance(100)
    assert notified == [("max_hold", began + 60)], "the callback must run when max_hold ends, not later"
    lease.release()


def test_callback_may_advance_the_clock(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", max_hold=60).acquire()
    began = leasehold_clock.now()
    lease.on_lost(lambda _: leasehold_clock.advance(40))
    leasehold_clock.advance(61)
    wait_until(lambda: leasehold_clock.now() >= began + 100)
    lease.release()


def test_blocking_callback_is_waited_for_only_briefly(leasehold_client, leasehold_clock, monkeypatch):
    monkeypatch.setattr(*probe_runtime.CALLBACK_TIMEOUT, 0.05)
    go = threading.Event()
    lease = leasehold_client.lock("job").acquire()
    lease.on_lost(lambda _: go.wait(30))
    lose(lease)
    assert not lease.held
    go.set()


# ------------------------------------------------------------------------ waiting


def test_clock_runs_in_real_time_while_a_call_waits(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    before, began = leasehold_clock.now(), time.monotonic()
    with pytest.raises(leasehold.NotAcquired):
        leasehold_client.lock("job", wait=0.2).acquire()
    assert leasehold_clock.now() - before >= 0.2
    assert time.monotonic() - began >= 0.19
    after = leasehold_clock.now()
    time.sleep(0.02)  # pause: real time must not count
    assert leasehold_clock.now() == after, "the clock must stand still again"
    lease.release()


def test_leases_are_renewed_while_a_call_waits(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("short", ttl=6).acquire()
    held = leasehold_client.lock("job").acquire()
    before = probe.trusted_until(lease)
    thread, outcome = start_in_thread(lambda: leasehold_client.lock("job", wait=60).acquire().release())
    wait_until(lambda: probe.trusted_until(lease) > before)
    assert lease.held
    lease.release()
    held.release()
    thread.join(60)
    assert outcome == [True]


def test_release_wakes_waiter_in_another_thread(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    thread, outcome = start_in_thread(lambda: leasehold_client.lock("job", wait=60).acquire().release())
    wait_until(lambda: queued_names(leasehold_client))
    lease.release()
    thread.join(60)
    assert outcome == [True]


def test_advance_ends_the_wait_of_another_thread(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    thread, outcome = start_in_thread(lambda: leasehold_client.lock("job", wait=60).acquire())
    wait_until(lambda: queued_names(leasehold_client))
    leasehold_clock.advance(61)
    thread.join(60)
    assert isinstance(outcome[0], leasehold.NotAcquired)
    assert lease.held
    lease.release()


def test_skipping_ends_a_wait_that_times_out(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    before, began = leasehold_clock.now(), time.monotonic()
    with leasehold_clock.skipping(), pytest.raises(leasehold.NotAcquired):
        leasehold_client.lock("job", wait=300).acquire()
    assert leasehold_clock.now() - before == pytest.approx(300, abs=1)
    check_elapsed(began, 150)
    assert lease.held, "the watchdog must have renewed it all the time"
    lease.release()


def test_skipping_stops_when_the_wait_is_over(leasehold_client, leasehold_clock):
    with leasehold_client.lock("job", min_hold=60):
        pass
    before = leasehold_clock.now()
    with leasehold_clock.skipping(), leasehold_client.lock("job", wait=600):
        assert leasehold_clock.now() - before == pytest.approx(60, abs=0.1)


def test_wait_lost_times_out_or_returns_at_max_hold(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", max_hold=60).acquire()
    assert not lease.wait_lost(0.05)
    with leasehold_clock.skipping():
        assert lease.wait_lost(600)
    lease.release()


# -------------------------------------------------------------------- expire, lose


def test_expire_loses_only_that_lease_as_stalled(leasehold_client, leasehold_clock):
    notified = []
    lease, other = leasehold_client.lock("job").acquire(), leasehold_client.lock("other").acquire()
    lease.on_lost(notified.append)
    before = leasehold_clock.now()
    expire(lease)
    assert (lease.state, lease.lost_reason) == (LeaseState.LOST, "stalled")
    assert notified == [lease]
    assert leasehold_clock.now() == before
    assert other.state is LeaseState.HELD
    second = leasehold_client.lock("job").try_acquire()
    assert second is not None
    assert second.token > lease.token
    assert not lease.release()
    assert second.held
    for remaining_lease in (second, other):
        assert remaining_lease.release()


def test_expire_after_renew_and_repeated_reports_stalled(leasehold_client):
    lease = leasehold_client.lock("job").acquire()
    lease.renew()
    expire(lease)
    expire(lease)
    assert lease.lost_reason == "stalled"


def test_expire_keeps_name_busy_for_its_delay(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job", delay=10).acquire()
    expire(lease)
    assert leasehold_client.lock("job").try_acquire() is None
    leasehold_clock.advance(10.1)
    with leasehold_client.lock("job", wait=0):
        pass


def test_expire_lets_the_next_waiter_acquire(leasehold_client, leasehold_clock):
    lease = leasehold_client.lock("job").acquire()
    thread, outcome = start_in_thread(lambda: leasehold_client.lock("job", wait=60).acquire())
    wait_until(lambda: queued_names(leasehold_client))
    before = leasehold_clock.now()
    expire(lease)
    thread.join(60)
    (second,) = outcome
    assert second.token > lease.token
    assert leasehold_clock.now() - before < 60
    second.release()


@pytest.mark.parametrize("reason", ["broken", "expired", "unknown"])
def test_lease_lost_at_engine_frees_the_name(leasehold_client, reason):
    notified = []
    lease = leasehold_client.lock("job", min_hold=60).acquire()
    lease.on_lost(lambda lost: notified.append(lost.lost_reason))
    lose(lease, reason)
    assert notified == [reason]
    with leasehold_client.lock("job", wait=0):
        assert not lease.release()


@pytest.mark.parametrize("reason", ["unreachable", "stalled", "max_hold"])
def test_lease_lost_only_locally_stays_held_at_engine(leasehold_client, reason):
    lease = leasehold_client.lock("job").acquire()
    lose(lease, reason)
    assert lease.lost_reason == reason
    assert leasehold_client.lock("job").locked()
    lease.release()
    assert not leasehold_client.lock("job").locked()


def test_lose_refuses_released_as_reason(leasehold_client):
    with leasehold_client.lock("job") as lease, pytest.raises(ValueError, match="release"):
        lose(lease, "released")


def test_expire_and_lose_refuse_leases_of_other_clients():
    with leasehold.Client("memory://") as client, client.lock("job") as lease:
        for call in (expire, lose):
            with pytest.raises(TypeError, match="leasehold_client"):
                call(lease)


# ------------------------------------------------------------------------ asyncio


def test_async_client_uses_the_same_clock(leasehold_client, leasehold_async_client, leasehold_clock):
    async def work():
        lease = await leasehold_async_client.lock("job", ttl=30).acquire()
        leasehold_clock.advance(600)
        assert lease.state is LeaseState.HELD
        assert leasehold_client.lock("job").try_acquire() is None
        before = leasehold_clock.now()
        with pytest.raises(leasehold.NotAcquired):
            await leasehold_async_client.lock("job", wait=0.1).acquire()
        assert leasehold_clock.now() - before >= 0.1
        await lease.release()

    asyncio.run(work())


@pytest.mark.parametrize("end", [expire, lose])
def test_async_body_is_cancelled_when_lease_is_lost(leasehold_async_client, end):
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
        async with asyncio.timeout(30):
            while not [holding for holding in await leasehold_async_client.inspect() if holding.state == "waiting"]:
                await asyncio.sleep(0.005)
        began = time.monotonic()
        leasehold_clock.advance(61)
        with pytest.raises(leasehold.NotAcquired):
            await task
        check_elapsed(began, 4, "a task that could not run must not delay the wait")
        await lease.release()

    asyncio.run(work())


def test_skipping_works_inside_the_event_loop(leasehold_async_client, leasehold_clock):
    async def work():
        async with leasehold_async_client.lock("job", min_hold=60):
            pass
        before = leasehold_clock.now()
        with leasehold_clock.skipping():
            async with leasehold_async_client.lock("job", wait=600):
                assert leasehold_clock.now() - before == pytest.approx(60, abs=0.1)

    asyncio.run(work())
