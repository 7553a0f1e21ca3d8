"""The health of an engine's servers, as values, and what the probes of all engines share.

Each engine has a `health.py` with `async def health(config, runtime, deadline) -> Health`; `leasehold.engines.health`
calls it. A probe opens its own connections, never uses those of locks, and closes them. A server that does not answer
is a result and not an error: `up` is False, and `error` says why. Each server gets an equal share of the time left, so
a silent one does not hide the others.

A field is None if the engine does not report it or this user may not read it: never 0 for something unknown. Texts of
servers are escaped and cut where they arrive (`core/texts.py`). Results contain no credentials.
"""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

from leasehold.core.texts import server_text
from leasehold.errors import LeaseholdError
from leasehold.runtime.base import Runtime, maybe_await
from leasehold.runtime.net.blocking import SocketAddress, SocketStream, connect_blocking
from leasehold.runtime.net.event_loop import LoopStream, connect_in_loop

T = TypeVar("T")
# What protects a connection: `authority`: TLS with the certificate of an authority, for whatever host; `verified`: also
# for the host of the URL.
Encryption: TypeAlias = Literal["none", "unverified", "authority", "verified"]

_MAX_TEXT_REPLY: Final = 1 << 20  # bytes of a reply that ends when the server closes the connection


@dataclass(frozen=True, slots=True)
class Storage:
    """One store of a server, in bytes."""

    store: str  # quota, filesystem, maxmemory, database or wal
    used: int
    limit: int | None = None

    @property
    def used_ratio(self) -> float | None:
        return self.used / self.limit if self.limit else None


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a table that Leasehold made."""

    name: str
    live: int
    dead: int  # deleted or replaced, and not yet vacuumed


@dataclass(frozen=True, slots=True)
class WeakSetting:
    """A setting that weakens what the engine promises, and what to do about it."""

    setting: str
    value: str
    advice: str


@dataclass(frozen=True, slots=True)
class MemberHealth:
    """One server. Seconds are floats."""

    member: str  # host:port
    up: bool  # it answered, and serves requests
    error: str | None = None  # why it is not up
    round_trip: float | None = None
    role: str | None = None  # leader, follower, learner, primary, replica, standalone
    version: str | None = None
    engine: str | None = None  # the scheme of the engine behind a lock server
    server_id: str | None = None  # different for every server, whatever its addresses
    storage: tuple[Storage, ...] = ()
    replicas: int | None = None  # connected to this server
    replication_lag: float | None = None  # of the replica that is furthest behind
    unapplied_entries: int | None = None  # log entries this server has not applied yet
    clock_offset: float | None = None  # the server's clock minus ours; None if smaller than its error
    clock_error: float | None = None  # half of the round trip
    memory: int | None = None  # bytes
    evictions: int | None = None  # since the server started
    connections_ratio: float | None = None
    cache_hit_ratio: float | None = None
    disk_seconds: float | None = None  # how slow the engine says that its writes are; docs/guarantees say what it is
    leader_changes: int | None = None  # since the server started
    certificate_left: float | None = None  # seconds; None without TLS, or if the certificate is not verified
    encryption: Encryption | None = None  # None: a socket of this machine, the URL says it, or it is not known
    anonymous: bool = False  # it grants locks to clients that do not sign in
    tables: tuple[Table, ...] = ()
    findings: tuple[WeakSetting, ...] = ()
    notes: tuple[str, ...] = ()  # why fields are missing


@dataclass(frozen=True, slots=True)
class Health:
    """All servers that the URL names."""

    engine: str
    up: bool  # as far as the probe can tell, the engine can grant locks
    members: tuple[MemberHealth, ...] = ()
    has_leader: bool | None = None  # or primary
    voting: int | None = None  # servers that decide
    reachable: int | None = None  # of these
    alarms: tuple[str, ...] = ()
    error: str | None = None  # why `up` is False


def describe_down(members: Sequence[MemberHealth]) -> str | None:
    """The errors of all members that have one, for `Health.error`."""
    return "; ".join(f"{each.member}: {each.error}" for each in members if each.error) or None


async def probe_each(
    servers: Sequence[T],
    probe: Callable[[T, float], Awaitable[MemberHealth]],
    name: Callable[[T], str],
    runtime: Runtime,
    deadline: float,
) -> tuple[MemberHealth, ...]:
    """Probe servers one after the other. Each gets an equal share of the time left."""
    found = []
    for number, server in enumerate(servers):
        now = runtime.now()
        share = now + (deadline - now) / (len(servers) - number)
        try:
            found.append(await probe(server, share))
        except LeaseholdError as error:
            found.append(MemberHealth(name(server), up=False, error=str(error)))
        except OSError as error:
            text = server_text(error.strerror or error) or type(error).__name__
            found.append(MemberHealth(name(server), up=False, error=text))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """When a request was sent and answered, by both of this machine's clocks."""

    seconds: float
    middle: float  # seconds since 1970

    def clock_offset(self, server_time: float | None) -> float | None:
        """None if unknown, or if it is not larger than half of the round trip, its error."""
        if server_time is None:
            return None
        offset = server_time - self.middle
        return offset if abs(offset) > self.seconds / 2 else None


