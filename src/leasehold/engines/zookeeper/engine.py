"""The verbs of the ZooKeeper engine. Each is one or a few flights of requests, tried again after a broken connection
until its deadline: the claim's mark is in its node's name, so whatever was carried out is found again (E2, E6).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from kazoo.exceptions import BadVersionError, NoAuthError, NodeExistsError, NoNodeError
from kazoo.protocol.serialization import Create2, Delete, GetChildren, GetData, SetData, Sync

from leasehold.config import EngineConfig
from leasehold.core.timing import HEARTBEAT_INTERVAL
from leasehold.engines.registry import ClaimRegistry, wait_for_wakeup
from leasehold.engines.zookeeper import nodes
from leasehold.engines.zookeeper.attempt import ZookeeperAttempt, create_root, find_unconfirmed, queue_path
from leasehold.engines.zookeeper.inspect import list_holdings
from leasehold.engines.zookeeper.kazoo_adapter import Reply, ZookeeperConnectionLost
from leasehold.engines.zookeeper.nodes import TOKEN_BASE, NodeQueue
from leasehold.engines.zookeeper.session import OwnNode, ZookeeperSession
from leasehold.engines.zookeeper.url import parse_url
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime

T = TypeVar("T")

TRAITS: Final = Traits(
    liveness="session",
    clock="engine",
    fencing=True,
    fair=True,
    push=True,
    shared=True,
    max_limit=None,
    slots=True,
    outlives=False,
    break_notice=False,
    min_ttl=0.0,
    ttl_step=0.0,
    survives="minority",
)

_RETRY_DELAY: Final = 0.01  # a pause before a request that was lost is sent anew
_ENSEMBLE_CONFIG: Final = "/zookeeper/config"
_REBASE_LEAD: Final = 10**13  # over two thousand elections
_TOKEN_HEADROOM: Final = 2**40  # tokens to be left: over two hundred elections


class ZookeeperEngine:
    listening = True  # a watch costs no connection of its own: every claim that waits may queue at once

    def __init__(self, runtime: Runtime, registry: ClaimRegistry, session: ZookeeperSession) -> None:
        self._runtime, self._registry, self._session = runtime, registry, session
        self.traits = TRAITS
        registry.engines.add(self)

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        asked_at = self._runtime.now()
        waiter = self._registry.waiting.get(claim.id_hash)
        woken = waiter is not None and waiter.woken
        if claim.queue:
            self._registry.add_waiter(claim, self._runtime)  # before asking (E4)

        async def run() -> Grant | Busy:
            return await ZookeeperAttempt(self._session, self._runtime, claim, asked_at, deadline).run(woken)

        return await self._retry_until(deadline, run)

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._registry.waiting.get(claim.id_hash):
            # Nobody tells the next but one that the next does not take its turn: it looks now and then.
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

    async def release(self, claim: Claim, deadline: float) -> bool:
        async def once() -> bool:
            return await self._release(claim, deadline)

        self._registry.remove_waiter(claim.id_hash)
        try:
            return await self._retry_until(deadline, once)
        except ConfigError as error:  # it was permitted when the claim was granted: it may be so again
            raise Unavailable(str(error), engine="zookeeper") from error

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        async def once() -> bool:
            parent = queue_path(self._session, namespace, name)
            reads = (Sync(parent), GetChildren(parent, None), GetData(self._base_path, None))
            _, children, base = await self._pipeline(deadline, *reads)
            offset = nodes.parse_base((base.get(NoNodeError) or (b"0", None))[0])
            paths = [f"{parent}/{node.name}" for node in NodeQueue(children.get(NoNodeError) or ()).holders]
            holder_replies = await self._pipeline(deadline, *(GetData(path, None) for path in paths)) if paths else []
            for path, reply in zip(paths, holder_replies, strict=True):
                data, stat = reply.get(NoNodeError) or (b"", None)
                if stat is not None and offset + stat.czxid == token and not nodes.parse_data(data).waits:
                    (deleted,) = await self._pipeline(deadline, Delete(path, -1))  # a path names one claim for ever
                    return deleted.get(NoNodeError) is not None
            return False

        return await self._retry_until(deadline, once)

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        async def once() -> list[Holding]:
            return await list_holdings(self._session, self._runtime, namespace, prefix, exact, deadline)

        return await self._retry_until(deadline, once)

    async def ping(self, deadline: float) -> None:
        """To the leader and back. Also learns whether this is an ensemble or one server."""

        async def once() -> None:
            synced, config = await self._pipeline(deadline, Sync("/"), GetData(_ENSEMBLE_CONFIG, None))
            synced.get()
            data, _ = config.get(NoNodeError, NoAuthError) or (b"", None)
            voters = data.count(b":participant")
            self.traits = replace(TRAITS, survives="minority" if voters >= 3 else "restart")

        await self._retry_until(deadline, once)

    async def rebase(self, floor: int, deadline: float) -> int:
        """Have every new token exceed `floor`, after the ensemble's data were lost; without one, all that may have been
        given. Gives the number that tokens now begin after. Never lowers it.

        A transaction's number grows by 2^32 with each election: that many tokens are far ahead of any clock, so what is
        not known is guessed well above it.
        """
        floor = floor or int(self._runtime.wall() * 1_000_000) + _REBASE_LEAD
        if not 0 < floor < nodes.TOKEN_BOUND - _TOKEN_HEADROOM:
            raise ConfigError(f"tokens must stay below 2^53, which they would not if they began at {floor}")

        async def once() -> int:
            while True:
                (reply,) = await self._pipeline(deadline, GetData(self._base_path, None))
                data, stat = reply.get(NoNodeError) or (b"0", None)
                new = max(floor, old := nodes.parse_base(data))
                if stat is not None and new == old:
                    return old
                text, acl = str(new).encode(), self._session.url.acl
                if stat is None:
                    (done,) = await self._pipeline(deadline, Create2(self._base_path, text, acl, 0))
                else:
                    (done,) = await self._pipeline(deadline, SetData(self._base_path, text, stat.version))
                if done.get(BadVersionError, NodeExistsError, NoNodeError) is not None:
                    return new
                if isinstance(done.error, NoNodeError):
                    await create_root(self._session, self._runtime, deadline)

        return await self._retry_until(deadline, once)

    def forget(self, claim: Claim) -> None:
        own_node = self._session.own_nodes.get(claim.id_hash)
        if own_node is None and claim.id_hash not in self._session.unconfirmed:
            self._registry.remove_waiter(claim.id_hash)  # whatever was sent was answered, and nothing is there
            return
        self._registry.retry_release(claim)  # first: torn between, it is still owed
        self._registry.remove_waiter(claim.id_hash)
        if own_node is not None:  # else its node is to be looked for first: the watchdog does that
            self._session.delete_nowait(
                claim.id_hash, own_node, lambda: self._registry.pending_releases.pop(claim.id_hash, None)
            )

    def after_fork(self) -> None:
        self._session.after_fork()

    async def close(self) -> None:
        if self._registry.remove_engine(self):
            await self._session.close(self._runtime)

    # --------------------------------------------------------------- flights

    @property
    def _base_path(self) -> str:
        return self._session.url.chroot + TOKEN_BASE

    async def _pipeline(self, deadline: float, *requests: Any) -> list[Reply]:
        return await self._session.pipeline(self._runtime, requests, deadline)

    async def _retry_until(self, deadline: float, verb: Callable[[], Awaitable[T]]) -> T:
        """The verb's answer, however often the connection breaks meanwhile."""
        while True:
            try:
                return await verb()
            except ZookeeperConnectionLost as lost:
                left = deadline - self._runtime.now()
                if left <= 0:
                    raise Unavailable("the connection to ZooKeeper broke", engine="zookeeper") from lost
                await self._runtime.sleep(min(_RETRY_DELAY, left))

    async def _renew(self, claims: Sequence[Claim], deadline: float) -> list[Alive | Gone | Unavailable]:
        """One flight for all. To each node that holds a write, which proves it there and starts its ttl anew; of each
        line that claims wait in, a list."""
        asked_at = self._runtime.now()
        session, replies = self._session, dict[int, Alive | Gone | Unavailable]()
        held: list[tuple[int, OwnNode, float]] = []
        queued: list[tuple[int, OwnNode, str]] = []
        for index, claim in enumerate(claims):
            if not claim.token and claim.id_hash in session.unconfirmed:
                replies[index] = Unavailable("its attempt has not been answered yet", engine="zookeeper")
                continue
            own_node = session.own_nodes.get(claim.id_hash) or await find_unconfirmed(
                session, self._runtime, claim, deadline
            )
            if own_node is None or claim.token != own_node.token:
                replies[index] = Gone("unknown")
            elif claim.token:
                held.append(
                    (index, own_node, max(claim.ttl, own_node.until - asked_at))
                )  # never shorter than was promised (E8)
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
            self._session.forget_node(own_node.claim.id_hash)
            return Gone("expired" if asked_at >= own_node.until else "broken")
        own_node.until = max(own_node.until, asked_at + life)
        return Alive(max(0.0, self._session.trusted_until(own_node) - asked_at))

    def _queued_answer(self, own_node: OwnNode, queue: NodeQueue) -> Alive | Gone:
        """A place lasts as long as its session; without one, its turn has come."""
        if (index := queue.index(own_node.name)) is None:
            self._session.forget_node(own_node.claim.id_hash)
            return Gone("unknown")
        return Alive(self._session.expiry.timeout, None if queue.holds(index) else queue.position(index))

    async def _release(self, claim: Claim, deadline: float) -> bool:
        session = self._session
        own_node = session.own_nodes.get(claim.id_hash)
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
            if not claim.id:  # a stray gives up a place or a turn, never a grant
                (reply,) = await self._pipeline(deadline, GetData(path, None))
                data, stat = reply.get(NoNodeError) or (b"", None)
                if stat is None or (node in queue.holders and not nodes.parse_data(data).waits):
                    still_held = stat is not None
                    continue
                version = stat.version
            (deleted,) = await self._pipeline(deadline, Delete(path, version))
            ended |= deleted.get(NoNodeError, BadVersionError) is not None and node in queue.holders
        if not still_held:
            session.forget_node(claim.id_hash)
        return ended


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> ZookeeperEngine:
    """`zookeeper://host:port,host:port/chroot`; the options are in `url.py`."""
    url = parse_url(config)
    session = registry.shared.get("zookeeper")
    if not isinstance(session, ZookeeperSession):  # the first of the twins
        session = registry.shared["zookeeper"] = ZookeeperSession(url, runtime, registry, config.call_timeout)
    return ZookeeperEngine(runtime, registry, session)
