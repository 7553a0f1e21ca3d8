"""What the page of the audit log shows: the end of the file, and whether its records form an unbroken chain."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Final, NamedTuple

from leasehold.server.dashboard.page_data import AT_RISK, BROKEN, HELD, LOST, REFUSED, PageData, State
from leasehold.server.dashboard.views import Context, PageTab
from leasehold.server.dashboard.words import counted, link
from leasehold.telemetry.audit.chain import AuditRecord, decode

MAX_RECORDS: Final = 100
_TAIL_BYTES: Final = 512 * 1024

_QUIET: Final = State("dim", "no", "")
_STATES: Final = {
    "grant": HELD,
    "release": _QUIET,
    "loss": LOST,
    "stale_token": REFUSED,
    "denied": AT_RISK,
    "renew_failed": AT_RISK,
    "break": BROKEN,
    "gap": LOST,
}
_TABS: Final = {
    "": ("Notable", frozenset(_STATES) - {"grant", "release"} | {"config", "rebase"}),
    "all": ("All", None),
    "break": ("Breaks", frozenset({"break"})),
    "denied": ("Denied", frozenset({"denied"})),
}


class RecordView(NamedTuple):
    seq: int
    at: float
    state: State
    who: str
    holder: str
    namespace: str
    name: str
    token: int | None
    why: str
    hash: str


class ChainState(NamedTuple):
    state: State
    text: str


def read_tail(path: str) -> list[AuditRecord]:
    """The records at the end of a file, oldest first. Blocks; raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).split(b"\n")
    whole = lines if size <= _TAIL_BYTES else lines[1:]  # the first may be cut
    return [record for line in whole if line and (record := decode(line)) is not None]


def audit(data: PageData, records: Sequence[AuditRecord] | None) -> Context:
    """`records`: None if this server writes no audit log."""
    chosen = data.arguments.get("which", "")
    chosen = chosen if chosen in _TABS else ""
    label, actions = _TABS[chosen]
    seen = [each for each in records or () if _may_see(data, each)]
    shown = [each for each in reversed(seen) if actions is None or each.fields["action"] in actions][:MAX_RECORDS]
    text = (
        "Start the server with --audit-file FILE, and it records who was granted, released, lost or broke which lock."
        if records is None
        else "No such record was written recently."
    )
    return {
        "tabs": [
            PageTab(each[0], 0, link("/audit", namespace=data.namespace, which=key), key == chosen)
            for key, each in _TABS.items()
        ],
        "chain": _chain(records),
        "records": [_view(each) for each in shown],
        "empty_title": "This server writes no audit log." if records is None else f"{label}: none.",
        "empty_text": text,
        "say": "",
    }


def _may_see(data: PageData, record: AuditRecord) -> bool:
    lock = record.fields.get("lock")
    if not isinstance(lock, dict):
        return data.reads_everything
    return data.may_read(str(lock.get("namespace", "")), str(lock.get("name", "")))


def _chain(records: Sequence[AuditRecord] | None) -> ChainState:
    if records is None:
        return ChainState(State("dim", "no", "Not recorded"), "")
    if not records:
        return ChainState(State("dim", "no", "Empty"), "")
    for before, after in pairwise(records):
        if after.prev != before.hash:
            text = f"Record {after.seq:,} does not follow {before.seq:,}. Run leasehold audit verify."
            return ChainState(LOST._replace(word="Chain broken"), text)
    text = f"The latest {counted(len(records), 'record')}, up to number {records[-1].seq:,}, form an unbroken chain."
    return ChainState(State("held", "ok", "Chain intact"), text)


def _view(record: AuditRecord) -> RecordView:
    fields = record.fields
    lock, who = fields.get("lock"), fields.get("who")
    lock, who = lock if isinstance(lock, dict) else {}, who if isinstance(who, dict) else {}
    action = str(fields["action"])
    state = _STATES.get(action, _QUIET)._replace(word=action.replace("_", " "))
    token = fields.get("token")
    return RecordView(
        seq=record.seq,
        at=datetime.fromisoformat(str(fields["at"])).timestamp(),
        state=state,
        who=str(who.get("subject") or fields.get("server") or ""),
        holder=str(who.get("holder") or ""),
        namespace=str(lock.get("namespace", "")),
        name=str(lock.get("name", "")),
        token=token if isinstance(token, int) else None,
        why=str(fields.get("why") or fields.get("result") or lock.get("purpose") or ""),
        hash=record.hash[:8],
    )
