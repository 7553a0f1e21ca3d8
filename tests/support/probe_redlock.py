"""What tests read and change inside the Redlock engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from leasehold.engines.redlock.broadcast import Broadcaster
from leasehold.engines.redlock.client_state import ProposalClock
from leasehold.engines.redlock.engine import RedlockEngine
from leasehold.engines.redlock.node import RedlockNode
from leasehold.engines.redlock.protocol import RedlockRequests
from leasehold.engines.redlock.pubsub import NodeSubscriptions
from leasehold.engines.registry import ClaimRegistry
from tests.support import probe
from tests.support.probe import AnyClient, Place

AnyEngine: TypeAlias = AnyClient | RedlockEngine

LISTENER_STEPS = [  # functions that the listener's thread calls
    Place(NodeSubscriptions, "_maintain_node"),
    Place(NodeSubscriptions, "_on_node_reply"),
    Place(NodeSubscriptions, "_on_node_notification"),
    Place(NodeSubscriptions, "_update_majority"),
]


def engine_of(user: AnyEngine) -> RedlockEngine:
    return cast(RedlockEngine, probe.engine(user))


def nodes(user: AnyEngine) -> Sequence[RedlockNode]:
    """The nodes as the engine sees them."""
    return engine_of(user)._nodes


def requests(user: AnyEngine) -> RedlockRequests:
    """What makes the requests of the engine, and its scripts."""
    return engine_of(user)._requests


def scripts(user: AnyEngine) -> Any:
    return requests(user).scripts


def broadcaster(user: AnyEngine) -> Broadcaster:
    """What sends the requests to the nodes."""
    return engine_of(user)._broadcaster


def proposals(user: AnyEngine) -> ProposalClock:
    """What gives the client's attempts their numbers, proposed tokens and tickets."""
    return engine_of(user)._proposals


def use_wall_clock(user: AnyEngine, wall: Callable[[], float]) -> None:
    """Let the client's proposals follow this clock."""
    proposals(user)._wall = wall


def use_lead(user: AnyEngine, lead: int) -> None:
    """Let the client's proposals be this much ahead of its clock, in microseconds."""
    proposals(user)._lead = lead


def subscriptions(user: AnyEngine) -> NodeSubscriptions:
    return engine_of(user)._subscriptions


def schedule_majority_recheck(
    user: AnyEngine, registry: ClaimRegistry, id_hash: str, node: int, recheck_at: float, now: float
) -> None:
    """As if a node had told a waiter when to re-check."""
    subscriptions(user)._schedule_majority_recheck(registry, id_hash, node, recheck_at, now)