async def timed(runtime: Runtime, call: Callable[[], Awaitable[T]]) -> tuple[T, RoundTrip]:
    began, began_wall = runtime.now(), runtime.wall()
    reply = await call()
    seconds = runtime.now() - began
    return reply, RoundTrip(seconds, began_wall + seconds / 2)


def parse_int(text: object) -> int | None:
    number = parse_float(text)
    return None if number is None else int(number)


def parse_float(text: object) -> float | None:
    """A finite number as a server wrote it; None for anything else."""
    with suppress(ValueError, TypeError, OverflowError):
        number = float(text.decode() if isinstance(text, bytes) else text)  # type: ignore[arg-type]
        if math.isfinite(number):
            return number
    return None


def filesystem(path: str) -> Storage | None:
    """The file system of a local path, as `df` shows it: without the blocks that only root may use."""
    try:
        found = os.statvfs(path)
    except (OSError, ValueError):  # the path may be a server's, with any characters
        return None
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return Storage("filesystem", used, used + found.f_bavail * found.f_frsize)


def ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole or whole < 0 else part / whole


class _UntilClosed:
    """A parser for a reply that ends when the server closes the connection."""

    def __init__(self) -> None:
        self.received = bytearray()

    def feed(self, data: bytes, /) -> None:
        self.received += data
        if len(self.received) > _MAX_TEXT_REPLY:
            raise ConnectionAbortedError("the reply exceeds 1 MiB")

    def gets(self) -> bool:
        return False

    mid_reply = False


async def certificate_left(
    address: SocketAddress, tls: ssl.SSLContext | None, runtime: Runtime, deadline: float
) -> float | None:
    """Seconds until the server's certificate ends, over a connection of its own. None: unknown."""
    if tls is None:
        return None
    try:
        stream = await _connect(address, tls, _UntilClosed(), runtime, deadline)
    except OSError:  # the probe itself says why
        return None
    try:
        end = stream.certificate_end()
    finally:
        stream.close()
    return None if end is None else end - runtime.wall()


async def _connect(
    address: SocketAddress, tls: ssl.SSLContext | None, parser: _UntilClosed, runtime: Runtime, deadline: float
) -> SocketStream | LoopStream:
    if runtime.blocking:
        return connect_blocking(address, tls, parser, runtime.now, deadline)
    return await connect_in_loop(address, tls, parser, runtime.now, deadline)


async def fetch_text(
    address: SocketAddress, tls: ssl.SSLContext | None, request: bytes, runtime: Runtime, deadline: float
) -> str:
    """All that a server sends until it closes the connection. Raises OSError."""
    parser = _UntilClosed()
    stream = await _connect(address, tls, parser, runtime, deadline)
    try:
        await maybe_await(stream.call(request, deadline))
    except ConnectionResetError:
        if not parser.received:
            raise
    finally:
        stream.close()
    return parser.received.decode(errors="replace")
