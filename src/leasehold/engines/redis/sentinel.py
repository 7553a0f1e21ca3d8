"""`redis+sentinel://`: the server that is primary now, as reported by the sentinels.

Every failover has a higher epoch. The client queries a majority of the sentinels, if that many answer, and the highest
epoch counts: a sentinel that is behind cannot lead the client back to the old primary. The client also checks what the
sentinels say: it uses a server only if the server itself says, on each new connection, that it is a primary.

A sentinel publishes a failover (`+switch-master`); in addition, the client queries the sentinels every few seconds.
After a failover the client drops every connection to the old primary, repeats calls in flight at the new one, and
renews every lease at once. If the new primary does not have a grant, that lease is lost, and its holder is notified as
early as possible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple
from weakref import WeakSet, ref

import hiredis

from leasehold.core.texts import server_text
from leasehold.core.timing import HEARTBEAT_INTERVAL
from leasehold.engines.redis.connections import Connections
from leasehold.engines.redis.discovery import (
    DiscoveryNode,
    QueryAnswers,
    SingleFlight,
    announced_address,
    query_in_turn,
)
from leasehold.engines.redis.pubsub import PubSubListener
from leasehold.engines.redis.scripts import PubSubCommands
from leasehold.engines.redis.server import RedisEndpoint, encode_command, is_error_reply
from leasehold.engines.redis.server_settings import NotPermitted, Unreachable
from leasehold.engines.redis.topology import WRONG_SERVER_ERRORS, Rejected, make_connections, rediscover
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.repeated_logs import log_once
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketAddress, SocketStream
from leasehold.runtime.net.event_loop import LoopStream

_log = logging.getLogger("leasehold.redis")

_SWITCH_CHANNEL: Final = "+switch-master"
_QUERY_INTERVAL: Final = 0.1  # between two messages of a sentinel that make the client query sentinels


class Primary(NamedTuple):
    """The address of the primary. A higher epoch is later."""

    epoch: int
    address: SocketAddress


def parse_primary(node: DiscoveryNode, service: str, reply: Any) -> Primary:
    """The primary in a sentinel's reply to SENTINEL MASTER."""
    if is_error_reply(reply, "ERR No such master"):
        raise ConfigError(f"{node} does not know the service {service!r}")
    if isinstance(reply, Exception):
        raise node.map_error(reply)
    try:
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        return Primary(int(fields[b"config-epoch"]), announced_address(fields[b"ip"].decode(), fields[b"port"]))
    except (TypeError, ValueError, KeyError, AttributeError) as bad:
        raise Unreachable(f"unexpected reply from {node} to SENTINEL MASTER", engine="redis") from bad


