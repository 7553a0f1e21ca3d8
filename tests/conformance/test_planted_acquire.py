"""Planted bugs in grants: who gets a name, with which token, and for how long. The suite must find each of them."""

from harness.checkers.mutation import Patch, PlantedBugs
from leasehold.client import lock
from leasehold.client.lease import BaseLease
from leasehold.core import lock_state, timing
from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import HELD
from leasehold.engines.memory import MemoryEngine, MemoryServer
from leasehold.model import Alive, Grant
from tests.support import probe_lock_state, probe_memory

planted_bugs = PlantedBugs("memory")


@planted_bugs.bug("E1", "exclusive_grant_excludes_other_claims", "lock_has_at_most_one_holder")
def every_claim_is_admitted(patch: Patch) -> None:
    patch(*probe_lock_state.CAN_ADMIT, lambda self, mode: True)


@planted_bugs.bug("E1", "shared_grants_coexist_but_exclude_exclusive_ones", "readers_share_and_writers_do_not")
def shared_is_admitted_beside_exclusive(patch: Patch) -> None:
    patch(*probe_lock_state.CAN_ADMIT, lambda self, mode: mode == "shared" or not self.holders)


@planted_bugs.bug("E1", "semaphore_grants_up_to_its_limit", "semaphore_has_at_most_limit_holders")
def semaphore_grants_one_permit_too_many(patch: Patch) -> None:
    original = getattr(*probe_lock_state.CAN_ADMIT)
    patch(*probe_lock_state.CAN_ADMIT, lambda self, mode: original(self, mode) or len(self.holders) == self.limit > 1)
    patch(*probe_lock_state.FREE_SLOT, lambda self: 0)


@planted_bugs.bug("E1", "smaller_limit_ends_no_grant_and_grants_none_until_drained")
def smaller_limit_is_ignored_while_it_is_exceeded(patch: Patch) -> None:
    original = LockState.set_limit

    def set_limit(self, context, limit):
        return original(self, context, limit and max(limit, len(self.holders)))

    patch(LockState, "set_limit", set_limit)


@planted_bugs.bug("E1", "smaller_limit_ends_no_grant_and_grants_none_until_drained")
def smaller_limit_ends_grants(patch: Patch) -> None:
    original = LockState.set_limit

    def set_limit(self, context, limit):
        for entry in list(self.holders.values())[limit or len(self.holders) :]:
            self._remove(entry)
        return original(self, context, limit)

    patch(LockState, "set_limit", set_limit)


@planted_bugs.bug("E1", "smaller_limit_withdraws_reservations")
def smaller_limit_keeps_reservations(patch: Patch) -> None:
    patch(*probe_lock_state.WITHDRAW_RESERVATION, lambda self, entry: None)


@planted_bugs.bug("E4", "larger_limit_wakes_the_waiters_that_fit")
def larger_limit_wakes_no_waiter(patch: Patch) -> None:
    original = LockState.set_limit
    patch(LockState, "set_limit", lambda self, context, limit: (original(self, context, limit)[0], []))


@planted_bugs.bug("E1", "limit_that_was_set_counts_for_every_claim_until_removed")
def limit_that_was_set_is_forgotten_when_idle(patch: Patch) -> None:
    original = MemoryServer.release

    def release(self, claim):
        released = original(self, claim)
        if self.lock_states[claim[:2]].empty:
            del self.lock_states[claim[:2]]
        return released

    patch(MemoryServer, "release", release)


@planted_bugs.bug("E1", "semaphore_slot_has_one_holder_at_a_time", "semaphore_lease_knows_its_slot")
def every_permit_gets_slot_0(patch: Patch) -> None:
    patch(*probe_lock_state.FREE_SLOT, lambda self: 0)


@planted_bugs.bug("E1", "live_name_refuses_other_kind_or_limit", "name_in_use_as_another_kind_is_refused")
def mismatched_kind_is_accepted(patch: Patch) -> None:
    original = LockState.attempt
    patch(
        LockState,
        "attempt",
        lambda self, context, claim, client: original(
            self, context, claim._replace(kind=self.kind, limit=self.limit), client
        ),
    )


