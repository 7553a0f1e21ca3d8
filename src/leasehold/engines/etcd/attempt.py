"""One attempt of one claim: join the queue or take the name, check which entries are ahead, become the holder.

Every step is one transaction from `queue.py`, and every answer leads to a reply or to the next step. `ClaimState` keeps
what the client knows from one attempt to the next. The leases of a key are recorded there before the key is written, so
that the release after a failed attempt knows what to end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from leasehold.core.lock_state import describe_kind
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.client_state import ClaimState, EtcdClientState, Held, New, Queued, TokenBase, claim_key
from leasehold.engines.etcd.delays import DelayTracker
from leasehold.engines.etcd.leases import EtcdLease, required_ttl
from leasehold.engines.etcd.queue import EntryState, EntryValue, QueueView
from leasehold.engines.etcd.rpc import LeaseNotFound, RpcClient
from leasehold.errors import Mismatch
from leasehold.model import Busy, Claim, Grant
from leasehold.runtime.base import Runtime

_ACTIVE_STATES: Final = ("waiting", "held")


class NextStep(Enum):
    """A step that decided nothing, but changed what the next one finds."""

    REREAD = auto()


REREAD: Final = NextStep.REREAD


@dataclass(slots=True)
class EtcdAttempt:
    client_state: EtcdClientState
    claim_state: ClaimState
    rpc: RpcClient
    runtime: Runtime
    claim: Claim
    asked_at: float  # the caller counts the grant's ttl from here (E8)
    deadline: float

    async def run(self, notified: bool) -> Grant | Busy:
        """`notified`: the claim is probably first in the queue now."""
        while True:
            reply = await self._step(notified)
            if reply is not REREAD:
                return reply
            notified = False

    async def _step(self, notified: bool) -> Grant | Busy | NextStep:
        match self.claim_state.state:
            case Held() as held:
                return await self._repeat_grant(held)
            case Queued() as queued:
                return await self._retry_queued(queued, notified)
            case New() if self.claim.queue:
                return await self._enqueue()
            case New():
                return await self._try_acquire()

    # --------------------------------------------------------- join the queue

    async def _enqueue(self) -> Grant | Busy | NextStep:
        """Join the queue, whether or not the name is free. If another claim of this client waits for the name, this
        one has to wait as well; otherwise the name is probably free."""
        token_base, ttl = await self._get_token_base(), required_ttl(self.claim)
        lease = self.claim_state.key_lease
        if lease is None:
            has_to_wait = self.client_state.has_other_waiter(self.claim)
            lease = await self._get_lease(self.client_state.waiter_lease_ttl if has_to_wait else ttl)
            self.claim_state.key_lease = lease
        if lease.requested_ttl == ttl:
            return await self._enqueue_as_holder(lease, token_base)
        return await self._enqueue_as_waiter(lease, token_base)

    async def _enqueue_as_holder(self, lease: EtcdLease, token_base: TokenBase) -> Grant | Busy | NextStep:
        """The optimistic path: the key is put as that of a holder, on a lease of the holder's ttl. If the name is free,
        this one transaction is all it takes; if not, a second one makes the claim a waiter."""
        enqueued = await self._put_entry("held", lease, token_base)
        if enqueued is REREAD:
            return REREAD
        if self._is_free(enqueued):
            return self._grant_reply(token_base, self.claim_state.create_revision)
        self._query_missing_ends(enqueued.oldest, self.claim_state.create_revision)
        return await self._requeue_as_waiter()

    async def _enqueue_as_waiter(self, lease: EtcdLease, token_base: TokenBase) -> Grant | Busy | NextStep:
        enqueued = await self._put_entry("waiting", lease, token_base)
        if enqueued is REREAD:
            return REREAD
        if self._is_free(enqueued):
            return await self._claim_grant(checked=True)
        self._query_missing_ends(enqueued.oldest, self.claim_state.create_revision)
        if not enqueued.conflicts:  # only a delay is left
            return REREAD
        self._watch_conflict(enqueued.conflicts, self.claim_state.create_revision)
        return Busy(None, self.claim_state.position)

    async def _put_entry(self, state: EntryState, lease: EtcdLease, token_base: TokenBase) -> queue.Enqueued | NextStep:
        """Create the claim's key."""
        claim_state = self.claim_state
        value = self._entry_value(state, token_base.number)
        txn = queue.enqueue_txn(claim_state.queue_key, value, lease.id, token_base.stored, claim_state.tag_revision)
        done = await self._write(txn)
        if done is None:
            claim_state.key_lease = None
            return REREAD
        enqueued = queue.parse_enqueued(claim_state.queue_key, done)
        if enqueued is None:
            view = await self._read_queue()
            if not await self._resolve_rejected_put(view, token_base):
                self._choose_key(view)
            return REREAD
        position = queue.position(claim_state.queue_key, enqueued.total, enqueued.oldest)
        claim_state.written_revision = revision = queue.txn_revision(done)
        claim_state.state = Queued(revision, revision, position)
        return enqueued

    def _is_free(self, enqueued: queue.Enqueued) -> bool:
        return queue.may_hold(self.claim_state.queue_key, len(enqueued.conflicts)) and not self._may_be_delayed()

    async def _rewrite(self, value: bytes, lease: EtcdLease) -> QueueView | NextStep:
        """Rewrite a waiter's key, on this lease, if it has not changed since this client last saw it."""
        claim_state, queued = self.claim_state, self.claim_state.state
        assert isinstance(queued, Queued)  # noqa: S101  # for the type checker
        done = await self._write(
            queue.requeue_txn(claim_state.queue_key, queued.create_revision, queued.mod_revision, value, lease.id)
        )
        if done is None:
            if lease is claim_state.prepared_lease:
                claim_state.prepared_lease = None
            return REREAD
        view = queue.parse_view(claim_state.queue_key, done)
        if done.succeeded:
            claim_state.written_revision = queued.mod_revision = queue.txn_revision(done)
            return view
        if self._own_key_exists(view):
            self._see_own_key(view.own)
        return REREAD

    def _see_own_key(self, own: messages.KeyValue | None) -> None:
        """Take over what a read shows of the claim's key: the answer to the last write may have been lost."""
        claim_state = self.claim_state
        if own is None or not isinstance(claim_state.state, Queued):
            return
        claim_state.state.mod_revision = own.mod_revision
        if claim_state.prepared_lease is not None and claim_state.prepared_lease.id == own.lease:
            self._switch_to_prepared_lease()

    async def _requeue_as_waiter(self) -> Busy | NextStep:
        """The claim has to wait: attach its key to a waiter's lease (E7) instead of one with the holder's ttl."""
        claim_state = self.claim_state
        if claim_state.prepared_lease is None:
            claim_state.prepared_lease = await self._get_lease(self.client_state.waiter_lease_ttl)
        view = await self._rewrite(self._entry_value("waiting", 0), claim_state.prepared_lease)
        if view is REREAD:
            return REREAD
        self._switch_to_prepared_lease()
        # REREAD: the entry ahead left meanwhile.
        return REREAD if queue.may_hold(claim_state.queue_key, len(view.conflicts)) else self._wait_reply(view)

    async def _try_acquire(self) -> Grant | Busy | NextStep:
        """Acquire the name now or not at all: no entry stays in the queue."""
        claim_state, token_base, viewed_revision = self.claim_state, await self._get_token_base(), 0
        while True:
            if claim_state.key_lease is None:
                claim_state.key_lease = await self._get_lease(required_ttl(self.claim))
            value, lease_id = self._entry_value("held", token_base.number), claim_state.key_lease.id
            done = await self._write(
                queue.try_acquire_txn(claim_state.queue_key, value, lease_id, token_base.stored, viewed_revision)
            )
            if done is None:
                claim_state.key_lease = None
                continue
            if queue.was_put(done):
                claim_state.state = Queued(revision := queue.txn_revision(done), revision)
                return self._grant_reply(token_base, revision)
            view = queue.parse_view(claim_state.queue_key, done)
            if await self._resolve_rejected_put(view, token_base):
                return REREAD
            if not queue.may_hold(claim_state.queue_key, len(view.conflicts)):
                break
            if not claim_state.queue_key.is_exclusive:
                self._choose_key(view)
                viewed_revision = view.revision
        self._discard()
        if view.head is None:
            return Busy()  # a key that is not ours is first: its holder is unknown
        (ttl_reply,) = await self.rpc.call_each(
            messages.LEASE_TTL, [messages.LeaseId(view.head.lease_id)], self.deadline
        )
        return self._busy_reply(view, None, float(max(ttl_reply.ttl, 0)))

    async def _resolve_rejected_put(self, view: QueueView, token_base: TokenBase) -> bool:
        """Handle the reason for a rejected put: the token base changed, or the claim has a key already. Raises Mismatch
        if the name has another kind. False: none of these."""
        head = view.head
        if view.token_base != token_base.stored:
            self.client_state.token_base = view.token_base
            return True
        if view.own is not None:
            await self._adopt_key(view.own)
            return True
        if head is not None and (head.kind, head.limit) != (self.claim.kind, self.claim.limit):
            self._discard()
            wanted, found = describe_kind(self.claim.kind, self.claim.limit), describe_kind(head.kind, head.limit)
            raise Mismatch(self.claim.name, wanted=wanted, found=found)
        return False

    async def _adopt_key(self, own: messages.KeyValue) -> None:
        """The claim has a key: an earlier request succeeded, but its reply was lost, or another client sent it (E2)."""
        claim_state, value = self.claim_state, queue.parse_value(own.value)
        claim_state.queue_key = claim_state.queue_key._replace(key=own.key)
        claim_state.state = Queued(own.create_revision, own.mod_revision)
        # The client that queued the claim may know of a delay that is left.
        claim_state.delays.known_end = max(
            claim_state.delays.known_end, self.runtime.now() + value.remaining_delay if value.remaining_delay else 0.0
        )
        await self._adopt_lease(own.lease)

    async def _adopt_lease(self, lease_id: int) -> EtcdLease | None:
        """The lease that the claim's key is attached to, perhaps by another client. None: it has expired."""
        claim_state = self.claim_state
        if claim_state.key_lease is None or claim_state.key_lease.id != lease_id:
            unused, claim_state.key_lease = claim_state.key_lease, None
            if unused is not None:
                self._dispose(unused)
            claim_state.key_lease = await self.client_state.leases.adopt(self.rpc, lease_id, self.deadline)
        return claim_state.key_lease

    def _choose_key(self, view: QueueView) -> None:
        """Other claims have the same tag: use the next number, if no further key with this tag appears meanwhile."""
        queue_key = self.claim_state.queue_key
        self.claim_state.queue_key = queue_key.with_number(queue.free_number(queue_key, view.tagged))
        self.claim_state.tag_revision = view.revision if view.tagged else 0

    # ----------------------------------------------------------------- queued

    async def _retry_queued(self, queued: Queued, notified: bool) -> Grant | Busy | NextStep:
        claim_state = self.claim_state
        if notified and claim_state.queue_key.is_exclusive and not self._may_be_delayed():
            return await self._claim_grant(checked=False)
        view = await self._read_queue()
        if not self._own_key_exists(view):
            return REREAD
        self._see_own_key(view.own)
        if view.own is not None and not await self._take_over(view.own):
            return REREAD
        self._observe(view)
        if not queue.may_hold(claim_state.queue_key, len(view.conflicts)) or not self._own_key_active(view):
            return self._wait_reply(view)
        if claim_state.delays.left(self.runtime.now()) > 0:
            return await self._publish_delay(queued, view)
        return await self._claim_grant(checked=True, own=view.own)

    async def _take_over(self, own: messages.KeyValue) -> bool:
        """Rewrite a waiter's key if another client wrote it last: that client no longer serves the claim, and must not
        decline for it. False: the key has changed meanwhile."""
        if own.mod_revision == self.claim_state.written_revision or queue.parse_value(own.value).state != "waiting":
            return True
        lease = await self._adopt_lease(own.lease)
        return lease is not None and await self._rewrite(own.value, lease) is not REREAD

    def _may_be_delayed(self) -> bool:
        """Whether a delay of an earlier entry is left, or may be."""
        return self.claim_state.delays.has_unknown_ends or self.claim_state.delays.left(self.runtime.now()) > 0

    async def _publish_delay(self, queued: Queued, view: QueueView) -> Busy | NextStep:
        """The claim is first in the queue, but a delay is left. Publish the delay in the claim's own value: waiters
        that arrive now have not seen the entry that vanished, and read the delay from there."""
        claim_state, now = self.claim_state, self.runtime.now()
        lease, end = claim_state.key_lease, claim_state.delays.known_end
        if end > max(queued.published_delay_end, now) and lease is not None:
            if await self._rewrite(self._entry_value("waiting", 0, end - now), lease) is REREAD:
                return REREAD
            queued.published_delay_end = end
        return self._wait_reply(view)

    def _observe(self, view: QueueView) -> None:
        """Set the position before querying: replies about entries that are gone wake only the first waiter."""
        queued = self.claim_state.state
        all_read = len(view.ahead) < queue.MAX_QUEUE_READ  # else the position is not known
        if all_read and isinstance(queued, Queued):
            queued.position = queue.position(self.claim_state.queue_key, len(view.ahead), reversed(view.ahead))
        self._query_missing_ends(view.oldest, view.revision)

    def _query_missing_ends(self, oldest: tuple[messages.KeyValue, ...], revision: int) -> None:
        """Ask etcd's history how the entries ended that are gone."""
        claim_state = self.claim_state
        ahead = queue.conflicts_ahead(claim_state.queue_key, claim_state.create_revision, oldest)
        for key, since_revision in claim_state.delays.observe(ahead, revision, self.runtime.now()):
            self.client_state.watcher.watch_history(claim_key(self.claim), key, since_revision)

    async def _claim_grant(self, *, checked: bool, own: messages.KeyValue | None = None) -> Grant | Busy | NextStep:
        """Become the holder. The lease is obtained before the transaction, so its life counts from before the grant.
        `own`: the key as it was just read. If it shows a holder already, another client may have got the grant."""
        claim_state, token_base = self.claim_state, await self._get_token_base()
        if own is not None and queue.parse_value(own.value).state == "held":
            lease = await self._outliving_lease(own.lease)
            if lease is None:
                return REREAD
        else:
            lease = claim_state.prepared_lease or await self._get_lease(required_ttl(self.claim))
        claim_state.prepared_lease = lease
        queue_key, queued, value = (
            claim_state.queue_key,
            claim_state.state,
            self._entry_value("held", token_base.number),
        )
        assert isinstance(queued, Queued)  # noqa: S101  # for the type checker
        revisions = (queued.create_revision, queued.mod_revision)
        done = await self._write(queue.grant_txn(queue_key, *revisions, value, lease.id, token_base.stored, checked))
        if done is None:
            claim_state.prepared_lease = None
            return REREAD
        if queue.was_put(done):
            self._switch_to_prepared_lease()
            return self._grant_reply(token_base, queue.txn_revision(done))
        return self._on_grant_refused(queue.parse_view(queue_key, done), token_base, queued, lease)

    def _on_grant_refused(
        self, view: QueueView, token_base: TokenBase, queued: Queued, lease: EtcdLease
    ) -> Grant | Busy | NextStep:
        """A condition of the transaction that grants was not met: `view` shows which."""
        claim_state = self.claim_state
        if view.token_base != token_base.stored:
            self.client_state.token_base = view.token_base
            return REREAD
        if not self._own_key_exists(view) or view.own is None:
            return REREAD
        if not self._own_key_active(view):
            return self._wait_reply(view)
        if view.own.mod_revision != queued.mod_revision:
            is_granted = view.own.lease == lease.id and queue.parse_value(view.own.value)[1:3] == (
                "held",
                token_base.number,
            )
            self._see_own_key(view.own)
            # Granted by this very transaction, whose first answer was lost.
            return self._grant_reply(token_base, view.own.mod_revision) if is_granted else REREAD
        if queue.may_hold(claim_state.queue_key, len(view.conflicts)):  # the entry ahead left just now
            return REREAD
        if not claim_state.has_unconfirmed_write:
            self.client_state.leases.recycle(self.rpc, lease)
            claim_state.prepared_lease = None
        return self._wait_reply(view)

    async def _outliving_lease(self, lease_id: int) -> EtcdLease | None:
        """A lease that ends no sooner than this one, which a holder may count on (E8). None: that one has expired."""
        claim_state, key_lease = self.claim_state, await self._adopt_lease(lease_id)
        if key_lease is None:
            return None
        ttl, prepared = max(required_ttl(self.claim), key_lease.ttl), claim_state.prepared_lease
        if prepared is not None and prepared.expires_at >= key_lease.expires_at and prepared.ttl >= ttl:
            return prepared
        if prepared is not None:
            claim_state.prepared_lease = None
            self._dispose(prepared)
        return await self.client_state.leases.create(self.rpc, ttl, self.deadline)

    async def _repeat_grant(self, held: Held) -> Grant | NextStep:
        """The claim holds the name already: return the same grant with the life that is left (E2, E8)."""
        view = await self._read_queue()
        if not self._own_key_exists(view) or view.own is None or queue.parse_value(view.own.value).state != "held":
            self._reset_expired()
            return REREAD
        lease = await self._adopt_lease(view.own.lease)
        return REREAD if lease is None else Grant(held.token, self._remaining_ttl())

    def _own_key_exists(self, view: QueueView) -> bool:
        if view.own is not None and view.own.create_revision == self.claim_state.create_revision:
            return True
        self._reset_expired()
        return False

    def _own_key_active(self, view: QueueView) -> bool:
        """False: the claim was broken or released, and only its key is kept for a while."""
        return view.own is not None and queue.parse_value(view.own.value).state in _ACTIVE_STATES

    # ---------------------------------------------------------------- replies

    def _grant_reply(self, token_base: TokenBase, revision: int) -> Grant:
        """`revision`: of the transaction that granted."""
        claim_state = self.claim_state
        create_revision = claim_state.create_revision
        token = token_base.number + create_revision
        claim_state.state = Held(create_revision, token, self.runtime.now())
        claim_state.delays = DelayTracker()
        watcher = self.client_state.watcher
        watcher.unwatch(claim_key(self.claim))
        watcher.watch_own(claim_key(self.claim), claim_state.queue_key.key, revision)
        return Grant(token, self._remaining_ttl())

    def _remaining_ttl(self) -> float:
        """Seconds from `asked_at`, where the caller starts counting. The delay is not part of them: for that time the
        engine keeps the name, but the holder must not use it."""
        lease = self.claim_state.key_lease
        assert lease is not None  # noqa: S101  # for the type checker
        return max(0.0, min(lease.expires_at - self.asked_at, float(lease.ttl)) - self.claim.delay)

    def _wait_reply(self, view: QueueView) -> Busy:
        claim_state = self.claim_state
        self._observe(view)
        self._watch_conflict(view.conflicts, view.revision)
        return self._busy_reply(view, claim_state.position, claim_state.delays.left(self.runtime.now()) or None)

    def _busy_reply(self, view: QueueView, position: int | None, left: float | None) -> Busy:
        head = view.head
        if head is None or head.create_revision == self.claim_state.create_revision:
            return Busy(left, position)
        return Busy(left, position, head.token if head.value.token_base else None, head.value.holder)

    def _watch_conflict(self, conflicts: tuple[messages.KeyValue, ...], revision: int) -> None:
        """Watch for the next change that matters. Locks: the nearest conflicting key ends. Permits: the first waiter is
        notified when any permit is released, a later one when the entry ahead of it leaves or becomes a holder."""
        queue_key, watcher, key = self.claim_state.queue_key, self.client_state.watcher, claim_key(self.claim)
        if not conflicts:  # only a delay is left
            watcher.keep_waiters()
            return
        # `conflicts` has at most one key more than the limit. Without that one, all keys ahead hold, and this is next.
        is_next = len(conflicts) <= queue_key.limit
        if is_next and queue_key.limit > 1:
            watcher.watch_conflict(
                key,
                queue_key.conflict_prefix,
                messages.range_end(queue_key.conflict_prefix),
                revision,
                include_puts=False,
                is_next=True,
            )
        else:
            watcher.watch_conflict(
                key, conflicts[0].key, b"", revision, include_puts=queue_key.limit > 1, is_next=is_next
            )

    # ------------------------------------------------------------------ steps

    async def _read_queue(self) -> QueueView:
        claim_state = self.claim_state
        view_txn = queue.view_txn(claim_state.queue_key, claim_state.create_revision)
        return queue.parse_view(claim_state.queue_key, await self._run_txn(view_txn))

    def _entry_value(self, state: EntryState, token_base: int, remaining_delay: float = 0.0) -> bytes:
        claim, written_at = self.claim, round(self.runtime.wall(), 3)
        value = EntryValue(
            claim.id_hash, state, token_base, claim.delay, claim.holder, written_at, remaining_delay, claim.min_hold
        )
        return value.to_bytes()

    async def _get_lease(self, seconds: int) -> EtcdLease:
        return await self.client_state.leases.get(self.rpc, seconds, self.deadline)

    async def _get_token_base(self) -> TokenBase:
        """Use one result for a whole transaction: another thread may learn of a new base meanwhile, and a grant must
        compare the very base that its token is made of (E3)."""
        stored = self.client_state.token_base
        if not stored:
            stored = await read_token_base(self.client_state, self.rpc, self.runtime, self.deadline)
            self.client_state.token_base = stored
        return self.client_state.parse_token_base(stored)

    async def _write(self, txn: messages.TxnRequest) -> messages.TxnResponse | None:
        """Run a transaction that puts a key. None: its lease has expired. Until the write is answered, and for good if
        a try got no reply, `has_unconfirmed_write` is set: etcd may still execute it."""
        claim_state, unconfirmed, was_unconfirmed = (
            self.claim_state,
            list[str](),
            self.claim_state.has_unconfirmed_write,
        )
        claim_state.has_unconfirmed_write = True
        try:
            done = await run_txn(self.client_state, self.rpc, txn, self.deadline, unconfirmed)
        except LeaseNotFound:
            claim_state.has_unconfirmed_write = was_unconfirmed or bool(unconfirmed)
            return None
        claim_state.has_unconfirmed_write = was_unconfirmed or bool(unconfirmed)
        return done

    async def _run_txn(self, txn: messages.TxnRequest) -> messages.TxnResponse:
        return await run_txn(self.client_state, self.rpc, txn, self.deadline)

    def _switch_to_prepared_lease(self) -> None:
        """The key is attached to the prepared lease now."""
        claim_state = self.claim_state
        old_lease, claim_state.key_lease, claim_state.prepared_lease = (
            claim_state.key_lease,
            claim_state.prepared_lease,
            None,
        )
        if old_lease is not None and old_lease is not claim_state.key_lease:
            self._dispose(old_lease)

    def _reset_expired(self) -> None:
        """The claim's key is gone: revoke its leases, so that no late write brings it back."""
        claim_state = self.claim_state
        for lease in claim_state.leases:
            self.client_state.leases.revoke_nowait(self.rpc, lease)
        claim_state.key_lease = claim_state.prepared_lease = None
        claim_state.state = New()  # `delays` stays: what it knows about earlier entries is still true

    def _discard(self) -> None:
        """The claim was refused and has no key: dispose of its lease and forget it."""
        if self.claim_state.key_lease is not None:
            self._dispose(self.claim_state.key_lease)
        self.client_state.remove_claim(self.claim, self.claim_state)

    def _dispose(self, lease: EtcdLease) -> None:
        """No key is attached to this lease any more. Reuse it, unless a late write may still attach one."""
        leases = self.client_state.leases
        (leases.revoke_nowait if self.claim_state.has_unconfirmed_write else leases.recycle)(self.rpc, lease)


