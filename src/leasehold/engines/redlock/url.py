"""Parses a redlock:// URL: the nodes, and how to sign in to them.

redlock://user:password@host1:6379,host2:6379,host3:6379/0?tls=yes&ssl_ca_certs=ca.pem
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from leasehold.config import EngineConfig
from leasehold.engines.redis.topology import TLS_OPTIONS, parse_bool, parse_server_as
from leasehold.engines.redlock.node import RedlockNode
from leasehold.errors import ConfigError

_MIN_NODES: Final = 3  # of two nodes the majority is both: one failure would stop everything


def parse_nodes(config: EngineConfig) -> tuple[RedlockNode, ...]:
    """Opens no connection. Raises `ConfigError` for a bad URL, when the client is built."""
    accepted = config.accept(allow_eviction=parse_bool, tls=parse_bool, **dict.fromkeys(TLS_OPTIONS, str))
    use_tls = bool(accepted.pop("tls", False))
    if not use_tls and (found := sorted(set(TLS_OPTIONS) & set(accepted))):
        raise ConfigError(f"{', '.join(found)}: add tls=yes to this redlock:// URL to use TLS")
    # Not config.target, which is decoded: a password may contain the delimiters of a URL.
    authority, slash, path = config.url.partition("://")[2].partition("?")[0].partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    options = {name: text for name, text in config.options.items() if name != "tls"}
    redlock_nodes = tuple(
        _build_node(config, use_tls, f"{userinfo}{at}", host, f"{slash}{path}", options) for host in hosts.split(",")
    )
    addresses = [node.address for node in redlock_nodes]
    if len(addresses) < _MIN_NODES:
        raise ConfigError(
            "a redlock:// URL needs at least three independent Redis servers: "
            "redlock://host1:6379,host2:6379,host3:6379"
        )
    for index, address in enumerate(addresses):
        if address in addresses[:index]:
            raise ConfigError(f"this redlock:// URL names {address} twice: it would vote twice")
    for node in redlock_nodes:
        node.peers, node.servers_at_once = redlock_nodes, len(redlock_nodes)
    return redlock_nodes


def _build_node(
    config: EngineConfig, use_tls: bool, userinfo: str, host: str, path: str, options: Mapping[str, str]
) -> RedlockNode:
    if not host:
        raise ConfigError("each node of a redlock:// URL must be HOST:PORT: redlock://host1:6379,host2:6379,host3:6379")
    scheme = "rediss" if use_tls else "redis"
    node_config = config.replace(url=f"{scheme}://{userinfo}{host}{path}", scheme=scheme, options=options)
    return parse_server_as(node_config, RedlockNode)[0]
