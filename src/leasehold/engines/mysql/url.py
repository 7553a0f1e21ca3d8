"""Parses `mysql://` URLs into PyMySQL's arguments and Leasehold's own options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from pymysql.constants import CLIENT

from leasehold.config import EngineConfig, parse_yes_no
from leasehold.credentials import Password
from leasehold.engines.mysql import schema
from leasehold.errors import ConfigError

_PORT: Final = 3306
_MAX_TIMEOUT: Final = 2_000_000.0  # seconds: the system and the server count milliseconds in 32 bits
_USER: Final = "root"

# What a URL may say about the connection.
TARGET_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "unix_socket": str,
    "ssl_ca": str,
    "ssl_cert": str,
    "ssl_key": str,
    "ssl_verify_identity": parse_yes_no,
    "program_name": str,
}


@dataclass(frozen=True, slots=True)
class MyTarget:
    """Where to connect, and as which user."""

    host: str
    port: int
    path: str  # of a unix socket, instead of host and port
    arguments: dict[str, Any] = field(repr=False)  # for PyMySQL
    password: Password

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class MyOptions:
    target: MyTarget
    database: str
    create: bool
    listen: bool
    procedures: bool
    call_timeout: float


def parse_url(config: EngineConfig) -> MyOptions:
    given = config.accept(create=parse_yes_no, listen=parse_yes_no, procedures=parse_yes_no, **TARGET_OPTIONS)
    target, database = parse_target(config, given)
    return MyOptions(
        target=target,
        database=database or schema.DEFAULT_NAME,
        create=bool(given.get("create", True)),
        listen=bool(given.get("listen", True)),
        procedures=bool(given.get("procedures", True)),
        call_timeout=min(config.call_timeout, _MAX_TIMEOUT),
    )


def parse_target(config: EngineConfig, given: dict[str, Any]) -> tuple[MyTarget, str]:
    """Where to connect to, and the name of the database: empty if the URL has none. `given`: the options of the URL."""
    if "ssl_verify_identity" in given and "ssl_ca" not in given:
        raise ConfigError("ssl_verify_identity needs ssl_ca, the authority that has signed the server's certificate")
    try:
        parts = urlsplit(config.url)
        host, port = unquote(parts.hostname or "localhost"), parts.port or _PORT
    except ValueError:  # its text may contain the password
        raise ConfigError(
            "this URL cannot be parsed: expected mysql://user:password@host:port/database?option=value"
        ) from None
    user, password = unquote(parts.username or _USER), config.password_or(unquote(parts.password or ""))
    database = unquote(parts.path).removeprefix("/")
    try:
        if database:
            schema.validate_name(database)
    except ValueError as error:
        raise ConfigError(f"the path of this mysql:// URL: {error}") from None
    if "," in parts.netloc:
        raise ConfigError("a mysql:// URL takes one host: the primary, which alone can grant locks")
    path = str(given.get("unix_socket", ""))
    return MyTarget(host, port, path, _arguments(given, host, user), password), database


def _arguments(given: dict[str, Any], host: str, user: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "host": host,
        "user": user,
        "charset": "utf8mb4",
        "autocommit": None,  # set later, together with the other settings
        "program_name": given.get("program_name", "leasehold"),
        "client_flag": CLIENT.MULTI_STATEMENTS,
    }
    arguments |= {name: given[name] for name in ("ssl_ca", "ssl_cert", "ssl_key") if name in given}
    if "ssl_ca" in given:  # naming an authority asks for verification
        arguments |= {"ssl_verify_cert": True, "ssl_verify_identity": given.get("ssl_verify_identity", True)}
    return arguments
