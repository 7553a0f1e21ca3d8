"""URLs of lock servers: addresses, the path before `/v1`, certificates, and the API key, which is never part of a URL.

http://host1:7420,host2:7420/base?api_key_file=/run/secrets/leasehold
https://host1,host2?ca=ca.pem&cert=client.pem&cert_key=client.key
"""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field
from typing import Final

from leasehold import files
from leasehold.config import API_KEY_VARIABLE, EngineConfig
from leasehold.credentials import Password
from leasehold.engines.tls import check_readable, client_context
from leasehold.errors import ConfigError
from leasehold.runtime.net.blocking import SocketAddress

DEFAULT_PORT: Final = 7420
_MAX_KEY: Final = 512  # characters
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]")
_BASE: Final = re.compile(r"[A-Za-z0-9._~%/-]*")


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    addresses: tuple[SocketAddress, ...]
    base: str  # before `/v1`, without a slash at its end
    tls: ssl.SSLContext | None
    api_key_file: str | None = field(repr=False)
    api_key: Password | None = None  # of `Client(password=...)`


def parse_url(config: EngineConfig) -> RemoteUrl:
    """Checks without connecting: a bad URL raises ConfigError when the client is created."""
    options = config.accept(api_key_file=str, ca=check_readable, cert=check_readable, cert_key=check_readable)
    api_key_file = options.pop("api_key_file", None)
    scheme, after_scheme = config.scheme, config.url.partition("://")[2].partition("?")[0]
    authority, _, base = after_scheme.partition("/")
    if "@" in authority:
        raise ConfigError(
            f"{scheme}:// URLs have no user and password: set ${API_KEY_VARIABLE}, or name a file with api_key_file="
        )
    if not _BASE.fullmatch(base):
        raise ConfigError(f"the path of this {scheme}:// URL has a character that must be percent-encoded")
    addresses = tuple(_parse_address(scheme, each) for each in (authority or "localhost").split(","))
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"a server is given twice in this {scheme}:// URL")
    base = base.strip("/")
    tls = client_context(scheme, "https", options, key_option="cert_key")
    if api_key_file is not None and config.password is not None:
        raise ConfigError(f"this {scheme}:// URL has api_key_file=: give either that or password=")
    return RemoteUrl(addresses, f"/{base}" if base else "", tls, api_key_file, config.password)


def _parse_address(scheme: str, text: str) -> SocketAddress:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if not _HOST.fullmatch(host):
        raise ConfigError(f"servers of {scheme}:// URLs are written host:port: {scheme}://host1:7420,host2:7420")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise ConfigError(f"the port of a {scheme}:// URL must be a number from 1 to 65535")
    return SocketAddress(host.strip("[]"), int(port))


def read_api_key(url: RemoteUrl) -> str:
    """The API key: of `password=`, of the file that the URL names, or of the environment; empty: there is none."""
    if url.api_key is not None:
        key, source = url.api_key.read(), "password="
    elif url.api_key_file is None:
        key, source = os.environ.get(API_KEY_VARIABLE, ""), f"${API_KEY_VARIABLE}"
    else:
        key, source = _read_file(url.api_key_file), "the file of api_key_file="
        if not key.strip():
            raise ConfigError(f"{source} is empty: write the API key into it")
    key = key.strip()
    if len(key) > _MAX_KEY or not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{source} does not contain an API key: that is one line of letters, digits and '_'")
    return key


def _read_file(path: str) -> str:
    try:
        with files.opened(path) as fd:
            return os.read(fd, 2 * _MAX_KEY).decode("latin-1")
    except OSError as error:
        raise ConfigError(f"the file of api_key_file= cannot be read: {error.strerror}") from None
