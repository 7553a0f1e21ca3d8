"""What a client's two engine instances share: one session, and with it one connection, their nodes and their watches.

The session owns every node the client has in a queue; when the session ends, its nodes are gone. The server executes
the requests of one session in the order they were sent, no matter which instance sent them, and those of one pipeline
arrive together. So a list sent with a create sees the created node, and a release sent after an abandoned attempt finds
the node that the attempt created.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from weakref import ref

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Delete
from kazoo.protocol.states import KazooState

from leasehold.core.texts import server_text
from leasehold.core.timing import MAX_SLEEP, WAITER_TTL
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.engines.repeated_logs import log_seldom
from leasehold.engines.zookeeper.kazoo_adapter import KazooAdapter, Reply, ZookeeperConnectionLost, is_write, map_error
from leasehold.engines.zookeeper.session_expiry import SessionExpiry
from leasehold.engines.zookeeper.url import ZookeeperUrl
from leasehold.errors import ConfigError, Unavailable
from leasehold.model import Claim
from leasehold.runtime.base import Runtime, Signal

T = TypeVar("T")

_log = logging.getLogger("leasehold.zookeeper")

_SWEEP_SHARE: Final = 1 / 16  # of the session timeout, between two sweeps
_MAX_ELECTIONS: Final = 3  # each election restarts the session timeout, so a silent session may last this many of them
_CLOSE_TIMEOUT: Final = 0.3  # seconds for the server to confirm that the session is over
_MAX_REMEMBERED: Final = 1_000  # entries of a cache; forgetting one costs a request or a wait


def remember(cache: dict[str, T], path: str, value: T) -> None:
    """Add an entry as the newest one, and drop the oldest ones over the limit."""
    cache.pop(path, None)
    cache[path] = value
    while len(cache) > _MAX_REMEMBERED:
        cache.pop(next(iter(cache)), None)


class OwnNode:
    """A node of this session: the claim's own node."""

    __slots__ = ("claim", "created_zxid", "expires_at", "name", "path", "session_id", "slot", "token", "waits")

    def __init__(self, claim: Claim, path: str, stat: Any, expires_at: float) -> None:
        self.claim, self.path, self.created_zxid, self.session_id = claim, path, stat.czxid, stat.ephemeralOwner
        self.name = path.rpartition("/")[2]
        self.token = 0  # set once, when the claim is first seen to hold the name
        self.slot: int | None = None
        self.expires_at = expires_at  # no other client deletes the node before this instant
        self.waits = False  # as in the node's data


class NodeWatch:
    """One watch on one node, for all claims of this client that wait for it. The session's thread calls it."""

    __slots__ = ("_session", "id_hashes", "path")

    def __init__(self, session: ZookeeperSession, path: str) -> None:
        self._session = ref(session)
        self.path, self.id_hashes = path, set[str]()

    def __call__(self, _event: object) -> None:
        """The node changed, or the watch was lost with the connection: wake the waiters, so that they check again."""
        if session := self._session():
            session.on_watch_fired(self)
            for id_hash in list(self.id_hashes):
                session.registry.on_notification("reserved", id_hash, 0.0, None)


