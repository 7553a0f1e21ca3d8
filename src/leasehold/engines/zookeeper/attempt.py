"""One attempt: a claim joins its queue or checks its position, and gets a grant or a busy reply.

    join       create2 own node | get children | get base        one pipeline: 3 requests
    woken      set own node | get children | get base            one pipeline; the set starts the ttl
    waiting    watch the node ahead | read the holders' nodes    one pipeline, then sleep

No client ends a holder because of one clock alone. It deletes the holder's node, by version, only if three conditions
agree: the version has been unchanged for the whole ttl by the client's own clock, the leader's clock says so too, and
the leader still has that version when it deletes. The first alone is safe if clocks run at the right speed: the holder
counts from before it wrote the version that the client saw later. The second keeps one waiter's wrong clock from
deciding. If the holder renews in between, the renewal wins.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Final

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError
from kazoo.protocol.serialization import Delete, Exists, SetData, Sync

from leasehold.core.lock_state import describe_kind
from leasehold.core.names import engine_key
from leasehold.engines.zookeeper import nodes, slots
from leasehold.engines.zookeeper.kazoo_adapter import CONTAINER, EPHEMERAL_SEQUENTIAL, CreateContainer, Reply
from leasehold.engines.zookeeper.nodes import ROOT, TOKEN_BASE, ClaimNode, NodeQueue
from leasehold.engines.zookeeper.requests import Create2, GetChildren, GetChildren2, GetData
from leasehold.engines.zookeeper.session import OwnNode, ZookeeperSession, remember
from leasehold.errors import ConfigError, Mismatch
from leasehold.model import Busy, Claim, Grant
from leasehold.runtime.base import Runtime

LAST_SEQUENCE: Final = 2**31 - 10**6  # after 2^31 the server repeats the same number
_PARENT_CACHE_TIME: Final = 20.0  # seconds for which a queue is assumed to exist: servers delete empty ones each minute
_DRAIN_POLL_INTERVAL: Final = 0.2  # how often to check whether a queue out of sequence numbers is empty


def queue_path(session: ZookeeperSession, namespace: str, name: str) -> str:
    return f"{session.url.chroot}{ROOT}/{engine_key(namespace, name)}"


class NodeState(Enum):
    """Where a claim's node is in its queue."""

    NONE = auto()  # not created yet
    DELETED = auto()  # not in the queue any more: the claim joins again
    PAST_THE_LAST_SEQUENCE = auto()  # the queue is out of sequence numbers
    OF_ANOTHER_KIND = auto()  # the queue of the name has another kind or limit
    BEHIND = auto()  # others hold the name, and the claim waits
    BEHIND_UNQUEUED = auto()  # others hold the name, and the claim does not wait
    FIRST_IF_REWRITTEN = auto()  # the claim may hold the name, but its ttl did not start when the queue was read
    FIRST = auto()  # the claim holds the name: its node was written in the pipeline that read the queue


class NextStep(Enum):
    """A step that decided nothing, but changed what the next one finds."""

    REREAD = auto()


REREAD: Final = NextStep.REREAD


