"""What a redlock URL says: the nodes, and how to sign in to all of them.

redlock://user:password@host1:6379,host2:6379,host3:6379/0?tls=yes&ssl_ca_certs=ca.pem
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from leasehold.config import EngineConfig
from leasehold.engines.redis.topology import TLS, made, yes
from leasehold.engines.redlock.node import Node
from leasehold.errors import ConfigError

_FEWEST: Final = 3  # of two, a majority is both: one that fails would stop all


def nodes(config: EngineConfig) -> tuple[Node, ...]:
    """Checked without a word to anybody: a bad URL is a ConfigError when the client is made."""
    given = config.accept(allow_eviction=yes, tls=yes, **dict.fromkeys(TLS, str))
    secure = bool(given.pop("tls", False))
    if not secure and (found := sorted(set(TLS) & set(given))):
        raise ConfigError(f"{', '.join(found)}: for TLS this redlock:// URL needs tls=yes")
    # Not config.target, which is decoded: a password may hold any of the characters that part a URL.
    places, slash, path = config.url.partition("://")[2].partition("?")[0].partition("/")
    who, at, hosts = places.rpartition("@")
    options = {name: text for name, text in config.options.items() if name != "tls"}
    found_nodes = tuple(
        _node(config, secure, f"{who}{at}", host, f"{slash}{path}", options) for host in hosts.split(",")
    )
    addresses = [node.address for node in found_nodes]
    if len(addresses) < _FEWEST:
        raise ConfigError(
            "a redlock:// URL names at least three Redis servers that do not depend on one another: "
            "redlock://host1:6379,host2:6379,host3:6379"
        )
    for number, address in enumerate(addresses):
        if address in addresses[:number]:
            raise ConfigError(f"{address} stands twice in this redlock:// URL: it would vote twice")
    for node in found_nodes:
        node.peers = found_nodes
    return found_nodes


def _node(config: EngineConfig, secure: bool, who: str, host: str, path: str, options: Mapping[str, str]) -> Node:
    if not host:
        raise ConfigError("a node of a redlock:// URL is a host and a port: redlock://host1:6379,host2:6379,host3:6379")
    scheme = "rediss" if secure else "redis"
    one = replace(config, url=f"{scheme}://{who}{host}{path}", scheme=scheme, options=options)
    return made(one, Node)[0]
