"""`leasehold audit`: check and read audit files."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Group
from leasehold.cli.option import whole_number
from leasehold.cli.options import audit_files, key_file_option, seconds, usage_error_if
from leasehold.core.texts import escape

if TYPE_CHECKING:
    from leasehold.telemetry.audit.verify import Report

EXAMPLES = """
leasehold audit verify /var/log/leasehold                    are the files complete and unchanged?
leasehold audit show audit.jsonl --lock orders/42 --since 1d
"""
VERIFY_EXAMPLES = """
leasehold audit verify audit.jsonl                           and its rotated files
leasehold audit verify /var/log/leasehold                    all files of a folder
leasehold audit verify audit.jsonl --key-file audit.key      sealed with a key
leasehold audit verify audit.jsonl --anchor 80000:8a4e...    was its end cut off?
"""
SHOW_EXAMPLES = """
leasehold audit show audit.jsonl                             all records
leasehold audit show audit.jsonl --lock orders/42 --since 2h
leasehold audit show audit.jsonl --action break -o json      as JSON lines
leasehold audit show audit.jsonl --token 48212               all about one grant
"""

_COLUMNS = ("TIME", "RECORD", "ACTION", "NAME", "TOKEN", "WHO", "DETAILS")


@click.group(
    "audit",
    cls=Group,
    examples=EXAMPLES,
    codes=(exit_codes.CHECK_FAILED, exit_codes.CONFIG),
)
def audit() -> None:
    """Check and read audit files.

    `leasehold run --audit FILE`, the hook `leasehold.telemetry.AuditFile` and lock servers write them. These commands
    need no server and no engine. See `leasehold docs operations/audit`.
    """


def _anchor(value: str) -> tuple[int, str]:
    found = re.fullmatch(r"(\d{1,18}):([0-9a-f]{8,64})", value.strip().lower())
    if found is None:
        raise click.BadParameter("an anchor is the number of a record and its hash, such as 80000:8a4e51c0")
    return int(found[1]), found[2]


@audit.command("verify", examples=VERIFY_EXAMPLES, codes=(exit_codes.CHECK_FAILED, exit_codes.CONFIG))
@audit_files
@key_file_option
@click.option(
    "--anchor",
    "anchors",
    type=_anchor,
    multiple=True,
    metavar="SEQ:HASH",
    help="Number and hash (at least its first 8 digits) of a record that must be there. The writer of the file logs "
    "such anchors. May be repeated.",
)
@pass_console
def verify_command(
    console: Console, files: Sequence[str], key_file: str | None, anchors: Sequence[tuple[int, str]]
) -> int:
    """Check that audit files are complete and unchanged.

    Finds every byte that was changed, removed or inserted, and every line that was removed, moved or duplicated. Lines
    that were cut off at the end, and files that were rewritten, are found only with --anchor, or, as long as the
    key is secret, with --key-file.

    FILE is an audit file, which is read together with its rotated files, or a folder. Default: LEASEHOLD_AUDIT. Files
    whose names end in .gz are unpacked. Each chain of files is reported on its own: one line per fault, then one for
    the chain. Lines that a crash or a full disk cut short are reported as notes, if the next record confirms them.

    With `-o json`: an array with one object per chain, described by `leasehold docs reference/json`.
    """
    from leasehold.telemetry.audit.chain import read_key  # loaded if needed: every other command would wait for it
    from leasehold.telemetry.audit.verify import find_files, sort_files, verify

    key = None if key_file is None else read_key(key_file)
    chains = sort_files(find_files(files))
    usage_error_if(bool(anchors) and len(chains) > 1, "--anchor can be used for one chain of files at a time")
    reports = [verify(chain, key, dict(anchors)) for chain in chains]
    if console.json:
        console.put_json([_report_as_json(report) for report in reports])
    else:
        for report in reports:
            _print_report(console, report)
    return exit_codes.CHECK_FAILED if any(report.faults for report in reports) else exit_codes.OK


def _report_as_json(report: Report) -> dict[str, object]:
    return {
        "files": report.paths,
        "whole": not report.faults,
        "records": report.records,
        "first": report.first,
        "last": report.last,
        "last_hash": report.last_hash,
        "faults": [{"file": fault.path, "line": fault.line or None, "text": fault.text} for fault in report.faults],
        "notes": [{"file": note.path, "line": note.line or None, "text": note.text} for note in report.notes],
    }


def _print_report(console: Console, report: Report) -> None:
    for note in report.notes:
        console.put(f"note   {escape(str(note))}")
    for fault in report.faults:
        console.put(click.style("FAULT", fg="red") + f"  {escape(str(fault))}")
    more = f" and {len(report.paths) - 1} older" if len(report.paths) > 1 else ""
    what = f"{escape(report.paths[-1])}{more}: {report.records} records"
    if report.faults:
        console.put(f"{what}, {len(report.faults)} faults: not complete, or changed")
    else:
        console.put(f"{what}, complete and unchanged; the last is {report.last}:{report.last_hash}")


def _instant(value: str) -> str:
    """A duration before now, or a time, as records have it."""
    from leasehold.telemetry.audit.chain import utc

    try:
        return utc(time.time() - seconds(value))
    except (click.BadParameter, OverflowError, OSError, ValueError):
        pass
    try:
        then = datetime.fromisoformat(value)
        return utc(then.timestamp() if then.tzinfo else then.replace(tzinfo=UTC).timestamp())
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f"{value!r} is neither a duration such as 2h nor a time such as 2026-11-16T01:00"
        ) from None


_instant.__name__ = "time"


@audit.command("show", examples=SHOW_EXAMPLES, codes=(exit_codes.CONFIG,))
@audit_files
@click.option("--lock", "name", metavar="NAME", help="Only records about this name.")
@click.option("--token", type=whole_number(min=0), metavar="N", help="Only records about the grant with this token.")
@click.option("--actor", metavar="TEXT", help="Only records whose holder, subject, host or address contains TEXT.")
@click.option("--action", metavar="ACTION", help="Only records of this action, such as grant, loss or break.")
@click.option(
    "--since",
    type=_instant,
    metavar="TIME",
    help="Only records since then: a duration such as 2h, or a time in UTC such as 2026-11-16T01:00.",
)
@pass_console
def show_command(
    console: Console,
    files: Sequence[str],
    name: str | None,
    token: int | None,
    actor: str | None,
    action: str | None,
    since: str | None,
) -> None:
    """Print audit records, oldest first.

    FILE is an audit file, which is read together with its rotated files, or a folder. Default: LEASEHOLD_AUDIT. With
    --namespace, only records of that namespace. This command checks nothing: use `leasehold audit verify` for that.

    With `-o json`: one record per line, as in the file; `leasehold docs operations/audit` describes them.
    """
    from leasehold.telemetry.audit.history import AuditFiles

    def matches(record: Mapping[str, Any]) -> bool:
        lock, who = record.get("lock") or {}, record.get("who") or {}
        return (
            (name is None or lock.get("name") == name)
            and (not console.namespace or lock.get("namespace") == console.namespace)
            and (token is None or record.get("token") == token)
            and (
                actor is None or any(actor in str(who.get(key, "")) for key in ("holder", "subject", "host", "address"))
            )
            and (action is None or record["action"] == action)
            and (since is None or str(record["at"]) >= since)
        )

    found = filter(matches, AuditFiles(files).all())
    if console.json:
        for record in found:
            console.put_json(record)
    elif rows := [_row(record) for record in found]:
        for line in render.table(_COLUMNS, rows):
            console.put(line)
    else:
        console.say("no such records")


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    lock, who = record.get("lock") or {}, record.get("who") or {}
    details = [str(record[key]) for key in ("result", "why") if record.get(key)]
    if record["action"] == "gap":
        details.append(f"{record.get('missed')} records missing since {record.get('since')}")
    if record.get("fence"):
        details.append(f"{record['fence']} fence had seen {record.get('seen')}")
    details += [f"{key} {render.duration(record[key])}" for key in ("waited", "held") if key in record]
    return (
        str(record["at"]),
        str(record["seq"]),
        str(record["action"]),
        str(lock.get("name", "-")),
        str(record.get("token", "-")),
        str(who.get("subject") or who.get("holder") or _process(who)),
        "; ".join(details) or "-",
    )


def _process(who: Mapping[str, Any]) -> str:
    return f"{who['host']}:{who.get('pid', '?')}" if who.get("host") else "-"