@planted_bugs.bug("E1", "idle_name_accepts_any_kind")
def first_kind_of_a_name_is_kept_forever(patch: Patch) -> None:
    idle = property(lambda self: False)
    patch(LockState, "empty", idle)


@planted_bugs.bug("E1", "unusual_names_never_collide", "namespaces_are_isolated_from_each_other")
def names_share_a_key(patch: Patch) -> None:
    def with_shared_key(verb):
        def run(self, claim, *args):
            full_name = f"{claim.namespace}:{claim.name}".casefold()
            return verb(self, claim._replace(namespace=claim.namespace[:24], name=full_name[25:]), *args)

        return run

    patch(MemoryServer, "attempt", with_shared_key(MemoryServer.attempt))
    patch(MemoryServer, "release", with_shared_key(MemoryServer.release))


@planted_bugs.bug("E2", "repeated_attempt_gets_the_same_grant")
def repeated_attempt_is_a_new_claim(patch: Patch) -> None:
    original = LockState.attempt

    def attempt(self, context, claim, client):
        if (entry := self.entries.get(claim.id_hash)) and entry.state == HELD:
            self._remove(entry)
        return original(self, context, claim, client)

    patch(LockState, "attempt", attempt)


@planted_bugs.bug("E2", "repeated_attempt_keeps_its_queue_position", "grants_follow_queue_order")
def repeated_attempt_moves_to_the_end_of_the_queue(patch: Patch) -> None:
    original = LockState.attempt

    def attempt(self, context, claim, client):
        if (entry := self.entries.get(claim.id_hash)) and entry.state == lock_state.WAITING:
            self._remove(entry)
        return original(self, context, claim, client)

    patch(LockState, "attempt", attempt)


@planted_bugs.bug("E3", "tokens_rise_after_release_expiry_and_break", "tokens_rise_across_clients")
def token_is_reused(patch: Patch) -> None:
    patch(
        *probe_memory.ISSUE_TOKEN,
        lambda self: 7 + sum(len(lock_state.holders) for lock_state in self.lock_states.values()),
    )


@planted_bugs.bug("E3", "client_wall_clock_has_no_effect_on_grants")
def tokens_come_from_the_client_wall_clock(patch: Patch) -> None:
    original = MemoryEngine.attempt

    async def attempt(self, claim, deadline):
        reply = await original(self, claim, deadline)
        return reply._replace(token=int(self._runtime.wall() * 1000)) if isinstance(reply, Grant) else reply

    patch(MemoryEngine, "attempt", attempt)


@planted_bugs.bug("E8", "unrenewed_grant_lives_for_its_ttl_and_no_longer", "renewed_grant_stays_alive")
def grants_expire_early(patch: Patch) -> None:
    attempt, renew = LockState.attempt, LockState.renew

    def attempt_with_half_ttl(self, context, claim, client):
        reply, notifications = attempt(self, context, claim._replace(ttl=claim.ttl / 2), client)
        return (reply._replace(ttl=claim.ttl) if isinstance(reply, Grant) else reply), notifications

    def renew_with_half_ttl(self, context, claim):
        reply, notifications = renew(self, context, claim._replace(ttl=claim.ttl / 2))
        return (reply._replace(ttl=claim.ttl) if isinstance(reply, Alive) else reply), notifications

    patch(LockState, "attempt", attempt_with_half_ttl)
    patch(LockState, "renew", renew_with_half_ttl)


@planted_bugs.bug("E8", "unrenewed_grant_lives_for_its_ttl_and_no_longer", "release_after_expiry_is_harmless")
def grants_never_expire(patch: Patch) -> None:
    patch(*probe_lock_state.EXPIRE_HOLDERS, lambda self, now: None)


