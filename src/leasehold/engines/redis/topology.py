"""Which connections serve a bucket of names, and which pub/sub commands it needs.

All keys of a name carry its bucket as their hash tag, so one server has all of them. In this module there is only one
server. With sentinels (sentinel.py) the primary changes; a cluster (cluster.py) has many. All implement `Topology`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit

from leasehold.config import EngineConfig
from leasehold.core.timing import backoff
from leasehold.credentials import Password
from leasehold.engines.redis.connections import BlockingPool, Connections, SharedConnection
from leasehold.engines.redis.scripts import PubSubCommands
from leasehold.engines.redis.server import RedisEndpoint
from leasehold.engines.redis.server_settings import Unreachable
from leasehold.engines.tls import refuse_passphrase
from leasehold.errors import ConfigError, LeaseholdError
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketAddress

S = TypeVar("S", bound=RedisEndpoint)

_PORT: Final = 6379
TLS_OPTIONS: Final[tuple[str, ...]] = (
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_check_hostname",
    "ssl_cert_reqs",
)


# Error replies of a server that has not executed the request, because it does not serve the name now.
WRONG_SERVER_ERRORS: Final = ("MOVED", "ASK ", "TRYAGAIN", "READONLY", "MASTERDOWN", "CLUSTERDOWN")


class Rejected(NamedTuple):
    """A request that was not executed: why, and by which server; None: no server was known."""

    error: Exception
    connections: Connections | None = None

    def map_error(self) -> LeaseholdError:
        if isinstance(self.error, LeaseholdError):
            return self.error
        assert self.connections is not None  # noqa: S101  # an error reply has a sender
        return self.connections.server.map_error(self.error)


class Topology(Protocol):
    """What an engine instance needs to know about a deployment."""

    pubsub_commands: PubSubCommands
    names_can_move: bool  # another server may soon serve a name: retry

    @property
    def survives(self) -> Literal["nothing", "restart"] | None:
        """As the server's settings allow; None: not known yet."""

    def connections(self, tag: str) -> Connections | None:
        """To the server that has the bucket with this hash tag; None: call `find` first."""

    async def find(self, deadline: float) -> None:
        """Discover which servers have the names. Raises `Unreachable` if that fails by the deadline."""

    async def redirect(self, tag: str, rejected: Rejected, tries: int, deadline: float) -> Connections:
        """If names can move: where to send a request that this server cannot execute, or that did not reach it, perhaps
        after a pause. Raises `Unreachable` if that is not known by the deadline."""

    async def all_connections(self, deadline: float) -> Iterable[Connections]:
        """To every server that has names."""

    def mark_stale(self, connections: Connections) -> None:
        """This server does not serve its names any more, or cannot be reached: discover again."""

    def is_replaced(self, connections: Connections) -> bool:
        """Whether another server has replaced this one as primary. This one may not know that yet."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


def make_connections(server: RedisEndpoint, runtime: Runtime) -> Connections:
    return BlockingPool(server, runtime) if runtime.blocking else SharedConnection(server, runtime)


async def pause_before_retry(runtime: Runtime, tries: int, deadline: float) -> bool:
    """Sleep before a retry, longer each time. False: the deadline would come first."""
    pause = backoff(tries, 0.02, 0.3, 0.5 + runtime.random() / 2)
    if runtime.now() + pause >= deadline:
        return False
    await runtime.sleep(pause)
    return True


async def rediscover(
    topology: Topology, runtime: Runtime, tag: str, rejected: Rejected, tries: int, deadline: float
) -> Connections:
    """Pause and discover where the name is, until that succeeds. Raises `Unreachable` at the deadline."""
    reason = ""
    while await pause_before_retry(runtime, tries, deadline):
        try:
            await topology.find(deadline)
        except Unreachable as error:
            reason, tries = f"; {error}", tries + 1
        if (connections := topology.connections(tag)) is not None:
            return connections
    raise Unreachable(f"{rejected.map_error()}{reason}", engine="redis") from rejected.error


class SingleServer:
    """One server for all names."""

    names_can_move = False

    def __init__(self, server: RedisEndpoint, runtime: Runtime) -> None:
        self.pubsub_commands = PubSubCommands()
        self._server, self._connections = server, make_connections(server, runtime)

    @property
    def survives(self) -> Literal["nothing", "restart"] | None:
        return None if self._server.settings is None else self._server.settings.survives

    def connections(self, tag: str) -> Connections:
        return self._connections

    async def find(self, deadline: float) -> None:
        """Nothing to discover: the URL has the address."""

    async def redirect(self, tag: str, rejected: Rejected, tries: int, deadline: float) -> Connections:
        raise rejected.map_error()  # there is no other server

    async def all_connections(self, deadline: float) -> Iterable[Connections]:
        return (self._connections,)

    def mark_stale(self, connections: Connections) -> None:
        connections.drop_connections()  # another server may have this address by now

    def is_replaced(self, connections: Connections) -> bool:
        return False

    def close(self) -> None:
        self._connections.close()

    def after_fork(self) -> None:
        self._connections.after_fork()


class RedisOptions(NamedTuple):
    """The options in the URL."""

    min_replicas: int = 0
    allow_eviction: bool = False


def parse_single_server(config: EngineConfig) -> tuple[RedisEndpoint, RedisOptions]:
    """Parse and check a `redis://`, `rediss://` or `redis+unix://` URL. Opens no connection."""
    return parse_server_as(config, RedisEndpoint)


def parse_server_as(config: EngineConfig, server_class: Callable[..., S]) -> tuple[S, RedisOptions]:
    """The same for another class of server."""
    parsers: dict[str, Callable[[str], object]] = {"min_replicas": parse_count, "allow_eviction": parse_bool}
    secure, unix_socket = config.scheme == "rediss", config.scheme == "redis+unix"
    if secure:
        parsers |= dict.fromkeys(TLS_OPTIONS, str)
    if unix_socket:
        parsers |= {"db": parse_count}
    url_options = config.accept(**parsers)
    try:
        parts = urlsplit(config.url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"this {config.scheme}:// URL is not valid; is the port a number from 1 to 65535?") from None
    if unix_socket:
        address, database = SocketAddress(path=unquote(parts.path)), cast(int, url_options.get("db", 0))
        if not address.path or parts.hostname:
            raise ConfigError("a redis+unix:// URL needs the path of a socket: redis+unix:///run/redis/redis.sock?db=0")
    else:
        address, database = SocketAddress(_host(parts), port or _PORT), _database(config.scheme, parts)
    tls = (
        tls_context(config.scheme, {name: str(url_options[name]) for name in TLS_OPTIONS if name in url_options})
        if secure
        else None
    )
    options = RedisOptions(cast(int, url_options.get("min_replicas", 0)), bool(url_options.get("allow_eviction")))
    user, password = unquote(parts.username or ""), password_of(config, unquote(parts.password or ""))
    return server_class(address, tls, user, password, database, options.allow_eviction), options


def password_of(config: EngineConfig, in_url: str) -> Password | None:
    """None: sign in without one, if there is no user either."""
    return config.password_or(in_url) if in_url or config.password is not None else None


def _host(parts: SplitResult) -> str:
    host = parts.hostname or "localhost"
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigError("the host of this redis:// URL is not a valid host name") from None
    return host


def _database(scheme: str, parts: SplitResult) -> int:
    text = parts.path.strip("/")
    if not text:
        return 0
    if not text.isdecimal() or "/" in parts.path[1:].rstrip("/"):
        raise ConfigError(f"the path of a {scheme}:// URL must be a database number, such as /0")
    return int(text)


def tls_context(scheme: str, tls_options: dict[str, str]) -> ssl.SSLContext:
    """The options have the same names as in redis-py, so that its URLs can be reused."""
    certificates = tls_options.get("ssl_cert_reqs", "required")
    if certificates not in ("required", "none"):
        raise ConfigError("ssl_cert_reqs must be 'required' or 'none'")
    try:
        context = ssl.create_default_context(cafile=tls_options.get("ssl_ca_certs"))
        if "ssl_certfile" in tls_options:
            context.load_cert_chain(tls_options["ssl_certfile"], tls_options.get("ssl_keyfile"), refuse_passphrase)
        context.check_hostname = certificates == "required" and parse_bool(tls_options.get("ssl_check_hostname", "yes"))
    except (OSError, ValueError) as bad:
        raise ConfigError(f"invalid TLS options in this {scheme}:// URL: {bad}") from bad
    if certificates == "none":
        context.verify_mode = ssl.CERT_NONE
    return context


def parse_count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("must be a whole number of 0 or more")
    return int(text)


def parse_bool(text: str) -> bool:
    value = {"yes": True, "true": True, "no": False, "false": False}.get(text.lower())
    if value is None:
        raise ValueError("must be yes or no")
    return value
