"""Planted bugs in how claims end and what is answered about them: the suite must notice each of them."""

from dataclasses import replace

from leasehold import book
from leasehold.core import admission
from leasehold.core.admission import Line
from leasehold.core.party import HELD
from leasehold.engines.memory import MemoryEngine, Store
from leasehold.errors import Unavailable
from leasehold.model import Alive, Busy, Gone
from leasehold.recipes.desk import Desk
from leasehold.testing.memory_rig import BreakableLink
from leasehold.testing.planting import Patch, Plants

plants = Plants("memory")


@plants.bug("E5", "a_renewal_after_the_lapse_is_gone", "every_answer_is_about_that_very_claim")
def a_renewal_says_yes_to_everything(patch: Patch) -> None:
    patch(Store, "renew", lambda self, claims: [Alive(claim.ttl) for claim in claims])


@plants.bug("E5", "a_renewal_after_the_lapse_is_gone")
def a_renewal_revives_the_lapsed(patch: Patch) -> None:
    true = Line.renew

    def renew(self, at, claim):
        if (party := self.parties.get(claim.mark)) and party.state == HELD:
            party.until = max(party.until, at.now + claim.ttl)
        return true(self, at, claim)

    patch(Line, "renew", renew)


@plants.bug("E5", "every_answer_is_about_that_very_claim")
def a_renewal_does_not_compare_the_token(patch: Patch) -> None:
    true = Line.renew

    def renew(self, at, claim):
        party = self.parties.get(claim.mark)
        return true(self, at, claim._replace(token=party.token) if party else claim)

    patch(Line, "renew", renew)


@plants.bug("E5", "a_client_cut_off_is_told_unavailable_in_time", "calls_of_a_client_cut_off_end_in_time")
def silence_is_taken_for_an_answer(patch: Patch) -> None:
    async def silence(self, verb, args, deadline):
        return {"attempt": Busy(), "renew": [Gone()] * 2}.get(verb, False)

    patch(BreakableLink, "_silence", silence)


@plants.bug("E6", "a_client_that_closes_leaves_nothing_of_those_who_acquire")
def close_waits_for_nobody(patch: Patch) -> None:
    async def at_once(_self, _until):
        return

    patch(Desk, "_end_others", at_once)


@plants.bug("E5", "a_break_ends_the_grant_with_that_token_only")
def a_break_hits_whoever_holds(patch: Patch) -> None:
    true = Line.break_
    patch(Line, "break_", lambda self, at, token: true(self, at, next(iter(self.occupiers), token)))


@plants.bug("E5", "a_break_is_told", "leaving_the_body_of_a_broken_lock_raises")
def a_break_is_not_told(patch: Patch) -> None:
    true = book.Book.deliver

    def deliver(self, kind, *more):
        return None if kind == "lost" else true(self, kind, *more)

    patch(book.Book, "deliver", deliver)


@plants.bug("E5", "inspect_shows_holders_and_line_and_no_secret")
def inspect_shows_the_mark(patch: Patch) -> None:
    true = Line.holdings

    def holdings(self, *about):
        marks = [*self.parties]
        return [replace(one, fingerprint=mark) for one, mark in zip(true(self, *about), marks, strict=True)]

    patch(Line, "holdings", holdings)


@plants.bug(
    "E6", "a_release_by_anybody_else_is_harmless", "a_late_release_is_harmless", "a_repeated_release_is_harmless"
)
def a_release_does_not_ask_whose(patch: Patch) -> None:
    true = Line.release
    patch(Line, "release", lambda self, at, mark, keep, *_: true(self, at, next(iter(self.parties), mark), keep))


@plants.bug("E6", "a_release_removes_every_trace", "a_forgotten_claim_leaves_nothing")
def a_release_leaves_the_place_in_line(patch: Patch) -> None:
    true = Line.release

    def release(self, at, mark, keep, *_):
        party = self.parties.get(mark)
        return (False, []) if party and party.state == admission.WAITING else true(self, at, mark, keep)

    patch(Line, "release", release)


@plants.bug("E6", "nothing_is_left_of_an_idle_name")
def a_counter_per_name_stays_behind(patch: Patch) -> None:
    patch(Line, "idle", property(lambda self: False))


@plants.bug("E6", "nothing_is_left_of_lapsed_names_in_the_long_run")
def nobody_sweeps(patch: Patch) -> None:
    patch(Store, "_sweep", lambda self, at: [])


@plants.bug("E6", "the_answer_of_any_call_may_be_lost", "giving_up_costs_no_second_deadline")
def a_claim_given_up_is_not_released(patch: Patch) -> None:
    patch(MemoryEngine, "forget", lambda self, claim: self._book.leave(claim.mark))
    patch(book.Book, "owe", lambda self, claim: None)


@plants.bug("E6", "an_owed_release_is_repeated_until_answered", "the_request_of_any_call_may_be_lost")
def an_owed_release_is_forgotten(patch: Patch) -> None:
    patch(book.Book, "owe", lambda self, claim: None)


@plants.bug("E6", "an_early_release_cools_for_min_hold", "min_hold_and_delay_as_asked_for_by_a_lock")
def min_hold_is_ignored(patch: Patch) -> None:
    true = Line.release
    patch(Line, "release", lambda self, at, mark, keep, *_: true(self, at, mark, 0.0))


@plants.bug("E6", "a_delay_keeps_the_name_after_a_lapse", "a_delay_keeps_the_name_after_a_break")
def delay_is_ignored(patch: Patch) -> None:
    true = Line._join
    patch(Line, "_join", lambda self, now, claim, client: true(self, now, claim._replace(delay=0.0), client))


@plants.bug("E6", "a_clean_release_leaves_no_delay")
def delay_follows_a_clean_release_too(patch: Patch) -> None:
    true = Line.release

    def release(self, at, mark, keep, *_):
        party = self.parties.get(mark)
        return true(self, at, mark, at.now - party.since + party.delay if party else keep)

    patch(Line, "release", release)


@plants.bug("E9", "a_client_cut_off_is_told_unavailable_in_time", "a_paused_engine_is_unavailable_in_time")
def a_driver_exception_crosses_the_seam(patch: Patch) -> None:
    async def silence(self, verb, args, deadline):
        raise OSError("connection reset by peer")

    patch(BreakableLink, "_silence", silence)


@plants.bug("E9", "a_client_cut_off_is_told_unavailable_in_time", "calls_of_a_client_cut_off_end_in_time")
def a_call_outlasts_its_deadline(patch: Patch) -> None:
    async def silence(self, verb, args, deadline):
        await self._runtime.sleep(1.0)
        raise Unavailable("at last")

    patch(BreakableLink, "_silence", silence)


test_a_planted_bug_is_caught = plants.test()


def test_every_promise_is_broken_once():
    assert {bug.promise for bug in plants.bugs.values()} >= {"E5", "E6", "E9"}