async def run_txn(
    client_state: EtcdClientState,
    rpc: RpcClient,
    txn: messages.TxnRequest,
    deadline: float,
    unconfirmed: list[str] | None = None,
) -> messages.TxnResponse:
    """Run a transaction. Raises ConfigError if etcd's revisions have gone back."""
    last_revision = client_state.last_revision()
    done = await rpc.call(messages.TXN, txn, deadline, unconfirmed)
    client_state.record_header(done.header, last_revision)
    client_state.check_history()
    return done


async def read_token_base(client_state: EtcdClientState, rpc: RpcClient, runtime: Runtime, deadline: float) -> bytes:
    """The number that tokens begin at. The first client creates it from its clock; later no client's clock matters."""
    key = queue.token_base_key(client_state.url.root)
    new = b"%d" % int(runtime.wall() * 1_000_000)
    absent = messages.Compare(messages.EQUAL, messages.CREATE, key)
    put, read = messages.RequestOp(put=messages.PutRequest(key, new)), messages.RequestOp(messages.RangeRequest(key))
    done = await run_txn(client_state, rpc, messages.TxnRequest((absent,), (put,), (read,)), deadline)
    if done.succeeded:
        return new
    found = done.responses[0].range if done.responses else None
    if found is None or not found.kvs:
        raise messages.MalformedReply("the token base neither exists nor is absent")
    return found.kvs[0].value
