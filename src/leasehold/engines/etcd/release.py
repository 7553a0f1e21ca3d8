"""Ending a claim: its client releases it, or an operator breaks it.

The key is deleted if it is still the one that was created for this claim. Three cases need more: `min_hold` keeps the
key for a while without a holder (`cooling`), `delay` needs a record that this was a release, and breaking a grant keeps
its key for the delay. If a write may still be in flight, the claim's leases are revoked: then that write fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.client_state import ClaimState, EtcdClientState, Held, Queued
from leasehold.engines.etcd.leases import MIN_TTL
from leasehold.engines.etcd.messages import KeyValue, PutRequest, RequestOp, TxnRequest
from leasehold.engines.etcd.queue import Entry, EntryValue
from leasehold.engines.etcd.rpc import NoSpace, RpcClient, read_range
from leasehold.model import Claim
from leasehold.runtime.base import Runtime


class ReleaseAction(Enum):
    NOTHING = auto()  # the claim ended before, or must not be ended by this release
    COOL = auto()  # keep the key without a holder for the rest of `min_hold`
    RECORD = auto()  # write how the claim ends, so that the waiters know whether its delay starts; then read it again
    DELETE = auto()  # delete the key


def choose_action(entry: Entry, claim: Claim, granted: bool, min_hold_left: float) -> ReleaseAction:
    """What to do with the key of a claim that is released. `held` may be optimistic: then the claim was not granted.

    | value of the key           | claim                             | delay | action                       |
    |----------------------------|-----------------------------------|-------|------------------------------|
    | cooling                    |                                   |       | NOTHING                      |
    | held, with another token   |                                   |       | NOTHING                      |
    | held, waiting, released    | granted, no id: a late wake-up    |       | NOTHING: it may be in use    |
    | held, released             | granted, `min_hold` is not over   |       | COOL                         |
    | held                       | granted                           | yes   | RECORD that it was released  |
    | held                       | not granted                       | yes   | RECORD that it only waited   |
    | anything else              |                                   |       | DELETE                       |
    """
    match entry.value.state:
        case "cooling":
            return ReleaseAction.NOTHING
        case "held" if claim.token and entry.token != claim.token:
            return ReleaseAction.NOTHING
        case _ if granted and not claim.id:  # a claim made from a late wake-up has no id
            return ReleaseAction.NOTHING
        case _ if granted and min_hold_left > 0:
            return ReleaseAction.COOL
        case "held" if entry.value.delay:
            return ReleaseAction.RECORD
        case _:
            return ReleaseAction.DELETE


@dataclass(slots=True)
class EtcdRelease:
    """One release."""

    client_state: EtcdClientState
    rpc: RpcClient
    runtime: Runtime
    claim: Claim
    deadline: float
    unconfirmed: list[str] = field(default_factory=list)  # the tries without an answer; one may have ended the grant

    async def run(self) -> bool | None:
        claim_state = self.client_state.find_claim_state(self.claim)
        if (
            claim_state is None
            or not claim_state.create_revision
            or claim_state.delay
            or claim_state.min_hold
            or not self.claim.id
        ):
            ended = await self._find_and_release(claim_state)
        elif isinstance(claim_state.state, Queued):
            left = await self._run_txn(queue.leave_txn(claim_state.queue_key, claim_state.state.mod_revision))
            ended = not left and await self._find_and_release(claim_state)
        else:
            dequeue = queue.dequeue_txn(claim_state.queue_key, claim_state.create_revision)
            ended = await self._run_txn(dequeue) or await self._find_and_release(claim_state)
        if claim_state is not None:
            await self._release_leases(claim_state)
        return None if not ended and self.unconfirmed else ended

    async def _find_and_release(self, claim_state: ClaimState | None) -> bool:
        """Read the claim's key and act on it, until it is gone or nothing is to be done."""
        while (found := await self._find_entry(claim_state)) is not None:
            kv, entry, granted = found
            min_hold_left = self._min_hold_left(claim_state, entry)
            match choose_action(entry, self.claim, granted, min_hold_left):
                case ReleaseAction.NOTHING:
                    return False
                case ReleaseAction.COOL:
                    value = entry.value._replace(delay=0.0)
                    if await start_cooling(
                        self.client_state, self.rpc, kv, value, min_hold_left, self.deadline, self.unconfirmed
                    ):
                        return True
                case ReleaseAction.RECORD:
                    if await self._record(kv, entry, granted):
                        return granted
                case ReleaseAction.DELETE:
                    if await self._delete(kv):
                        return granted
        return False

    async def _record(self, kv: KeyValue, entry: Entry, granted: bool) -> bool:
        """Write how the claim ends. True: there is no space to write, so the key was deleted without it: the next
        waiter waits for the delay, not for the whole ttl."""
        final_value = entry.value._replace(state="released" if granted else "waiting")
        put = RequestOp(put=PutRequest(kv.key, final_value.to_bytes(), entry.lease_id))
        try:
            await self.rpc.call(messages.TXN, queue.if_unchanged_txn(kv, put), self.deadline)
        except NoSpace:
            return await self._delete(kv)
        return False

    async def _delete(self, kv: KeyValue) -> bool:
        return await self._run_txn(queue.if_unchanged_txn(kv, RequestOp(delete=messages.DeleteRangeRequest(kv.key))))

    async def _run_txn(self, txn: TxnRequest) -> bool:
        """Run a transaction that ends the grant. Returns whether its conditions were met."""
        return bool((await self.rpc.call(messages.TXN, txn, self.deadline, self.unconfirmed)).succeeded)

    async def _find_entry(self, claim_state: ClaimState | None) -> tuple[KeyValue, Entry, bool] | None:
        """The claim's key, and whether the claim holds the name. What this client knows of the key may be out of date:
        then only its position in the queue tells a holder from a claim that has written itself as one too early."""
        root = self.client_state.url.root
        if claim_state is not None and claim_state.create_revision:
            kvs = await self._read_keys(claim_state.queue_key.tag)
            kv = queue.find_own(self.claim.id_hash, kvs)
            entry = None if kv is None else queue.parse_entry(root, kv)
            if kv is not None and entry is not None and claim_state.knows(kv):
                return kv, entry, claim_state.is_held
        kvs = await self._read_keys(queue.claim_prefix(root, self.claim))
        kv = queue.find_own(self.claim.id_hash, kvs)
        entry = None if kv is None else queue.parse_entry(root, kv)
        if kv is None or entry is None:
            return None
        return kv, entry, entry.value.state != "waiting" and _is_holder(root, entry, kvs)

    async def _read_keys(self, prefix: bytes) -> list[KeyValue]:
        return await read_range(self.rpc, prefix, self.deadline)

    def _min_hold_left(self, claim_state: ClaimState | None, entry: Entry) -> float:
        """What is left of `min_hold`: all of it if another client acquired the claim, as the start is then unknown."""
        if self.claim.min_hold < 0:
            return 0.0
        min_hold = entry.value.min_hold
        if claim_state is not None and isinstance(claim_state.state, Held):
            return claim_state.state.since + min_hold - self.runtime.now()
        return min_hold

    async def _release_leases(self, claim_state: ClaimState) -> None:
        """The key is gone. Its leases can carry the next claim, unless a write with them may still be in flight."""
        leases, reusable = claim_state.leases, not claim_state.has_unconfirmed_write
        if not reusable:
            for lease in leases:
                await self.client_state.leases.revoke(self.rpc, lease, self.deadline)
        # Only the first of two releases at once reuses the leases: each carries one claim at a time.
        if self.client_state.remove_claim(self.claim, claim_state) and reusable:
            for lease in leases:
                self.client_state.leases.recycle(self.rpc, lease)


