"""What the rigs and the simulator read and change inside a client: the only place of `harness/` that knows where it is
kept. The tests have `tests/support/probe.py`, and more such modules next to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from leasehold import AsyncClient, Client, LeaseState
from leasehold.client.core import ClientCore
from leasehold.client.lease import BaseLease, Validity
from leasehold.model import Claim

if TYPE_CHECKING:
    from leasehold.engines.zookeeper.session import ZookeeperSession  # needs kazoo


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


def kazoo_session(session: ZookeeperSession) -> Any:
    """The session's id and password, with which any client can connect to it; None if there is none."""
    return None if session._kazoo is None else session._kazoo.client_id
