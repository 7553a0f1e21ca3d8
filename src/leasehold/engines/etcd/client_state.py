"""What a client's two engine instances share: its claims, leases and watches, and what it knows about the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple
from weakref import ref

from leasehold.core.timing import WAITER_TTL, poll_interval
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.delays import DelayTracker
from leasehold.engines.etcd.leases import SERVED_WAITER_LEASE_TTL, WAITER_LEASE_TTL, EtcdLease, LeasePool
from leasehold.engines.etcd.rpc import ClusterMemory
from leasehold.engines.etcd.url import EtcdUrl
from leasehold.engines.etcd.watch import ClaimKey, KeyWatch, WatchCallback, Watcher
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.engines.sql.fair_mutex import Caller, FairMutex
from leasehold.errors import ConfigError
from leasehold.model import Claim
from leasehold.runtime.base import Runtime

_MAX_TOKEN_BASE: Final = (1 << 53) - (1 << 40)  # so that tokens stay below 2^53 for 10^12 more revisions


class TokenBase(NamedTuple):
    """What is added to a create revision to make a token."""

    stored: bytes  # as in etcd: the transaction that grants compares it
    number: int


@dataclass(frozen=True, slots=True)
class New:
    """The claim has no key that this client knows of."""


@dataclass(slots=True)
class Queued:
    """The claim has a key in the queue, and no grant."""

    create_revision: int  # of the key: the claim's place in the order of creation
    mod_revision: int  # of the last write to the key that this client has seen
    position: int | None = None  # how many waiters are ahead, as last read
    published_delay_end: float = 0.0  # the end of the delay that the claim's own value shows


@dataclass(frozen=True, slots=True)
class Held:
    """The claim was granted the name."""

    create_revision: int
    token: int
    since: float


class ClaimState:
    """What this client knows about one of its claims at etcd. `state` is replaced as a whole, because the watcher and
    the watchdog read it on their own threads."""

    __slots__ = (
        "delay",
        "delays",
        "has_unconfirmed_write",
        "key_lease",
        "min_hold",
        "mutex",
        "prepared_lease",
        "queue_key",
        "renewed_at",
        "state",
        "tag_revision",
        "written_revision",
    )

    def __init__(self, queue_key: queue.QueueKey, runtime: Runtime) -> None:
        self.queue_key = queue_key
        self.renewed_at = runtime.now()  # when the claim last joined the queue, or its last heartbeat (E7)
        self.mutex = FairMutex(runtime, "etcd", "the claim")  # one attempt at a time
        self.delay = self.min_hold = 0.0  # as in the last attempt
        self.tag_revision = 0  # at which the keys with the claim's tag were read, and none was the claim's; 0: never
        self.state: New | Queued | Held = New()
        self.key_lease: EtcdLease | None = None  # the etcd lease that the key is attached to
        self.prepared_lease: EtcdLease | None = None  # the etcd lease that the next write attaches the key to
        self.delays = DelayTracker()  # delays of earlier entries
        self.written_revision = 0  # of this client's last write to the key of the queued claim
        self.has_unconfirmed_write = False  # etcd may execute a write for this claim even after later requests

    @property
    def create_revision(self) -> int:
        """0: no key."""
        return 0 if isinstance(self.state, New) else self.state.create_revision

    @property
    def position(self) -> int | None:
        return self.state.position if isinstance(self.state, Queued) else None

    @property
    def is_held(self) -> bool:
        return isinstance(self.state, Held)

    def knows(self, own: messages.KeyValue) -> bool:
        """Whether the key is as this client has written or seen it last, so that `state` is up to date."""
        if isinstance(self.state, Queued):
            return own.mod_revision == self.state.mod_revision
        return own.create_revision == self.create_revision  # a grant's key is rewritten by renewals

    @property
    def is_empty(self) -> bool:
        """The claim has nothing at etcd, and no write is in flight."""
        return isinstance(self.state, New) and not self.has_unconfirmed_write and not self.leases

    @property
    def leases(self) -> list[EtcdLease]:
        """The etcd leases that the key is or may be attached to."""
        found = {id(lease): lease for lease in (self.key_lease, self.prepared_lease) if lease is not None}
        return list(found.values())


class EtcdClientState:
    def __init__(self, url: EtcdUrl, runtime: Runtime, registry: ClaimRegistry) -> None:
        self.url = url
        self.claim_states: dict[ClaimKey, ClaimState] = {}
        self._runtime, self._mutex = runtime, runtime.mutex()
        self.leases = LeasePool(runtime)
        self.memory = ClusterMemory()
        self.token_base = b""  # as stored in etcd; empty: not read yet
        self.member_count = len(url.endpoints)
        self._now, self._registry = runtime.now, ref(registry)
        self._revision = self._cluster_id = 0
        self._rewound_reason = ""
        self.watcher = Watcher(url, runtime, self.memory, _weak_callback(ref(self)), _weak_lister(ref(self)))

    def find_claim_state(self, claim: Claim) -> ClaimState | None:
        return self.claim_states.get(claim_key(claim))

    def get_claim_state(self, claim: Claim) -> ClaimState:
        claim_state = self.claim_states.get(claim_key(claim))
        if claim_state is None:
            queue_key = queue.make_queue_key(self.url.root, claim)
            claim_state = self.claim_states.setdefault(claim_key(claim), ClaimState(queue_key, self._runtime))
        return claim_state

    async def begin_attempt(self, claim: Claim, deadline: float) -> tuple[ClaimState, Caller]:
        """The state of a claim, for one attempt at a time. The caller releases its mutex."""
        while True:
            claim_state = self.get_claim_state(claim)
            caller = claim_state.mutex.new_caller()
            try:
                await claim_state.mutex.acquire(caller, deadline)
            except BaseException:
                claim_state.mutex.release(caller)
                raise
            if self.claim_states.get(claim_key(claim)) is claim_state:
                return claim_state, caller
            claim_state.mutex.release(caller)  # an attempt that came first was refused, and has removed the claim

    def remove_claim(self, claim: Claim, claim_state: ClaimState) -> bool:
        """Forget a claim. False: it was removed before, or has a new state."""
        with self._mutex:
            if self.claim_states.get(claim_key(claim)) is not claim_state:
                return False
            del self.claim_states[claim_key(claim)]
        self.watcher.unwatch(claim_key(claim))
        return True

    def has_other_waiter(self, claim: Claim) -> bool:
        """Whether another claim of this client waits for the same name."""
        if (registry := self._registry()) is None:
            return False
        other_claims = (
            waiter.claim for _, waiter in snapshot_items(registry.waiting) if waiter.claim.id_hash != claim.id_hash
        )
        return any(other.name == claim.name and other.namespace == claim.namespace for other in other_claims)

    @property
    def waiter_lease_ttl(self) -> int:
        """The ttl of a waiter's etcd lease. A short one needs the watch thread; and if other clients serve the claim
        as well, the next one needs time to take it over."""
        registry = self._registry()
        if self.watcher.has_no_thread or registry is None or not registry.undo_unanswered:
            return SERVED_WAITER_LEASE_TTL
        return WAITER_LEASE_TTL

    def waiters_leases(self) -> list[EtcdLease]:
        """The etcd leases that waiters' keys are attached to, and that are to be kept alive (E7). From any thread."""
        if (registry := self._registry()) is None:
            return []
        now, found = self._now(), []
        for _, waiter in snapshot_items(registry.waiting):
            claim_state = self.claim_states.get(claim_key(waiter.claim))
            if claim_state is None or claim_state.is_held or (lease := claim_state.key_lease) is None:
                continue
            # Once more renewed, a lease lives for its whole ttl: that must not outlast the waiter's own (E7).
            if now < claim_state.renewed_at + WAITER_TTL - lease.ttl:
                found.append(lease)
        return found

    def after_fork(self) -> None:
        self.claim_states.clear()
        self._mutex = self._runtime.mutex()
        self.leases.after_fork()
        self.watcher.after_fork()

    # ------------------------------------------------ replies and events

    def parse_token_base(self, stored: bytes) -> TokenBase:
        """Raises ConfigError if it is not a valid one."""
        if not 0 < queue.parse_token_base(stored) < _MAX_TOKEN_BASE:
            raise ConfigError(
                f"{queue.token_base_key(self.url.root).decode()} in etcd must hold the number that tokens begin at; "
                "run `leasehold rebase` to repair it"
            )
        return TokenBase(stored, int(stored))

    def last_revision(self) -> int:
        """Read this before sending a request: no answer to it may have a lower revision."""
        return self._revision

    def record_header(self, header: messages.ResponseHeader | None, last_revision: int) -> None:
        """Detect that the data were restored from a snapshot: the revision went back, so tokens would fall and grants
        are lost."""
        if header is None:
            return
        if header.revision < last_revision or self._cluster_id not in (0, header.cluster_id):
            self._rewound_reason = (
                f"the data of this etcd were replaced: the revision was {last_revision}, now it is {header.revision}. "
                "If they were restored without --bump-revision, run `leasehold rebase`. Then create a new client"
            )
        self._cluster_id = header.cluster_id
        self._revision = max(self._revision, header.revision)

    @property
    def history_rewound(self) -> bool:
        return bool(self._rewound_reason)

    def check_history(self) -> None:
        """Raises ConfigError once this client has seen the revision go back: it must not issue tokens any more."""
        if self._rewound_reason:
            raise ConfigError(self._rewound_reason)

    def on_watch_event(self, key_watch: KeyWatch, event: messages.WatchEvent | None, seconds: float | None) -> None:
        """Called on the watcher's thread."""
        *_, id_hash = key_watch.claim_key
        claim_state, registry = self.claim_states.get(key_watch.claim_key), self._registry()
        if claim_state is None or registry is None:
            return
        if key_watch.reason == "own":
            if event is not None and (event.type == messages.DELETED or _is_cooling(event.kv)):
                registry.on_notification("broken", id_hash, 0.0, None)
            return
        if event is not None and event.type == messages.DELETED:
            self._on_key_deleted(claim_state, event.kv.key if event.kv is not None else key_watch.key, event.prev_kv)
        elif event is None and key_watch.reason == "past":
            self._on_key_deleted(claim_state, key_watch.key, None)
        if key_watch.reason == "past" and claim_state.position:
            return  # other entries are still ahead, and the waiter is notified when they end
        if event is None:
            if seconds is None:  # a position that is not known is beyond the first MAX_QUEUE_READ
                position = queue.MAX_QUEUE_READ if claim_state.position is None else claim_state.position
                seconds = poll_interval(position, 0, self._runtime.random())
            registry.on_notification("recheck", id_hash, seconds, None)
        else:
            registry.on_notification("reserved", id_hash, 0.0, None)

    def _on_key_deleted(self, claim_state: ClaimState, key: bytes, previous_kv: messages.KeyValue | None) -> None:
        last_entry = None if previous_kv is None else queue.parse_entry(self.url.root, previous_kv)
        # A higher create revision means that a later claim, behind this one, has reused the key.
        if last_entry is None or last_entry.create_revision < claim_state.create_revision:
            claim_state.delays.entry_ended(key, last_entry, self._now())


def claim_key(claim: Claim) -> ClaimKey:
    return claim.namespace, claim.name, claim.id_hash


def _is_cooling(kv: messages.KeyValue | None) -> bool:
    return kv is not None and queue.parse_value(kv.value).state == "cooling"


def _weak_callback(client_state: ref[EtcdClientState]) -> WatchCallback:
    def on_watch_event(key_watch: KeyWatch, event: messages.WatchEvent | None, seconds: float | None) -> None:
        if (live_state := client_state()) is not None:
            live_state.on_watch_event(key_watch, event, seconds)

    return on_watch_event


def _weak_lister(client_state: ref[EtcdClientState]) -> Callable[[], list[EtcdLease]]:
    def list_leases() -> list[EtcdLease]:
        return [] if (live_state := client_state()) is None else live_state.waiters_leases()

    return list_leases
