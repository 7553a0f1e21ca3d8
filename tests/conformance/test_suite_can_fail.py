"""Planted bugs in who is granted a name, by which token, and for how long: the suite must notice each of them."""

from leasehold.core import admission, timing
from leasehold.core.admission import Line
from leasehold.core.party import HELD
from leasehold.engines.memory import MemoryEngine, Store
from leasehold.model import Alive, Grant
from leasehold.recipes import lock
from leasehold.recipes.lease import BaseLease
from leasehold.testing.planting import Patch, Plants

plants = Plants("memory")


@plants.bug("E1", "an_exclusive_grant_stands_alone", "only_one_is_ever_inside")
def everybody_fits(patch: Patch) -> None:
    patch(Line, "_fits", lambda self, mode: True)


@plants.bug("E1", "readers_stand_beside_readers_and_never_beside_a_writer", "readers_share_and_writers_do_not")
def shared_fits_beside_exclusive(patch: Patch) -> None:
    patch(Line, "_fits", lambda self, mode: mode == "shared" or not self.occupiers)


@plants.bug("E1", "a_semaphore_admits_its_limit", "no_more_than_the_limit_are_inside")
def one_permit_too_many(patch: Patch) -> None:
    true = Line._fits
    patch(Line, "_fits", lambda self, mode: true(self, mode) or len(self.occupiers) == self.limit > 1)
    patch(Line, "_free_slot", lambda self: 0)


@plants.bug("E1", "permits_are_numbered_and_a_number_has_one_holder", "a_lease_of_a_semaphore_knows_its_slot")
def every_permit_is_slot_0(patch: Patch) -> None:
    patch(Line, "_free_slot", lambda self: 0)


@plants.bug("E1", "a_live_name_has_one_kind_and_one_limit", "a_name_in_use_as_another_kind_is_refused")
def any_kind_goes(patch: Patch) -> None:
    true = Line.attempt
    patch(
        Line,
        "attempt",
        lambda self, at, claim, who: true(self, at, claim._replace(kind=self.kind, limit=self.limit), who),
    )


@plants.bug("E1", "an_idle_name_has_no_kind")
def the_first_kind_is_for_ever(patch: Patch) -> None:
    idle = property(lambda self: False)
    patch(Line, "idle", idle)


@plants.bug("E1", "every_name_is_a_name_of_its_own", "namespaces_are_apart")
def names_share_a_key(patch: Patch) -> None:
    def blurred(verb):
        def run(self, claim, *more):
            whole = f"{claim.namespace}:{claim.name}".casefold()
            return verb(self, claim._replace(namespace=claim.namespace[:24], name=whole[25:]), *more)

        return run

    patch(Store, "attempt", blurred(Store.attempt))
    patch(Store, "release", blurred(Store.release))


@plants.bug("E2", "a_repeated_attempt_gets_the_same_grant")
def a_repeat_is_a_new_claim(patch: Patch) -> None:
    true = Line.attempt

    def attempt(self, at, claim, client):
        if (party := self.parties.get(claim.mark)) and party.state == HELD:
            self._remove(party)
        return true(self, at, claim, client)

    patch(Line, "attempt", attempt)


@plants.bug("E2", "a_repeated_attempt_keeps_its_place_in_line", "grants_follow_the_line")
def whoever_asks_again_goes_to_the_back(patch: Patch) -> None:
    true = Line.attempt

    def attempt(self, at, claim, client):
        if (party := self.parties.get(claim.mark)) and party.state == admission.WAITING:
            self._remove(party)
        return true(self, at, claim, client)

    patch(Line, "attempt", attempt)


@plants.bug("E3", "tokens_rise_over_release_lapse_and_break", "tokens_rise_from_client_to_client")
def a_token_is_used_again(patch: Patch) -> None:
    patch(Store, "_issue", lambda self: 7 + sum(len(line.occupiers) for line in self.lines.values()))


@plants.bug("E3", "the_wall_clock_of_a_client_decides_nothing")
def tokens_are_the_wall_clock_of_the_client(patch: Patch) -> None:
    true = MemoryEngine.attempt

    async def attempt(self, claim, deadline):
        reply = await true(self, claim, deadline)
        return reply._replace(token=int(self._runtime.wall() * 1000)) if isinstance(reply, Grant) else reply

    patch(MemoryEngine, "attempt", attempt)


@plants.bug("E8", "a_grant_lives_as_long_as_it_was_told_and_no_longer", "a_renewed_grant_lives_on")
def early_expiry(patch: Patch) -> None:
    attempt, renew = Line.attempt, Line.renew

    def halved(self, at, claim, client):
        reply, words = attempt(self, at, claim._replace(ttl=claim.ttl / 2), client)
        return (reply._replace(ttl=claim.ttl) if isinstance(reply, Grant) else reply), words

    def renewed(self, at, claim):
        reply, words = renew(self, at, claim._replace(ttl=claim.ttl / 2))
        return (reply._replace(ttl=claim.ttl) if isinstance(reply, Alive) else reply), words

    patch(Line, "attempt", halved)
    patch(Line, "renew", renewed)


@plants.bug("E8", "a_grant_lives_as_long_as_it_was_told_and_no_longer", "a_late_release_is_harmless")
def a_lease_is_forgotten_by_nobody(patch: Patch) -> None:
    patch(Line, "_settle", lambda self, now: None)


@plants.bug("E8", "no_verb_shortens_a_life_already_promised")
def a_renewal_sets_the_end(patch: Patch) -> None:
    true = Line.renew

    def renew(self, at, claim):
        answer = true(self, at, claim)
        if (party := self.parties.get(claim.mark)) and party.state == HELD:
            party.until = self._next_end = at.now + claim.ttl
        return answer

    patch(Line, "renew", renew)


@plants.bug("E8", "a_repeated_grant_tells_the_life_that_is_left")
def a_repeated_grant_tells_a_whole_life(patch: Patch) -> None:
    true = Line._claim

    def claim_(self, at, party, claim, words):
        until = party.until if party.state == HELD else at.now + claim.ttl
        grant = true(self, at, party, claim, words)
        party.until = self._next_end = until
        return grant

    patch(Line, "_claim", claim_)


@plants.bug("E8", "a_holder_cut_off_is_at_risk_then_lost_before_anybody_else")
def a_lease_is_trusted_for_too_long(patch: Patch) -> None:
    patch(timing, "valid_until", lambda asked, ttl: asked + 3 * ttl)


@plants.bug("E8", "max_hold_ends_a_lease")
def max_hold_is_ignored(patch: Patch) -> None:
    true = BaseLease.__init__
    patch(BaseLease, "__init__", lambda self, *given: true(self, *given[:-1], None))


@plants.bug("E8", "a_ttl_becomes_what_the_traits_say")
def a_ttl_is_rounded_in_silence(patch: Patch) -> None:
    true = Store.attempt
    patch(Store, "attempt", lambda self, claim, client: true(self, claim._replace(ttl=float(round(claim.ttl))), client))


@plants.bug("require", "what_an_engine_does_not_promise_is_refused_when_a_lock_is_built")
def an_unmet_requirement_is_let_through(patch: Patch) -> None:
    patch(lock, "check_required", lambda words, traits, engine: None)


test_a_planted_bug_is_caught = plants.test()


def test_every_promise_is_broken_once():
    assert {bug.promise for bug in plants.bugs.values()} >= {"E1", "E2", "E3", "E8"}