class SentinelSet:
    """The sentinels, and the primary they reported. Shared by a client's engine instances and listeners."""

    def __init__(
        self,
        nodes: list[DiscoveryNode],
        service: str,
        make_server: Callable[[SocketAddress], RedisEndpoint],
        runtime: Runtime,
    ) -> None:
        self.nodes, self.service, self._make_server, self._runtime = nodes, service, make_server, runtime
        self._primary: Primary | None = None
        self.server: RedisEndpoint | None = None  # the primary, as last known
        self.stale = True  # query the sentinels before the server is used
        self.connections: WeakSet[Connections] = WeakSet()  # of all engine instances, to the primary
        self.switch_callbacks: list[Callable[[str], None]] = []  # called after a failover
        self.after_fork()

    def after_fork(self) -> None:
        self.mutex = self._runtime.mutex()

    async def find(self, runtime: Runtime, deadline: float) -> RedisEndpoint:
        """The primary, as reported by a majority of the sentinels. Raises `Unreachable` with each sentinel's error."""
        previous = self._primary
        request = encode_command("SENTINEL", "MASTER", self.service), 1
        answers = await query_in_turn(self.nodes, request, self._parse_reply, self._is_enough, runtime, deadline)
        if not answers:
            raise self._no_primary_error(answers)
        latest = max(answers)
        if previous is not None and latest.epoch < previous.epoch and len(answers) < len(self.nodes):
            raise Unreachable(
                f"only outdated sentinels of {self.service!r} answered: {answers.describe_errors()}",
                engine="redis",
            )
        return self._update_primary(latest, previous)  # if all sentinels have a lower epoch, they were reset

    async def confirm_switch(self, node: DiscoveryNode, runtime: Runtime, deadline: float) -> None:
        """Query the sentinel that has just published a failover. The others may not know of it yet."""
        self._update_primary(
            self._parse_reply(
                node, await node.query(encode_command("SENTINEL", "MASTER", self.service), 1, runtime, deadline)
            )
        )

    def _is_enough(self, answers: list[Primary]) -> bool:
        primary = self._primary
        return 2 * len(answers) > len(self.nodes) and (primary is None or max(answers).epoch >= primary.epoch)

    def _parse_reply(self, node: DiscoveryNode, replies: list[Any]) -> Primary:
        (reply,) = replies
        return parse_primary(node, self.service, reply)

    def _no_primary_error(self, answers: QueryAnswers[Primary]) -> LeaseholdError:
        text = f"no sentinel reported a primary of {self.service!r}: {answers.describe_errors()}"
        if answers.config_error_count == len(self.nodes):
            return NotPermitted(text)
        return Unreachable(text, engine="redis")

    def _update_primary(self, latest: Primary, expected: Primary | None = None) -> RedisEndpoint:
        """Switch to `latest`. A lower epoch is accepted only in place of `expected`, the primary known at the query."""
        with self.mutex:
            previous, server = self._primary, self.server
            if (
                server is not None
                and previous is not None
                and latest.epoch < previous.epoch
                and previous is not expected
            ):
                return server
            if server is None or previous is None or previous.address != latest.address:
                server = self._make_server(latest.address)
            self._primary, self.server, self.stale = latest, server, False
            all_connections = list(self.connections)
        if previous is not None and previous.address != latest.address:
            text = f"failover of {self.service!r} from {previous.address} to {latest.address}"
            _log.info("%s", text)
            for connections in all_connections:
                if connections.server is not server:
                    connections.abort()
            for callback in self.switch_callbacks:
                callback(text)
        return server

    # ------------------------------------------- Connector for the listener

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        server = self.server
        if server is None or self.stale:
            server = await self.find(runtime, deadline)
        try:
            return await server.open(runtime, deadline)
        except Unreachable:
            self.stale = True
            raise

    def map_error(self, error: Exception) -> LeaseholdError:
        return Unavailable(server_text(error), engine="redis") if self.server is None else self.server.map_error(error)


class SentinelTopology:
    """The topology with sentinels: one server for all names, another one after each failover."""

    names_can_move = True
    survives: Literal["nothing"] = "nothing"  # a promoted replica may lack the last grant

    def __init__(self, sentinels: SentinelSet, runtime: Runtime) -> None:
        self.pubsub_commands = PubSubCommands()
        self._sentinels, self._runtime, self._single_flight = sentinels, runtime, SingleFlight(runtime)
        self._connections: Connections | None = None

    def connections(self, tag: str) -> Connections | None:
        sentinels = self._sentinels
        if sentinels.stale or sentinels.server is None:
            return None
        connections = self._connections
        return (
            connections
            if connections is not None and connections.server is sentinels.server
            else self._replace_connections()
        )

    def _replace_connections(self) -> Connections | None:
        with self._sentinels.mutex:  # one set for all threads, and known to a concurrent failover
            previous, server = self._connections, self._sentinels.server
            if server is None or (previous is not None and previous.server is server):
                return previous
            self._connections = connections = make_connections(server, self._runtime)
            self._sentinels.connections.add(connections)
        if previous is not None:
            previous.close()
        return connections

    async def find(self, deadline: float) -> None:
        await self._single_flight.run(lambda: self._sentinels.find(self._runtime, deadline), deadline)

    async def all_connections(self, deadline: float) -> Iterable[Connections]:
        while (connections := self.connections("")) is None:  # find() may have joined another call that failed
            await self.find(deadline)
        return (connections,)

    async def redirect(self, tag: str, rejected: Rejected, tries: int, deadline: float) -> Connections:
        connections = self._connections
        if (
            connections is not None
            and connections is rejected.connections
            and not self._sentinels.stale
            and is_error_reply(rejected.error, WRONG_SERVER_ERRORS)
        ):
            connections.drop_connections()  # no primary any more: it will say so on each new connection
        self._sentinels.stale = True
        return await rediscover(self, self._runtime, tag, rejected, tries, deadline)

    def mark_stale(self, connections: Connections) -> None:
        if connections is self._connections:
            self._sentinels.stale = True

    def is_replaced(self, connections: Connections) -> bool:
        return connections.server is not self._sentinels.server

    def close(self) -> None:
        if self._connections is not None:
            self._connections.close()

    def after_fork(self) -> None:
        self._single_flight = SingleFlight(self._runtime)
        if self._connections is not None:
            self._connections.after_fork()


