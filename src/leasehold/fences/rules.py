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

TOKEN_LIMIT: Final = 1 << 53  # tokens are below, so that doubles (Lua, JSON) carry them exactly
SLOT_LIMIT: Final = 1 << 31  # slots are below: an integer of every database
_MAX_DIGITS: Final = 16  # of 2^53
NO_TOKEN: Final = 0  # the mark of a resource that was never shown a token


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


def token_for_read(lease: Shown) -> Pass:
    """What a lease shows to a fence for a read that raises the mark, unless it is shared."""
    if isinstance(lease, bool) or not isinstance(lease, int | Bearer):
        raise ConfigError(f"a fence takes a lease or its token, not {lease!r}")
    token_info = Pass(lease) if isinstance(lease, int) else Pass(lease.token, lease.slot, lease.shared)
    if not _is_int(token_info.token) or not NO_TOKEN < token_info.token < TOKEN_LIMIT:
        raise ConfigError(
            f"{token_info.token!r} is no fencing token: tokens are whole numbers from 1 to 2^53 - 1. "
            'An engine without tokens is refused by client.lock(..., require={"fencing"})'
        )
    if token_info.slot is not None and not (_is_int(token_info.slot) and 0 <= token_info.slot < SLOT_LIMIT):
        raise ConfigError(f"{token_info.slot!r} is no slot of a semaphore: slots are whole numbers from 0 to 2^31 - 1")
    return token_info


def _is_int(number: object) -> bool:
    """A float would pass the comparison, and be cut or rounded on its way."""
    return isinstance(number, int) and not isinstance(number, bool)


def token_for_write(lease: Shown) -> Pass:
    """What a lease shows for a write, or to claim the fence. A shared lease cannot."""
    token_info = token_for_read(lease)
    if token_info.shared:
        raise ConfigError("this lease is shared with other readers: writing takes the write side of the rwlock")
    return token_info


def check_token(lease: Shown, token_info: Pass, highest_token: int, resource: str) -> int:
    """The mark after this token was shown; raises `StaleToken` for a lower one. The whole of rule 1."""
    if token_info.token < highest_token:
        raise_stale(lease, token_info, highest_token, resource)
    return highest_token if token_info.shared else token_info.token


def raise_stale(lease: Shown, token_info: Pass, highest_token: int, resource: str) -> NoReturn:
    """Raise `StaleToken`, and tell the client whose lease it is."""
    stale = StaleToken(resource, token=token_info.token, highest=highest_token, slot=token_info.slot)
    if (notify := getattr(lease, "_report_stale_token", None)) is not None:
        notify(stale)
    raise stale


def parse_highest_token(text: bytes | str, where: str) -> int:
    """The mark that stands there. Fails closed: of anything but plain digits nobody knows what it was."""
    plain = text.decode("latin-1") if isinstance(text, bytes) else text
    if not (plain.isascii() and plain.isdigit() and len(plain) <= _MAX_DIGITS):
        raise ConfigError(f"{where} holds no mark of a fence: it was overwritten, or is another's")
    return int(plain)


def check_resource(resource: str) -> str:
    """A resource is named like a lock: 1 to 255 bytes of UTF-8, without NUL."""
    try:
        fits = isinstance(resource, str) and 1 <= len(resource.encode()) <= 255
    except UnicodeEncodeError:  # half a character
        fits = False
    if not fits:
        raise ConfigError(f"a fence needs the name of its resource, 1 to 255 bytes, not {resource!r}")
    if "\0" in resource:
        raise ConfigError("the name of a resource cannot contain NUL")
    return resource


def choose_token_key(chosen: str | None, default: str, resource: str) -> str:
    """Where the mark is kept. Not in the very place that is written to."""
    if chosen == resource:
        raise ConfigError(
            f"the mark of {resource} cannot be kept in {resource} itself: what is written would replace it"
        )
    return default if chosen is None else chosen


def to_bytes(data: bytes | str) -> bytes:
    """Text as UTF-8. Refused before anything is done: what is neither."""
    if not isinstance(data, str | bytes | bytearray | memoryview):
        raise TypeError(f"a fence writes bytes or text, not {type(data).__name__}")
    return data.encode() if isinstance(data, str) else bytes(data)


def check_shared(token_info: Pass, shared: bool) -> None:
    """For fences that know of the lock itself whether it is shared. A bare token does not say."""
    if shared and not token_info.shared:
        raise ConfigError(
            "this token is of a lease shared with other readers: show the lease, or Pass(..., shared=True)"
        )


def refuse_slot(token_info: Pass, what: str) -> Pass:
    """For fences that have room for one mark alone."""
    if token_info.slot is not None:
        raise ConfigError(f"{what} has one mark, and a permit of a semaphore needs one for its slot: use a fence row")
    return token_info
