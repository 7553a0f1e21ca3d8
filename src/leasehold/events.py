"""What happened, as frozen values passed to one hook. Metrics, traces and audit logs are built on it.

    client = leasehold.Client(url, on_event=print)

Events of the caller's own calls arrive on the caller's thread. Events of the watchdog arrive on the callback thread, so
that a slow hook cannot delay a renewal. If a hook raises, the exception is logged and otherwise ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

EventKind: TypeAlias = Literal[
    "attempted",  # an acquire began
    "granted",  # the acquire returned a lease; `seconds` since it began
    "busy",  # the acquire ended without a lease: another claim holds the name
    "failed",  # the acquire ended otherwise (no answer, another kind, cancelled); with `reason`
    "waited",  # the acquire had to queue; `seconds` in the queue
    "renewed",
    "renew_failed",
    "at_risk",
    "lost",  # with `reason`
    "released",  # `seconds` held
    "release_pending",  # a release could not be confirmed; the watchdog retries it
    "broken",  # this client broke another holder's lock
    "stale_token",  # a fence refused the lease's token; `reason` has the highest token it has seen
    "ran",  # `once` ran its function and recorded the result; `seconds` it took
    "replayed",  # `once` returned a stored result
    "conflict",  # `optimistic` met another writer's change (`reason`) and retries in `seconds`
]

_log = logging.getLogger("leasehold.events")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one name. `at` is wall-clock time, display only."""

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
    """Call the hook. An exception that it raises is logged and never reaches the lock."""
    try:
        hook(event)
    except Exception:
        _log.exception("the on_event hook failed on %s of %s", event.kind, event.name)
