"""`Client(pool)`: the URL and the password of a connection pool that the caller's program has already.

Leasehold opens connections of its own with the same settings, because a lock needs deadlines of its own, and a
connection that no other query holds up. The pool is never used, and may be closed. A setting that Leasehold does not
have is refused, never left out: it may be the one that makes the connection secure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, get_origin
from urllib.parse import quote, urlencode

from leasehold.credentials import PasswordArgument
from leasehold.errors import ConfigError


class PoolSettings(NamedTuple):
    url: str
    password: PasswordArgument | None

    def __repr__(self) -> str:  # without the password
        return f"<settings of {self.url}>"


def settings_of(pool: object) -> PoolSettings:
    """Raises ConfigError for an object that is no pool of a known library, and for settings without a counterpart."""
    for kind in type(pool).__mro__:
        if (package := _package(kind)) in _READERS:
            return _READERS[package](pool)
    raise ConfigError(
        "a client takes an engine's URL, a client or pool of redis-py, a pool of psycopg_pool, or an engine of "
        f"SQLAlchemy, not an object of type {type(pool).__name__}"
    )


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


# -------------------------------------------------------------------------------- redis-py

_REDIS_PACKAGES: Final = ("redis", "valkey")
_REDIS_TLS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")
# How redis-py itself talks to the server: nothing to do with ours.
_REDIS_IGNORED: Final = (
    *("client_name", "command_packer", "decode", "driver_info", "encoding", "event_dispatcher", "health", "himport"),
    *("legacy", "lib_", "maint_", "max_connections", "orig_", "parser_class", "protocol", "retry"),
    *("single_connection", "socket_connect_timeout", "socket_keepalive", "socket_read_size", "socket_timeout"),
)


def _redis(client: Any) -> PoolSettings:
    pool = getattr(client, "connection_pool", client)
    given = getattr(pool, "connection_kwargs", None)
    if not isinstance(given, Mapping) or hasattr(pool, "sentinel_manager") or hasattr(client, "nodes_manager"):
        raise ConfigError(
            "of redis-py, a client takes Redis and ConnectionPool; for Sentinel and Cluster write the URL, "
            "redis+sentinel://host1,host2/service or redis+cluster://host1,host2, with password= for the password"
        )
    set_options = {name: value for name, value in given.items() if value not in (None, False)}
    if _package(connection_class := pool.connection_class) not in _REDIS_PACKAGES:
        _refuse_further("redis-py", ["connection_class"])  # it may connect to another host, or in another way
    provider = set_options.pop("credential_provider", None)
    user, password = set_options.pop("username", None) or "", set_options.pop("password", None)
    if provider is not None:
        try:
            *users, _ = provider.get_credentials()  # (user, password) or (password,)
        except Exception as error:  # without its text, which may show the password
            raise ConfigError(f"the credential_provider of this pool raised {type(error).__name__}") from None
        user, password = "".join(users), lambda: provider.get_credentials()[-1]
    database, host = set_options.pop("db", 0), set_options.pop("host", "localhost")
    port, path = set_options.pop("port", 6379), set_options.pop("path", "")
    tls = "ssl_cert_reqs" in given or "SSL" in connection_class.__name__
    options = {name: _redis_tls_text(set_options.pop(name)) for name in _REDIS_TLS if name in set_options}
    _refuse_further("redis-py", [name for name in set_options if not name.startswith(_REDIS_IGNORED)])
    userinfo = f"{quote(user, safe='')}@" if user else ""
    if path:
        return PoolSettings(f"redis+unix://{userinfo}{quote(path)}?db={database}", password)
    scheme = "rediss" if tls else "redis"
    return PoolSettings(_url(scheme, userinfo, host, port, str(database), options if tls else {}), password)


def _redis_tls_text(value: object) -> str:
    text = getattr(value, "name", value)  # ssl.CERT_REQUIRED
    return {"True": "yes", "CERT_REQUIRED": "required", "CERT_NONE": "none"}.get(str(text), str(text))


# ----------------------------------------------------------------------------- psycopg_pool

_PSYCOPG_IGNORED: Final = ("autocommit", "context", "cursor_factory", "prepare_threshold", "row_factory")


def _psycopg_pool(pool: Any) -> PoolSettings:
    from psycopg import Error
    from psycopg.conninfo import conninfo_to_dict

    if _package(get_origin(pool.connection_class) or pool.connection_class) != "psycopg":
        _refuse_further("psycopg_pool", ["connection_class"])  # its `connect` may add a password, for instance

    def read() -> dict[str, Any]:
        conninfo, more = (value() if callable(value) else value for value in (pool.conninfo, pool.kwargs))
        libpq = {name: value for name, value in (more or {}).items() if name not in _PSYCOPG_IGNORED}
        try:
            return conninfo_to_dict(conninfo or "", **libpq)
        except Error:  # its text may show a part of the password
            raise ConfigError("the conninfo of this pool of psycopg_pool cannot be parsed by libpq") from None

    changes = callable(pool.conninfo) or callable(pool.kwargs)
    return _sql("postgresql", read, changes, "psycopg_pool")


# ------------------------------------------------------------------------------- SQLAlchemy

_SQLALCHEMY_IGNORED: Final = ("autocommit", "charset", "client_flag", "context", "use_unicode", "async_")


def _sqlalchemy(engine: Any) -> PoolSettings:
    engine = getattr(engine, "sync_engine", engine)
    name = getattr(getattr(engine, "dialect", None), "name", "")
    if name not in ("postgresql", "mysql", "mariadb"):
        raise ConfigError(
            f"of SQLAlchemy, a client takes engines of PostgreSQL and MySQL, not {name or type(engine).__name__!r}"
        )
    dialect = engine.dialect
    changes = bool(dialect.dispatch.do_connect)
    given, given_by_name = _connect_arguments(engine)

    def read() -> dict[str, Any]:
        """What the engine passes to its driver for a new connection: with `connect_args`, and after the listeners of
        `do_connect`, which put a fresh password in."""
        arguments, found = list(given), dict(given_by_name)
        for listener in tuple(dialect.dispatch.do_connect):
            if listener(dialect, None, arguments, found) is not None:
                raise ConfigError(_OWN_CONNECTIONS)
        return {option: value for option, value in found.items() if option not in _SQLALCHEMY_IGNORED}

    return _sql(name, read, changes, "SQLAlchemy")


_OWN_CONNECTIONS: Final = (
    "this SQLAlchemy engine connects by a function of its own (creator=), whose settings cannot be read: pass a URL"
)


class _Captured(Exception):
    """Without the arguments: SQLAlchemy logs its text."""


def _connect_arguments(engine: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the engine passes to its driver, before the listeners of `do_connect`. Only called once for each client: if
    a listener comes or goes while other threads connect, SQLAlchemy fails their connections."""
    from sqlalchemy import event

    this_thread, found = threading.get_ident(), list[tuple[list[Any], dict[str, Any]]]()

    def capture(_dialect: Any, _record: Any, arguments: list[Any], by_name: dict[str, Any]) -> None:
        if threading.get_ident() == this_thread:  # other threads may connect meanwhile
            found.append((list(arguments), dict(by_name)))
            raise _Captured

    event.listen(engine, "do_connect", capture, insert=True)
    try:
        engine.pool.recreate().connect().close()
    except _Captured:
        return found[0]
    except Exception:  # of the function, and its text may show a password
        raise ConfigError(_OWN_CONNECTIONS) from None
    finally:
        event.remove(engine, "do_connect", capture)
    raise ConfigError(_OWN_CONNECTIONS)


