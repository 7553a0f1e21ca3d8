"""The verbs of the ZooKeeper engine. Each is one or a few pipelines of requests.

If the connection is lost, a verb is retried until its deadline. That is safe because a node's name contains the claim's
id hash: a retry finds whatever was executed before (E2, E6).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from kazoo.exceptions import BadVersionError, NoAuthError, NodeExistsError, NoNodeError
from kazoo.protocol.serialization import Delete, SetData, Sync

from leasehold.config import EngineConfig
from leasehold.core.timing import HEARTBEAT_INTERVAL
from leasehold.engines.base import fixed_limits
from leasehold.engines.registry import ClaimRegistry, wait_for_wakeup
from leasehold.engines.zookeeper import nodes
from leasehold.engines.zookeeper.attempt import ZookeeperAttempt, create_root, find_unconfirmed, queue_path
from leasehold.engines.zookeeper.inspect import list_holdings
from leasehold.engines.zookeeper.kazoo_adapter import Reply, ZookeeperConnectionLost
from leasehold.engines.zookeeper.nodes import TOKEN_BASE, NodeQueue
from leasehold.engines.zookeeper.requests import Create2, GetChildren, GetData
from leasehold.engines.zookeeper.session import OwnNode, ZookeeperSession
from leasehold.engines.zookeeper.url import parse_url
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime

T = TypeVar("T")

TRAITS: Final = Traits(liveness="session", outlives=False, break_notice=False, resizable=False, survives="minority")

_RETRY_DELAY: Final = 0.01  # seconds before a verb is retried after the connection was lost
_ENSEMBLE_CONFIG: Final = "/zookeeper/config"
_REBASE_LEAD: Final = 10**13  # enough for over two thousand elections
_TOKEN_HEADROOM: Final = 2**40  # tokens left below 2^53: enough for over two hundred elections


class ZookeeperEngine:
    # A watch needs no connection of its own, so every claim that may wait joins the queue at once.
    queues_at_once = True

    def __init__(self, runtime: Runtime, registry: ClaimRegistry, session: ZookeeperSession) -> None:
        self._runtime, self._registry, self.session = runtime, registry, session
        self.traits = TRAITS
        registry.engines.add(self)

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        asked_at = self._runtime.now()
        waiter = self._registry.waiting.get(claim.id_hash)
        woken = waiter is not None and waiter.woken
        if claim.queue:
            self._registry.add_waiter(claim, self._runtime)  # before asking (E4)

        async def run() -> Grant | Busy:
            return await ZookeeperAttempt(self.session, self._runtime, claim, asked_at, deadline).run(woken)

        return await self._retry_until(deadline, run)

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._registry.waiting.get(claim.id_hash):
            # If the first waiter does not claim the free name, no watch notifies the second: it has to poll.
            await wait_for_wakeup(
                self._runtime, waiter, busy, min(seconds, HEARTBEAT_INTERVAL) if (busy.position or 0) < 2 else seconds
            )

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        async def once() -> list[Alive | Gone | Unavailable]:
            return await self._renew(claims, deadline)

        if not claims:
            return []
        try:
            return await self._retry_until(deadline, once)
        except LeaseholdError as error:
            unavailable = error if isinstance(error, Unavailable) else Unavailable(str(error), engine="zookeeper")
            return [unavailable] * len(claims)

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        tries = 0

        async def once() -> bool | None:
            nonlocal tries
            tries += 1
            return await self._release(claim, deadline) or (False if tries == 1 else None)

        self._registry.remove_waiter(claim.id_hash)
        try:
            return await self._retry_until(deadline, once)
        except ConfigError as error:  # ZooKeeper permitted this when the claim was granted, and may permit it again
            raise Unavailable(str(error), engine="zookeeper") from error

    async def decline(self, claim: Claim, deadline: float) -> bool:
        """Delete the node if it is first and still waits: then the next waiter is notified. Compares its version."""

        async def once() -> bool:
            parent = queue_path(self.session, claim.namespace, claim.name)
            _, children = await self._pipeline(deadline, Sync(parent), GetChildren(parent, None))
            for node in NodeQueue(children.get(NoNodeError) or ()).holders:
                if node.id_hash != claim.id_hash:
                    continue
                path = f"{parent}/{node.name}"
                (reply,) = await self._pipeline(deadline, GetData(path, None))
                data, stat = reply.get(NoNodeError) or (b"", None)
                if stat is not None and nodes.parse_data(data).waits:
                    (deleted,) = await self._pipeline(deadline, Delete(path, stat.version))
                    return deleted.get(NoNodeError, BadVersionError) is not None
            return False

        return await self._retry_until(deadline, once)

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        async def once() -> bool:
            parent = queue_path(self.session, namespace, name)
            reads = (Sync(parent), GetChildren(parent, None), GetData(self._base_path, None))
            _, children, base = await self._pipeline(deadline, *reads)
            offset = nodes.parse_base((base.get(NoNodeError) or (b"0", None))[0])
            paths = [f"{parent}/{node.name}" for node in NodeQueue(children.get(NoNodeError) or ()).holders]
            holder_replies = await self._pipeline(deadline, *(GetData(path, None) for path in paths)) if paths else []
            for path, reply in zip(paths, holder_replies, strict=True):
                data, stat = reply.get(NoNodeError) or (b"", None)
                if stat is not None and offset + stat.czxid == token and not nodes.parse_data(data).waits:
                    (deleted,) = await self._pipeline(deadline, Delete(path, -1))  # paths are never reused
                    return deleted.get(NoNodeError) is not None
            return False

        return await self._retry_until(deadline, once)

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        raise fixed_limits(TRAITS, "zookeeper")

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        async def once() -> list[Holding]:
            return await list_holdings(self.session, self._runtime, namespace, prefix, exact, deadline)

        return await self._retry_until(deadline, once)

    async def ping(self, deadline: float) -> None:
        """One round trip to the leader. Also detects whether this is an ensemble or a single server."""

        async def once() -> None:
            synced, config = await self._pipeline(deadline, Sync("/"), GetData(_ENSEMBLE_CONFIG, None))
            synced.get()
            data, _ = config.get(NoNodeError, NoAuthError) or (b"", None)
            voters = data.count(b":participant")
            self.traits = TRAITS._replace(survives="minority" if voters >= 3 else "restart")

        await self._retry_until(deadline, once)

    async def rebase(self, floor: int, deadline: float) -> int:
        """Make every new token exceed `floor`, or, if that is 0, every token that may have been granted: for use after
        the ensemble's data were lost. Returns the number after which tokens now begin. Never lowers it.

        A zxid grows by 2^32 with each election, so tokens may be far ahead of any clock. An unknown floor is therefore
        guessed well above the clock.
        """
        floor = floor or int(self._runtime.wall() * 1_000_000) + _REBASE_LEAD
        if not 0 < floor < nodes.TOKEN_BOUND - _TOKEN_HEADROOM:
            raise ConfigError(f"tokens must stay below 2^53: they cannot begin at {floor}")

        async def once() -> int:
            while True:
                (reply,) = await self._pipeline(deadline, GetData(self._base_path, None))
                data, stat = reply.get(NoNodeError) or (b"0", None)
                new = max(floor, old := nodes.parse_base(data))
                if stat is not None and new == old:
                    return old
                text, acl = str(new).encode(), self.session.url.acl
                if stat is None:
                    (done,) = await self._pipeline(deadline, Create2(self._base_path, text, acl, 0))
                else:
                    (done,) = await self._pipeline(deadline, SetData(self._base_path, text, stat.version))
                if done.get(BadVersionError, NodeExistsError, NoNodeError) is not None:
                    return new
                if isinstance(done.error, NoNodeError):
                    await create_root(self.session, self._runtime, deadline)

        return await self._retry_until(deadline, once)

    def forget(self, claim: Claim) -> None:
        own_node = self.session.own_node(claim)
        if own_node is None and claim.id_hash not in self.session.unconfirmed:
            self._registry.remove_waiter(claim.id_hash)  # every request was answered, and the claim has no node
            return
        self._registry.retry_release(claim)  # first: if this method is interrupted, the release is still pending
        self._registry.remove_waiter(claim.id_hash)
        if own_node is not None:  # otherwise the watchdog has to find the node first
            self.session.delete_nowait(
                claim.id_hash, own_node, lambda: self._registry.pending_releases.pop(claim.id_hash, None)
            )

    def disown(self, claim: Claim) -> None:
        """The claim's node lives on until its ttl or this client's session ends."""
        self._registry.disown_waiter(claim.id_hash)
        self.session.forget_claim(claim)

    def after_fork(self) -> None:
        self.session.after_fork()

    async def close(self) -> None:
        if self._registry.remove_engine(self):
            await self.session.close(self._runtime)

    # -------------------------------------------------------------- requests

    @property
    def _base_path(self) -> str:
        return self.session.url.chroot + TOKEN_BASE

    async def _pipeline(self, deadline: float, *requests: Any) -> list[Reply]:
        return await self.session.pipeline(self._runtime, requests, deadline)

    async def _retry_until(self, deadline: float, verb: Callable[[], Awaitable[T]]) -> T:
        """Run a verb again each time the connection is lost, until the deadline."""
        while True:
            try:
                return await verb()
            except ZookeeperConnectionLost as lost:
                left = deadline - self._runtime.now()
                if left <= 0:
                    raise self.session.timeout_error() from lost
                await self._runtime.sleep(min(_RETRY_DELAY, left))

    async def _renew(self, claims: Sequence[Claim], deadline: float) -> list[Alive | Gone | Unavailable]:
        """One pipeline for all claims: a write to each held node, which proves that the node exists and restarts its
        ttl, and a list of each queue in which claims wait."""
        asked_at = self._runtime.now()
        session, replies = self.session, dict[int, Alive | Gone | Unavailable]()
        held: list[tuple[int, OwnNode, float]] = []
        queued: list[tuple[int, OwnNode, str]] = []
        for index, claim in enumerate(claims):
            if not claim.token and claim.id_hash in session.unconfirmed:
                replies[index] = Unavailable("the claim's attempt is not answered yet", engine="zookeeper")
                continue
            own_node = session.own_node(claim) or await find_unconfirmed(session, self._runtime, claim, deadline)
            if own_node is None or claim.token != own_node.token:
                replies[index] = Gone("unknown")
            elif claim.token:
                # Never shorter than an earlier answer promised (E8).
                held.append((index, own_node, max(claim.ttl, own_node.expires_at - asked_at)))
            else:
                queued.append((index, own_node, queue_path(session, claim.namespace, claim.name)))
        writes = [
            SetData(own_node.path, nodes.encode_data(own_node.claim.holder, life, False), -1)
            for _, own_node, life in held
        ]
        parents = list(dict.fromkeys(parent for _, _, parent in queued))
        reads = [read for parent in parents for read in (Sync(parent), GetChildren(parent, None))]
        answers = await self._pipeline(deadline, *writes, *reads) if held or queued else []
        for (index, own_node, life), answer in zip(held, answers, strict=False):
            replies[index] = self._held_answer(own_node, asked_at, life, answer.get(NoNodeError))
        queues = [NodeQueue(answer.get(NoNodeError) or ()) for answer in answers[len(held) + 1 :: 2]]
        for index, own_node, parent in queued:
            replies[index] = self._queued_answer(own_node, queues[parents.index(parent)])
        return [replies[index] for index in range(len(claims))]

    def _held_answer(self, own_node: OwnNode, asked_at: float, life: float, stat: Any) -> Alive | Gone:
        if stat is None:
            self.session.forget_node(own_node.claim.id_hash)
            return Gone("expired" if asked_at >= own_node.expires_at else "broken")
        own_node.expires_at = max(own_node.expires_at, asked_at + life)
        return Alive(max(0.0, self.session.trusted_until(own_node) - asked_at))

    def _queued_answer(self, own_node: OwnNode, queue: NodeQueue) -> Alive | Gone:
        """A queued claim lives as long as its session. A position of None means that it may claim the name now."""
        if (index := queue.index(own_node.name)) is None:
            self.session.forget_node(own_node.claim.id_hash)
            return Gone("unknown")
        return Alive(self.session.expiry.timeout, None if queue.holds(index) else queue.position(index))

    async def _release(self, claim: Claim, deadline: float) -> bool:
        session = self.session
        own_node = session.own_node(claim)
        if own_node is not None and claim.id:
            (deleted,) = await self._pipeline(deadline, Delete(own_node.path, -1))
            ended = deleted.get(NoNodeError) is not None
            session.forget_node(claim.id_hash)
            return ended and own_node.token > 0
        parent = queue_path(session, claim.namespace, claim.name)
        _, children = await self._pipeline(deadline, Sync(parent), GetChildren(parent, None))
        queue = NodeQueue(children.get(NoNodeError) or ())
        ended = still_held = False
        for node in queue.by_id_hash(claim.id_hash):
            path, version = f"{parent}/{node.name}", -1
            if not claim.id:  # from a late wake-up: ends a queued claim or a reservation, never a grant
                (reply,) = await self._pipeline(deadline, GetData(path, None))
                data, stat = reply.get(NoNodeError) or (b"", None)
                if stat is None or (node in queue.holders and not nodes.parse_data(data).waits):
                    still_held = stat is not None
                    continue
                version = stat.version
            (deleted,) = await self._pipeline(deadline, Delete(path, version))
            ended |= deleted.get(NoNodeError, BadVersionError) is not None and node in queue.holders
        if not still_held:
            session.forget_claim(claim)
        return ended


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> ZookeeperEngine:
    """`zookeeper://host:port,host:port/chroot`; the options are in `url.py`."""
    url = parse_url(config)
    session = registry.shared.get("zookeeper")
    if not isinstance(session, ZookeeperSession):  # the client's first engine instance
        session = registry.shared["zookeeper"] = ZookeeperSession(
            url, runtime, registry, config.call_timeout, config.drift
        )
    return ZookeeperEngine(runtime, registry, session)
