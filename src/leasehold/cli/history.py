"""`leasehold history`: the past grants of a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Command
from leasehold.cli.options import audit_files, checked_name

if TYPE_CHECKING:
    from leasehold.telemetry.audit.history import PastGrant

EXAMPLES = """
leasehold history nightly-report /var/log/leasehold/audit.jsonl
leasehold history --namespace shop orders/42 /var/log/leasehold
LEASEHOLD_AUDIT=audit.jsonl leasehold history nightly-report -o json
"""

_COLUMNS = ("TOKEN", "HOLDER", "GRANTED", "WAITED", "HELD", "END", "REASON", "REFUSED")


@click.command(
    "history", short_help="Print the past grants of NAME.", cls=Command, examples=EXAMPLES, codes=(exit_codes.CONFIG,)
)
@click.argument("name", type=checked_name)
@audit_files
@pass_console
def history(console: Console, name: str, files: Sequence[str]) -> None:
    """Print the past grants of NAME, with their tokens, ends and reasons.

    Reads audit files, which `leasehold run --audit FILE` and `leasehold.telemetry.AuditFile` write. FILE is a file,
    with those that rotation made of it, or a folder. Default: LEASEHOLD_AUDIT. Pass the files of all machines that use
    NAME: a process records only what it did itself.

    END is `released`, `lost` (REASON says why), `broken` (REASON says by whom and why), or `-` if no end was recorded:
    the grant still lives, or its holder died. REFUSED counts how often a fence refused the token.

    With `-o json`: one array, described by `leasehold docs reference/json`. `leasehold audit verify` tells whether the
    files are complete and unchanged.
    """
    from leasehold.telemetry.audit.history import AuditFiles, past_grants  # loaded if needed

    grants = past_grants(AuditFiles(files), console.namespace, name)
    if console.json:
        console.put_json([asdict(grant) for grant in grants])
    elif grants:
        for line in render.table(_COLUMNS, [_row(grant) for grant in grants]):
            console.put(line)
    else:
        console.say(f"no grants of {name} in the audit files")


def _row(grant: PastGrant) -> tuple[str, ...]:
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
