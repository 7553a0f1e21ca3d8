"""The watchdog: many leases, batches, deadlines, strange engines."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from leasehold import Unavailable
from leasehold.engines.memory import MemoryEngine
from leasehold.model import Alive, Claim, Gone, Holder
from leasehold.runtime.base import step

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


@pytest.mark.usefixtures("untraced")
def test_ten_thousand_leases_are_renewed_by_one_thread_in_batches(bench, wait_until) -> None:
    client = bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(10_000)]
    wait_until(lambda: len(client._desk.dog._ends) == 10_000)
    for now in (1010, 1020, 1030, 1040):
        calls = bench.link.calls
        bench.clock.turn(10)
        wait_until(lambda now=now: all(lease._asked == now for lease in leases), 30)
        assert bench.link.calls - calls < 100
    assert all(lease.state == "HELD" for lease in leases)
    dogs = [thread for thread in threading.enumerate() if thread.name == "leasehold-watchdog"]
    assert len(dogs) == 1
    assert all(lease.release() for lease in leases)


def test_leases_taken_together_are_not_all_renewed_together(bench) -> None:
    client = bench.client()
    due = sorted(client.lock(f"n{number}", ttl=30).acquire()._due for number in range(200))
    assert due[0] >= 1008
    assert due[-1] <= 1010
    assert due[-1] - due[0] > 1


def test_what_is_nearly_due_goes_along_with_what_is(bench, wait_until) -> None:
    client = bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(200)]
    wait_until(lambda: len(client._desk.dog._renewals) == 200)
    first = min(lease._due for lease in leases) - bench.clock.at
    along = [lease for lease in leases if lease._due - bench.clock.at <= first / 0.9]
    others = [lease for lease in leases if lease not in along]
    before = bench.link.calls
    bench.clock.turn(first)
    wait_until(lambda: all(lease._asked == bench.clock.at for lease in along))
    assert len(along) > 20
    assert bench.link.calls - before == 1
    assert others
    assert all(lease._asked == 1000 for lease in others)


def test_one_that_was_missed_waits_until_it_is_due(bench, wait_until) -> None:
    client = bench.client()
    missed, other = client.lock("missed", ttl=30).acquire(), client.lock("other", ttl=30).acquire()
    missed._missed, missed._due, other._due = True, 1009.5, 1009.0
    for lease in (missed, other):
        client._desk.dog.watch(lease)
    bench.clock.turn(9.0)
    wait_until(lambda: other._asked == 1009)
    assert missed._asked == 1000
    bench.clock.turn(0.5)
    wait_until(lambda: missed._asked == 1009.5)


def test_one_that_was_renewed_meanwhile_gets_another_appointment(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    wait_until(lambda: client._desk.dog._renewals)
    before = bench.link.calls
    lease._asked, lease._due = 1009.0, 1019.0  # by hand, and nobody has told the watchdog yet
    bench.clock.turn(10)
    wait_until(lambda: client._desk.dog._first_renewal() == 1019.0)
    assert bench.link.calls == before
    assert lease._asked == 1009.0


def test_two_threads_may_look_after_what_was_dropped(bench) -> None:
    class Taken(deque):
        """The last one went to another thread, just after it was seen."""

        def __bool__(self) -> bool:
            return True

    dog = bench.client()._desk.dog
    dog._dropped = Taken()
    dog.owe_dropped()


def test_no_call_outlasts_a_third_of_the_shortest_life(bench, wait_until) -> None:
    client = bench.client(call_timeout=60)
    short, long = client.lock("short", ttl=3).acquire(), client.lock("long", ttl=300).acquire()
    deadlines: list[float] = []
    call = bench.link.call
    bench.link.call = lambda verb, args, deadline: deadlines.append(deadline) or call(verb, args, deadline)
    bench.clock.turn(1)
    wait_until(lambda: short._asked == 1001)
    assert deadlines[0] <= 1001 + 2 / 3
    deadlines.clear()
    bench.clock.turn(0.2)
    long._due = 0.0
    client._desk.dog.watch(long)
    wait_until(lambda: long._asked > 1000)
    assert deadlines[-1] <= 1001.2 + 1


def test_a_miss_is_tried_again_sooner_and_sooner(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    bench.link.silent = True
    bench.clock.turn(10)
    wait_until(lambda: lease._missed)
    tries = bench.link.calls
    while lease.held:
        bench.clock.turn(1)
        wait_until(lambda: bench.clock.at < client._desk.dog._wakes_at < float("inf") or not lease.held)
    assert bench.link.calls - tries >= 6
    assert lease.lost_reason == "unreachable"


def test_an_engine_that_raises_what_it_should_not_is_no_answer(bench, wait_until, monkeypatch, caplog) -> None:
    async def renew(*_: object) -> None:
        raise OSError("driver's own")

    lease = bench.client().lock("a", ttl=30).acquire()
    monkeypatch.setattr(MemoryEngine, "renew", renew)
    bench.clock.turn(10)
    wait_until(lambda: lease.state == "AT_RISK")
    wait_until(lambda: "should have mapped" in caplog.text)  # told on the teller's thread


def test_a_stumbling_watchdog_goes_on(bench, wait_until, caplog) -> None:
    client = bench.client()
    dog = client._desk.dog
    lease = client.lock("a", ttl=30).acquire()
    stumbles: list[int] = []
    turn = dog._turn

    async def stumble(runtime):
        if not stumbles:
            stumbles.append(1)
            raise RuntimeError("stumbled")
        return await turn(runtime)

    dog._turn = stumble
    bench.clock.turn(10)
    wait_until(lambda: lease._asked > 1000 or bench.clock.turn(0.2))
    wait_until(lambda: "the watchdog stumbled" in caplog.text)  # told on the teller's thread


def test_gone_is_lost_at_once_and_says_why(bench, wait_until, monkeypatch) -> None:
    async def renew(_self, claims, _deadline):
        return [Gone("lapsed")] * len(claims)

    lease = bench.client().lock("a", ttl=30).acquire()
    monkeypatch.setattr(MemoryEngine, "renew", renew)
    bench.clock.turn(10)
    wait_until(lambda: lease.state == "LOST")
    assert lease.lost_reason == "lapsed"


def test_an_engine_that_grants_less_is_believed(bench, wait_until, monkeypatch) -> None:
    async def renew(_self, claims, _deadline):
        return [Alive(12.0)] * len(claims)

    lease = bench.client().lock("a", ttl=30).acquire()
    monkeypatch.setattr(MemoryEngine, "renew", renew)
    bench.clock.turn(10)
    wait_until(lambda: lease._asked == 1010)
    assert lease.ttl == 12.0
    assert lease.remaining == pytest.approx(12 * 0.99)


def test_waiters_keep_their_place_by_one_batch(bench, wait_until) -> None:
    held = bench.client().lock("a", ttl=100).acquire()
    client = bench.client()
    threads = [threading.Thread(target=lambda: client.lock("a").acquire().release()) for _ in range(10)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(held._desk.book.client and bench.store.lines["", "a"].waiters) == 10)
    beats: list[int] = []
    call = bench.link.call

    def count(verb, args, deadline):
        if verb == "renew":
            beats.append(len(args[0]))
        return call(verb, args, deadline)

    bench.link.call = count
    for _ in range(3):
        bench.clock.turn(5)
        expected = len(beats) + 1
        wait_until(lambda expected=expected: beats.count(10) >= expected or beats.count(10) >= 3)
    assert len(bench.store.lines["", "a"].waiters) == 10
    held.release()
    for thread in threads:
        thread.join(20)


def test_a_waiter_the_engine_no_longer_knows_asks_again(bench, wait_until) -> None:
    held = bench.client().lock("a", ttl=100).acquire()
    client = bench.client()
    thread = threading.Thread(target=lambda: client.lock("a").acquire().release())
    thread.start()
    wait_until(lambda: bench.store.lines["", "a"].waiters)
    line = bench.store.lines["", "a"]
    line._remove(line.waiters[0][1])  # as after a restart that lost the line
    bench.clock.turn(5)
    wait_until(lambda: line.waiters)
    held.release()
    thread.join(20)


def test_a_beat_wakes_whoever_has_to_ask_and_nobody_else(bench, monkeypatch) -> None:
    client = bench.client()
    book, dog = client._desk.book, client._desk.dog
    book.stir = lambda _at: None  # the thread stays out of this
    replies = {
        "deep": Alive(15, 4),
        "head": Alive(15, 0),
        "turn": Alive(15),
        "gone": Gone(),
        "silent": Unavailable("-"),
    }
    waiters = [book.enter(Claim("", name, name, name, Holder("-"), 30), dog._runtime) for name in replies]

    async def ask(*_):
        return list(replies.values())

    monkeypatch.setattr(dog, "_ask", ask)
    dog._beat_at = 0.0
    step(dog._keep_places(dog._runtime))
    assert [waiter.claim.name for waiter in waiters if waiter.go] == ["head", "turn", "gone"]


def test_a_turn_for_a_claim_nobody_knows_is_released(bench, wait_until) -> None:
    from leasehold.model import Claim, Holder

    held = bench.client().lock("a", ttl=100).acquire()
    client = bench.client()
    client.lock("other").acquire().release()  # it listens now
    late = Claim("", "a", "", "f" * 32, Holder("late"), 10.0, queue=True)
    bench.store.attempt(late, client._desk.book.client)  # an attempt given up long ago lands in line
    held.release()
    wait_until(lambda: not bench.store.lines)


def test_a_late_wake_up_does_not_end_a_grant_that_was_handed_on(bench, wait_until) -> None:
    from leasehold.model import Claim, Holder
    from leasehold.recipes import deed

    client = bench.client()
    lease = client.lock("a", ttl=60).acquire()
    mark = lease._claim.mark
    deed.let_go(lease)  # written down for another process: this one no longer knows the claim
    client._desk.book.deliver("go", mark, 0.0, Claim("", "a", "", mark, Holder("stray"), 15.0))
    wait_until(lambda: not client._desk.book.owed)
    assert [holding.state for holding in client.inspect()] == ["held"]


def test_a_late_wake_up_does_not_release_what_is_held(bench) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    client._desk.book.deliver("go", lease._claim.mark, 0.0, lease._claim)
    client._desk.book.deliver("head", "nobody", 1.0, None)
    assert not client._desk.book.owed
    lease.verify()


def test_a_twin_that_cannot_be_opened_is_no_answer(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()

    def refuse(_runtime):
        raise Unavailable("no connection to spare")

    client._desk.dog._open_twin = refuse
    bench.clock.turn(10)
    wait_until(lambda: lease.state == "AT_RISK")


def test_an_end_before_any_renewal_is_met_in_time_though_the_watchdog_sleeps(bench, wait_until) -> None:
    client = bench.client()
    keep = client.lock("long", ttl=300).acquire()
    wait_until(lambda: client._desk.dog._wakes_at < float("inf"))
    lease = client.lock("short", ttl=300, max_hold=1).acquire()
    wait_until(lambda: client._desk.dog._wakes_at <= 1001)
    bench.clock.turn(1)
    wait_until(lambda: lease._ended is not None)
    assert keep.held