def send_release(client_state: EtcdClientState, rpc: RpcClient, claim: Claim, claim_state: ClaimState) -> None:
    """Send the release of a claim without waiting, on a connection that is open anyway: the watchdog, which confirms
    it, may have none, and at interpreter exit may be unable to open one. Not with a delay or `min_hold`: these take
    several steps."""
    if claim_state.delay or claim_state.min_hold or not claim.id:
        return
    if claim_state.create_revision:
        rpc.send_nowait(messages.TXN, queue.dequeue_txn(claim_state.queue_key, claim_state.create_revision))
    elif claim_state.has_unconfirmed_write and claim_state.key_lease is not None:
        client_state.leases.revoke_nowait(rpc, claim_state.key_lease)


async def decline_first(client_state: EtcdClientState, rpc: RpcClient, claim: Claim, deadline: float) -> bool:
    """Remove a waiter that is first in the queue: its key, if it has not become that of a grant meanwhile, and no other
    client has written it since, which then serves the claim."""
    claim_state = client_state.find_claim_state(claim)
    root, prefix = client_state.url.root, queue.claim_prefix(client_state.url.root, claim)
    kvs = await read_range(rpc, prefix, deadline)
    for kv in kvs:
        entry = queue.parse_entry(root, kv)
        if entry is None or entry.value.id_hash != claim.id_hash:
            continue
        if claim_state is None or kv.mod_revision != claim_state.written_revision:
            return False
        if entry.value.state == "waiting" and _is_holder(root, entry, kvs):
            delete = RequestOp(delete=messages.DeleteRangeRequest(kv.key))
            return bool((await rpc.call(messages.TXN, queue.if_unchanged_txn(kv, delete), deadline)).succeeded)
    return False


