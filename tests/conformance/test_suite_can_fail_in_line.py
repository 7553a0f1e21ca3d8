"""Planted bugs in the line of waiters, its wake-ups and heart-beats: the suite must notice each of them."""

from leasehold.core import admission
from leasehold.core.admission import Line
from leasehold.core.party import HELD, RESERVED
from leasehold.engines import memory
from leasehold.engines.memory import MemoryEngine, Store
from leasehold.testing.planting import Patch, Plants

plants = Plants("memory")


@plants.bug("E4", "a_waiter_is_woken_by_a_release", "the_next_waiter_is_woken_when_the_first_leaves_the_line")
def nobody_is_woken(patch: Patch) -> None:
    patch(Store, "_deliver", lambda self, words: None)


@plants.bug("E4", "a_wake_up_before_the_wait_is_remembered")
def an_early_wake_up_is_forgotten(patch: Patch) -> None:
    async def turn(runtime, waiter, busy, seconds):
        waiter.go = False
        waiter.signal = runtime.signal()
        await waiter.signal.wait(seconds)

    patch(memory, "turn", turn)


@plants.bug("E4", "a_wait_for_nothing_ends_in_time")
def a_wait_takes_a_place(patch: Patch) -> None:
    async def wait(self, claim, busy, seconds):
        self._link.post("release", (claim,))

    patch(MemoryEngine, "wait", wait)
    patch(Line, "_place", lambda self, party: party.ticket - 2)


@plants.bug("E4", "a_writer_in_line_is_not_starved_by_readers")
def newcomers_go_first(patch: Patch) -> None:
    true = Line.attempt

    def attempt(self, at, claim, client):
        waiters, self.waiters = self.waiters, []
        try:
            return true(self, at, claim._replace(queue=False), client)
        finally:
            self.waiters = waiters

    def either(self, at, claim, client):
        return (true if claim.queue or claim.mark in self.parties else attempt)(self, at, claim, client)

    patch(Line, "attempt", either)


@plants.bug("E4", "a_silent_head_holds_up_nobody_for_long")
def the_end_of_a_reservation_is_untold(patch: Patch) -> None:
    true = Store._deliver

    def deliver(self, words):
        true(self, [told for told in words if told[2].kind != "head"])

    patch(Store, "_deliver", deliver)


@plants.bug("E7", "a_waiter_not_heard_of_loses_its_place")
def a_place_is_kept_for_ever(patch: Patch) -> None:
    patch(admission, "BEAT", 1000.0)


@plants.bug("E7", "a_renewal_keeps_a_place_and_grants_nothing", "a_waiter_not_heard_of_loses_its_place")
def a_renewal_does_not_keep_a_place(patch: Patch) -> None:
    true = Line.renew

    def renew(self, at, claim):
        party = self.parties.get(claim.mark)
        beat = party.beat if party else 0.0
        answer = true(self, at, claim)
        if party and party.state != HELD:
            party.beat = beat
        return answer

    patch(Line, "renew", renew)


@plants.bug("E7", "a_renewal_keeps_a_place_and_grants_nothing")
def a_renewal_takes_the_grant(patch: Patch) -> None:
    true = Line.renew

    def renew(self, at, claim):
        answer = true(self, at, claim)
        if (party := self.parties.get(claim.mark)) and party.state == RESERVED:
            party.state, party.until = HELD, at.now + claim.ttl
        return answer

    patch(Line, "renew", renew)


@plants.bug("E7", "one_passed_over_keeps_its_ticket", "one_that_cannot_be_told_comes_back_at_its_place")
def one_passed_over_is_dropped(patch: Patch) -> None:
    patch(Line, "_pass_over", Line._remove)


test_a_planted_bug_is_caught = plants.test()


def test_every_promise_is_broken_once():
    assert {bug.promise for bug in plants.bugs.values()} >= {"E4", "E7"}
