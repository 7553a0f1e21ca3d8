"""Wake-ups in a cluster: one channel per bucket, subscribed to at the node that has the bucket.

Only there can a script count the subscribers. A client has one connection and one thread for each node that has buckets
of its names. If a slot moves, its node ends the subscription, and the listener subscribes at the slot's new node. If a
node fails, the listener itself reads the slot map and subscribes at the next owner: the waiters send nothing meanwhile
that would find out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final
from weakref import ref

import hiredis

from leasehold.engines.redis.cluster import SlotMap, slot_of
from leasehold.engines.redis.protocol import lock_keys
from leasehold.engines.redis.pubsub import BaseSubscription, PubSubListener, Subscription
from leasehold.engines.redis.scripts import SHARDED_PUBSUB
from leasehold.engines.redis.server import encode_command, is_error_reply
from leasehold.engines.redis.server_settings import Unreachable
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import WOKEN, SelfPipe, SocketAddress, SocketStream
from leasehold.runtime.net.event_loop import LoopStream

_MAX_SUBSCRIBE_REDIRECTS: Final = 3  # of one channel, before its node pauses


class ChannelSubscription(BaseSubscription):
    """The subscription for one bucket."""

    def __init__(self, tag: str, subscriptions: ClusterSubscriptions) -> None:
        super().__init__()
        self.tag, self.slot, self._subscriptions = tag, slot_of(tag), subscriptions
        self.node: NodeListener | None = None  # that listens for it, or tries to subscribe
        self.redirects = 0  # in a row
        self.ended_by_server = False

    @property
    def failing(self) -> bool:
        return self.node is None or self.node.failing

    def start(self) -> None:
        if self.node is None:
            self._subscriptions.assign(self)

    def drop_connection(self) -> None:
        if self.node is not None:
            self.node.drop_connection()


class ClusterSubscriptions:
    """All subscriptions of a client, one listener per node."""

    def __init__(self, slot_map: SlotMap, runtime: Runtime, registry: ClaimRegistry, call_timeout: float) -> None:
        self.slot_map, self._runtime, self._registry_ref, self._call_timeout = (
            slot_map,
            runtime,
            ref(registry),
            call_timeout,
        )
        self._channels: dict[str, ChannelSubscription] = {}
        self._listeners: dict[SocketAddress, NodeListener] = {}  # of nodes with channels

    def for_bucket(self, tag: str) -> Subscription:
        return self._channels.get(tag) or self._channels.setdefault(tag, ChannelSubscription(tag, self))

    def assign(self, channel: ChannelSubscription) -> None:
        """Subscribe at the slot's node. If the map has none, the next `start` tries again."""
        owner, registry = self.slot_map.owners[channel.slot], self._registry_ref()
        if owner is None or registry is None:
            channel.node = None
            channel.wake_attempts()
            return
        while True:
            listener = self._listeners.get(owner)
            if listener is None:
                listener = self._listeners.setdefault(
                    owner, NodeListener(owner, self, self._runtime, registry, self._call_timeout)
                )
            if listener.add(channel):
                return

    def forget(self, listener: NodeListener) -> None:
        """It has no channels left, and will get none: a hostile node can redirect them to ever new addresses."""
        self._listeners.pop(listener.address, None)

    def close(self) -> None:
        for _, listener in snapshot_items(self._listeners):
            listener.close()

    def after_fork(self) -> None:
        for _, listener in snapshot_items(self._listeners):
            listener.after_fork()
        self._listeners, self._channels = {}, {}