class SwitchWatcher(PubSubListener):
    """Listens for failovers at one sentinel; after a disconnect, at the next one."""

    def __init__(self, sentinels: SentinelSet, runtime: Runtime, registry: ClaimRegistry, call_timeout: float) -> None:
        self._sentinels, self._node_index, self._next_query_at = sentinels, -1, 0.0
        self._majority_due = float("inf")
        super().__init__(sentinels, PubSubCommands(), runtime, registry, call_timeout)

    async def _open(self, runtime: Runtime) -> SocketStream | LoopStream:
        self._majority_due = runtime.now() + HEARTBEAT_INTERVAL
        self._node_index = (self._node_index + 1) % len(self._sentinels.nodes)
        return await self._sentinels.nodes[self._node_index].open(runtime, runtime.now() + self._call_timeout)

    def _subscribe_commands(self, client: str) -> bytes:
        return encode_command("SUBSCRIBE", _SWITCH_CHANNEL)

    async def _on_push(self, reply: Any, runtime: Runtime) -> None:
        node = self._sentinels.nodes[self._node_index]
        match reply:
            case [b"subscribe", *_]:
                await self._pause_between_queries(runtime)
                await self._on_idle(runtime)  # a failover may have been missed meanwhile
                # Only now: if no sentinel reports a primary, the next connect must back off.
                self.active = self._succeeded = True
            case [b"message", _, bytes(message)] if message.startswith(f"{self._sentinels.service} ".encode()):
                await self._pause_between_queries(runtime)
                await self._sentinels.confirm_switch(node, runtime, runtime.now() + self._call_timeout)
            case hiredis.ReplyError():  # not subscribed: a majority is asked now and then all the same
                error = node.map_error(reply)
                level = logging.WARNING if isinstance(error, ConfigError) else logging.DEBUG
                log_once(_log, level, f"failovers are noticed late, because a sentinel does not publish them: {error}")
            case list() | b"PONG":
                pass
            case _:
                raise ConnectionAbortedError("the sentinel sent a reply that is not a message")
        if runtime.now() >= self._majority_due:  # a sentinel that is never silent must not hide what the others know
            await self._on_idle(runtime)

    async def _pause_between_queries(self, runtime: Runtime) -> None:
        """Every query opens a connection, and a sentinel may send messages without end."""
        await runtime.sleep(max(self._next_query_at - runtime.now(), 0.0))
        self._next_query_at = runtime.now() + _QUERY_INTERVAL

    async def _on_idle(self, runtime: Runtime) -> None:
        self._majority_due = runtime.now() + HEARTBEAT_INTERVAL
        await self._sentinels.find(runtime, runtime.now() + self._call_timeout)


class SentinelPubSub(PubSubListener):
    """Listens to the current primary, and to the sentinels."""

    def __init__(self, sentinels: SentinelSet, runtime: Runtime, registry: ClaimRegistry, call_timeout: float) -> None:
        self._sentinels, self._switch_watcher = sentinels, SwitchWatcher(sentinels, runtime, registry, call_timeout)
        super().__init__(sentinels, PubSubCommands(), runtime, registry, call_timeout)
        self_ref, registry_ref = ref(self), ref(registry)

        def on_switch(text: str) -> None:
            if (subscription := self_ref()) is not None and (registry := registry_ref()) is not None:
                subscription.drop_connection()
                registry.mark_all_at_risk(text)

        sentinels.switch_callbacks.append(on_switch)

    def start(self) -> None:
        super().start()
        self._switch_watcher.start()

    def close(self) -> None:
        super().close()
        self._switch_watcher.close()

    def after_fork(self) -> None:
        super().after_fork()
        self._switch_watcher.after_fork()
        self._sentinels.after_fork()
