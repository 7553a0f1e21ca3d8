"""A batch of renewals: leases first, then the keys.

The keys are read after their leases were renewed, so each answer holds for the renewed lease. The lease alone proves
nothing: it stays alive when its key was broken, and then two holders would believe for good that they hold the name
(E5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from leasehold.core.timing import WAITER_TTL
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.attempt import run_txn
from leasehold.engines.etcd.client_state import ClaimState, EtcdClientState, Held
from leasehold.engines.etcd.leases import EtcdLease, required_ttl
from leasehold.engines.etcd.queue import Entry
from leasehold.engines.etcd.rpc import LeaseNotFound, RpcClient
from leasehold.errors import ConfigError, Unavailable
from leasehold.model import Alive, Claim, Gone
from leasehold.runtime.base import Runtime

RenewReply: TypeAlias = Alive | Gone | Unavailable


@dataclass(slots=True)
class EtcdRenewal:
    client_state: EtcdClientState
    rpc: RpcClient
    runtime: Runtime
    claims: Sequence[Claim]
    deadline: float
    asked_at: float = field(init=False)
    live_leases: dict[int, EtcdLease] = field(init=False, default_factory=dict)
    overdue: set[int] = field(init=False, default_factory=set)

    async def run(self) -> list[RenewReply]:
        self.asked_at = self.runtime.now()
        claim_states = [self.client_state.find_claim_state(claim) for claim in self.claims]
        if all(map(_is_first_attempt_in_flight, self.claims, claim_states)):
            # Most such claims are granted without waiting: do not even open a connection for them.
            return [_attempt_in_flight() for _ in claim_states]
        known_leases = {
            claim_state.key_lease.id: claim_state.key_lease
            for claim_state in claim_states
            if claim_state is not None and claim_state.key_lease is not None
        }
        await self._exclude_overdue(known_leases)
        if known_leases:
            live_ids = await self.client_state.leases.keep_alive(self.rpc, list(known_leases.values()), self.deadline)
            self.live_leases = {lease_id: lease for lease_id, lease in known_leases.items() if lease_id in live_ids}
        try:
            entries = await self._read_entries(claim_states)
        except ConfigError:
            if not self.client_state.history_rewound:
                raise
            return [Gone("unknown")] * len(self.claims)  # the data were replaced: they hold no grant of this client
        return [
            await self._reply(claim, claim_state, entry)
            for claim, claim_state, entry in zip(self.claims, claim_states, entries, strict=True)
        ]

    async def _exclude_overdue(self, known_leases: dict[int, EtcdLease]) -> None:
        """Do not renew leases of grants that have expired and only keep the name for their delay: renewing them would
        make the delay endless."""
        delayed = {
            claim_state.key_lease.id: claim_state.delay
            for claim in self.claims
            if claim.token
            and (claim_state := self.client_state.find_claim_state(claim))
            and claim_state.delay
            and claim_state.key_lease
        }
        await self._find_overdue(delayed)
        for lease_id in self.overdue:
            known_leases.pop(lease_id, None)

    async def _find_overdue(self, delayed: dict[int, float]) -> None:
        """etcd reports whole seconds: a lease is overdue only if its ttl has expired for certain."""
        replies = await self.rpc.call_each(
            messages.LEASE_TTL, [messages.LeaseId(lease_id) for lease_id in delayed], self.deadline
        )
        for (lease_id, delay), reply in zip(delayed.items(), replies, strict=True):
            if reply.ttl + 1 <= delay:
                self.overdue.add(lease_id)

    async def _read_entries(self, claim_states: Sequence[ClaimState | None]) -> list[Entry | None]:
        """Read the key of each claim. If another process acquired the claim, read the whole queue of its name."""
        root = self.client_state.url.root
        reads = []
        for claim, claim_state in zip(self.claims, claim_states, strict=True):
            prefix = queue.claim_prefix(root, claim)
            reads.append(
                messages.RangeRequest(prefix, messages.range_end(prefix))
                if claim_state is None
                else messages.RangeRequest(claim_state.queue_key.tag, messages.range_end(claim_state.queue_key.tag))
            )
        txn = messages.TxnRequest((), tuple(messages.RequestOp(read) for read in reads))
        done = await run_txn(self.client_state, self.rpc, txn, self.deadline)
        if len(done.responses) != len(reads):
            raise messages.MalformedReply("not one response per key")
        found: list[Entry | None] = []
        for claim, read, op in zip(self.claims, reads, done.responses, strict=True):
            if op.range is None or not all(kv.key.startswith(read.key) for kv in op.range.kvs):
                raise messages.MalformedReply("the reply holds keys that were not requested")
            entries = [entry for kv in op.range.kvs if (entry := queue.parse_entry(root, kv)) is not None]
            found.append(next((entry for entry in entries if entry.value.id_hash == claim.id_hash), None))
        return found

    async def _reply(self, claim: Claim, claim_state: ClaimState | None, entry: Entry | None) -> RenewReply:
        if not claim.token:
            if entry is None and _is_first_attempt_in_flight(claim, claim_state):
                return _attempt_in_flight()
            if entry is None or entry.value.state == "cooling":
                return Gone("expired")
            if claim_state is None:
                return Alive(WAITER_TTL)
            claim_state.renewed_at = self.asked_at
            return Alive(WAITER_TTL, claim_state.position)
        gone = self._gone_reply(claim, claim_state, entry)
        if gone is not None:
            self._forget_claim(claim, claim_state)
            return gone
        assert entry is not None  # noqa: S101  # for the type checker
        return await self._alive_reply(claim, claim_state, entry)

    def _gone_reply(self, claim: Claim, claim_state: ClaimState | None, entry: Entry | None) -> Gone | None:
        if entry is None:
            if claim_state is None or claim_state.key_lease is None:
                return Gone("unknown")
            return Gone("broken" if claim_state.key_lease.id in self.live_leases else "expired")
        if entry.value.state == "cooling":
            return Gone("broken")
        if entry.value.state != "held" or entry.token != claim.token:
            return Gone("unknown")
        return Gone("expired") if entry.lease_id in self.overdue else None

    async def _alive_reply(self, claim: Claim, claim_state: ClaimState | None, entry: Entry) -> RenewReply:
        claim = claim._replace(delay=entry.value.delay)  # as granted: a renewal need not know it
        lease = self.live_leases.get(entry.lease_id)
        if lease is None:  # created by another process, or just now by the other engine instance
            if claim.delay:
                await self._find_overdue({entry.lease_id: claim.delay})
            if entry.lease_id in self.overdue:
                return Gone("expired")
            lease = await self.client_state.leases.adopt(self.rpc, entry.lease_id, self.deadline)
            if lease is None:
                return Gone("expired")
        if required_ttl(claim) > lease.ttl:
            longer = await self._move_to_longer_lease(claim, claim_state, entry)
            if longer is None:
                return Unavailable("the claim's key was changed during the renewal", engine="etcd")
            lease = longer
        return Alive(max(0.0, min(lease.expires_at - self.asked_at, float(lease.ttl)) - claim.delay))

    async def _move_to_longer_lease(
        self, claim: Claim, claim_state: ClaimState | None, entry: Entry
    ) -> EtcdLease | None:
        """An etcd lease cannot change its ttl, so a longer one replaces it. A shorter one never does (E8)."""
        while True:
            lease = await self.client_state.leases.get(self.rpc, required_ttl(claim), self.deadline)
            try:
                done = await run_txn(
                    self.client_state, self.rpc, queue.attach_lease_txn(entry, lease.id), self.deadline
                )
                break
            except LeaseNotFound:  # the pooled lease was revoked from outside
                continue
        if not done.succeeded:
            self.client_state.leases.recycle(self.rpc, lease)
            return None
        if claim_state is not None:
            old_lease, claim_state.key_lease = claim_state.key_lease, lease
            if old_lease is not None and not claim_state.has_unconfirmed_write:
                self.client_state.leases.recycle(self.rpc, old_lease)
        return lease

    def _forget_claim(self, claim: Claim, claim_state: ClaimState | None) -> None:
        """The grant is gone at etcd: revoke its leases, except one that keeps the name for a running delay."""
        if (
            claim_state is None
            or not isinstance(claim_state.state, Held)
            or claim_state.state.token != claim.token
            or self.client_state.find_claim_state(claim) is not claim_state
        ):
            return  # the renewal was for an older grant of this claim
        for lease in claim_state.leases:
            if lease.id not in self.overdue:
                self.client_state.leases.revoke_nowait(self.rpc, lease)
        self.client_state.remove_claim(claim, claim_state)


def _is_first_attempt_in_flight(claim: Claim, claim_state: ClaimState | None) -> bool:
    """Whether the claim's first attempt is not answered yet, so that no key of it is known."""
    return not claim.token and claim_state is not None and not claim_state.create_revision


def _attempt_in_flight() -> Unavailable:
    return Unavailable("the claim's first attempt is not answered yet", engine="etcd")
