"""Planted bugs in the queue, its wake-ups and heartbeats. The suite must find each of them."""

from harness.checkers.mutation import Patch, PlantedBugs
from leasehold.core import lock_state
from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import HELD, RESERVED
from leasehold.engines import memory
from leasehold.engines.memory import MemoryEngine
from tests.support import probe_lock_state, probe_memory

planted_bugs = PlantedBugs("memory")


@planted_bugs.bug("E4", "waiter_is_woken_by_release", "next_waiter_is_woken_after_first_left_the_queue")
def no_waiter_is_woken(patch: Patch) -> None:
    patch(*probe_memory.SEND_NOTIFICATIONS, lambda self, notifications: None)


@planted_bugs.bug("E4", "wakeup_before_wait_is_remembered")
def early_wakeup_is_forgotten(patch: Patch) -> None:
    async def wait_for_wakeup(runtime, waiter, busy, seconds):
        waiter.woken = False
        waiter.signal = runtime.signal()
        await waiter.signal.wait(seconds)

    patch(memory, "wait_for_wakeup", wait_for_wakeup)


@planted_bugs.bug("E4", "wait_without_wakeup_returns_in_time")
def wait_changes_the_queue_position(patch: Patch) -> None:
    async def wait(self, claim, busy, seconds):
        self._transport.post("release", (claim,))

    patch(MemoryEngine, "wait", wait)
    patch(*probe_lock_state.POSITION, lambda self, entry: entry.ticket - 2)


@planted_bugs.bug("E4", "queued_writer_is_not_starved_by_readers")
def new_claims_bypass_the_queue(patch: Patch) -> None:
    original = LockState.attempt

    def attempt_first(self, context, claim, client):
        waiters, self.waiters = self.waiters, []
        try:
            return original(self, context, claim._replace(queue=False), client)
        finally:
            self.waiters = waiters

    def attempt_either(self, context, claim, client):
        return (original if claim.queue or claim.id_hash in self.entries else attempt_first)(
            self, context, claim, client
        )

    patch(LockState, "attempt", attempt_either)


@planted_bugs.bug("E4", "silent_first_waiter_delays_the_queue_only_briefly")
def end_of_reservation_is_not_notified(patch: Patch) -> None:
    original = getattr(*probe_memory.SEND_NOTIFICATIONS)

    def send_notifications(self, notifications):
        original(self, [notification for notification in notifications if notification[2].kind != "recheck"])

    patch(*probe_memory.SEND_NOTIFICATIONS, send_notifications)


@planted_bugs.bug("E7", "waiter_without_heartbeat_loses_its_position")
def queue_position_is_kept_forever(patch: Patch) -> None:
    patch(lock_state, "WAITER_TTL", 1000.0)


@planted_bugs.bug(
    "E7", "renewal_keeps_queue_position_and_grants_nothing", "waiter_without_heartbeat_loses_its_position"
)
def renewal_does_not_keep_the_queue_position(patch: Patch) -> None:
    original = LockState.renew

    def renew(self, context, claim):
        entry = self.entries.get(claim.id_hash)
        heartbeat = entry.heartbeat_expires_at if entry else 0.0
        answer = original(self, context, claim)
        if entry and entry.state != HELD:
            entry.heartbeat_expires_at = heartbeat
        return answer

    patch(LockState, "renew", renew)


@planted_bugs.bug("E7", "renewal_keeps_queue_position_and_grants_nothing")
def renewal_of_waiter_takes_the_grant(patch: Patch) -> None:
    original = LockState.renew

    def renew(self, context, claim):
        answer = original(self, context, claim)
        if (entry := self.entries.get(claim.id_hash)) and entry.state == RESERVED:
            entry.state, entry.expires_at = HELD, context.now + claim.ttl
        return answer

    patch(LockState, "renew", renew)


@planted_bugs.bug("E7", "passed_over_waiter_keeps_its_position", "unreachable_waiter_returns_to_its_position")
def passed_over_waiter_is_dropped(patch: Patch) -> None:
    patch(*probe_lock_state.PASS_OVER, probe_lock_state.remove)


@planted_bugs.bug("E7", "declined_reservation_goes_to_the_next_waiter")
def declined_claim_keeps_its_reservation(patch: Patch) -> None:
    patch(LockState, "decline", lambda self, context, id_hash, client: (True, []))


@planted_bugs.bug("E7", "decline_ends_neither_a_grant_nor_a_position")
def decline_ends_the_claim(patch: Patch) -> None:
    patch(LockState, "decline", lambda self, context, id_hash, client: self.release(context, id_hash))


@planted_bugs.bug("E4", "disowned_claim_lives_on")
def disowned_claim_is_still_waited_for(patch: Patch) -> None:
    patch(MemoryEngine, "disown", lambda self, claim: self._registry.remove_waiter(claim.id_hash))


@planted_bugs.bug("E4", "disowned_claim_lives_on")
def disowned_claim_is_released(patch: Patch) -> None:
    original = MemoryEngine.disown

    def disown(self, claim):
        original(self, claim)
        self._transport.post("release", (claim,))

    patch(MemoryEngine, "disown", disown)


test_conformance_suite_catches_planted_bug = planted_bugs.test()


def test_planted_bugs_break_every_promise_of_this_file():
    assert {bug.promise for bug in planted_bugs.bugs.values()} >= {"E4", "E7"}
