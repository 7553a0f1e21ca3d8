"""The lease that `leasehold run` holds while this process runs, as its environment tells it."""

from __future__ import annotations

import os
from typing import NamedTuple

from leasehold.errors import ConfigError


class CurrentLease(NamedTuple):
    """What a child of `leasehold run` may know of the lease it works under. It can be shown to fences as a lease can.

    Not promised: that it is still held. The wrapper sees to that and stops this process; a fence needs no such promise.
    """

    name: str
    token: int
    holder: str
    ttl: float
    slot: int | None = None
    shared: bool = False


def current_lease() -> CurrentLease:
    """The lease under which `leasehold run` started this process, or the shell around it. Holds no secret.

    Raises `ConfigError` outside of `leasehold run`.
    """
    getenv = os.environ.get
    if getenv("LEASEHOLD_HELD") != "1":
        raise ConfigError(
            "this process does not run under `leasehold run NAME -- CMD`, so there is no current lease; "
            "or its environment was not passed on: sudo and cron drop LEASEHOLD_*"
        )
    try:
        return CurrentLease(
            name=os.environ["LEASEHOLD_LOCK"],
            token=int(os.environ["LEASEHOLD_TOKEN"]),
            holder=getenv("LEASEHOLD_HOLDER", ""),
            ttl=float(os.environ["LEASEHOLD_TTL"]),
            slot=int(slot) if (slot := getenv("LEASEHOLD_SLOT")) is not None else None,
            shared=getenv("LEASEHOLD_SHARED") == "1",
        )
    except (KeyError, ValueError) as bad:
        raise ConfigError(f"the environment of `leasehold run` arrived here in parts: {bad}") from None
