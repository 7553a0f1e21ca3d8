"""What happened, as frozen values for one hook: metrics, traces and audit logs are built on it.

    client = leasehold.Client(url, on_event=print)

Events made by the caller's own calls arrive on the caller's thread; those of the watchdog on the teller's thread,
so that a slow hook cannot hold up a renewal. A hook that raises is logged and otherwise ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

EventKind: TypeAlias = Literal[
    "attempted",  # an acquire began
    "granted",  # it ended with a lease; `seconds` since it began
    "busy",  # it ended without one: somebody else has it
    "failed",  # it ended otherwise: no answer, another kind, cancelled; with `reason`
    "waited",  # it had to stand in line; `seconds` in line
    "renewed",
    "renew_failed",
    "at_risk",
    "lost",  # with `reason`
    "released",  # `seconds` held
    "release_pending",  # a release could not be confirmed and is repeated
    "broken",  # this client broke somebody's lock
    "stale_token",  # a fence refused the lease's token; with what it has seen as `reason`
    "ran",  # `once` ran its function and recorded the result; `seconds` it took
    "replayed",  # `once` gave a stored result
    "conflict",  # `optimistic` met somebody else's change; `seconds` until it tries again, `reason` what it met
]

_log = logging.getLogger("leasehold.events")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one name. `at` is wall-clock time, for people; nothing is decided by it."""

    kind: EventKind
    engine: str
    namespace: str
    name: str
    at: float
    token: int | None = None
    fingerprint: str | None = None
    holder: str | None = None
    seconds: float | None = None
    reason: str | None = None


Hook: TypeAlias = Callable[[Event], None]


def call_hook(hook: Hook, event: Event) -> None:
    """Call the hook; whatever it raises is its own affair, never the lock's."""
    try:
        hook(event)
    except Exception:
        _log.exception("the on_event hook failed on %s of %s", event.kind, event.name)
