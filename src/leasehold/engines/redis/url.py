"""Parses and checks URLs of several servers: `redis+sentinel://` and `redis+cluster://`. Opens no connection.

redis+sentinel://user:password@host1:26379,host2:26379/service/0?sentinel_user=...&sentinel_password=...
redis+cluster://user:password@host1:6379,host2:6379?tls=yes
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Final, NamedTuple, cast
from urllib.parse import unquote

from leasehold.config import EngineConfig
from leasehold.credentials import Password
from leasehold.engines.redis.discovery import DiscoveryNode
from leasehold.engines.redis.server import RedisEndpoint
from leasehold.engines.redis.topology import (
    TLS_OPTIONS,
    RedisOptions,
    parse_bool,
    parse_count,
    password_of,
    tls_context,
)
from leasehold.errors import ConfigError
from leasehold.runtime.net.blocking import SocketAddress

_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379


class MultiServerUrl(NamedTuple):
    """The servers to query, and how to sign in to them and to the servers they report."""

    nodes: list[DiscoveryNode]
    make_server: Callable[[SocketAddress], RedisEndpoint]
    make_node: Callable[[SocketAddress], DiscoveryNode]
    options: RedisOptions
    service: str = ""  # watched by the sentinels


def parse_sentinel_url(config: EngineConfig) -> MultiServerUrl:
    url_options = config.accept(**_COMMON_OPTIONS, sentinel_user=str, sentinel_password=str, sentinel_tls=parse_bool)
    user, password, hosts, path = _split_url(config)
    service, _, database = path.partition("/")
    if not service or (database and not database.isdecimal()):
        raise ConfigError(
            "the path of a redis+sentinel:// URL must be a service name, optionally followed by a database number: "
            "redis+sentinel://host1,host2,host3/mymaster/0"
        )
    tls = _make_tls_context(config, url_options, bool(url_options.get("tls")))
    sentinel_tls = _make_tls_context(config, url_options, bool(url_options.get("sentinel_tls", url_options.get("tls"))))
    options, remap = (
        _make_options(url_options),
        cast("dict[SocketAddress, SocketAddress]", url_options.get("remap", {})),
    )
    sentinel_user, sentinel_password = str(url_options.get("sentinel_user", "")), url_options.get("sentinel_password")
    for_sentinels = Password(str(sentinel_password), "sentinel_password=") if sentinel_password else None

    def make_server(address: SocketAddress) -> RedisEndpoint:
        target = remap.get(address, address)
        return RedisEndpoint(target, tls, user, password, int(database or 0), options.allow_eviction)

    def make_node(address: SocketAddress) -> DiscoveryNode:
        return DiscoveryNode(address, sentinel_tls, sentinel_user, for_sentinels, title="sentinel")

    addresses = _parse_addresses(config, hosts, _SENTINEL_PORT)
    return MultiServerUrl(
        [make_node(target) for target in addresses], make_server, make_node, options, unquote(service)
    )


def parse_cluster_url(config: EngineConfig) -> MultiServerUrl:
    url_options = config.accept(**_COMMON_OPTIONS)
    user, password, hosts, path = _split_url(config)
    if path.strip("/") not in ("", "0"):
        raise ConfigError("a redis+cluster:// URL must have no path: a Redis cluster has only one database")
    tls = _make_tls_context(config, url_options, bool(url_options.get("tls")))
    options, remap = (
        _make_options(url_options),
        cast("dict[SocketAddress, SocketAddress]", url_options.get("remap", {})),
    )

    def make_server(address: SocketAddress) -> RedisEndpoint:
        return RedisEndpoint(remap.get(address, address), tls, user, password, 0, options.allow_eviction)

    def make_node(address: SocketAddress) -> DiscoveryNode:
        return DiscoveryNode(remap.get(address, address), tls, user, password, title="node")

    return MultiServerUrl(
        [make_node(target) for target in _parse_addresses(config, hosts, _PORT)], make_server, make_node, options
    )


def _split_url(config: EngineConfig) -> tuple[str, Password | None, str, str]:
    """User, password, hosts, path. Not from config.target, which is decoded: a password may contain any character."""
    after_scheme = config.url.partition("://")[2].partition("?")[0]
    authority, _, path = after_scheme.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    user, _, password = credentials.partition(":")
    return unquote(user), password_of(config, unquote(password)), hosts, path.rstrip("/")


def _parse_addresses(config: EngineConfig, hosts: str, port: int) -> list[SocketAddress]:
    try:
        found = (
            [_parse_address(host, port) for host in hosts.split(",")] if hosts else [SocketAddress("localhost", port)]
        )
    except ValueError as bad:
        raise ConfigError(f"invalid hosts in this {config.scheme}:// URL: {bad}") from None
    if len(set(found)) < len(found):
        raise ConfigError(f"this {config.scheme}:// URL names the same host and port twice")
    return found


def _parse_address(text: str, default_port: int = 0) -> SocketAddress:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError("expected HOST:PORT, separated by commas, such as host1:6379,host2:6379")
    return SocketAddress(unquote(host), int(port))


def _parse_remap(text: str) -> dict[SocketAddress, SocketAddress]:
    """`announced=reached`, separated by commas: where this client reaches an address that servers announce."""
    found = {}
    for pair in text.split(","):
        announced, equals, reached = pair.partition("=")
        if not equals:
            raise ValueError("expected pairs such as 10.0.0.5:6379=localhost:7001, separated by commas")
        found[_parse_address(announced)] = _parse_address(reached)
    return found


_COMMON_OPTIONS: Final[dict[str, Callable[[str], object]]] = {
    "min_replicas": parse_count,
    "allow_eviction": parse_bool,
    "remap": _parse_remap,
    "tls": parse_bool,
    **dict.fromkeys(TLS_OPTIONS, str),
}


def _make_options(url_options: dict[str, object]) -> RedisOptions:
    return RedisOptions(cast(int, url_options.get("min_replicas", 0)), bool(url_options.get("allow_eviction")))


def _make_tls_context(config: EngineConfig, url_options: dict[str, object], enabled: bool) -> ssl.SSLContext | None:
    tls_options = {name: str(url_options[name]) for name in TLS_OPTIONS if name in url_options}
    if enabled:
        return tls_context(config.scheme, tls_options)
    if tls_options and not url_options.get("tls") and not url_options.get("sentinel_tls"):
        raise ConfigError(f"{', '.join(sorted(tls_options))}: add tls=yes to the URL to use TLS")
    return None
