"""The four states, and every way a lease ends."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import warnings

import pytest

from leasehold import Client, ConfigError, Lease, LeaseLost, LeaseState, NotAcquired, Unavailable

# Leases here are often still held when a test ends, and closed with their client.
pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_a_lease_says_what_it_is(bench) -> None:
    lease = bench.client(holder="web-3").lock("orders/42", ttl=30).acquire()
    assert (lease.name, lease.holder, lease.ttl, lease.slot) == ("orders/42", "web-3", 30, None)
    assert lease.state is LeaseState.HELD == "HELD"
    assert lease.held
    assert lease.remaining == pytest.approx(29.7)
    assert len(lease.fingerprint) == 16
    assert lease.lost_reason is None
    lease.check()


def test_nothing_shown_holds_the_secret(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    secret = lease._claim.id
    shown = [
        repr(lease),
        repr(lease._claim),
        str(lease._claim),
        repr(client.inspect()),
        repr(client),
        repr(client.lock("a")),
    ]
    with pytest.raises(NotAcquired) as busy:
        bench.client().lock("a").acquire(wait=0)
    shown.append(str(busy.value) + repr(busy.value.__dict__))
    assert not [text for text in shown if secret in text or lease._claim.mark in text]


def test_renewal_keeps_it_and_its_token(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    for _ in range(6):
        asked = lease._asked
        bench.clock.turn(10)
        wait_until(lambda asked=asked: lease._asked > asked)
    assert lease.state == "HELD"
    assert bench.clock.at == 1060


def test_it_is_at_risk_once_a_renewal_failed_and_held_again_once_one_succeeds(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.link.silent = True
    bench.clock.turn(10)
    wait_until(lambda: lease.state == "AT_RISK")
    assert lease.held
    lease.check()
    bench.link.silent = False
    bench.clock.turn(4)
    wait_until(lambda: lease.state == "HELD")


def test_it_is_at_risk_as_soon_as_the_engine_loses_its_connection(bench, wait_until) -> None:
    events = []
    client = bench.client(on_event=lambda event: events.append(event.kind))
    lease, over = client.lock("a", ttl=30).acquire(), client.lock("b", ttl=30).acquire()
    over.release()
    bench.link.silent = True
    for _ in range(3):
        client._desk.book.doubt("the connection broke")
    assert (lease.state, lease.held, over.state) == (LeaseState.AT_RISK, True, LeaseState.RELEASED)
    wait_until(lambda: "renew_failed" in events)  # it is renewed at once, not when that would have been due
    assert events.count("at_risk") == 1
    bench.link.silent = False
    client._desk.book.doubt("again")
    bench.clock.turn(5)
    wait_until(lambda: lease.state is LeaseState.HELD)


def test_it_is_at_risk_if_the_connection_was_lost_while_it_was_granted(bench, wait_until) -> None:
    client, call = bench.client(), bench.link.call

    def granted_and_cut_off(verb, args, deadline):
        reply = call(verb, args, deadline)
        client._desk.book.doubt("the connection broke")
        bench.link.call, bench.link.silent = call, True
        return reply

    bench.link.call = granted_and_cut_off
    lease = client.lock("a", ttl=30).acquire()
    assert (lease.state, lease.held) == (LeaseState.AT_RISK, True)
    bench.link.silent = False
    bench.clock.turn(5)
    wait_until(lambda: lease.state is LeaseState.HELD)  # renewed at once
    assert client.lock("b").acquire().state is LeaseState.HELD


def test_a_silent_engine_loses_it_at_the_local_deadline_and_not_before(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    told: list[str | None] = []
    lease.on_lost(lambda lease: told.append(lease.lost_reason))
    bench.link.silent = True
    bench.clock.turn(10)
    wait_until(lambda: lease.state == "AT_RISK")
    bench.clock.turn(19.6)
    assert lease.held
    bench.clock.turn(0.11)
    assert (lease.state, lease.remaining, lease.lost_reason) == ("LOST", 0.0, "unreachable")
    with pytest.raises(LeaseLost, match=r"a \(token \d+\) is lost: the engine did not answer"):
        lease.check()
    wait_until(lambda: told == ["unreachable"])


def test_no_renewal_tried_in_time_is_told_as_stalled(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.clock.at += 31  # the whole process stood still: no thread was woken
    assert (lease.state, lease.lost_reason) == ("LOST", "stalled")


def test_it_is_overdue_at_two_thirds(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.clock.at += 19.9
    assert lease.state == "HELD"
    bench.clock.at += 0.2
    assert lease.state == "AT_RISK"


def test_max_hold_ends_it_though_the_engine_would_go_on(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30, max_hold=45).acquire()
    bench.clock.turn(20)
    wait_until(lambda: lease._asked > 1000)
    bench.clock.turn(20)
    wait_until(lambda: lease._asked > 1020)
    assert lease.remaining == pytest.approx(5)
    bench.clock.turn(5)
    wait_until(lambda: lease._ended is not None)
    assert (lease.state, lease.lost_reason) == ("LOST", "max_hold")
    assert not lease.release()
    assert bench.client().lock("a").try_acquire()


def test_a_break_is_told_at_once(bench) -> None:
    lease = bench.client().lock("a", delay=5).acquire()
    other = bench.client()
    assert other.break_lock("a", token=lease.token)
    assert (lease.state, lease.lost_reason) == ("LOST", "broken")
    assert not other.break_lock("a", token=lease.token)
    assert [holding.state for holding in other.inspect()] == ["cooling"]


def test_a_break_not_told_is_noticed_at_the_next_renewal(bench, wait_until) -> None:
    lease = bench.client().lock("a").acquire()
    bench.store.mailboxes.clear()
    bench.client().break_lock("a", token=lease.token)
    assert lease.held
    bench.clock.turn(10)
    wait_until(lambda: lease.state == "LOST")
    assert lease.lost_reason == "unknown"


def test_release_is_once_and_by_the_clock(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    assert lease.release()
    assert not lease.release()
    assert (lease.state, lease.held, lease.remaining, lease.lost_reason) == ("RELEASED", False, 0.0, None)
    with pytest.raises(LeaseLost, match="it was released"):
        lease.check()
    late = client.lock("a", ttl=30).acquire()
    bench.clock.at += 31
    assert not late.release()
    assert late.state == "LOST"


def test_a_late_release_does_not_free_another_holders_lock(bench) -> None:
    late = bench.client().lock("a", ttl=30).acquire()
    bench.clock.at += 31
    new = bench.client().lock("a").acquire()
    assert new.token > late.token
    late.release()
    assert bench.client().lock("a").try_acquire() is None
    new.verify()


def test_renew_sets_the_life_left(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    lease.renew(ttl=100)
    assert (lease.ttl, lease.remaining) == (100, pytest.approx(99))
    lease.renew(10)
    assert (lease.ttl, lease.remaining) == (10, pytest.approx(9.9))
    lease.renew()
    assert lease.ttl == 10
    with pytest.raises(ConfigError, match="ttl must be more than 0"):
        lease.renew(0)


def test_a_lease_renewed_by_hand_has_one_appointment_with_the_watchdog(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    for _ in range(200):
        lease.renew()
    bench.clock.turn(10)
    wait_until(lambda: lease._asked == 1010)
    dog = client._desk.dog
    wait_until(lambda: dog._wakes_at < float("inf"))
    calls = bench.link.calls
    bench.clock.turn(10)
    wait_until(lambda: lease._asked == 1020)
    assert bench.link.calls == calls + 1


def test_verify_asks_the_engine(bench) -> None:
    lease = bench.client().lock("a").acquire()
    lease.verify()
    bench.link.silent = True
    with pytest.raises(Unavailable):
        lease.verify()
    assert lease.state == "AT_RISK"
    bench.link.silent = False
    bench.store.mailboxes.clear()
    bench.client().break_lock("a", token=lease.token)
    with pytest.raises(LeaseLost, match="no longer knows it"):
        lease.verify()
    with pytest.raises(LeaseLost):
        lease.renew()


def test_an_answer_overtaken_by_a_later_one_changes_nothing(bench) -> None:
    from leasehold.model import Alive

    lease = bench.client().lock("a", ttl=30).acquire()
    lease.renew(100)
    lease._answered(900.0, lease._renewal(30), Alive(30.0))
    assert lease.ttl == 100


def test_an_answer_for_a_lease_released_meanwhile_is_dropped(bench) -> None:
    from leasehold.model import Alive, Gone

    lease = bench.client().lock("a", ttl=30).acquire()
    lease.release()
    lease._answered(2000.0, lease._renewal(), Alive(30.0))
    lease._answered(2000.0, lease._renewal(), Gone())
    assert lease.state == "RELEASED"


def test_a_release_that_cannot_be_confirmed_is_owed_and_settled_later(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    bench.link.silent = True
    assert not lease.release()
    assert lease.state == "RELEASED"
    assert client._desk.book.owed
    bench.link.silent = False
    bench.clock.turn(5)
    wait_until(lambda: not client._desk.book.owed)
    assert not bench.store.lines


def test_what_is_owed_is_dropped_once_it_has_lapsed(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=20).acquire()
    bench.link.silent = True
    lease.release()
    wait_until(lambda: client._desk.dog._owed_misses > 0)
    bench.clock.turn(21)
    wait_until(lambda: not client._desk.book.owed)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_lease_torn_while_it_is_made_is_dropped_without_a_word() -> None:
    torn = Lease.__new__(Lease)
    del torn
    gc.collect()


def test_a_dropped_lease_is_released_and_warned_about(bench, wait_until) -> None:
    lock = bench.client().lock("a")
    with pytest.warns(ResourceWarning, match=r"a .* was dropped without release"):
        lock.acquire()
    wait_until(lambda: not bench.store.lines)
    lease = lock.try_acquire()
    assert lease is not None
    lease.release()


def test_a_lease_that_ended_is_collected_without_a_word(bench) -> None:
    lock = bench.client().lock("a", ttl=30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = lock.acquire()
        lease.release()
        del lease
        gc.collect()


def test_wait_lost(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    assert not lease.wait_lost(0)
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(lease.wait_lost(60)))
    waiter.start()
    wait_until(lambda: lease._signals)
    bench.client().break_lock("a", token=lease.token)
    waiter.join(10)
    assert seen == [True]
    assert lease.wait_lost(5)


def test_wait_lost_ends_when_another_thread_releases(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(lease.wait_lost()))
    waiter.start()
    wait_until(lambda: lease._signals)
    lease.release()
    waiter.join(10)
    assert seen == [False]


def test_callbacks_run_on_a_thread_of_their_own_and_a_failing_one_harms_nobody(bench, wait_until, caplog) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    threads: list[str] = []

    def fails(_lease: object) -> None:
        raise RuntimeError("callback")

    lease.on_lost(fails)
    lease.on_lost(lambda _: threads.append(threading.current_thread().name))
    client.break_lock("a", token=lease.token)
    wait_until(lambda: threads == ["leasehold-teller"])
    lease.on_lost(lambda _: threads.append("late"))
    wait_until(lambda: threads[1:] == ["late"])
    assert "fails failed" in caplog.text


def test_a_slow_callback_holds_up_no_renewal(bench, wait_until) -> None:
    client = bench.client()
    broken, kept = client.lock("a").acquire(), client.lock("b", ttl=30).acquire()
    stuck = threading.Event()
    broken.on_lost(lambda _: stuck.wait(20))
    client.break_lock("a", token=broken.token)
    bench.clock.turn(10)
    wait_until(lambda: kept._asked == 1010)
    stuck.set()


def test_on_lost_wants_a_plain_function(bench) -> None:
    lease = bench.client().lock("a").acquire()

    async def later(_lease: object) -> None: ...

    for wrong in (later, 7):
        with pytest.raises(ConfigError, match="plain function"):
            lease.on_lost(wrong)  # type: ignore[arg-type]
    lease.release()
    lease.on_lost(lambda _: pytest.fail("it was released, not lost"))


def test_a_lease_cannot_be_pickled(bench) -> None:
    with pytest.raises(TypeError, match=r"Send lease\.token"):
        pickle.dumps(bench.client().lock("a").acquire())


def test_a_lease_is_handed_to_another_thread_freely(bench) -> None:
    lease = bench.client().lock("a").acquire()
    thread = threading.Thread(target=lease.release)
    thread.start()
    thread.join(10)
    assert lease.state == "RELEASED"


def test_by_the_real_clock_a_lease_is_renewed_and_lapses_in_time() -> None:
    with Client("memory://") as client:
        with client.lock("a", ttl=1.0) as lease:
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                lease.check()
                time.sleep(0.01)
        assert lease.state == "RELEASED"
