"""Parses `postgresql://` URLs into libpq's parameters and Leasehold's own options."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from leasehold.config import EngineConfig, parse_yes_no
from leasehold.credentials import Password
from leasehold.engines.postgresql import schema
from leasehold.errors import ConfigError

_LIBPQ: Final = frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults())
# Not for users to set: deadlines are per call, and names are UTF-8.
_FIXED: Final = {"client_encoding", "connect_timeout"}

# How far a connection is protected: each more than the one before it.
_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_AUTH_OPTIONS: Final = ("require_auth", "channel_binding")

_MAX_TIMEOUT: Final = 2_000_000.0  # seconds: the system and the server count milliseconds in 32 bits
_KEEPALIVE_IDLE: Final = 10  # seconds of silence before the first keepalive probe


@dataclass(frozen=True, slots=True)
class PgTarget:
    """Where to connect: one set of parameters per host, tried in order. They may contain the password."""

    hosts: tuple[dict[str, str], ...] = field(repr=False)
    password: Password | None = None  # instead of one in the parameters


@dataclass(frozen=True, slots=True)
class PgOptions:
    """`listen` is None with listen=no: for a pooler without a direct way to the server."""

    target: PgTarget
    listen: PgTarget | None
    pooled: bool
    schema: str
    create: bool
    durable: bool
    call_timeout: float


def parse_url(config: EngineConfig) -> PgOptions:
    known = dict.fromkeys(_LIBPQ - _FIXED, str)
    own_options = {
        "schema": schema.validate_name,
        "create": parse_yes_no,
        "durable": parse_yes_no,
        "listen": parse_yes_no,
        "listen_url": str,
    }
    given = config.accept(**known, **own_options)  # type: ignore[arg-type]
    direct = given.get("listen_url")
    if direct and not given.get("listen", True):
        raise ConfigError("listen_url cannot be combined with listen=no, which turns wake-ups off")
    target = _target(config, {*own_options, "password_file"})
    listen = target
    if direct:
        listen = _target(EngineConfig.parse(str(direct), config.call_timeout), {"password_file"})
        if listen.password is None and "password" not in listen.hosts[0]:
            listen = replace(listen, password=config.password)
        listen = replace(listen, hosts=tuple(each | _protection(target.hosts[0], each) for each in listen.hosts))
    return PgOptions(
        target=target,
        listen=listen if given.get("listen", True) else None,
        pooled=bool(direct) or not given.get("listen", True),
        schema=str(given.get("schema", schema.DEFAULT_NAME)),
        create=bool(given.get("create", True)),
        durable=bool(given.get("durable", True)),
        call_timeout=min(config.call_timeout, _MAX_TIMEOUT),
    )


def _target(config: EngineConfig, own_options: set[str]) -> PgTarget:
    call_timeout = config.call_timeout
    try:
        parts = urlsplit(config.url)
        pairs = [
            (name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name not in own_options
        ]
        query = urlencode(pairs, quote_via=quote)
        # Always with "://": if there is no host, urlunsplit omits it, and libpq does not recognise the URL.
        path_and_query = urlunsplit(("", "", parts.path, query, ""))
        found = conninfo_to_dict(f"postgresql://{parts.netloc}{path_and_query}")
    except (ValueError, psycopg.Error):  # their texts may contain the password
        raise ConfigError(
            "this URL cannot be parsed: expected postgresql://user:password@host:port/database?option=value"
        ) from None
    if parts.scheme.lower() != "postgresql":
        raise ConfigError("listen_url must be a postgresql:// URL, percent-encoded as a whole")
    defaults: dict[str, str] = {
        "application_name": "leasehold",
        "keepalives": "1",
        "keepalives_idle": str(_KEEPALIVE_IDLE),
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": str(int(min(max(call_timeout, 1.0), _MAX_TIMEOUT) * 1000)),
    }
    if "service" not in found and "PGSERVICE" not in os.environ:
        defaults |= _environment_defaults()
    params = defaults | {name: str(value) for name, value in found.items() if value} | {"client_encoding": "UTF8"}
    if config.password is not None:
        config.password_or(params.get("password", ""))
    hosts, ports = params.get("host", "").split(","), params.get("port", "").split(",")
    if len(hosts) == 1 or "hostaddr" in params:
        return PgTarget((params,), config.password)
    if len(ports) not in (1, len(hosts)):
        raise ConfigError(f"this URL has {len(hosts)} hosts and {len(ports)} ports; give one port, or one per host")
    params.setdefault("target_session_attrs", "read-write")  # of several hosts, the primary
    ports = ports * len(hosts) if len(ports) == 1 else ports
    each_host = (params | {"host": host, "port": port} for host, port in zip(hosts, ports, strict=True))
    return PgTarget(tuple(each_host), config.password)


def _protection(params: dict[str, str], listen_params: dict[str, str]) -> dict[str, str]:
    """The options of the URL that `listen_url` takes over: what it does not say itself must not be weaker. It may get
    the same password."""
    found: dict[str, str] = {
        name: params[name] for name in _AUTH_OPTIONS if name in params and name not in listen_params
    }
    if not {"sslmode", "service"} & set(listen_params) and "PGSERVICE" not in os.environ:
        mode = params.get("sslmode", "")
        if mode in _SSL_MODES and _SSL_MODES.index(mode) > _SSL_MODES.index(_default_ssl_mode()):
            found |= {name: value for name, value in params.items() if name.startswith("ssl")} | {
                name: value for name, value in listen_params.items() if name.startswith("ssl")
            }
    return found


def _default_ssl_mode() -> str:
    """libpq's own, or that of PGSSLMODE."""
    known = {option.keyword: option.val for option in pq.Conninfo.get_defaults()}
    mode = (known.get(b"sslmode") or b"").decode(errors="replace")
    return mode if mode in _SSL_MODES else "disable"


def _environment_defaults() -> dict[str, str]:
    """The server's location from PGHOST, PGHOSTADDR and PGPORT: Leasehold, not libpq, resolves and tries hosts."""
    known = {option.keyword.decode(): option.val for option in pq.Conninfo.get_defaults()}
    return {name: value.decode() for name in ("host", "hostaddr", "port") if (value := known.get(name))}
