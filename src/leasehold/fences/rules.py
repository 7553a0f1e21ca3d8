"""The rules that every fence keeps, once. A fence remembers one number, its mark: the highest token it was shown.

1. A lower token is refused with `StaleToken`; an equal one passes, so that a lease may write many times; a higher one
   passes and becomes the mark.
2. First use: a resource that was never shown a token has the mark 0, so any token passes and becomes the mark.
3. A read that decides a write is shown the token as well, and raises the mark: otherwise an older holder could write
   between this read and the write that follows from it (a lost update).
4. Permits of a semaphore overlap, so one number cannot order them: each slot has a mark of its own.
5. A shared lease (the read side of an rwlock) may only read, and raises nothing: two readers at once are both right.
6. Comparing and doing are one atomic step of the resource. How, is what the modules beside this one differ in.
7. Every refusal is told: as the error, and as the event `stale_token` of the lease's client.
"""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn, Protocol, TypeAlias, runtime_checkable

from leasehold.errors import ConfigError, StaleToken

MOST: Final = 1 << 53  # tokens are below, so that doubles (Lua, JSON) carry them exactly
NEVER: Final = 0  # the mark of a resource that was never shown a token


@runtime_checkable
class Bearer(Protocol):
    """What carries a token: a lease of either face, `leasehold.current_lease()`, or a `Pass`."""

    @property
    def token(self) -> int: ...

    @property
    def slot(self) -> int | None: ...

    @property
    def shared(self) -> bool: ...


Shown: TypeAlias = Bearer | int  # an int is the token of an exclusive lease


class Pass(NamedTuple):
    """A token as it travels, where the lease itself does not: in a message, a header, a row."""

    token: int
    slot: int | None = None
    shared: bool = False


def to_read(lease: Shown) -> Pass:
    """What a lease shows to a fence for a read that raises the mark, unless it is shared."""
    if isinstance(lease, bool) or not isinstance(lease, int | Bearer):
        raise ConfigError(f"a fence takes a lease or its token, not {lease!r}")
    shown = Pass(lease) if isinstance(lease, int) else Pass(lease.token, lease.slot, lease.shared)
    if not NEVER < shown.token < MOST:
        raise ConfigError(
            f"{shown.token} is no fencing token: tokens are from 1 to 2^53 - 1. "
            'An engine without tokens is refused by client.lock(..., require={"fencing"})'
        )
    return shown


def to_write(lease: Shown) -> Pass:
    """What a lease shows for a write, or to claim the fence. A shared lease cannot."""
    shown = to_read(lease)
    if shown.shared:
        raise ConfigError("this lease is shared with other readers: writing takes the write side of the rwlock")
    return shown


def raised(lease: Shown, shown: Pass, mark: int, resource: str) -> int:
    """The mark after this token was shown; raises `StaleToken` for a lower one. The whole of rule 1."""
    if shown.token < mark:
        refuse(lease, shown, mark, resource)
    return mark if shown.shared else shown.token


def refuse(lease: Shown, shown: Pass, mark: int, resource: str) -> NoReturn:
    """Raise `StaleToken`, and tell the client whose lease it is."""
    stale = StaleToken(resource, token=shown.token, highest=mark, slot=shown.slot)
    if (tell := getattr(lease, "_refused", None)) is not None:
        tell(stale)
    raise stale


def check_resource(resource: str) -> str:
    """A resource is named like a lock: 1 to 255 bytes of UTF-8, without NUL."""
    if not isinstance(resource, str) or not 1 <= len(resource.encode("utf-8", "surrogatepass")) <= 255:
        raise ConfigError(f"a fence needs the name of its resource, 1 to 255 bytes, not {resource!r}")
    if "\0" in resource:
        raise ConfigError("the name of a resource cannot contain NUL")
    return resource


def lacks_slots(shown: Pass, what: str) -> Pass:
    """For fences that have room for one mark alone."""
    if shown.slot is not None:
        raise ConfigError(f"{what} has one mark, and a permit of a semaphore needs one for its slot: use a fence row")
    return shown
