"""Planted bugs in release, expiry and the answers about ended claims. The suite must find each of them."""

from harness.checkers.mutation import Patch, PlantedBugs
from leasehold.core import lock_state
from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import HELD
from leasehold.engines import registry
from leasehold.engines.memory import MemoryEngine, MemoryServer
from leasehold.errors import Unavailable
from leasehold.model import NO_MIN_HOLD, Alive, Busy, Gone
from tests.support import probe, probe_lock_state, probe_memory

planted_bugs = PlantedBugs("memory")


@planted_bugs.bug("E5", "renewal_after_expiry_answers_gone", "renewal_answers_each_claim_separately")
def renewal_answers_alive_for_every_claim(patch: Patch) -> None:
    patch(MemoryServer, "renew", lambda self, claims: [Alive(claim.ttl) for claim in claims])


@planted_bugs.bug("E5", "renewal_after_expiry_answers_gone")
def renewal_revives_expired_grant(patch: Patch) -> None:
    original = LockState.renew

    def renew(self, context, claim):
        if (entry := self.entries.get(claim.id_hash)) and entry.state == HELD:
            entry.expires_at = max(entry.expires_at, context.now + claim.ttl)
        return original(self, context, claim)

    patch(LockState, "renew", renew)


@planted_bugs.bug("E5", "renewal_answers_each_claim_separately")
def renewal_does_not_compare_the_token(patch: Patch) -> None:
    original = LockState.renew

    def renew(self, context, claim):
        entry = self.entries.get(claim.id_hash)
        return original(self, context, claim._replace(token=entry.token) if entry else claim)

    patch(LockState, "renew", renew)


@planted_bugs.bug("E5", "engine_calls_end_unavailable_in_time_when_cut_off", "client_calls_end_in_time_when_cut_off")
def missing_answer_is_taken_for_an_answer(patch: Patch) -> None:
    async def wait_unanswered(self, verb, args, deadline):
        return {"attempt": Busy(), "renew": [Gone()] * 2}.get(verb, False)

    patch(*probe_memory.WAIT_UNANSWERED, wait_unanswered)


@planted_bugs.bug("E6", "closing_client_withdraws_its_pending_acquires")
def close_does_not_wait_for_pending_acquires(patch: Patch) -> None:
    async def at_once(_self, _until):
        return

    patch(*probe.DRAIN_IN_FLIGHT, at_once)


@planted_bugs.bug("E5", "break_ends_only_the_grant_with_its_token")
def break_ignores_the_token(patch: Patch) -> None:
    original = LockState.break_
    patch(LockState, "break_", lambda self, context, token: original(self, context, next(iter(self.holders), token)))


@planted_bugs.bug("E5", "holder_is_notified_of_break", "broken_lease_raises_at_end_of_with_block")
def break_is_not_notified(patch: Patch) -> None:
    original = registry.ClaimRegistry.on_notification

    def on_notification(self, kind, *args):
        return None if kind == "broken" else original(self, kind, *args)

    patch(registry.ClaimRegistry, "on_notification", on_notification)


@planted_bugs.bug("E5", "inspect_shows_holders_and_queue_but_no_secrets")
def inspect_shows_the_id_hash(patch: Patch) -> None:
    original = LockState.holdings

    def holdings(self, *args):
        id_hashes = [*self.entries]
        return [
            holding._replace(fingerprint=id_hash)
            for holding, id_hash in zip(original(self, *args), id_hashes, strict=True)
        ]

    patch(LockState, "holdings", holdings)


@planted_bugs.bug(
    "E6", "release_by_another_client_is_harmless", "release_after_expiry_is_harmless", "repeated_release_is_harmless"
)
def release_does_not_check_the_claim(patch: Patch) -> None:
    original = LockState.release
    patch(
        LockState,
        "release",
        lambda self, context, id_hash, keep, *_: original(self, context, next(iter(self.entries), id_hash), keep),
    )


@planted_bugs.bug("E6", "release_removes_every_trace", "forgotten_claim_leaves_no_trace")
def release_leaves_the_queue_entry(patch: Patch) -> None:
    original = LockState.release

    def release(self, context, id_hash, keep, *_):
        entry = self.entries.get(id_hash)
        return (False, []) if entry and entry.state == lock_state.WAITING else original(self, context, id_hash, keep)

    patch(LockState, "release", release)


@planted_bugs.bug("E6", "idle_name_leaves_no_data_behind")
def idle_name_is_never_removed(patch: Patch) -> None:
    patch(LockState, "empty", property(lambda self: False))


@planted_bugs.bug("E6", "expired_names_are_swept_eventually")
def expired_names_are_never_swept(patch: Patch) -> None:
    patch(*probe_memory.SWEEP, lambda self, context: [])


