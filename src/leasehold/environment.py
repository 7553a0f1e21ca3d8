"""The lease that `leasehold run` holds while this process runs, read from the environment."""

from __future__ import annotations

import os
from typing import NamedTuple

from leasehold.errors import ConfigError


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

    Raises `ConfigError` outside of `leasehold run`.
    """
    getenv = os.environ.get
    if getenv("LEASEHOLD_HELD") != "1":
        raise ConfigError(
            "no current lease: this process was not started by `leasehold run NAME -- CMD`, "
            "or its environment was not passed on (sudo and cron drop LEASEHOLD_*)"
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
        raise ConfigError(f"incomplete or invalid LEASEHOLD_* environment: {bad}") from None