class ZookeeperAttempt:
    """One attempt, and what it has read so far."""

    def __init__(
        self, session: ZookeeperSession, runtime: Runtime, claim: Claim, asked_at: float, deadline: float
    ) -> None:
        self._session, self._runtime, self._claim = session, runtime, claim
        self._asked_at, self._deadline = asked_at, deadline
        self._parent = queue_path(session, claim.namespace, claim.name)
        self._base_path = session.url.chroot + TOKEN_BASE
        self._own_node: OwnNode | None = None
        self._queue = NodeQueue(())
        self._token_base = 0
        self._slots: tuple[bytes, int] = (b"", 0)  # the parent node's data and version
        self._is_fresh = False  # the claim's node was written in the same pipeline in which the queue was read
        self._mismatch_seen = False
        self._leader_time_ms = 0  # the leader's clock, in ms, at the last write of this attempt

    async def run(self, woken: bool) -> Grant | Busy:
        await self._read_known_node(woken)
        while True:
            reply = await self._step()
            if reply is not REREAD:
                return reply

    async def _read_known_node(self, woken: bool) -> None:
        """If an earlier attempt created the claim's node, find it and read its queue."""
        session, claim = self._session, self._claim
        self._own_node = session.own_node(claim)
        if self._own_node is None and claim.id_hash in session.unconfirmed:
            self._own_node = await find_unconfirmed(session, self._runtime, claim, self._deadline)
        if self._own_node is not None:
            # A semaphore's waiter does not write its node before it may hold: that would wake the waiter behind it.
            await self._refresh(write=bool(self._own_node.token) or (woken and claim.kind == "lock"))

    def _state(self) -> NodeState:
        """Where the claim's node is, by what this attempt has read last."""
        own_node, queue = self._own_node, self._queue
        if own_node is None:
            return NodeState.NONE
        index = queue.index(own_node.name)
        if index is None:
            return NodeState.DELETED
        if queue.node(index).sequence > LAST_SEQUENCE:
            return NodeState.PAST_THE_LAST_SEQUENCE
        if queue.mismatches(index):
            return NodeState.OF_ANOTHER_KIND
        if queue.holds(index):
            return NodeState.FIRST if self._is_fresh else NodeState.FIRST_IF_REWRITTEN
        # A queued claim keeps its position (E2).
        return NodeState.BEHIND if self._claim.queue or own_node.waits else NodeState.BEHIND_UNQUEUED

    async def _step(self) -> Grant | Busy | NextStep:
        match self._state():
            case NodeState.NONE:
                return await self._join()
            case NodeState.DELETED:
                self._forget_node()
                return REREAD
            case NodeState.PAST_THE_LAST_SEQUENCE:
                return await self._leave_exhausted_queue()
            case NodeState.OF_ANOTHER_KIND:
                return await self._check_mismatch()
            case NodeState.BEHIND:
                return await self._stay_queued()
            case NodeState.BEHIND_UNQUEUED:
                return await self._give_up()
            case NodeState.FIRST_IF_REWRITTEN:
                await self._refresh(write=True)
                return REREAD
            case NodeState.FIRST:
                return await self._grant()

    @property
    def _node(self) -> OwnNode:
        """The claim's node, in every state but NONE."""
        assert self._own_node is not None  # noqa: S101  # for the type checker
        return self._own_node

    # ------------------------------------------------------------- requests

    async def _pipeline(self, *requests: Any) -> list[Reply]:
        return await self._session.pipeline(self._runtime, requests, self._deadline)

    def _queue_reads(self) -> list[Any]:
        """Reads the slots before the queue: only then is a claim that has a slot and is not in the queue gone."""
        reads = [GetChildren(self._parent, None), GetData(self._base_path, None)]
        return [GetData(self._parent, None), *reads] if self._claim.kind == "semaphore" else reads

    def _parse_queue(self, replies: list[Reply]) -> None:
        *slot_replies, children, base = replies
        self._queue = NodeQueue(children.get(NoNodeError) or ())
        self._token_base = nodes.parse_base((base.get(NoNodeError) or (b"0", None))[0])
        if slot_replies:
            data, stat = slot_replies[-1].get(NoNodeError) or (b"", None)
            self._slots = (data, stat.version if stat else 0)

    def _forget_node(self) -> None:
        self._session.forget_node(self._claim.id_hash)
        self._own_node = None

    def _record_write(self, own_node: OwnNode, sent: float, life: float, waits: bool, stat: Any) -> None:
        own_node.waits, own_node.expires_at = waits, max(own_node.expires_at, sent + life)
        self._leader_time_ms = stat.mtime
        self._session.leader_clock_offset = stat.mtime / 1000 - self._runtime.now()

    async def _join(self) -> Busy | NextStep:
        """Create the claim's node and read the queue in one pipeline. Until that is answered, the node may or may not
        exist."""
        if busy := await self._drain_exhausted_queue():
            return busy
        session, claim, parent = self._session, self._claim, self._parent
        acl = session.url.acl
        data = nodes.encode_data(claim.holder, claim.ttl, False)
        create = Create2(f"{parent}/{nodes.name_prefix(claim)}", data, acl, EPHEMERAL_SEQUENTIAL)
        while True:
            sent = self._runtime.now()
            known = session.known_parents.get(parent, float("-inf")) > sent - _PARENT_CACHE_TIME
            parent_creates = () if known else (CreateContainer(parent, b"", acl, CONTAINER),)
            requests = (*parent_creates, create, *self._queue_reads())
            replies = await session.pipeline(self._runtime, requests, self._deadline, creates=claim.id_hash)
            created = replies[len(parent_creates)]
            if created.error is None:
                break
            session.unconfirmed.discard(claim.id_hash)  # answered: no node was created
            session.known_parents.pop(parent, None)
            created.get(NoNodeError)
            if parent_creates and isinstance(replies[0].error, NoNodeError):
                await create_root(session, self._runtime, self._deadline)
            elif parent_creates and replies[0].error is not None:
                replies[0].get(NodeExistsError)  # raises, unless the server just deleted an empty parent that existed
        path, stat = created.value
        own_node = self._own_node = session.own_nodes[claim.id_hash] = OwnNode(claim, path, stat, sent + claim.ttl)
        session.unconfirmed.discard(claim.id_hash)
        remember(session.known_parents, parent, sent)
        self._record_write(own_node, sent, claim.ttl, False, stat)
        self._is_fresh = True
        self._parse_queue(replies[len(parent_creates) + 1 :])
        return REREAD

    async def _refresh(self, write: bool) -> None:
        own_node, claim, sent = self._node, self._claim, self._runtime.now()
        if not write:  # sync first: a lagging follower must show a release that another client has seen confirmed
            self._is_fresh = False
            _, *read_replies = await self._pipeline(Sync(self._parent), *self._queue_reads())
            self._parse_queue(read_replies)
            return
        # Never shorter than an earlier answer promised (E8).
        life = max(claim.ttl, own_node.expires_at - sent) if own_node.token else claim.ttl
        write_request = SetData(own_node.path, nodes.encode_data(claim.holder, life, False), -1)
        write_reply, *read_replies = await self._pipeline(write_request, *self._queue_reads())
        self._parse_queue(read_replies)
        if stat := write_reply.get(NoNodeError):
            self._record_write(own_node, sent, life, False, stat)
            self._is_fresh = True

    # -------------------------------------------------------------- replies

    async def _grant(self) -> Grant | NextStep:
        """REREAD: the slots changed meanwhile."""
        own_node, claim = self._node, self._claim
        if claim.kind == "semaphore" and own_node.slot is None:
            data, version = self._slots
            slot, new_data = slots.choose(data, self._queue, claim.id_hash, own_node.created_zxid, claim.limit)
            if new_data is not None:
                (reply,) = await self._pipeline(SetData(self._parent, new_data, version))
                if reply.get(BadVersionError, NoNodeError) is None:
                    await self._refresh(write=True)
                    return REREAD
            own_node.slot = slot
        token = own_node.token or self._token_base + own_node.created_zxid
        if token >= nodes.TOKEN_BOUND:
            raise ConfigError(f"{nodes.TOKEN_BASE} is too high: tokens would not stay below 2^53")
        own_node.token = token
        left = self._session.trusted_until(own_node) - self._asked_at
        return Grant(own_node.token, max(0.0, min(left, claim.ttl)), own_node.slot)

    async def _check_mismatch(self) -> NextStep:
        """Raises `Mismatch` if two reads show a queue of another kind: a claim that is itself about to be refused fixes
        no kind. A holder that has expired does not either."""
        if await self._delete_expired(self._queue.holders) is not None:
            if self._mismatch_seen:
                await self._pipeline(Delete(self._node.path, -1))
                self._forget_node()
                wanted = describe_kind(self._claim.kind, self._claim.limit)
                raise Mismatch(self._claim.name, wanted=wanted, found=self._queue.describe_kind())
            self._mismatch_seen = True
        await self._refresh(write=False)
        return REREAD

    async def _give_up(self) -> Busy | NextStep:
        """The claim does not wait: delete its node, and report the holder."""
        holders = self._queue.holders
        deleted, *holder_replies = await self._pipeline(Delete(self._node.path, -1), *self._holder_reads(holders))
        deleted.get(NoNodeError)
        self._forget_node()
        return await self._busy_reply(holders, holder_replies, None)

    async def _stay_queued(self) -> Busy | NextStep:
        """Watch the node that is in the way. REREAD: a node is gone meanwhile."""
        session, claim, own_node, queue = self._session, self._claim, self._node, self._queue
        index = queue.index(own_node.name)
        assert index is not None  # noqa: S101  # for the type checker
        position = queue.position(index)
        holders = queue.holders if position == 0 else queue.holders[:1]
        is_semaphore_head = claim.kind == "semaphore" and position == 0
        target = self._parent if is_semaphore_head else f"{self._parent}/{queue.predecessor(index).name}"
        watch = session.watch(target, claim.id_hash)
        # An ephemeral node has no children, so a child watch fires only when it is deleted, not when it is renewed. A
        # semaphore's waiter must also know when the waiter ahead becomes a holder: that one writes its node then.
        by_data = claim.kind == "semaphore" and not is_semaphore_head
        watch_request = GetData(target, watch) if by_data else GetChildren(target, watch)
        sent = self._runtime.now()
        waiting_writes = (
            [] if own_node.waits else [SetData(own_node.path, nodes.encode_data(claim.holder, claim.ttl, True), -1)]
        )
        replies = await self._pipeline(*waiting_writes, watch_request, *self._holder_reads(holders))
        if waiting_writes and (stat := replies.pop(0).get(NoNodeError)):
            self._record_write(own_node, sent, claim.ttl, True, stat)
        watch_reply, *holder_replies = replies
        self._is_fresh = False
        watched_value = watch_reply.get(NoNodeError)
        if watched_value is None or (is_semaphore_head and NodeQueue(watched_value).names != queue.names):
            await self._refresh(write=False)
            return REREAD
        return await self._busy_reply(holders, holder_replies, position)

    async def _leave_exhausted_queue(self) -> NextStep:
        """The queue is out of sequence numbers: no claim joins it any more, and it is recreated once it is empty."""
        deleted, parent = await self._pipeline(Delete(self._node.path, -1), Exists(self._parent, None))
        deleted.get(NoNodeError)
        self._forget_node()
        if stat := parent.get(NoNodeError):
            self._session.draining[self._parent] = stat.czxid
        return REREAD

    async def _drain_exhausted_queue(self) -> Busy | None:
        session, parent = self._session, self._parent
        while (exhausted_zxid := session.draining.get(parent)) is not None:
            (reply,) = await self._pipeline(GetChildren2(parent, None))
            names, stat = reply.get(NoNodeError) or ((), None)
            if stat is None or stat.czxid != exhausted_zxid:
                session.draining.pop(parent, None)
            elif names and not NodeQueue(names).names:
                raise ConfigError(
                    f"{parent} is out of sequence numbers; delete the nodes in it that are not ours, so that it is "
                    "recreated"
                )
            elif names:
                return Busy(_DRAIN_POLL_INTERVAL)
            else:
                (deleted,) = await self._pipeline(Delete(parent, -1))
                deleted.get(NoNodeError, NotEmptyError)
                session.known_parents.pop(parent, None)
        return None

    # --------------------------------------------------- expired holders

    def _holder_reads(self, holders: list[ClaimNode]) -> list[Any]:
        return [GetData(f"{self._parent}/{node.name}", None) for node in holders]

    async def _busy_reply(
        self, holders: list[ClaimNode], holder_replies: list[Reply], position: int | None
    ) -> Busy | NextStep:
        """Report what is in the way. REREAD: a holder is gone now."""
        left = await self._delete_expired(holders, holder_replies) if not position else float("inf")
        if left is None:
            if self._own_node is not None:
                await self._refresh(write=False)
            return REREAD
        data, stat = holder_replies[0].get(NoNodeError) or (b"", None)
        if stat is None:
            return Busy(None if position else 0.0, position)
        node_data = nodes.parse_data(data)
        return Busy(left if left < float("inf") else None, position, self._token_base + stat.czxid, node_data.holder)

    async def _delete_expired(
        self, holders: list[ClaimNode], holder_replies: list[Reply] | None = None
    ) -> float | None:
        """Delete a holder that has expired. None: a holder is gone now. Otherwise the seconds until one may expire."""
        if holder_replies is None:
            holder_replies = await self._pipeline(*self._holder_reads(holders))
        now, soonest = self._runtime.now(), float("inf")
        expired = []
        for node, holder_reply in zip(holders, holder_replies, strict=True):
            data, stat = holder_reply.get(NoNodeError) or (b"", None)
            path = f"{self._parent}/{node.name}"
            if stat is None:
                self._session.seen_versions.pop(path, None)
                return None
            life = nodes.parse_data(data).life
            left = life * (1 + self._session.drift) - self._session.unchanged_for(path, stat.version, now)
            if left <= 0:
                expired.append((path, stat, life))
            else:
                soonest = min(soonest, left, life)  # at most the ttl, as it is displayed; checking too early is cheap
        for path, stat, life in expired:
            if self._leader_time_ms == 0:
                await self._read_leader_clock()
            if (left := (stat.mtime - self._leader_time_ms) / 1000 + life) > 0:  # by the leader's clock
                soonest = min(soonest, left)
                continue
            (deleted,) = await self._pipeline(Delete(path, stat.version))
            deleted.get(NoNodeError, BadVersionError)
            self._session.seen_versions.pop(path, None)
            return None
        return soonest

    async def _read_leader_clock(self) -> None:
        """Rewrite the claim's own node to learn the leader's clock. Changes nothing else."""
        own_node, claim = self._node, self._claim
        (write_reply,) = await self._pipeline(
            SetData(own_node.path, nodes.encode_data(claim.holder, claim.ttl, own_node.waits), -1)
        )
        if stat := write_reply.get(NoNodeError):
            self._leader_time_ms = stat.mtime


