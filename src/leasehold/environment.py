"""The lease under which the running code works: that of the `with` around it, else that of `leasehold run`, read from
the environment of this process."""

import os
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from leasehold.client.held_locks import CURRENT_LEASES
from leasehold.config import check_ttl
from leasehold.core.names import check_name
from leasehold.core.timing import NEVER
from leasehold.errors import ConfigError

if TYPE_CHECKING:
    from leasehold.aio.locks import AsyncLease
    from leasehold.blocking.locks import Lease

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


def current_lease(name: str | None = None) -> "Lease | AsyncLease | CurrentLease":
    """The lease of the innermost `with` block or decorated function around this call, in this thread or task. If there
    is none: the lease under which `leasehold run` started this process or its parent shell.

    A lease that was lost or released in its block is still the current one: its `check()` raises `LeaseLost`. Tasks
    that are created in a block, and `asyncio.to_thread`, work under its lease until the block is left. A new thread has
    a context of its own: start it with `contextvars.copy_context().run`.

    name  the name that this code needs: skips the blocks of other names

    Raises `ConfigError` if there is no such lease, if the block in which this task was created has been left and no
    name is given, if the block is that of a multilock and no name is given, or if the environment has a value that
    `leasehold run` never sets.
    """
    for leases in reversed(CURRENT_LEASES.get()):
        if name is None and not leases and not leases.was_left_here():  # the token of an outer block is of another name
            raise ConfigError(
                "the `with` block in which this task was created has been left, and its lease is released: wait for "
                "the task inside of the block, or pass the name of an outer lease, current_lease(NAME)"
            )
        matching: list[Any] = [lease for lease in leases if name is None or lease.name == name]
        if name is None and len(matching) > 1:
            names = ", ".join(repr(lease.name) for lease in matching)
            raise ConfigError(f"this code runs under a multilock of {names}: pass the name, current_lease(NAME)")
        if matching:
            return matching[0]  # type: ignore[no-any-return]  # a Lease or AsyncLease
    return _lease_of_run(name)


def _lease_of_run(name: str | None) -> CurrentLease:
    if os.environ.get("LEASEHOLD_HELD") != "1":
        raise ConfigError(
            f"no current lease{f' of {name}' if name else ''}: this code is in no `with` block of a lock (threads do "
            "not inherit it: see contextvars.copy_context), and its process was not started by `leasehold run NAME "
            "-- CMD`, or its environment was not passed on (sudo and cron drop LEASEHOLD_*)"
        )
    lease = _read_environment()
    if name is not None and lease.name != name:
        raise ConfigError(f"no current lease of {name}: `leasehold run` started this process with {lease.name}")
    return lease


def _read_environment() -> CurrentLease:
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
