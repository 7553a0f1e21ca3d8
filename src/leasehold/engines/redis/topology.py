"""Which connection serves a bucket of names, and how wake-ups travel there.

All keys of a name carry its bucket as their hash tag, so one server always has the whole of it. Here that is the only
one. What else a deployment can be answers the same questions: see `Topology`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit

from leasehold.config import EngineConfig
from leasehold.engines.redis.scripts import Publishing
from leasehold.engines.redis.server import Server
from leasehold.engines.redis.wire import PoolWire, SharedWire, Wire
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.runtime.streams import Address

S = TypeVar("S", bound=Server)

_PORT: Final = 6379
TLS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")


class Topology(Protocol):
    """What the engine and the listener ask of a deployment."""

    publishing: Publishing

    def wire(self, tag: str) -> Wire:
        """To the server that has the bucket with this hash tag."""

    def wires(self) -> Iterable[Wire]:
        """To every server that has any, for what concerns all names."""

    def doubt(self, wire: Wire) -> None:
        """An answer said that this server is not, or no longer, the one to ask."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


class Single:
    """One server for all."""

    def __init__(self, server: Server, runtime: Runtime) -> None:
        self.publishing = Publishing()
        self._wire: Wire = PoolWire(server, runtime) if runtime.blocking else SharedWire(server, runtime)

    def wire(self, tag: str) -> Wire:
        return self._wire

    def wires(self) -> Iterable[Wire]:
        return (self._wire,)

    def doubt(self, wire: Wire) -> None:
        wire.hang_up()  # behind its address there may be another by now

    def close(self) -> None:
        self._wire.close()

    def after_fork(self) -> None:
        self._wire.after_fork()


class Options(NamedTuple):
    """What the URL says beside the place."""

    min_replicas: int = 0
    allow_eviction: bool = False


def single(config: EngineConfig) -> tuple[Server, Options]:
    """`redis://`, `rediss://` and `redis+unix://`, read and checked. Opens nothing."""
    return made(config, Server)


def made(config: EngineConfig, make: Callable[..., S]) -> tuple[S, Options]:
    """The same, as another kind of server."""
    kinds: dict[str, Callable[[str], object]] = {"min_replicas": _count, "allow_eviction": yes}
    secure, local = config.scheme == "rediss", config.scheme == "redis+unix"
    if secure:
        kinds |= dict.fromkeys(TLS, str)
    if local:
        kinds |= {"db": _count}
    given = config.accept(**kinds)
    try:
        parts = urlsplit(config.url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"this {config.scheme}:// URL cannot be read: is the port a number?") from None
    if local:
        address, database = Address(path=unquote(parts.path)), cast(int, given.get("db", 0))
        if not address.path or parts.hostname:
            raise ConfigError("redis+unix:// takes the path of a socket: redis+unix:///run/redis/redis.sock?db=0")
    else:
        address, database = Address(_host(parts), port or _PORT), _database(config.scheme, parts)
    tls = _context({name: str(given[name]) for name in TLS if name in given}) if secure else None
    options = Options(cast(int, given.get("min_replicas", 0)), bool(given.get("allow_eviction")))
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return make(address, tls, user, password, database, options.allow_eviction), options


def _host(parts: SplitResult) -> str:
    host = parts.hostname or "localhost"
    try:
        host.encode("idna")
    except UnicodeError as bad:
        raise ConfigError(f"{host!r} is no name a host could have: {bad}") from None
    return host


def _database(scheme: str, parts: SplitResult) -> int:
    text = parts.path.strip("/")
    if not text:
        return 0
    if not text.isdecimal() or "/" in parts.path[1:].rstrip("/"):
        raise ConfigError(f"the path of a {scheme}:// URL is the number of a database, such as /0")
    return int(text)


def _context(given: dict[str, str]) -> ssl.SSLContext:
    """The options have the names redis-py gives them, so that a URL can be taken along."""
    certificates = given.get("ssl_cert_reqs", "required")
    if certificates not in ("required", "none"):
        raise ConfigError(f"ssl_cert_reqs is required or none, not {certificates!r}")
    try:
        context = ssl.create_default_context(cafile=given.get("ssl_ca_certs"))
        if "ssl_certfile" in given:
            context.load_cert_chain(given["ssl_certfile"], given.get("ssl_keyfile"))
        context.check_hostname = certificates == "required" and yes(given.get("ssl_check_hostname", "yes"))
    except (OSError, ValueError) as bad:
        raise ConfigError(f"the TLS options of this rediss:// URL cannot be used: {bad}") from bad
    if certificates == "none":
        context.verify_mode = ssl.CERT_NONE
    return context


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"a whole number of 0 or more, not {text!r}")
    return int(text)


def yes(text: str) -> bool:
    found = {"yes": True, "true": True, "no": False, "false": False}.get(text.lower())
    if found is None:
        raise ValueError(f"yes or no, not {text!r}")
    return found
