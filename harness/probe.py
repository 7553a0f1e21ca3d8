"""What rigs, simulator and `bench/` read and change inside a client: the only place that knows where that is kept.

The tests have `tests/support/probe.py`, and more such modules next to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from leasehold import AsyncClient, Client, LeaseState
from leasehold.client.core import ClientCore
from leasehold.client.lease import BaseLease, Validity
from leasehold.client.lock import BaseLock
from leasehold.model import Claim

if TYPE_CHECKING:
    from leasehold.engines.redis.connections import BlockingPool
    from leasehold.engines.redis.engine import RedisEngine
    from leasehold.engines.redis.protocol import RedisRequests
    from leasehold.engines.zookeeper.session import ZookeeperSession  # needs kazoo
    from leasehold.runtime.net.blocking import SocketStream


class HasCore(Protocol):
    """A client, or what it has made: a lock, a lease, an election."""

    _core: ClientCore


AnyClient: TypeAlias = Client | AsyncClient | HasCore


def core(client: AnyClient) -> ClientCore:
    """What all leases of the client share."""
    return client._core


def claim(lease: BaseLease) -> Claim:
    """The claim that the lease was granted for, with its secret id."""
    return lease._claim


def new_claim(lock: BaseLock[Any]) -> Claim:
    """A claim as the lock would make it for an attempt."""
    return lock._new_claim()


def validity(lease: BaseLease) -> Validity:
    """All that says how long the lease is trusted."""
    return lease._validity


def is_strict(lease: BaseLease) -> bool:
    """Whether the lease ends as soon as its renewal is overdue."""
    return lease._strict


def has_final_state(lease: BaseLease) -> bool:
    """Whether the lease's end was recorded, rather than found by comparing the clock."""
    return lease._final_state is not None


def set_final_state(lease: BaseLease, state: LeaseState) -> None:
    """End the lease, and notify no caller."""
    lease._final_state = state


def redis_requests(client: AnyClient) -> RedisRequests:
    """What makes the requests of the client's engine."""
    return cast("RedisEngine", client._core.engine())._requests


def redis_stream(client: AnyClient, tag: str) -> SocketStream:
    """The only connection of a client of one server, which is idle."""
    connections = cast("RedisEngine", client._core.engine())._topology.connections(tag)
    (stream,) = cast("BlockingPool", connections)._idle
    return stream


def kazoo_session(session: ZookeeperSession) -> Any:
    """The session's id and password, with which any client can connect to it; None if there is none."""
    return None if session._kazoo is None else session._kazoo.client_id