@planted_bugs.bug("E6", "any_call_tolerates_a_lost_answer", "unanswered_attempt_is_released_in_the_background")
def abandoned_claim_is_not_released(patch: Patch) -> None:
    patch(MemoryEngine, "forget", lambda self, claim: self._registry.remove_waiter(claim.id_hash))
    patch(registry.ClaimRegistry, "retry_release", lambda self, claim: None)


@planted_bugs.bug("E6", "pending_release_is_retried_until_confirmed", "any_call_tolerates_a_lost_request")
def pending_release_is_forgotten(patch: Patch) -> None:
    patch(registry.ClaimRegistry, "retry_release", lambda self, claim: None)


@planted_bugs.bug("E6", "early_release_keeps_name_cooling_for_min_hold", "lock_options_min_hold_and_delay_are_honoured")
def min_hold_is_ignored(patch: Patch) -> None:
    original = LockState.release
    patch(LockState, "release", lambda self, context, id_hash, keep, *_: original(self, context, id_hash, 0.0))


@planted_bugs.bug("E6", "delay_keeps_name_busy_after_expiry", "delay_keeps_name_busy_after_break")
def delay_is_ignored(patch: Patch) -> None:
    original = getattr(*probe_lock_state.ADD_ENTRY)
    patch(
        *probe_lock_state.ADD_ENTRY,
        lambda self, now, claim, client: original(self, now, claim._replace(delay=0.0), client),
    )


@planted_bugs.bug("E6", "clean_release_leaves_no_delay")
def delay_follows_a_clean_release(patch: Patch) -> None:
    original = LockState.release

    def release(self, context, id_hash, keep, *_):
        if entry := self.entries.get(id_hash):
            entry.min_hold = context.now - entry.since + entry.delay
        return original(self, context, id_hash, keep)

    patch(LockState, "release", release)


@planted_bugs.bug(
    "E9", "engine_calls_end_unavailable_in_time_when_cut_off", "engine_calls_end_unavailable_in_time_when_paused"
)
def driver_exception_is_not_mapped(patch: Patch) -> None:
    async def wait_unanswered(self, verb, args, deadline):
        raise OSError("connection reset by peer")

    patch(*probe_memory.WAIT_UNANSWERED, wait_unanswered)


@planted_bugs.bug("E9", "engine_calls_end_unavailable_in_time_when_cut_off", "client_calls_end_in_time_when_cut_off")
def call_outlasts_its_deadline(patch: Patch) -> None:
    async def wait_unanswered(self, verb, args, deadline):
        await self._runtime.sleep(1.0)
        raise Unavailable("at last")

    patch(*probe_memory.WAIT_UNANSWERED, wait_unanswered)


@planted_bugs.bug("E5", "renewal_and_release_need_namespace_name_and_id")
def claim_is_renewed_by_its_id_alone(patch: Patch) -> None:
    def find_name(server, claim):
        found = [key for key, state in server.lock_states.items() if claim.id_hash in state.entries]
        return claim._replace(namespace=found[0][0], name=found[0][1]) if found else claim

    original = MemoryServer.renew
    patch(MemoryServer, "renew", lambda self, claims: original(self, [find_name(self, claim) for claim in claims]))


@planted_bugs.bug("E6", "renewal_and_release_need_namespace_name_and_id")
def claim_is_released_by_its_id_in_any_namespace(patch: Patch) -> None:
    def release(self, claim):
        keys = [key for key, state in self.lock_states.items() if claim.id_hash in state.entries]
        return any(original(self, claim._replace(namespace=namespace)) for namespace, _ in keys)

    original = MemoryServer.release
    patch(MemoryServer, "release", release)


@planted_bugs.bug("E6", "engine_keeps_min_hold_for_a_release_that_does_not_know_it")
def min_hold_of_the_release_counts(patch: Patch) -> None:
    original = MemoryServer.release

    def release(self, claim):
        return original(self, claim if claim.min_hold else claim._replace(min_hold=NO_MIN_HOLD))

    patch(MemoryServer, "release", release)


@planted_bugs.bug("E6", "min_hold_does_not_apply_to_a_claim_without_work")
def min_hold_always_applies(patch: Patch) -> None:
    original = MemoryServer.release
    patch(MemoryServer, "release", lambda self, claim: original(self, claim._replace(min_hold=0.0)))


@planted_bugs.bug("E6", "release_that_does_not_know_the_delay_leaves_none")
def release_leaves_the_delay(patch: Patch) -> None:
    def release(self, context, id_hash, keep_min_hold=True, release_held=True):
        entry = self.entries[id_hash]
        return self.break_(context, entry.token) if entry.delay else original(self, context, id_hash)

    original = LockState.release
    patch(LockState, "release", release)


test_conformance_suite_catches_planted_bug = planted_bugs.test()


def test_planted_bugs_break_every_promise_of_this_file():
    assert {bug.promise for bug in planted_bugs.bugs.values()} >= {"E5", "E6", "E9"}