async def start_cooling(
    client_state: EtcdClientState,
    rpc: RpcClient,
    kv: KeyValue,
    value: EntryValue,
    seconds: float,
    deadline: float,
    unconfirmed: list[str],
) -> bool:
    """Turn a grant into `cooling`: its key stays for `seconds` without a holder. False: the key changed meanwhile, if
    there are `unconfirmed` tries perhaps by one of these."""
    lease = await client_state.leases.create(rpc, max(MIN_TTL, math.ceil(seconds)), deadline)
    put = RequestOp(put=PutRequest(kv.key, value._replace(state="cooling").to_bytes(), lease.id))
    if (await rpc.call(messages.TXN, queue.if_unchanged_txn(kv, put), deadline, unconfirmed)).succeeded:
        return True
    if not unconfirmed:  # else the key may be attached to this lease, and would be deleted with it
        client_state.leases.revoke_nowait(rpc, lease)
    return False


async def break_grant(
    client_state: EtcdClientState, rpc: RpcClient, namespace: str, name: str, token: int, deadline: float
) -> bool:
    """End the grant that has this token. Repeats if the key changes between the read and the write."""
    root = client_state.url.root
    begin = queue.names_prefix(root, namespace, name, exact=True)
    unconfirmed: list[str] = []
    while True:
        kvs = await read_range(rpc, begin, deadline)
        for kv in kvs:
            entry = queue.parse_entry(root, kv)
            if entry is None or entry.token != token or entry.value.state not in ("held", "cooling"):
                continue
            if entry.value.delay and entry.value.state == "cooling":
                # The delay protects against a holder not yet notified: a second break must not end it.
                return bool(unconfirmed)  # this break may have begun it, without an answer
            if not _is_holder(root, entry, kvs):
                return False
            if entry.value.delay:
                if await start_cooling(client_state, rpc, kv, entry.value, entry.value.delay, deadline, unconfirmed):
                    return True
                break
            if (
                await rpc.call(
                    messages.TXN,
                    queue.if_unchanged_txn(kv, RequestOp(delete=messages.DeleteRangeRequest(kv.key))),
                    deadline,
                )
            ).succeeded:
                return True
            break
        else:
            return False


def _is_holder(root: str, candidate: Entry, kvs: list[KeyValue]) -> bool:
    earlier = [
        entry
        for kv in kvs
        if (entry := queue.parse_entry(root, kv)) is not None and entry.create_revision < candidate.create_revision
    ]
    return queue.is_holder(candidate, len(earlier), all(entry.mode == "shared" for entry in earlier))
