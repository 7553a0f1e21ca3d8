"""Where `renew` and `release` find the lease that `acquire` printed: never on the command line, where `ps` shows it."""

from __future__ import annotations

import os
import sys
from typing import Final

from leasehold.cli.options import refuse
from leasehold.model import Claim
from leasehold.recipes import deed

VARIABLE: Final = "LEASEHOLD_LEASE"


def read_deed() -> Claim:
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        refuse(
            sys.stdin is not None and sys.stdin.isatty(),
            f"no lease: set ${VARIABLE} to what `leasehold acquire` printed, or pipe it to stdin",
        )
        text = "" if sys.stdin is None else sys.stdin.read()  # None: closed, `<&-`
    refuse(not text.strip(), f"no lease: ${VARIABLE} and stdin are empty; give what `leasehold acquire` printed")
    return deed.read(text)