class ZookeeperSession:
    def __init__(
        self, url: ZookeeperUrl, runtime: Runtime, registry: ClaimRegistry, call_timeout: float, drift: float
    ) -> None:
        self.url, self.registry = url, registry
        self._runtime, self._call_timeout, self.drift = runtime, call_timeout, drift
        self.now = runtime.now
        self._reset()

    def _reset(self) -> None:
        """Set the state of a client that has sent nothing."""
        self._mutex = self._runtime.mutex()
        self._kazoo: KazooAdapter | None = None
        self._connection_waiters: set[Signal] = set()  # calls that wait for a connection, or for its end
        self._connected = False
        self.expiry = SessionExpiry(self.drift)
        self.own_nodes: dict[str, OwnNode] = {}
        self.unconfirmed: set[str] = set()  # id hashes of claims whose create got no reply: the node may exist
        self.watches: dict[str, NodeWatch] = {}  # by path
        self._watch_by_id_hash: dict[str, NodeWatch] = {}
        self.known_parents: dict[str, float] = {}  # queues by path, and when they were last known to exist
        self.draining: dict[str, int] = {}  # queues out of sequence numbers, and the zxid that created them
        # Nodes of other clients by path: the version, and since when it is unchanged.
        self.seen_versions: dict[str, tuple[int, float]] = {}
        self.leader_clock_offset = 0.0  # the leader's wall clock minus our own clock, at our last write
        self._sweep_at = self._sweep_every = 0.0

    # ------------------------------------------------------------- requests

    async def pipeline(
        self, runtime: Runtime, requests: Sequence[Any], deadline: float, *, creates: str | None = None
    ) -> list[Reply]:
        """Send all requests at once and wait for all replies. Raises `ZookeeperConnectionLost` if the connection is
        lost, and `Unavailable` at the deadline. `creates`: the id hash of the claim whose node this creates; it counts
        as unconfirmed from the moment of sending."""
        kazoo = await self._wait_connected(runtime, deadline)
        sent, signal = runtime.now(), runtime.signal()
        with self._mutex:
            heartbeat = self.expiry.provable_heartbeat(sent)
        replies = [Reply() for _ in requests]
        last = replies[-1]  # replies come in the order of their requests
        last.on_done = lambda _: signal.set()
        if creates is not None:
            self.unconfirmed.add(creates)
        kazoo.submit(requests, replies)
        while not last.done:
            left = deadline - runtime.now()
            if left <= 0:
                raise self.timeout_error()
            await signal.wait(min(left, MAX_SLEEP))
        for reply in replies:
            if reply.error is not None and isinstance(map_error(reply.error), ZookeeperConnectionLost):
                raise ZookeeperConnectionLost from reply.error
        with self._mutex:
            self.expiry.on_answered(sent, runtime.now())
            if any(is_write(request) and reply.error is None for request, reply in zip(requests, replies, strict=True)):
                self.expiry.confirm(heartbeat)  # not by errors: a follower itself may refuse, e.g. when it throttles
        return replies

    async def _wait_connected(self, runtime: Runtime, deadline: float) -> KazooAdapter:
        """The adapter, once it is connected: a request queued before that could be executed at any later time."""
        if self._connected and (kazoo := self._kazoo):
            return kazoo
        signal = runtime.signal()
        self._connection_waiters.add(signal)
        first_round = 0
        try:
            while True:
                with self._mutex:
                    # The client may have been closed during this call.
                    if self.registry.closed or not self.registry.engines:
                        raise ConfigError("this client is closed: make a new one")
                    kazoo = self._kazoo or self._connect()
                if self._connected:
                    return kazoo
                if kazoo.credentials_refused:
                    self._on_kazoo_ended(kazoo)  # the next call connects again
                    raise ConfigError("ZooKeeper refused the credentials of this URL") from kazoo.last_error
                # Not if a server ever answered: it may be restarting.
                if first_round and kazoo.refused_round >= first_round and not self.expiry.session_id:
                    raise Unavailable(
                        f"cannot connect to ZooKeeper at {self.url.servers}: {kazoo.refusal}", engine="zookeeper"
                    ) from kazoo.last_error
                first_round = first_round or kazoo.round + 1  # one that begins after this call
                left = deadline - runtime.now()
                if left <= 0:
                    raise self.timeout_error()
                await signal.wait(min(left, MAX_SLEEP))
        finally:
            self._connection_waiters.discard(signal)

    def timeout_error(self) -> Unavailable:
        error = self._kazoo.last_error if self._kazoo is not None else None
        why = f" ({server_text(error)})" if error is not None else ""
        no_majority = self._kazoo is not None and not self._connected and self._kazoo.lacks_quorum
        if no_majority:
            why += "; a server that answered is cut off from the majority, or an election is under way"
        return Unavailable(
            f"ZooKeeper at {self.url.servers} did not answer in time{why}", engine="zookeeper", no_majority=no_majority
        )

    # --------------------------------------------------------------- watches

    def watch(self, path: str, id_hash: str) -> NodeWatch:
        """The watch to send with a read, so that this claim is woken. All waiters for one node share one watch."""
        with self._mutex:
            if (last := self._watch_by_id_hash.get(id_hash)) and last.path != path:
                self._unsubscribe(last, id_hash)
            watch = self.watches.get(path)
            if watch is None:
                watch = self.watches[path] = NodeWatch(self, path)
            watch.id_hashes.add(id_hash)
            self._watch_by_id_hash[id_hash] = watch
        return watch

    def on_watch_fired(self, watch: NodeWatch) -> None:
        with self._mutex:
            if self.watches.get(watch.path) is watch:
                del self.watches[watch.path]

    def _unsubscribe(self, watch: NodeWatch, id_hash: str) -> None:
        """Remove the watch with its last waiter: otherwise it would stay until its node is gone."""
        watch.id_hashes.discard(id_hash)
        if not watch.id_hashes:
            if self.watches.get(watch.path) is watch:
                del self.watches[watch.path]
            if self._kazoo is not None:
                self._kazoo.unwatch(watch.path, watch)

    def unchanged_for(self, path: str, version: int, now: float) -> float:
        """For how long this client has seen the node with this version, by its own clock."""
        last_seen = self.seen_versions.get(path)
        if last_seen is None or last_seen[0] != version:
            last_seen = (version, now)
            remember(self.seen_versions, path, last_seen)
        return now - last_seen[1]

    def own_node(self, claim: Claim) -> OwnNode | None:
        """The node of a claim. The id alone does not identify it: namespace and name must fit as well."""
        own_node = self.own_nodes.get(claim.id_hash)
        return own_node if own_node is not None and own_node.claim[:2] == claim[:2] else None

    def forget_claim(self, claim: Claim) -> None:
        """Forget a claim, unless its id is in use for another name."""
        if claim.id_hash not in self.own_nodes or self.own_node(claim) is not None:
            self.forget_node(claim.id_hash)

    def forget_node(self, id_hash: str) -> None:
        """Forget a claim that has no node at the server any more."""
        self.own_nodes.pop(id_hash, None)
        self.unconfirmed.discard(id_hash)
        with self._mutex:
            if watch := self._watch_by_id_hash.pop(id_hash, None):
                self._unsubscribe(watch, id_hash)

    @property
    def session_id(self) -> int:
        return self._kazoo.session_id if self._kazoo is not None else 0

    def trusted_until(self, own_node: OwnNode) -> float:
        """Until when the node surely exists. Raises `ZookeeperConnectionLost` if its session is over, whatever an
        earlier reply said."""
        with self._mutex:
            end = min(own_node.expires_at, self.expiry.expires_at(own_node.session_id))
        if end == float("-inf"):
            raise ZookeeperConnectionLost
        return end

    # ------------------------------------- from the session's own thread

    def _connect(self) -> KazooAdapter:
        """Open a connection. Its callbacks hold only a weak reference, so that the connection does not keep an unused
        client alive. Callbacks of a replaced adapter, above all that it has closed, do not concern the current nodes
        and are ignored."""
        session_ref = ref(self)

        def weak_callback(method: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                if (session := session_ref()) is not None and session._kazoo is kazoo:
                    method(session, *args)

            return call

        kazoo = self._kazoo = KazooAdapter(
            self.url,
            self._call_timeout,
            self.now,
            on_session_confirmed=weak_callback(ZookeeperSession._on_session_confirmed),
            on_heartbeat=weak_callback(ZookeeperSession._on_heartbeat),
            on_sent=weak_callback(ZookeeperSession._sweep),
            on_state_change=weak_callback(ZookeeperSession._on_state_change),
            on_refused=weak_callback(ZookeeperSession._wake),
            on_ended=weak_callback(ZookeeperSession._on_kazoo_ended),
        )
        try:
            kazoo.open()
        except (OSError, RuntimeError) as error:
            self._kazoo = None
            raise Unavailable(f"cannot connect to ZooKeeper: {error}", engine="zookeeper") from error
        return kazoo

    def _on_session_confirmed(self, sent: float, timeout: float, session_id: int) -> None:
        with self._mutex:
            self.expiry.on_connected(sent, timeout, session_id)
        self.registry.abandoned_ttl = max(WAITER_TTL, _MAX_ELECTIONS * timeout)
        self._sweep_every = timeout * _SWEEP_SHARE

    def _on_heartbeat(self, sent: float) -> None:
        with self._mutex:
            self.expiry.on_answered(sent, self.now())

    def _sweep(self) -> None:
        """Delete this client's nodes that are no longer in use. A session keeps its nodes while it lives, and a client
        that tries only once cannot know for how long a node has been unchanged. So the client itself deletes its
        expired leases, and the queue entries that it gave up while the server was unreachable.

        It does so after `expires_at`: no lease is trusted for longer, and an attempt that is not in the registry has
        reached its deadline by then.
        """
        now = self.now()
        if now < self._sweep_at or not self._connected:
            return
        self._sweep_at = now + self._sweep_every
        for id_hash, own_node in snapshot_items(self.own_nodes):
            if now > own_node.expires_at and (own_node.token or not self.registry.knows(id_hash)):
                self.delete_nowait(id_hash, own_node)

    def delete_nowait(self, id_hash: str, own_node: OwnNode, on_deleted: Callable[[], object] = lambda: None) -> None:
        """Send a delete without waiting. Without a reply nothing is forgotten."""

        def on_reply(reply: Reply) -> None:
            if reply.error is None or isinstance(reply.error, NoNodeError):
                self.forget_node(id_hash)
                on_deleted()

        if (kazoo := self._kazoo) is not None and self._connected:
            kazoo.submit([Delete(own_node.path, -1)], [Reply(on_reply)])

    def _on_state_change(self, state: str) -> None:
        self._connected = state == KazooState.CONNECTED
        if state == KazooState.LOST:
            self._on_session_ended()
        if not self._connected:
            self.registry.mark_all_at_risk("the connection to ZooKeeper was lost")
        if state == KazooState.SUSPENDED:
            log_seldom(_log, logging.WARNING, f"lost the connection to ZooKeeper at {self.url.servers}; reconnecting")
        self._wake()

    def _on_session_ended(self) -> None:
        """The session has ended, so its nodes are gone."""
        self.own_nodes.clear()
        self.unconfirmed.clear()

    def _on_kazoo_ended(self, kazoo: KazooAdapter) -> None:
        if self._kazoo is kazoo:
            self._kazoo, self._connected = None, False
        self._wake()

    def _wake(self) -> None:
        for signal in list(self._connection_waiters):
            signal.set()

    # ------------------------------------------------------------- closing

    async def close(self, runtime: Runtime) -> None:
        """End the session, and with it everything it still holds. Waits a moment for the server to confirm."""
        signal = runtime.signal()
        with self._mutex:  # a call that checked that the client is open may just be connecting
            kazoo = self._kazoo
        if kazoo is None:
            return
        self._connection_waiters.add(signal)
        kazoo.close_session()
        until = runtime.now() + min(_CLOSE_TIMEOUT, self._call_timeout)
        while self._kazoo is kazoo and runtime.now() < until:
            await signal.wait(until - runtime.now())
        kazoo.shutdown_socket()
        self._connection_waiters.discard(signal)
        self._kazoo, self._connected = None, False
        self._on_session_ended()

    def after_fork(self) -> None:
        if self._kazoo is not None:
            self._kazoo.after_fork()
        self._reset()

    def __del__(self) -> None:
        kazoo = getattr(self, "_kazoo", None)
        if kazoo is not None and not sys.is_finalizing():  # at interpreter exit nothing is released
            kazoo.close_session()
