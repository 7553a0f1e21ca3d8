"""Wake-ups from all nodes: a subscription at each, heard by one thread.

A turn is one when all nodes gave it, or a majority did and the others are late: a waiter that one of them told to go
would find the others busy. One that fewer told looks all the same, a little later: when several came at once, the
nodes may have given the turn to different ones, and looking is what makes them agree (`engine.py`). When to look is
what a majority says likewise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import hiredis

from leasehold.core.timing import HEARTBEAT_INTERVAL, WAITER_TTL, backoff
from leasehold.engines.redis.protocol import parse_key
from leasehold.engines.redis.pubsub import PubSubListener
from leasehold.engines.redis.scripts import MICROS, PubSubCommands
from leasehold.engines.redis.server import encode_command
from leasehold.engines.redlock.node import RedlockNode
from leasehold.engines.redlock.quorum import majority
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.errors import ConfigError
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.fanout_blocking import ConnectionGroup, FanoutRequests, WaitPolicy

_log = logging.getLogger("leasehold.redlock")

_SPLIT_VOTE_DELAY: Final = 0.05  # seconds that a turn given by too few nodes is left to become one
_MAJORITY_DELAY: Final = (
    0.005  # that a majority waits for the others: the release that they tell of is on its way to those
)
_MISSED_RELEASE_DELAY: Final = 0.2  # that a node is left to be itself again before it is told what it missed
_MAX_SLEEP: Final = 1.0  # the longest sleep: whether the client is still there is seen by then


class _NodeSubscription:
    """What is known of the subscription at one node."""

    def __init__(self) -> None:
        self.active = self.awaiting_reply = self.uncounted = (
            False  # told: something was sent that has not been answered
        )
        self.due_at, self.failures = 0.0, 0  # when to do something about it


class NodeSubscriptions(PubSubListener):
    """Of one client: on the shelf of its book, shared by both twins."""

    def __init__(
        self, nodes: Sequence[RedlockNode], runtime: Runtime, registry: ClaimRegistry, call_timeout: float
    ) -> None:
        self._nodes, self._quorum = nodes, majority(len(nodes))
        super().__init__(nodes[0], PubSubCommands(), runtime, registry, call_timeout)

    def after_fork(self) -> None:
        if (connections := getattr(self, "_node_connections", None)) is not None:
            connections.after_fork()
        super().after_fork()
        self._node_connections: ConnectionGroup | None = None
        self._node_subscriptions = [_NodeSubscription() for _ in self._nodes]
        self._reserved_by: dict[str, set[int]] = {}  # by mark: the nodes that gave it its turn
        self._recheck_times: dict[str, dict[int, float]] = {}  # by mark: when to look, as each node says

    def close(self) -> None:
        self._stop_flag.append(True)
        if self._node_connections is not None:
            self._node_connections.shutdown()

    # -------------------------------------------------------- of one waiter

    def reset_waiter(self, id_hash: str) -> None:
        """It is about to ask: what was told before is out of date."""
        self._reserved_by[id_hash], self._recheck_times[id_hash] = set(), {}

    def remove_waiter(self, id_hash: str) -> None:
        self._reserved_by.pop(id_hash, None)
        self._recheck_times.pop(id_hash, None)

    def on_node_reservation(self, id_hash: str, index: int) -> None:
        """A node gave it its turn."""
        registry, reserved_by = self._registry_ref(), self._reserved_by.get(id_hash)
        if registry is None or reserved_by is None:
            return
        reserved_by.add(index)
        if len(reserved_by) >= max(self._quorum, sum(subscription.active for subscription in self._node_subscriptions)):
            registry.on_notification("go", id_hash, 0.0, None)
        else:
            registry.on_notification(
                "head", id_hash, _SPLIT_VOTE_DELAY if len(reserved_by) < self._quorum else _MAJORITY_DELAY, None
            )

    def check_node_subscribed(self, index: int, subscribed: bool) -> None:
        """Told by a reply whether the node counts this client among its subscribers. If not, though it should, the
        connection is dead and nobody said so. One made anew that is not counted either is no reason to try for ever:
        some proxies hide the count."""
        subscription = self._node_subscriptions[index]
        if subscribed:
            subscription.uncounted = False
        elif subscription.active and not subscription.uncounted:
            subscription.uncounted, subscription.failures, subscription.due_at = True, 1, 0.0

    def probe_node_soon(self, index: int) -> None:
        """A node has missed a release: it is asked soon whether it is there, and told (`_send_missed_releases`)."""
        subscription = self._node_subscriptions[index]
        if subscription.active and not subscription.awaiting_reply:
            subscription.due_at = min(subscription.due_at, self._runtime.now() + _MISSED_RELEASE_DELAY)

    # --------------------------------------------------------- on its thread

    async def _listen(self, runtime: Runtime, stop_flag: list[bool]) -> None:
        connections = self._node_connections = ConnectionGroup(self._nodes, hiredis.Reader, runtime.now)
        try:
            while not stop_flag and (registry := self._registry_ref()) is not None:
                now = runtime.now()
                for index, subscription in enumerate(self._node_subscriptions):
                    if subscription.due_at <= now:
                        self._maintain_node(connections, index, subscription, registry.client_id, runtime)
                del registry
                due = min(subscription.due_at for subscription in self._node_subscriptions)
                for index, reply in connections.receive(min(max(due - runtime.now(), 0.0), _MAX_SLEEP)):
                    self._on_node_reply(index, reply, runtime)
        finally:
            self._node_connections = None
            connections.close()

    def _maintain_node(
        self, connections: ConnectionGroup, index: int, subscription: _NodeSubscription, client: str, runtime: Runtime
    ) -> None:
        """Subscribe; ask one that was quiet for long whether it is there; give up one that does not say so."""
        now = runtime.now()
        if subscription.awaiting_reply or (subscription.active and subscription.failures):
            connections.drop(index)
            self._on_node_disconnect(subscription, runtime)
            return
        request = (
            encode_command("PING")
            if subscription.active
            else encode_command(self._pubsub_commands.subscribe, f"{self._pubsub_commands.channel_prefix('')}{client}")
        )
        subscription.awaiting_reply, subscription.due_at = True, now + self._call_timeout
        try:
            connections.send(index, request)
        except OSError as error:
            _log.debug("no wake-ups from %s: %s", self._nodes[index], error)
            connections.drop(index)
            self._on_node_disconnect(subscription, runtime)

    def _on_node_disconnect(self, subscription: _NodeSubscription, runtime: Runtime) -> None:
        subscription.active, subscription.awaiting_reply, subscription.failures = (
            False,
            False,
            subscription.failures + 1,
        )
        subscription.due_at = runtime.now() + backoff(subscription.failures, 0.02, 1.0, 0.5 + runtime.random() / 2)
        self._update_majority()

    def _on_node_reply(self, index: int, reply: Any, runtime: Runtime) -> None:
        subscription, registry = self._node_subscriptions[index], self._registry_ref()
        if isinstance(reply, Exception):
            level = (
                logging.WARNING
                if isinstance(reply, ConfigError | hiredis.ReplyError) and not subscription.failures
                else logging.DEBUG
            )
            _log.log(level, "no wake-ups from %s, so waiters look now and then: %s", self._nodes[index], reply)
            if isinstance(reply, hiredis.ReplyError) and self._node_connections is not None:
                self._node_connections.drop(index)
            self._on_node_disconnect(subscription, runtime)
            return
        subscription.awaiting_reply, subscription.due_at = False, runtime.now() + HEARTBEAT_INTERVAL
        if self._nodes[index].missed_releases:
            self._send_missed_releases(index, runtime)
        if registry is None or not isinstance(reply, list) or len(reply) < 2:
            return
        if reply[0] == self._pubsub_commands.subscribe.lower().encode():
            subscription.active, subscription.failures = True, 0
            self._update_majority()
            for id_hash, _ in snapshot_items(registry.waiting):  # their turn may have come while nobody could tell them
                registry.on_notification("head", id_hash, 0.0, None)
        elif reply[0] == b"message" and len(reply) == 3 and isinstance(reply[2], bytes):
            self._on_node_notification(registry, index, reply[2], runtime.now())

    def _send_missed_releases(self, index: int, runtime: Runtime) -> None:
        """It is there, and has missed releases: a new connection begins with them. Nobody else may ask it for long."""
        connections, until = (
            ConnectionGroup(self._nodes, hiredis.Reader, runtime.now),
            runtime.now() + self._call_timeout,
        )
        try:
            connections.request_all(FanoutRequests({index: encode_command("PING")}), 1, WaitPolicy(until, until, bool))
        finally:
            connections.close()

    def _update_majority(self) -> None:
        """Wake-ups reach this client when those of a majority do."""
        count = sum(subscription.active for subscription in self._node_subscriptions)
        self.active = count >= self._quorum
        if self.active:
            self._succeeded, self._failing = True, False
            self.wake_waiters()
        elif all(subscription.active or subscription.failures for subscription in self._node_subscriptions):
            self._failing = True
            self.wake_waiters()

    def _on_node_notification(self, registry: ClaimRegistry, index: int, message: bytes, now: float) -> None:
        """A message of a script's: kind, microseconds, key, mark."""
        with suppress(ValueError, OverflowError):  # not ours
            kind, after, key, raw = message.split(b" ", 3)
            id_hash, seconds, name_id = raw.hex(), int(after) / MICROS, parse_key(key.decode())
            if kind == b"go" and name_id is not None and not registry.knows(id_hash):
                registry.on_notification("go", id_hash, 0.0, Claim(*name_id, "", id_hash, Holder("stray"), WAITER_TTL))
            elif kind == b"go":
                self.on_node_reservation(id_hash, index)
            elif kind == b"head":
                self._schedule_majority_recheck(registry, id_hash, index, now + seconds, now)
            elif kind == b"lost":
                registry.on_notification("lost", id_hash, 0.0, None)

    def _schedule_majority_recheck(
        self, registry: ClaimRegistry, id_hash: str, index: int, recheck_at: float, now: float
    ) -> None:
        recheck_times = self._recheck_times.get(id_hash)
        if recheck_times is not None:
            recheck_times[index] = recheck_at
            if self._reserved_by.get(
                id_hash
            ):  # it looks soon, whatever the others say: the turn is given for a moment only
                return
            if len(recheck_times) >= self._quorum:
                registry.on_notification(
                    "head", id_hash, max(0.0, sorted(recheck_times.values())[self._quorum - 1] - now), None
                )
