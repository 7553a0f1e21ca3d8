"""Read the lease that `acquire` printed, for `renew` and `release`; never from the command line, which `ps` shows."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import click

from leasehold.cli.console import Console, is_terminal
from leasehold.cli.help import Command
from leasehold.cli.options import LEASE_VARIABLE, usage_error_if
from leasehold.errors import ConfigError

if TYPE_CHECKING:
    from leasehold.client.lease_document import Document

_MAX_BYTES: Final = 1 << 16  # a lease document has below 2,000, even with the longest names


class LeaseCommand(Command):
    """A command about the lease that it reads. It names no argument that it refuses: that could be the lease itself."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        usage_error_if(
            bool(rest),
            f"{self.name} takes no argument: pipe what `leasehold acquire` printed to stdin, or set "
            f"${LEASE_VARIABLE} to it; `leasehold break NAME` takes a name away from another holder",
        )
        return rest


def read_lease(console: Console) -> tuple[Console, Document]:
    """The lease, and the console with its namespace unless the caller has named one: the wrong one is refused."""
    from leasehold.client import lease_document  # only here: `run` needs no more than the name of the variable

    text = os.environ.get(LEASE_VARIABLE, "")
    if not text.strip():
        usage_error_if(
            is_terminal(sys.stdin),
            f"no lease: set ${LEASE_VARIABLE} to what `leasehold acquire` printed, or pipe it to stdin",
        )
        text = "" if sys.stdin is None else _read_stdin()  # None: stdin is closed (`<&-`)
    usage_error_if(
        not text.strip(), f"no lease: ${LEASE_VARIABLE} and stdin are empty; pass what `leasehold acquire` printed"
    )
    document = lease_document.load(text)
    return console._replace(namespace=console.namespace or document.claim.namespace), document


def _read_stdin() -> str:
    document = sys.stdin.buffer.read(_MAX_BYTES + 1)
    try:
        if len(document) <= _MAX_BYTES:
            return document.decode()
    except UnicodeDecodeError:
        pass
    raise ConfigError("stdin is not the JSON that `leasehold acquire` printed: pass it on unchanged")
