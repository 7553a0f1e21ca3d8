"""etcd URLs: the members' addresses, the credentials, and the prefix of all keys.

etcd://user:password@host1:2379,host2:2379,host3:2379/prefix
etcds://host1,host2?ca=ca.pem&cert=client.pem&key=client.key
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from leasehold.config import EngineConfig
from leasehold.credentials import Password
from leasehold.engines.etcd.queue import key_root
from leasehold.engines.tls import check_readable, client_context
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.runtime.net import host_names

_DEFAULT_PORT: Final = 2379


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    endpoints: tuple[Endpoint, ...]
    root: str  # the prefix of every key
    user: str
    password: Password
    tls: ssl.SSLContext | None


def parse_url(config: EngineConfig) -> EtcdUrl:
    """Checks without connecting: a bad URL raises ConfigError when the client is created."""
    options = config.accept(ca=check_readable, cert=check_readable, key=check_readable)
    # Not config.target, which is decoded: a password may contain the characters that separate the parts of a URL.
    after_scheme = config.url.partition("://")[2].partition("?")[0]
    authority, _, prefix = after_scheme.partition("/")
    userinfo, at_sign, hosts = authority.rpartition("@")
    user, colon, password = userinfo.partition(":")
    if (at_sign and not (user and (colon or config.password))) or (config.password and not user):
        raise ConfigError("an etcd URL needs both user and password, or neither: etcd://user:password@host:2379")
    prefix = unquote(prefix).strip("/")
    if "\0" in prefix or len(prefix.encode()) > 255:
        raise ConfigError("the prefix of an etcd URL must have at most 255 bytes and no NUL character")
    endpoints = (
        tuple(_parse_endpoint(each) for each in hosts.split(",")) if hosts else (Endpoint("localhost", _DEFAULT_PORT),)
    )
    if len(set(endpoints)) < len(endpoints):
        raise ConfigError("an endpoint is given twice in this etcd URL")
    tls = client_context(config.scheme, "etcds", options)
    if tls is not None:
        tls.set_alpn_protocols(["h2"])
    return EtcdUrl(endpoints, key_root(prefix), unquote(user), config.password_or(unquote(password)), tls)


def _parse_endpoint(text: str) -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(_DEFAULT_PORT)
    if host.startswith("[") != host.endswith("]") or not host.strip("[]"):
        raise ConfigError("an endpoint of an etcd URL must be host:port: etcd://host1:2379,host2:2379")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise ConfigError("the port of an etcd URL must be a number from 1 to 65535")
    return Endpoint(unquote(host.strip("[]")), int(port))


async def resolve(host: str, runtime: Runtime, deadline: float) -> list[str]:
    """The IP addresses of a host. Raises OSError."""
    try:
        return await host_names.resolve(host, runtime, deadline)
    except OSError as error:
        raise OSError(None, f"cannot find the host's address: {error.strerror}") from error
