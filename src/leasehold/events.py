"""What happened, as frozen values passed to one hook. Metrics, traces and audit logs are built on it.

    client = leasehold.Client(url, on_event=print)

Events of the caller's own calls arrive on the caller's thread. Events of the watchdog arrive on the callback thread, so
that a slow hook cannot delay a renewal. If a hook raises, the exception is logged and otherwise ignored. A hook that is
slow is reported once; `leasehold.telemetry.background` runs it on a thread of its own.
"""

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Final, Literal, NamedTuple, TypeAlias

from leasehold.model import Mode

EventKind: TypeAlias = Literal[
    "attempted",  # an acquire began
    "granted",  # the acquire returned a lease; `seconds` since it began
    "busy",  # the acquire ended without a lease: another claim holds the name; `reason` is its holder
    "failed",  # the acquire ended otherwise (no answer, another kind, cancelled); with `reason`
    "unguaranteed",  # the engine did not answer, and on_unavailable="run" let the caller go on; with `reason`
    "waited",  # the acquire had to queue; `seconds` in the queue
    "renewed",
    "renew_failed",
    "at_risk",
    "lost",  # with `reason`
    "released",  # `seconds` held
    "release_pending",  # a release could not be confirmed; the watchdog retries it
    "broken",  # this client broke another holder's lock
    "resized",  # this client set the limit of a semaphore; `limit` is None if it removed it
    "stale_token",  # a fence refused a token; `seen` is the highest token it has seen
    "ran",  # `once` ran its function and recorded the result; `seconds` it took
    "replayed",  # `once` returned a stored result
    "breaker_opened",  # the engine did not answer 5 calls in a row: attempts fail at once; `name` is empty
    "breaker_closed",  # the engine answers again; `name` is empty
    "conflict",  # `optimistic` met another writer's change (`reason`) and retries in `seconds`
]

# What refused a token: the kind of a fence, or the record of `once`.
FenceKind: TypeAlias = Literal["sql", "redis", "etcd", "zookeeper", "file", "object", "http", "local", "once"]

SLOW_SECONDS: Final = 0.05
_SLOW_CALLS: Final = 3  # in a row, for one kind of event: single ones are the fault of a busy machine

_log = logging.getLogger("leasehold.events")
_failures = _dropped = 0
_slow_calls: dict[tuple[str, str], int] = {}  # in a row, by hook and kind of event
_slow_hooks: set[str] = set()  # that were reported


class Event(NamedTuple):
    """One thing that happened to one name. `at` is wall-clock time, for display only. New fields come last."""

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
    queued: bool | None = None  # whether the acquire waited in the queue
    error: str | None = None  # the class of the error in `reason`
    ttl: float | None = None  # seconds that the engine granted
    left: float | None = None  # seconds of them that were left when the engine answered
    mode: Mode | None = None
    slot: int | None = None  # of a semaphore
    purpose: str | None = None  # the lock's, for display only
    fence: FenceKind | None = None
    seen: int | None = None  # the highest token that the fence has seen
    actor: str | None = None  # who broke the lock, or set its limit
    why: str | None = None  # and the reason that was given
    group: str | None = None  # for metrics, if the lock was built with one
    position: int | None = None  # how many waiters were ahead when the acquire joined the queue
    limit: int | None = None  # that was set


Hook: TypeAlias = Callable[[Event], None]


def call_hook(hook: Hook, event: Event, may_be_slow: bool = False) -> None:
    """Call the hook. An exception that it raises is logged and never reaches the lock."""
    global _failures
    began = perf_counter()
    try:
        hook(event)
    except Exception:
        _failures += 1
        _log.exception("the on_event hook failed on %s of %s", event.kind, event.name)
    if perf_counter() - began > SLOW_SECONDS:
        if not may_be_slow:
            _on_slow_call(hook, event, perf_counter() - began)
    elif _slow_calls:
        _slow_calls.pop((_hook_name(hook), event.kind), None)


def hook_failures() -> int:
    """How many calls of hooks failed in this process. Close enough for metrics: two at the same instant may be one."""
    return _failures


def count_dropped_event() -> None:
    """An event was dropped because a hook is too slow."""
    global _dropped
    _dropped += 1


def dropped_events() -> int:
    """How many events were dropped in this process; as exact as `hook_failures`."""
    return _dropped


def _hook_name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def _on_slow_call(hook: Hook, event: Event, seconds: float) -> None:
    """Log it once for each hook."""
    name = _hook_name(hook)
    if name in _slow_hooks:
        return
    calls = _slow_calls[name, event.kind] = _slow_calls.get((name, event.kind), 0) + 1
    if calls < _SLOW_CALLS:
        return
    _slow_hooks.add(name)
    _slow_calls.clear()
    _log.warning(
        "the on_event hook %s is slow (%.3f s for %s) and delays the code that acquires locks: "
        "pass on_event=leasehold.telemetry.background(hook)",
        name,
        seconds,
        event.kind,
    )
