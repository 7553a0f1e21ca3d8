"""What tests read and change inside the memory engine."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from leasehold.engines.memory import MemoryEngine, MemoryServer
from leasehold.engines.registry import ClaimRegistry
from leasehold.runtime.base import Mutex, Runtime
from leasehold.testing.conformance.memory_rig import BreakableTransport
from tests.support import probe
from tests.support.probe import AnyClient, Place

AnyEngine: TypeAlias = AnyClient | MemoryEngine

# Steps that tests replace by a wrong one.
CURRENT_CONTEXT = Place(MemoryServer, "_current_context")  # the time of a decision, and what it may ask
ISSUE_TOKEN = Place(MemoryServer, "_issue_token")
SEND_NOTIFICATIONS = Place(MemoryServer, "_send_notifications")
SWEEP = Place(MemoryServer, "_sweep")
SWEEP_NAME = Place(MemoryServer, "_sweep_name")
WAIT_UNANSWERED = Place(BreakableTransport, "_wait_unanswered")  # what a call does while the engine is silent


def engine_of(user: AnyEngine) -> MemoryEngine:
    return cast(MemoryEngine, probe.engine(user))


def mutex(server: MemoryServer) -> Mutex:
    """The one under which all decisions are made."""
    return server._mutex


def server_runtime(server: MemoryServer) -> Runtime:
    return server._runtime


def transport(user: AnyEngine) -> Any:
    """What carries the engine's calls to its server."""
    return engine_of(user)._transport


def registry(engine: MemoryEngine) -> ClaimRegistry:
    return engine._registry


def runtime(engine: MemoryEngine) -> Runtime:
    return engine._runtime
