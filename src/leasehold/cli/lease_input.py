"""Read the lease that `acquire` printed, for `renew` and `release`; never from the command line, which `ps` shows."""

from __future__ import annotations

import os
import sys
from typing import Final

from leasehold.cli.options import usage_error_if
from leasehold.client import lease_document
from leasehold.model import Claim

LEASE_VARIABLE: Final = "LEASEHOLD_LEASE"


def read_lease() -> Claim:
    text = os.environ.get(LEASE_VARIABLE, "")
    if not text.strip():
        usage_error_if(
            sys.stdin is not None and sys.stdin.isatty(),
            f"no lease: set ${LEASE_VARIABLE} to what `leasehold acquire` printed, or pipe it to stdin",
        )
        text = "" if sys.stdin is None else sys.stdin.read()  # None: stdin is closed (`<&-`)
    usage_error_if(
        not text.strip(), f"no lease: ${LEASE_VARIABLE} and stdin are empty; pass what `leasehold acquire` printed"
    )
    return lease_document.load(text)
