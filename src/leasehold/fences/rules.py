"""The rules that all fences share. A fence remembers one number: the highest token it has seen.

1. A lower token is refused with `StaleToken`. An equal token passes, so a lease may write many times. A higher token
   passes and becomes the highest.
2. First use: the highest token of a new resource is 0, so any token passes and becomes the highest.
3. A read that decides a write presents the token too, and raises the highest token. Otherwise an older holder could
   write between this read and the write that follows from it (a lost update).
4. Permits of a semaphore overlap, so one number cannot order them: each slot has its own highest token.
5. A shared lease (the read side of an rwlock) may only read, and does not raise the highest token: several readers may
   hold it at once.
6. The check and the operation are one atomic step at the resource. The other modules differ in how they do this.
7. Every refusal is reported: as the error, and as the event `stale_token`, to the hook of the lease's client and to the
   hook of all fences of this process (`on_event`). The second also hears of plain tokens, from messages and headers.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple, NoReturn, Protocol, TypeAlias, TypeGuard, runtime_checkable

from leasehold import log_lines
from leasehold.errors import ConfigError, StaleToken
from leasehold.events import Event, FenceKind, Hook, call_hook

TOKEN_LIMIT: Final = 1 << 53  # tokens are below this, so that doubles (Lua, JSON) represent them exactly
SLOT_LIMIT: Final = 1 << 31  # slots are below this, so that they fit an integer column of any database
_MAX_DIGITS: Final = 16  # digits of 2^53
NO_TOKEN: Final = 0  # the highest token of a resource that has not seen one

_hook: Hook | None = None  # of all fences of this process


@runtime_checkable
class HasToken(Protocol):
    """Anything that carries a token: a `Lease`, an `AsyncLease`, `leasehold.current_lease()`, or a `TokenInfo`."""

    @property
    def token(self) -> int: ...

    @property
    def slot(self) -> int | None: ...

    @property
    def shared(self) -> bool: ...


LeaseLike: TypeAlias = HasToken | int  # an int is the token of an exclusive lease


class TokenInfo(NamedTuple):
    """A token without its lease, to send in a message, a header or a row."""

    token: int
    slot: int | None = None
    shared: bool = False


def token_for_read(lease: LeaseLike) -> TokenInfo:
    """The checked token for a read. The read raises the highest token unless the lease is shared."""
    if isinstance(lease, bool) or not isinstance(lease, int | HasToken):
        raise ConfigError(f"a fence takes a lease or its token, not {lease!r}")
    token_info = TokenInfo(lease) if isinstance(lease, int) else TokenInfo(lease.token, lease.slot, lease.shared)
    if not is_token(token_info.token):
        raise ConfigError(
            f"{token_info.token!r} is not a fencing token: tokens are whole numbers from 1 to 2^53 - 1. "
            'To refuse an engine without tokens, use client.lock(..., require={"fencing"})'
        )
    if token_info.slot is not None and not is_slot(token_info.slot):
        raise ConfigError(f"{token_info.slot!r} is not a semaphore slot: slots are whole numbers from 0 to 2^31 - 1")
    if not isinstance(token_info.shared, bool):
        raise ConfigError(f"shared must be True or False, not {token_info.shared!r}")
    return token_info


def is_token(number: object) -> TypeGuard[int]:
    """A whole number from 1 to 2^53 - 1. A float would pass a comparison and later be truncated or rounded."""
    return isinstance(number, int) and not isinstance(number, bool) and NO_TOKEN < number < TOKEN_LIMIT


def is_slot(number: object) -> TypeGuard[int]:
    """A whole number from 0 to 2^31 - 1."""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < SLOT_LIMIT


def token_for_write(lease: LeaseLike) -> TokenInfo:
    """The checked token for a write or a claim. Refuses a shared lease."""
    token_info = token_for_read(lease)
    if token_info.shared:
        raise ConfigError("a shared lease cannot write or claim a fence: acquire the write side of the rwlock")
    return token_info


def check_token(
    lease: LeaseLike, token_info: TokenInfo, highest_token: int, resource: str, fence: FenceKind | None
) -> int:
    """The new highest token. Raises `StaleToken` if this token is lower than `highest_token` (rule 1). `fence`: the
    kind of the fence; None if the caller reports refusals itself."""
    if token_info.token < highest_token:
        raise_stale(lease, token_info, highest_token, resource, fence)
    return highest_token if token_info.shared else token_info.token


def raise_stale(
    lease: LeaseLike, token_info: TokenInfo, highest_token: int, resource: str, fence: FenceKind | None
) -> NoReturn:
    """Raise `StaleToken`, and report it (rule 7)."""
    stale = StaleToken(resource, token=token_info.token, highest=highest_token, slot=token_info.slot)
    if fence is not None:
        report_refusal(stale, fence, lease)
    raise stale


def on_event(hook: Hook | None) -> None:
    """Call `hook` with an event `stale_token` for every token that a fence or middleware of this process refuses, on
    the thread of the refused caller. None: remove the hook. If the client of the refused lease has the very same
    hook, the hook gets one event, the client's."""
    global _hook
    if hook is not None and not callable(hook):
        raise ConfigError("on_event takes a function that takes one event, or None")
    _hook = hook


