"""`leasehold history`: the past grants of a name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command
from leasehold.cli.options import checked_name, files_or_default, live_names
from leasehold.cli.server_api import ServerApi, is_server, reading

if TYPE_CHECKING:
    from leasehold.telemetry.audit.history import RecordedGrant

EXAMPLES = """
leasehold -u http://locks:7420 history nightly-report
leasehold history nightly-report /var/log/leasehold/audit.jsonl
leasehold history --namespace shop orders/42 /var/log/leasehold
LEASEHOLD_AUDIT=audit.jsonl leasehold history nightly-report -o json
"""

# Of a server's answer, as far as reading it does not check them.
_TYPES: Final = (
    (("fingerprint", "holder", "mode"), str),
    (("purpose", "end", "reason", "actor", "trace"), str | None),
    (("token", "slot"), int | None),
    (("waited",), int | float | None),
)
_COLUMNS = ("TOKEN", "HOLDER", "GRANTED", "WAITED", "HELD", "END", "REASON", "REFUSED")


@command("history", EXAMPLES, exit_codes.UNREACHABLE, exit_codes.CONFIG, short_help="Print the past grants of NAME.")
@click.argument("name", type=checked_name, shell_complete=live_names)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@pass_console
def history(console: Console, name: str, files: tuple[str, ...]) -> None:
    """Print the past grants of NAME, with their tokens, ends and reasons.

    With the URL of a lock server and without FILE, this asks the server, which remembers the latest grants that went
    through it and its peers.

    Otherwise this reads audit files, which `leasehold run --audit FILE`, `leasehold serve --audit-file FILE` and
    `leasehold.telemetry.AuditFile` write. FILE is an audit file, which is read together with its rotated files, or a
    folder. Default: LEASEHOLD_AUDIT. Pass the files of all machines that use NAME: a process records only what it did
    itself.

    END is `released`, `lost` (REASON says why), `broken` (REASON says by whom and why), `unseen` (it ended, but not
    through this server), or `-` if no end was recorded: the grant is still live, or its holder died. REFUSED counts how
    often a fence refused the token.

    With `-o json`: one array, described by `leasehold docs reference/json`. `leasehold audit verify` tells whether the
    files are complete and unchanged.
    """
    if not files and is_server(console.url):
        grants, where = _from_server(console, name), "that the server remembers"
    else:
        from leasehold.telemetry.audit.history import AuditFiles, past_grants  # loaded if needed

        found = AuditFiles(files_or_default(files, ", or pass the URL of a lock server with -u"))
        grants, where = past_grants(found, console.namespace, name), "in the audit files"
    if console.json:
        console.put_json([asdict(grant) for grant in grants])
    elif grants:
        for line in render.table(_COLUMNS, [_row(grant) for grant in grants]):
            console.put(line)
    else:
        console.say(f"no grants of {name} {where}")


def _from_server(console: Console, name: str) -> list[RecordedGrant]:
    with closing(ServerApi(console.url)) as server, reading("/v1/history"):
        found = server.get("/v1/history", namespace=console.namespace, name=name)
        missing, grants = list(map(str, found["missing"])), [_read(each) for each in reversed(found["grants"])]
    if missing:
        console.say(f"not shown, because they do not answer: {', '.join(missing)}", error=True)
    return grants


def _read(each: Mapping[str, Any]) -> RecordedGrant:
    from leasehold.telemetry.audit.history import RecordedGrant

    for members, kind in _TYPES:
        if not all(isinstance(each[member], kind) for member in members):
            raise TypeError(f"one of {members} has another type")
    return RecordedGrant(
        each["token"],
        each["fingerprint"],
        each["holder"],
        None,
        None,
        each["mode"],
        each["slot"],
        each["purpose"],
        None if each["partial"] else _utc(each["granted_at"]),
        None if each["partial"] else each["waited"],
        ended_at=_utc(each["ended_at"]),
        end=each["end"],
        reason=each["reason"],
        held=None if each["ended_at"] is None else max(0.0, round(each["ended_at"] - each["granted_at"], 6)),
        broken_by=each["actor"],
        refused=len(each["refused"]),
        trace=each["trace"],
    )


def _utc(instant: float | None) -> str | None:
    if instant is None:
        return None
    return datetime.fromtimestamp(instant, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _row(grant: RecordedGrant) -> tuple[str, ...]:
    reason = ": ".join(text for text in (grant.broken_by and f"by {grant.broken_by}", grant.reason) if text)
    return (
        str(grant.token or "-"),
        grant.holder or "-",
        grant.granted_at or "-",
        "-" if grant.waited is None else render.duration(grant.waited),
        "-" if grant.held is None else render.duration(grant.held),
        grant.end or "-",
        reason or "-",
        str(grant.refused or "-"),
    )
