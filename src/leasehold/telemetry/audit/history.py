"""The grants of a name, assembled from the records in audit files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from heapq import merge
from typing import Any, Literal, TypeAlias

from leasehold.errors import ConfigError
from leasehold.telemetry.audit.chain import decode
from leasehold.telemetry.audit.verify import find_files, read_file, sort_files

End: TypeAlias = Literal["released", "lost", "broken", "unseen"]  # unseen: not through the server that was asked


@dataclass(frozen=True, slots=True)
class RecordedGrant:
    """One grant. Times are texts in UTC; None: not recorded, which for an end may mean that the grant still lives."""

    token: int | None
    fingerprint: str | None
    holder: str | None
    host: str | None
    pid: int | None
    mode: str | None
    slot: int | None
    purpose: str | None
    granted_at: str | None
    waited: float | None
    ended_at: str | None = None
    end: End | None = None
    reason: str | None = None  # of the loss, or of the operator who broke it
    held: float | None = None
    broken_by: str | None = None
    refused: int = 0  # times that a fence refused its token
    trace: str | None = None  # the id of the trace in which it was acquired


def _read_chain(paths: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    for path in paths:
        try:
            for line in read_file(path):
                if (record := decode(line.text)) is not None:
                    yield record.fields
        except PermissionError:
            raise
        except OSError as error:  # such as a damaged gzip
            raise ConfigError(f"{path} cannot be read to its end: {error.strerror or error}") from None


class AuditFiles:
    """The records in audit files."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = find_files(paths)

    def all(self) -> Iterator[Mapping[str, Any]]:
        """All records: of one chain in their order, those of several merged by their times."""
        return merge(*map(_read_chain, sort_files(self._paths)), key=lambda record: str(record["at"]))

    def records(self, namespace: str, name: str) -> Iterator[Mapping[str, Any]]:
        for record in self.all():
            lock = record.get("lock")
            if isinstance(lock, dict) and lock.get("name") == name and lock.get("namespace", "") == namespace:
                yield record


def past_grants(files: AuditFiles, namespace: str, name: str) -> list[RecordedGrant]:
    """The grants of a name, by their tokens. A grant of which only the end was recorded is listed, too."""
    found: dict[object, RecordedGrant] = {}
    for record in files.records(namespace, name):
        action, token = record.get("action"), record.get("token")
        key = token if token is not None else record.get("fingerprint")
        known = found.get(key)
        if action == "grant":
            found[key] = _begin(record, known)
        elif action in ("release", "loss", "break"):
            found[key] = _end(known or _begin(record, None, granted=False), record)
        elif action == "stale_token" and (known is not None or token is not None):
            known = known or _begin(record, None, granted=False)
            found[key] = replace(known, refused=known.refused + 1)
    return sorted(found.values(), key=lambda grant: (grant.token or 0, grant.granted_at or ""))


def _begin(record: Mapping[str, Any], known: RecordedGrant | None, *, granted: bool = True) -> RecordedGrant:
    lock, who = record.get("lock") or {}, record.get("who") or {}
    grant = RecordedGrant(
        record.get("token"),
        record.get("fingerprint"),
        who.get("holder"),
        who.get("host"),
        who.get("pid"),
        lock.get("mode"),
        lock.get("slot"),
        lock.get("purpose"),
        str(record["at"]) if granted else None,
        record.get("waited") if granted else None,
        trace=record.get("trace"),
    )
    if known is None:
        return grant
    # The end may have been recorded first: it comes from another thread.
    names = ("ended_at", "end", "reason", "held", "broken_by", "refused")
    return replace(grant, **{each: getattr(known, each) for each in names})


def _end(grant: RecordedGrant, record: Mapping[str, Any]) -> RecordedGrant:
    who = record.get("who") or {}
    if record["action"] == "break":
        why = record.get("why") or grant.reason
        held = grant.held if grant.held is not None else _seconds_between(grant.granted_at, str(record["at"]))
        grant = replace(grant, ended_at=str(record["at"]), held=held)
        return replace(grant, end="broken", reason=why, broken_by=who.get("subject"))
    held = record.get("held")
    if grant.end is not None:  # `release` after `loss`, and what the holder saw of a break
        return replace(grant, held=grant.held if held is None else held)
    end: End = "lost" if record["action"] == "loss" else "released"
    return replace(grant, ended_at=str(record["at"]), end=end, reason=record.get("why"), held=held)


def _seconds_between(begin: str | None, end: str) -> float | None:
    try:
        return None if begin is None else (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    except (ValueError, TypeError):  # TypeError: one of them has no time zone
        return None
