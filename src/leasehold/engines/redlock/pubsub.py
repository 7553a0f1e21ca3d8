"""Wake-ups from all nodes: one subscription at each, received by one thread.

A waiter is woken when all nodes have reserved the name for it, or when a majority has and the others are late: if it
attempted after the first reservation, it would find the other nodes busy. If fewer nodes have, it still re-checks a
little later: if several claims arrived at once, the nodes may have reserved for different ones, and the attempt makes
them agree (`engine.py`). The time of a re-check also follows a majority.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import hiredis

from leasehold.core.timing import HEARTBEAT_INTERVAL, STABLE_AFTER, backoff
from leasehold.engines.redis.protocol import parse_key
from leasehold.engines.redis.pubsub import PubSubListener
from leasehold.engines.redis.scripts import MICROS, PubSubCommands
from leasehold.engines.redis.server import encode_command
from leasehold.engines.redlock.node import RedlockNode, new_reader
from leasehold.engines.redlock.quorum import majority
from leasehold.engines.registry import ClaimRegistry, make_unknown_claim, snapshot_items
from leasehold.engines.repeated_logs import log_once
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.fanout_blocking import ConnectionGroup

_log = logging.getLogger("leasehold.redlock")

_SPLIT_VOTE_DELAY: Final = 0.05  # seconds to wait for more nodes, if fewer than a majority have reserved
_MAJORITY_DELAY: Final = 0.005  # the same once a majority has: the release is on its way to the other nodes
_MISSED_RELEASE_DELAY: Final = 0.2  # seconds for a node to recover, before it gets the releases it missed
_RELEASES_PAUSE: Final = 1.0  # seconds after a node did not take the releases it missed
_MAX_SLEEP: Final = 1.0  # seconds between checks whether the client still exists


class _NodeSubscription:
    """The state of the subscription at one node."""

    def __init__(self) -> None:
        self.active = self.awaiting_reply = self.uncounted = False
        self.due_at, self.failures = 0.0, 0  # due_at: when to subscribe, ping or give up
        self.began, self.misses = float("inf"), 0  # began: when it was last confirmed; misses: as in `_count_misses`
        self.releases_sent, self.releases_due_at = 0, 0.0  # missed, on a connection of their own; due_at: as above


class NodeSubscriptions(PubSubListener):
    """The subscriptions of one client, shared by its engine instances."""

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
        self._reserved_by: dict[str, set[int]] = {}  # by id hash: the nodes that reserved the name
        self._recheck_times: dict[str, dict[int, float]] = {}  # by id hash: when to re-check, by node

    def close(self) -> None:
        self._stop_flag.append(True)
        if self._node_connections is not None:
            self._node_connections.shutdown()

    # -------------------------------------------------------------- waiters

    def reset_waiter(self, id_hash: str) -> None:
        """Before an attempt: earlier notifications are out of date."""
        self._reserved_by[id_hash], self._recheck_times[id_hash] = set(), {}

    def remove_waiter(self, id_hash: str) -> None:
        self._reserved_by.pop(id_hash, None)
        self._recheck_times.pop(id_hash, None)

    def on_node_reservation(self, id_hash: str, index: int) -> None:
        """A node has reserved the name for this waiter."""
        registry, reserved_by = self._registry_ref(), self._reserved_by.get(id_hash)
        if registry is None or reserved_by is None:
            return
        reserved_by.add(index)
        if len(reserved_by) >= max(self._quorum, sum(subscription.active for subscription in self._node_subscriptions)):
            registry.on_notification("reserved", id_hash, 0.0, None)
        else:
            registry.on_notification(
                "recheck", id_hash, _SPLIT_VOTE_DELAY if len(reserved_by) < self._quorum else _MAJORITY_DELAY, None
            )

    def check_node_subscribed(self, index: int, subscribed: bool) -> None:
        """`subscribed`: by its reply, the node counts this client as a subscriber. If it does not, though the
        subscription seems active, the connection must be dead, and is replaced. If the node does not count the next one
        either, it is kept: some proxies hide the count."""
        subscription = self._node_subscriptions[index]
        if subscribed:
            subscription.uncounted = False
        elif subscription.active and not subscription.uncounted:
            subscription.uncounted, subscription.failures, subscription.due_at = True, 1, 0.0

    def probe_node_soon(self, index: int) -> None:
        """A node has missed a release: ping it soon, and send the release when it answers (`_send_missed_releases`)."""
        subscription = self._node_subscriptions[index]
        if subscription.active and not subscription.awaiting_reply:
            subscription.due_at = min(subscription.due_at, self._runtime.now() + _MISSED_RELEASE_DELAY)

    # --------------------------------------------------------- on its thread

    async def _listen(self, runtime: Runtime, stop_flag: list[bool]) -> None:
        self._node_subscriptions = [_NodeSubscription() for _ in self._nodes]  # after an error, subscribe again
        # Two connections to each node: the second, numbered behind all nodes, sends the releases that it missed.
        connections = ConnectionGroup([*self._nodes, *self._nodes], new_reader(self._nodes), runtime.now)
        self._node_connections = connections
        try:
            while not stop_flag and (registry := self._registry_ref()) is not None:
                now = runtime.now()
                for index, subscription in enumerate(self._node_subscriptions):
                    if subscription.due_at <= now:
                        self._maintain_node(connections, index, subscription, registry.client_id, runtime)
                    if subscription.releases_sent and subscription.releases_due_at <= now:
                        self._on_releases_end(connections, index, runtime)
                del registry
                due = min(subscription.due_at for subscription in self._node_subscriptions)
                for index, reply in connections.receive(min(max(due - runtime.now(), 0.0), _MAX_SLEEP)):
                    if index < len(self._nodes):
                        self._on_node_reply(connections, index, reply, runtime)
                    else:
                        self._on_releases_end(connections, index - len(self._nodes), runtime)
        finally:
            self._node_connections = None
            connections.close()

    def _maintain_node(
        self, connections: ConnectionGroup, index: int, subscription: _NodeSubscription, client: str, runtime: Runtime
    ) -> None:
        """Subscribe; ping a node that has been silent for long; disconnect from one that does not answer."""
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
            _log.debug("push notifications from %s unavailable: %s", self._nodes[index], error)
            connections.drop(index)
            self._on_node_disconnect(subscription, runtime)

    def _on_node_disconnect(self, subscription: _NodeSubscription, runtime: Runtime) -> None:
        now, subscription.failures = runtime.now(), subscription.failures + 1
        subscription.misses = 0 if now - subscription.began >= STABLE_AFTER else subscription.misses + 1
        subscription.active, subscription.awaiting_reply, subscription.began = False, False, float("inf")
        subscription.due_at = now + backoff(subscription.misses, 0.02, 1.0, 0.5 + runtime.random() / 2)
        self._update_majority()

    def _on_node_reply(self, connections: ConnectionGroup, index: int, reply: Any, runtime: Runtime) -> None:
        subscription, registry = self._node_subscriptions[index], self._registry_ref()
        if not isinstance(reply, list | Exception):
            reply = hiredis.ReplyError("the server sent a reply that is not a message")
        if isinstance(reply, Exception):
            level = (
                logging.WARNING
                if isinstance(reply, ConfigError | hiredis.ReplyError) and not subscription.failures
                else logging.DEBUG
            )
            log_once(_log, level, f"push notifications from {self._nodes[index]} unavailable: {reply}")
            if isinstance(reply, hiredis.ReplyError):
                connections.drop(index)
            self._on_node_disconnect(subscription, runtime)
            return
        subscription.awaiting_reply, subscription.due_at = False, runtime.now() + HEARTBEAT_INTERVAL
        if self._nodes[index].missed_releases:
            self._send_missed_releases(connections, index, runtime)
        if registry is None or len(reply) < 2:
            return
        if reply[0] == self._pubsub_commands.subscribe.lower().encode():
            subscription.active, subscription.failures, subscription.began = True, 0, runtime.now()
            self._update_majority()
            for id_hash, _ in snapshot_items(registry.waiting):  # wake-ups may have been lost meanwhile
                registry.on_notification("recheck", id_hash, 0.0, None)
        elif reply[0] == b"message" and len(reply) == 3 and isinstance(reply[2], bytes):
            self._on_node_notification(registry, index, reply[2], runtime.now())

    def _send_missed_releases(self, connections: ConnectionGroup, index: int, runtime: Runtime) -> None:
        """The node is back and has missed releases. A new connection sends them first, and other calls may not open one
        for long. This thread does not wait for it: the node may answer on old connections only."""
        subscription, now = self._node_subscriptions[index], runtime.now()
        if subscription.releases_sent or now < subscription.releases_due_at:
            return
        subscription.releases_sent = len(self._nodes[index].missed_releases)
        subscription.releases_due_at = now + self._call_timeout
        try:
            connections.send(len(self._nodes) + index, encode_command("PING"))
        except OSError as error:
            _log.debug("missed releases not sent to %s: %s", self._nodes[index], error)
            self._on_releases_end(connections, index, runtime)

    def _on_releases_end(self, connections: ConnectionGroup, index: int, runtime: Runtime) -> None:
        """The node has answered, or its time is over. If it took some of the releases, send the next ones."""
        subscription, missed = self._node_subscriptions[index], len(self._nodes[index].missed_releases)
        connections.drop(len(self._nodes) + index)
        took_some, subscription.releases_sent = missed < subscription.releases_sent, 0
        subscription.releases_due_at = 0.0 if took_some else runtime.now() + _RELEASES_PAUSE
        if took_some and missed:
            self._send_missed_releases(connections, index, runtime)

    def _update_majority(self) -> None:
        """Push is active if a majority of the nodes has a subscription."""
        count = sum(subscription.active for subscription in self._node_subscriptions)
        self.active = count >= self._quorum
        if self.active:
            self._succeeded, self._failing = True, False
            self.wake_attempts()
        elif all(subscription.active or subscription.failures for subscription in self._node_subscriptions):
            self._failing = True
            self.wake_attempts()

    def _on_node_notification(self, registry: ClaimRegistry, index: int, message: bytes, now: float) -> None:
        """A message from a script: kind, microseconds, key, id hash."""
        with suppress(ValueError, OverflowError):  # not our format
            kind, after, key, raw = message.split(b" ", 3)
            id_hash, seconds, name_id = raw.hex(), int(after) / MICROS, parse_key(key.decode())
            if kind == b"reserved" and name_id is not None and not registry.knows(id_hash):
                registry.on_notification("reserved", id_hash, 0.0, make_unknown_claim(*name_id, id_hash))
            elif kind == b"reserved":
                self.on_node_reservation(id_hash, index)
            elif kind == b"recheck":
                self._schedule_majority_recheck(registry, id_hash, index, now + seconds, now)
            elif kind == b"broken":
                registry.on_notification("broken", id_hash, 0.0, None)

    def _schedule_majority_recheck(
        self, registry: ClaimRegistry, id_hash: str, index: int, recheck_at: float, now: float
    ) -> None:
        recheck_times = self._recheck_times.get(id_hash)
        if recheck_times is not None:
            recheck_times[index] = recheck_at
            if self._reserved_by.get(id_hash):  # re-checks soon anyway: the reservation is short-lived
                return
            if len(recheck_times) >= self._quorum:
                registry.on_notification(
                    "recheck", id_hash, max(0.0, sorted(recheck_times.values())[self._quorum - 1] - now), None
                )
