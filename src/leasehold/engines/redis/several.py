"""What a URL of several servers says: `redis+sentinel://` and `redis+cluster://`, read and checked. Opens nothing.

redis+sentinel://user:password@host1:26379,host2:26379/service/0?sentinel_user=...&sentinel_password=...
redis+cluster://user:password@host1:6379,host2:6379?tls=yes
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Final, NamedTuple, cast
from urllib.parse import unquote

from leasehold.config import EngineConfig
from leasehold.engines.redis.doors import Door
from leasehold.engines.redis.server import Server
from leasehold.engines.redis.topology import TLS, Options, count, tls_context, yes
from leasehold.errors import ConfigError
from leasehold.runtime.streams import Address

_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379


class Places(NamedTuple):
    """Whom to ask where names are, and how to sign in there and at the servers found."""

    doors: list[Door]
    serve: Callable[[Address], Server]
    door: Callable[[Address], Door]
    options: Options
    service: str = ""  # that the sentinels watch over


def behind_sentinels(config: EngineConfig) -> Places:
    given = config.accept(**_COMMON, sentinel_user=str, sentinel_password=str, sentinel_tls=yes)
    user, password, hosts, path = _parts(config)
    service, _, database = path.partition("/")
    if not service or (database and not database.isdecimal()):
        raise ConfigError(
            "the path of a redis+sentinel:// URL is the name of a service, and the number of a database if that is "
            "not 0: redis+sentinel://host1,host2,host3/mymaster/0"
        )
    tls = _tls(config, given, bool(given.get("tls")))
    sentinel_tls = _tls(config, given, bool(given.get("sentinel_tls", given.get("tls"))))
    options, remap = _options(given), cast("dict[Address, Address]", given.get("remap", {}))
    secret = str(given.get("sentinel_user", "")), str(given.get("sentinel_password", ""))

    def serve(address: Address) -> Server:
        place = remap.get(address, address)
        return Server(place, tls, user, password, int(database or 0), options.allow_eviction)

    def door(address: Address) -> Door:
        return Door(address, sentinel_tls, *secret, title="sentinel")

    places = _addresses(config, hosts, _SENTINEL_PORT)
    return Places([door(place) for place in places], serve, door, options, unquote(service))


def in_cluster(config: EngineConfig) -> Places:
    given = config.accept(**_COMMON)
    user, password, hosts, path = _parts(config)
    if path.strip("/") not in ("", "0"):
        raise ConfigError("a Redis cluster has one database: a redis+cluster:// URL has no path")
    tls = _tls(config, given, bool(given.get("tls")))
    options, remap = _options(given), cast("dict[Address, Address]", given.get("remap", {}))

    def serve(address: Address) -> Server:
        return Server(remap.get(address, address), tls, user, password, 0, options.allow_eviction)

    def door(address: Address) -> Door:
        return Door(remap.get(address, address), tls, user, password, title="node")

    return Places([door(place) for place in _addresses(config, hosts, _PORT)], serve, door, options)


def _parts(config: EngineConfig) -> tuple[str, str, str, str]:
    """User, password, hosts, path. Not from config.target, which is decoded: a password may hold any character."""
    rest = config.url.partition("://")[2].partition("?")[0]
    places, _, path = rest.partition("/")
    who, _, hosts = places.rpartition("@")
    user, _, password = who.partition(":")
    return unquote(user), unquote(password), hosts, path.rstrip("/")


def _addresses(config: EngineConfig, hosts: str, port: int) -> list[Address]:
    try:
        found = [_address(host, port) for host in hosts.split(",")] if hosts else [Address("localhost", port)]
    except ValueError as bad:
        raise ConfigError(f"the hosts of this {config.scheme}:// URL: {bad}") from None
    if len(set(found)) < len(found):
        raise ConfigError(f"a host is given twice in this {config.scheme}:// URL")
    return found


def _address(text: str, usual: int = 0) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(usual)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError("a host and a port, host:6379, several parted by commas")
    return Address(unquote(host), int(port))


def _remap(text: str) -> dict[Address, Address]:
    """`announced=reached`, parted by commas: where this client finds what servers call themselves."""
    found = {}
    for pair in text.split(","):
        announced, equals, reached = pair.partition("=")
        if not equals:
            raise ValueError("pairs such as 10.0.0.5:6379=localhost:7001, parted by commas")
        found[_address(announced)] = _address(reached)
    return found


_COMMON: Final[dict[str, Callable[[str], object]]] = {
    "min_replicas": count,
    "allow_eviction": yes,
    "remap": _remap,
    "tls": yes,
    **dict.fromkeys(TLS, str),
}


def _options(given: dict[str, object]) -> Options:
    return Options(cast(int, given.get("min_replicas", 0)), bool(given.get("allow_eviction")))


def _tls(config: EngineConfig, given: dict[str, object], wanted: bool) -> ssl.SSLContext | None:
    chosen = {name: str(given[name]) for name in TLS if name in given}
    if wanted:
        return tls_context(config.scheme, chosen)
    if chosen and not given.get("tls") and not given.get("sentinel_tls"):
        raise ConfigError(f"{', '.join(sorted(chosen))}: for TLS, say tls=yes in the URL")
    return None