@planted_bugs.bug("E8", "promised_ttl_is_never_shortened_by_later_calls")
def renewal_may_shorten_the_ttl(patch: Patch) -> None:
    original = LockState.renew

    def renew(self, context, claim):
        answer = original(self, context, claim)
        if (entry := self.entries.get(claim.id_hash)) and entry.state == HELD:
            entry.expires_at = self._next_expiry = context.now + claim.ttl
        return answer

    patch(LockState, "renew", renew)


@planted_bugs.bug("E8", "repeated_attempt_reports_the_remaining_ttl")
def repeated_grant_reports_the_full_ttl(patch: Patch) -> None:
    original = getattr(*probe_lock_state.GRANT_ENTRY)

    def grant_entry(self, context, entry, claim, notifications):
        until = entry.expires_at if entry.state == HELD else context.now + claim.ttl
        grant = original(self, context, entry, claim, notifications)
        entry.expires_at = self._next_expiry = until
        return grant

    patch(*probe_lock_state.GRANT_ENTRY, grant_entry)


@planted_bugs.bug("E8", "cut_off_holder_is_at_risk_then_lost_before_next_grant")
def lease_is_trusted_beyond_its_ttl(patch: Patch) -> None:
    patch(timing, "valid_until", lambda asked, ttl, *_: asked + 3 * ttl)


@planted_bugs.bug("E8", "max_hold_ends_a_lease")
def max_hold_is_ignored(patch: Patch) -> None:
    original = BaseLease.__init__
    patch(BaseLease, "__init__", lambda self, *args: original(self, *args[:5], None, *args[6:]))


@planted_bugs.bug("E8", "granted_ttl_is_rounded_as_traits_declare")
def ttl_is_rounded_silently(patch: Patch) -> None:
    original = MemoryServer.attempt
    patch(
        MemoryServer,
        "attempt",
        lambda self, claim, client: original(self, claim._replace(ttl=float(round(claim.ttl))), client),
    )


@planted_bugs.bug("require", "unsupported_requirement_is_refused_when_lock_is_built")
def unmet_requirement_is_ignored(patch: Patch) -> None:
    patch(lock, "check_required", lambda requirements, traits, engine: None)


@planted_bugs.bug(
    "E2",
    "claim_belongs_to_no_instance",
    "queued_claim_keeps_its_position_at_any_instance",
    "permit_belongs_to_no_instance",
    "repeat_at_another_instance_never_shortens_a_grant",
    "simultaneous_attempts_at_all_instances_are_one_grant",
)
def claim_is_known_to_its_first_instance_only(patch: Patch) -> None:
    original = LockState.attempt

    def attempt(self, context, claim, client):
        entry = self.entries.get(claim.id_hash)
        if entry is not None and entry.client != client:
            claim = claim._replace(id_hash=client)
        return original(self, context, claim, client)

    patch(LockState, "attempt", attempt)


@planted_bugs.bug("E2", "waiter_is_woken_at_the_instance_it_asked_last")
def waiter_is_notified_at_its_first_instance(patch: Patch) -> None:
    original = LockState.attempt

    def attempt(self, context, claim, client):
        entry = self.entries.get(claim.id_hash)
        return original(self, context, claim, client if entry is None else entry.client)

    patch(LockState, "attempt", attempt)


@planted_bugs.bug("E6", "claim_belongs_to_no_instance", "release_ends_a_claim_that_was_granted_again_elsewhere")
def release_counts_at_the_first_instance_only(patch: Patch) -> None:
    original_attempt, original_release = MemoryEngine.attempt, MemoryEngine.release
    instances: dict[str, object] = {}

    async def attempt(self, claim, deadline):
        instances.setdefault(claim.id_hash, self)
        return await original_attempt(self, claim, deadline)

    async def release(self, claim, deadline):
        return instances.get(claim.id_hash) is self and await original_release(self, claim, deadline)

    patch(MemoryEngine, "attempt", attempt)
    patch(MemoryEngine, "release", release)


test_conformance_suite_catches_planted_bug = planted_bugs.test()


def test_planted_bugs_break_every_promise_of_this_file():
    assert {bug.promise for bug in planted_bugs.bugs.values()} >= {"E1", "E2", "E3", "E8"}