def report_refusal(stale: StaleToken, fence: FenceKind, lease: LeaseLike | None = None) -> None:
    """Emit `stale_token`: to the client of the lease, and to the hook of all fences."""
    client_hook = None
    if (report_to_client := getattr(lease, "_report_stale_token", None)) is not None:
        client_hook = report_to_client(stale, fence)
    wants_event = _hook is not None and _hook != client_hook
    logs = report_to_client is None and log_lines.is_logged("stale_token")  # a client has logged it
    if wants_event or logs:
        event = Event(
            kind="stale_token",
            engine="",
            namespace="",
            name=stale.resource,
            at=time.time(),
            token=stale.token,
            reason=str(stale),
            slot=stale.slot,
            fence=fence,
            seen=stale.highest,
        )
        if logs:
            log_lines.log_event(event)
        if _hook is not None and wants_event:
            call_hook(_hook, event)


def parse_highest_token(text: bytes | str, where: str) -> int:
    """The stored highest token. Fails closed: raises `ConfigError` for anything but plain digits."""
    plain = text.decode("latin-1") if isinstance(text, bytes) else text
    if not (plain.isascii() and plain.isdigit() and len(plain) <= _MAX_DIGITS and int(plain) < TOKEN_LIMIT):
        raise ConfigError(f"{where} does not contain a fence's highest token: something else overwrote or created it")
    return int(plain)


def check_resource(resource: str) -> str:
    """The name of a resource, checked like that of a lock: 1 to 255 bytes of UTF-8, without NUL."""
    try:
        fits = isinstance(resource, str) and 1 <= len(resource.encode()) <= 255
    except UnicodeEncodeError:  # a lone surrogate
        fits = False
    if not fits:
        raise ConfigError(f"a fence needs a resource name of 1 to 255 bytes, not {resource!r}")
    if "\0" in resource:
        raise ConfigError("a resource name cannot contain NUL")
    return resource


def choose_token_key(option: str, chosen: str | None, default: str, resource: str) -> str:
    """Where the highest token is kept. Refuses the resource itself."""
    if chosen == resource:
        raise ConfigError(
            f"{option}= cannot be {resource} itself: a write to {resource} would overwrite the highest token"
        )
    return default if chosen is None else chosen


def to_bytes(data: bytes | str) -> bytes:
    """Bytes, or text encoded as UTF-8. Raises `TypeError` for anything else, before anything is written."""
    if not isinstance(data, str | bytes | bytearray | memoryview):
        raise TypeError(f"a fence writes bytes or text, not {type(data).__name__}")
    return data.encode() if isinstance(data, str) else bytes(data)


def check_shared(token_info: TokenInfo, shared: bool) -> None:
    """For fences that read from the lock whether it is shared: a bare token does not show that."""
    if shared and not token_info.shared:
        raise ConfigError("this token belongs to a shared lease: pass the lease itself, or TokenInfo(..., shared=True)")


def refuse_slot(token_info: TokenInfo, what: str) -> TokenInfo:
    """For fences that can only keep one highest token."""
    if token_info.slot is not None:
        raise ConfigError(f"{what} keeps one token and cannot fence the slots of a semaphore: use a fence row")
    return token_info
