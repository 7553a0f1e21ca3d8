"""The log line of each event: its level, its text, and its fields for machines.

The fields are in one attribute of the log record, `record.leasehold`, so that they collide with nothing:
`telemetry.JSONFormatter` writes them out, and any other formatter may. A line never contains a claim's id or a URL.
"""

from __future__ import annotations

import logging
from logging import DEBUG, INFO, WARNING
from typing import Any, Final, NamedTuple

from leasehold import tracing
from leasehold.core.texts import escape
from leasehold.events import Event, EventKind

_log = logging.getLogger("leasehold")


class _Line(NamedTuple):
    level: int
    text: str
    fields: tuple[str, ...]  # of the event, for the text


_LEASE: Final = ("name", "token", "fingerprint")
_LINES: Final[dict[EventKind, _Line]] = {
    "attempted": _Line(DEBUG, "acquiring %s (%s)", ("name", "fingerprint")),
    "granted": _Line(DEBUG, "acquired %s (token %s, %s) after %.3f s", (*_LEASE, "seconds")),
    "waited": _Line(DEBUG, "waited for %s (token %s, %s) for %.3f s", (*_LEASE, "seconds")),
    "busy": _Line(DEBUG, "did not acquire %s within %.3f s: the holder is %s", ("name", "seconds", "reason")),
    "failed": _Line(DEBUG, "acquiring %s failed after %.3f s: %s", ("name", "seconds", "reason")),
    "unguaranteed": _Line(
        WARNING,
        'the engine did not answer, so the work under %s runs WITHOUT its lock (on_unavailable="run"): another holder '
        "may run at the same time: %s",
        ("name", "reason"),
    ),
    "renewed": _Line(DEBUG, "renewed the lease of %s (token %s, %s) in %.3f s", (*_LEASE, "seconds")),
    "renew_failed": _Line(DEBUG, "the lease of %s (token %s, %s) was not renewed: %s", (*_LEASE, "reason")),
    "at_risk": _Line(WARNING, "the lease of %s (token %s, %s) is at risk: %s", (*_LEASE, "reason")),
    "lost": _Line(WARNING, "the lease of %s (token %s, %s) is lost: %s", (*_LEASE, "reason")),
    "released": _Line(DEBUG, "released %s (token %s, %s)", _LEASE),
    "release_pending": _Line(
        WARNING,
        "the release of %s could not be confirmed; retrying in the background: %s",
        ("name", "reason"),
    ),
    "broken": _Line(INFO, "%s broke the lock %s (token %s): %s", ("actor", "name", "token", "why")),
    "resized": _Line(INFO, "%s set the limit of %s to %s: %s", ("actor", "name", "limit", "why")),
    "stale_token": _Line(WARNING, "an access was refused: %s", ("reason",)),
    "ran": _Line(DEBUG, "ran %s once (token %s) in %.3f s", ("name", "token", "seconds")),
    "replayed": _Line(DEBUG, "returned the stored result of %s (token %s)", ("name", "token")),
    "breaker_opened": _Line(WARNING, "%s: %s", ("engine", "reason")),
    "breaker_closed": _Line(INFO, "%s: %s", ("engine", "reason")),
    "conflict": _Line(DEBUG, "%s was changed by another writer: %s", ("name", "reason")),
}

LEVELS: Final[dict[EventKind, int]] = {kind: line.level for kind, line in _LINES.items()}


def is_logged(kind: EventKind) -> bool:
    """Whether events of this kind are logged, as logging is configured now."""
    return _log.isEnabledFor(LEVELS[kind])


def log_event(event: Event) -> None:
    line = _LINES[event.kind]
    level = INFO if event.reason == "max_hold" else line.level  # asked for, so no reason to worry
    found = [getattr(event, field) for field in line.fields]
    arguments = [escape(value) if isinstance(value, str) else value for value in found]
    _log.log(level, line.text, *arguments, extra=extra(**fields_of(event)))


def fields_of(event: Event) -> dict[str, Any]:
    return {
        "event": event.kind,
        "namespace": event.namespace,
        "lock": event.name,
        "group": event.group,
        "token": event.token,
        "fingerprint": event.fingerprint,
        "holder": event.holder,
        "engine": event.engine,
        "seconds": event.seconds,
        "reason": event.reason,
        "error": event.error,
        "trace": tracing.find(event.fingerprint),
    }


def extra(**fields: Any) -> dict[str, dict[str, Any]]:
    """The argument `extra` of a log call, without fields that have no value."""
    return {"leasehold": {name: value for name, value in fields.items() if value not in (None, "")}}
