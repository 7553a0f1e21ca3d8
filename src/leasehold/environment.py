"""The lease that `leasehold run` holds while this process runs, read from the environment."""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from leasehold.config import check_ttl
from leasehold.core.names import check_name
from leasehold.core.timing import NEVER
from leasehold.errors import ConfigError

_MAX_TOKEN: Final = 2**63 - 1
_MAX_SLOT: Final = 2**31 - 1


class CurrentLease(NamedTuple):
    """The lease under which a child of `leasehold run` works. Fences accept it like a lease.

    Not promised: that the lease is still held. If it is lost, `leasehold run` stops this process; a fence refuses its
    token once the resource has seen a higher one.
    """

    name: str
    token: int
    holder: str
    ttl: float
    slot: int | None = None
    shared: bool = False


def current_lease() -> CurrentLease:
    """The lease under which `leasehold run` started this process or its parent shell. Contains no secret.

    Raises `ConfigError` outside of `leasehold run`, or if a variable has a value that `leasehold run` never sets.
    """
    if os.environ.get("LEASEHOLD_HELD") != "1":
        raise ConfigError(
            "no current lease: this process was not started by `leasehold run NAME -- CMD`, "
            "or its environment was not passed on (sudo and cron drop LEASEHOLD_*)"
        )
    try:
        ttl = float(_matching("LEASEHOLD_TTL", r"[0-9.]+(e[+-]?[0-9]+)?"))
        check_ttl(ttl, NEVER)  # `leasehold run` has checked its own bound
        return CurrentLease(
            name=check_name(_matching("LEASEHOLD_LOCK", r".+")),
            token=_whole_number("LEASEHOLD_TOKEN", _MAX_TOKEN),
            holder=_matching("LEASEHOLD_HOLDER", r".{0,200}"),
            ttl=ttl,
            slot=_whole_number("LEASEHOLD_SLOT", _MAX_SLOT) if "LEASEHOLD_SLOT" in os.environ else None,
            shared="LEASEHOLD_SHARED" in os.environ and bool(_matching("LEASEHOLD_SHARED", "1")),
        )
    except ValueError as bad:  # a ConfigError is one, too
        raise ConfigError(
            f"the environment of this process is not one that `leasehold run` made: {bad}; pass on all LEASEHOLD_* "
            "variables unchanged"
        ) from None


def _matching(variable: str, pattern: str) -> str:
    text = os.environ.get(variable)
    if text is None:
        raise ConfigError(f"{variable} is not set")
    if not re.fullmatch(pattern, text, re.DOTALL):
        raise ConfigError(f"{variable} is not valid")
    return text


def _whole_number(variable: str, largest: int) -> int:
    number = int(_matching(variable, "[0-9]{1,19}"))
    if number > largest:
        raise ConfigError(f"{variable} is not valid")
    return number
