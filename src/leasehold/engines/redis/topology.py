"""Which connection serves a bucket of names, and how wake-ups travel there.

All keys of a name carry its bucket as their hash tag, so one server always has the whole of it. Here that is the only
one; behind sentinels (sentinel.py) it moves, in a cluster (cluster.py) there are many. All answer the same questions.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit

from leasehold.config import EngineConfig
from leasehold.core.timing import backoff
from leasehold.engines.redis.scripts import Publishing
from leasehold.engines.redis.server import Server, says
from leasehold.engines.redis.settings import Unreached
from leasehold.engines.redis.wire import PoolWire, SharedWire, Wire
from leasehold.errors import ConfigError, LeaseholdError
from leasehold.runtime.base import Runtime
from leasehold.runtime.streams import Address

S = TypeVar("S", bound=Server)

_PORT: Final = 6379
TLS: Final[tuple[str, ...]] = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")


# A server that says so has not carried out the request: it is not, or not now, the one to ask.
ELSEWHERE: Final = ("MOVED", "ASK ", "TRYAGAIN", "READONLY", "MASTERDOWN", "CLUSTERDOWN")


class Rejected(NamedTuple):
    """A request that was not carried out: by whom, if anybody was asked, and why."""

    error: Exception
    wire: Wire | None = None

    @property
    def follows(self) -> bool:
        """Whether another may carry it out, or this one later."""
        return isinstance(self.error, Unreached) or says(self.error, ELSEWHERE)

    def mapped(self) -> LeaseholdError:
        if self.wire is None or isinstance(self.error, LeaseholdError):
            return self.error if isinstance(self.error, LeaseholdError) else Unreached(str(self.error), engine="redis")
        return self.wire.server.refusal(self.error)


class Topology(Protocol):
    """What one twin of the engine asks of a deployment."""

    publishing: Publishing
    follows: bool  # a name may be elsewhere in a moment: it is worth asking again

    @property
    def survives(self) -> Literal["nothing", "restart"] | None:
        """What its settings make of it; None: not known yet."""

    def wire(self, tag: str) -> Wire | None:
        """To the server that has the bucket with this hash tag; None: that has to be found out first."""

    async def find(self, deadline: float) -> None:
        """Find out where names are. Raises `Unreached` if nobody says so by then."""

    async def elsewhere(self, tag: str, rejected: Rejected, turn: int, deadline: float) -> Wire | None:
        """Where to ask instead, perhaps after a pause; None: nowhere. Raises `Unreached` if that is not in time."""

    async def wires(self, deadline: float) -> Iterable[Wire]:
        """To every server that has any, for what concerns all names."""

    def doubt(self, wire: Wire) -> None:
        """This server is not, or no longer, the one to ask."""

    def replaced(self, wire: Wire) -> bool:
        """Whether another has taken over from this server since it was asked, and it may not know."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


def wire_to(server: Server, runtime: Runtime) -> Wire:
    return PoolWire(server, runtime) if runtime.blocking else SharedWire(server, runtime)


async def pause_before(runtime: Runtime, turn: int, deadline: float) -> bool:
    """Before asking again, longer from turn to turn. False: the deadline would come first."""
    pause = backoff(turn, 0.02, 0.3, 0.5 + runtime.fraction() / 2)
    if runtime.now() + pause >= deadline:
        return False
    await runtime.sleep(pause)
    return True


async def found_again(
    topology: Topology, runtime: Runtime, tag: str, rejected: Rejected, turn: int, deadline: float
) -> Wire:
    """Where the name is after a pause, by whoever knows; again until somebody does. Unreached: not by the deadline."""
    unfound = ""
    while await pause_before(runtime, turn, deadline):
        try:
            await topology.find(deadline)
        except Unreached as nobody:
            unfound, turn = f"; {nobody}", turn + 1
        if (wire := topology.wire(tag)) is not None:
            return wire
    raise Unreached(f"{rejected.mapped()}{unfound}", engine="redis") from rejected.error


class Single:
    """One server for all."""

    follows = False

    def __init__(self, server: Server, runtime: Runtime) -> None:
        self.publishing = Publishing()
        self._server, self._wire = server, wire_to(server, runtime)

    @property
    def survives(self) -> Literal["nothing", "restart"] | None:
        return None if self._server.settings is None else self._server.settings.survives

    def wire(self, tag: str) -> Wire:
        return self._wire

    async def find(self, deadline: float) -> None:
        """It is where the URL says."""

    async def elsewhere(self, tag: str, rejected: Rejected, turn: int, deadline: float) -> None:
        return None

    async def wires(self, deadline: float) -> Iterable[Wire]:
        return (self._wire,)

    def doubt(self, wire: Wire) -> None:
        wire.hang_up()  # behind its address there may be another by now

    def replaced(self, wire: Wire) -> bool:
        return False

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
    kinds: dict[str, Callable[[str], object]] = {"min_replicas": count, "allow_eviction": yes}
    secure, local = config.scheme == "rediss", config.scheme == "redis+unix"
    if secure:
        kinds |= dict.fromkeys(TLS, str)
    if local:
        kinds |= {"db": count}
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
    tls = tls_context(config.scheme, {name: str(given[name]) for name in TLS if name in given}) if secure else None
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


def tls_context(scheme: str, given: dict[str, str]) -> ssl.SSLContext:
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
        raise ConfigError(f"the TLS options of this {scheme}:// URL cannot be used: {bad}") from bad
    if certificates == "none":
        context.verify_mode = ssl.CERT_NONE
    return context


def count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"a whole number of 0 or more, not {text!r}")
    return int(text)


def yes(text: str) -> bool:
    found = {"yes": True, "true": True, "no": False, "false": False}.get(text.lower())
    if found is None:
        raise ValueError(f"yes or no, not {text!r}")
    return found