async def create_root(session: ZookeeperSession, runtime: Runtime, deadline: float) -> None:
    """Create the root node of all queues, and the nodes above it."""
    path, creates = "", []
    for part in (session.url.chroot + ROOT).split("/")[1:]:
        path += f"/{part}"
        creates.append(Create2(path, b"", session.url.acl, 0))
    replies = await session.pipeline(runtime, creates, deadline)
    if not isinstance(replies[-1].error, NodeExistsError | None):
        for reply in replies:  # raise the first error; nodes above the root may exist already
            reply.get(NodeExistsError)


async def find_unconfirmed(
    session: ZookeeperSession, runtime: Runtime, claim: Claim, deadline: float
) -> OwnNode | None:
    """Find the node of a claim, by its id hash, if its create got no reply.

    The sync is for a connection that moved to another server. A create sent through the old server has reached the
    leader by then, or the leader will refuse it because the session has moved. But the new server may not know it yet.
    """
    parent = queue_path(session, claim.namespace, claim.name)
    asked_at = runtime.now()
    _, children = await session.pipeline(runtime, (Sync(parent), GetChildren(parent, None)), deadline)
    names = [node.name for node in NodeQueue(children.get(NoNodeError) or ()).by_id_hash(claim.id_hash)]
    if names:
        replies = await session.pipeline(runtime, [Exists(f"{parent}/{name}", None) for name in names], deadline)
        for name, reply in zip(names, replies, strict=True):
            if (stat := reply.get(NoNodeError)) and stat.ephemeralOwner == session.session_id:
                own_node = OwnNode(claim, f"{parent}/{name}", stat, asked_at + claim.ttl)
                return session.own_nodes.setdefault(claim.id_hash, own_node)
    session.unconfirmed.discard(claim.id_hash)
    return None