# --------------------------------------------------------------------------------- for both


def _sql(scheme: str, read: Callable[[], dict[str, Any]], changes: bool, library: str) -> PoolSettings:
    def read_password() -> str:
        found = read()
        return str(found.get("password") or found.get("passwd") or "")

    found = {name: value for name, value in read().items() if value not in (None, "")}
    user, host, port = (found.pop(name, "") for name in ("user", "host", "port"))
    password = found.pop("password", "") or found.pop("passwd", "")
    database = found.pop("dbname", "") or found.pop("database", "") or found.pop("db", "")
    _refuse_further(library, [name for name, value in found.items() if not isinstance(value, str | int)])
    if str(host).startswith(("/", "@")):
        found["host"], host = host, ""
    userinfo = f"{quote(str(user), safe='')}@" if user else ""
    options = {name: str(value) for name, value in found.items() if name != "connect_timeout"}  # ours is call_timeout
    url = _url(scheme, userinfo, str(host), port, quote(str(database), safe=""), options)
    return PoolSettings(url, read_password if changes else str(password) or None)


def _url(scheme: str, userinfo: str, host: str, port: object, path: str, options: Mapping[str, str]) -> str:
    hosts, ports = host.split(","), str(port or "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    bracketed = [f"[{each}]" if ":" in each else each for each in hosts]
    authority = ",".join(f"{each}:{number}" if number else each for each, number in zip(bracketed, ports, strict=False))
    query = f"?{urlencode(options, quote_via=quote)}" if options else ""
    return f"{scheme}://{userinfo}{authority}/{path}{query}"


def _refuse_further(library: str, names: list[str]) -> None:
    if names:
        raise ConfigError(
            f"this pool of {library} has the setting {sorted(names)[0]!r}, for which Leasehold has no counterpart: "
            "pass an engine's URL instead, and password= if the password changes"
        )


_READERS: Final[dict[str, Callable[[Any], PoolSettings]]] = {
    **dict.fromkeys(_REDIS_PACKAGES, _redis),
    "psycopg_pool": _psycopg_pool,
    "sqlalchemy": _sqlalchemy,
}