class NodeListener(PubSubListener):
    """One connection, for all channels of one node."""

    def __init__(
        self,
        address: SocketAddress,
        subscriptions: ClusterSubscriptions,
        runtime: Runtime,
        registry: ClaimRegistry,
        call_timeout: float,
    ) -> None:
        self.address, self._subscriptions = address, subscriptions
        self._channels: dict[str, ChannelSubscription] = {}  # by tag
        self._retired = False  # it had no channels, and its thread ends
        self._node = subscriptions.slot_map.server(address)
        super().__init__(self._node, SHARDED_PUBSUB, runtime, registry, call_timeout)

    def after_fork(self) -> None:
        super().after_fork()
        if self.self_pipe is not None:
            self.self_pipe.close()
        self._pending: deque[ChannelSubscription] = deque()  # requested, not confirmed, in order
        self._to_subscribe: deque[ChannelSubscription] = deque()  # not requested yet
        self._just_confirmed: set[str] = set()  # tags
        self._resubscribed = False  # some of them had been ended by this node before

    def add(self, channel: ChannelSubscription) -> bool:
        """Listen for this channel too. From any thread. False: its thread is about to end, so another must listen."""
        with self._mutex:
            if self._retired:
                return False
            channel.node = self
            self._channels[channel.tag] = channel
            self._to_subscribe.append(channel)
            if not self._running:
                self.self_pipe = SelfPipe()
            self.start()
            self_pipe = self.self_pipe
        if self_pipe is not None:
            self_pipe.set()
        return True

    def close(self) -> None:
        super().close()
        if self.self_pipe is not None:
            self.self_pipe.set()

    # ------------------------------------------------------- on its thread

    def _run(self, stop_flag: list[bool]) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        self_pipe, listen = self.self_pipe, super()._run(stop_flag)

        async def run(runtime: Runtime) -> None:
            try:
                await listen(runtime)
            finally:
                if self_pipe is not None:
                    self_pipe.close()

        return run

    async def _open(self, runtime: Runtime) -> SocketStream | LoopStream:
        """Reassign channels whose slot has moved. If none is left, the thread ends."""
        if self._subscriptions.slot_map.stale:
            await self._refresh_slot_map(runtime)
        owners = self._subscriptions.slot_map.owners
        for tag, channel in snapshot_items(self._channels):
            if owners[channel.slot] != self.address:
                self._reassign(tag, channel)
        with self._mutex:
            if not self._channels:
                self._retired = True
                self._subscriptions.forget(self)
                self._stop_flag.append(True)
                raise Unreachable("no subscribed bucket is left on this node", engine="redis")
            self._pending.clear()
            self._to_subscribe = deque(self._channels.values())
        try:
            return await super()._open(runtime)
        except Unreachable:
            self._subscriptions.slot_map.stale = True
            raise

    def _reassign(self, tag: str, channel: ChannelSubscription) -> None:
        del self._channels[tag]
        channel.active = False
        self._subscriptions.assign(channel)

    def _subscribe_commands(self, client: str) -> bytes:
        commands = []
        while self._to_subscribe:
            channel = self._to_subscribe.popleft()
            if self._channels.get(channel.tag) is channel:
                self._pending.append(channel)
                commands.append(encode_command("SSUBSCRIBE", f"{SHARDED_PUBSUB.channel_prefix(channel.tag)}{client}"))
        return b"".join(commands)

    async def _on_push(self, reply: Any, runtime: Runtime) -> None:
        if isinstance(reply, hiredis.ReplyError) and self._pending:
            channel = self._pending.popleft()
            if not is_error_reply(reply, "MOVED"):
                raise self._server.map_error(reply)
            channel.redirects += 1
            if channel.redirects > _MAX_SUBSCRIBE_REDIRECTS:  # do not follow it: this listener pauses ever longer
                self._subscriptions.slot_map.stale = True
                raise Unreachable(f"too many subscription redirects: {self._node.map_error(reply)}", engine="redis")
            self._subscriptions.slot_map.apply_moved(reply, self._node)
            self._reassign(channel.tag, channel)
        elif isinstance(reply, list) and len(reply) == 3 and reply[0] == b"sunsubscribe":
            self._subscriptions.slot_map.stale = True
            name = reply[1] if isinstance(reply[1], bytes) else b""
            tag = name.decode(errors="replace").partition(":")[2].rpartition(":c:")[0]
            # Only one that was confirmed: a hostile node may end the same one without end.
            if (ended_channel := self._channels.get(tag)) is not None and ended_channel.active:
                ended_channel.active, ended_channel.ended_by_server = False, True
                self._to_subscribe.append(ended_channel)
        else:
            await super()._on_push(reply, runtime)
            if self._resubscribed and not self._pending:
                await self._check_ownership(runtime)
        if reply is WOKEN or self._to_subscribe:
            self._subscribe_new(runtime)

    async def _refresh_slot_map(self, runtime: Runtime) -> None:
        with suppress(Unreachable):
            await self._subscriptions.slot_map.find(runtime, runtime.now() + self._call_timeout, self.address)

    async def _check_ownership(self, runtime: Runtime) -> None:
        """After a node ended subscriptions and accepted them again. A primary that became a replica does that too, but
        no script counts subscribers there. The node itself knows the current owners."""
        self._resubscribed = False
        await self._refresh_slot_map(runtime)
        owners = self._subscriptions.slot_map.owners
        if any(owners[channel.slot] != self.address for _, channel in snapshot_items(self._channels)):
            raise Unreachable(f"slots have moved away from {self._server}", engine="redis")

    def _subscribe_new(self, runtime: Runtime) -> None:
        if (
            (registry := self._registry_ref()) is not None
            and self._stream is not None
            and (commands := self._subscribe_commands(registry.client_id))
        ):
            self._stream.send(commands, runtime.now() + self._call_timeout)

    def _on_subscribed(self, registry: ClaimRegistry) -> None:
        self._succeeded, self._failing = True, False
        if self._pending:
            channel = self._pending.popleft()
            self._resubscribed |= channel.ended_by_server
            channel.active, channel.ended_by_server, channel.redirects = True, False, 0
            channel.wake_attempts()
            self._just_confirmed.add(channel.tag)
        if self._pending:
            return
        confirmed_tags, self._just_confirmed = self._just_confirmed, set()
        for id_hash, waiter in snapshot_items(registry.waiting):  # wake-ups may have been lost meanwhile
            if lock_keys(waiter.claim.namespace, waiter.claim.name)[0].partition(":")[2] in confirmed_tags:
                registry.on_notification("recheck", id_hash, 0.0, None)

    def _on_disconnect(self) -> None:
        for _, channel in snapshot_items(self._channels):
            channel.active = False
            if self._failing:
                channel.wake_attempts()
