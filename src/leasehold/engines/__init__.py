"""Maps URL schemes to engines. A module is imported on first use, so a driver that is not needed is never loaded.

base.py        the Engine protocol, E1 to E9
probe.py       the health of an engine's servers: values, and what all probes share; `health` below runs a probe
repeated_logs.py  log lines that every client of a server would repeat
registry.py    a client's claims by state: shared by its two engine instances, the client and the watchdog
listener_thread.py  the thread of a listener for push notifications: redis/, redlock/ and remote/
memory.py      locks within one process; the reference
sqlite/  redis/  redlock/  etcd/  zookeeper/  postgresql/  mysql/     one folder per engine
remote/        a Leasehold server over HTTP, with any engine behind it
sql/           what PostgreSQL and MySQL share
tls.py         TLS for URLs that name certificate files
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

from leasehold.config import SCHEME_ALIASES, EngineConfig, did_you_mean
from leasehold.engines.base import Opener
from leasehold.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from leasehold.engines.probe import Health
    from leasehold.runtime.base import Runtime

ENTRY_POINT_GROUP: Final = "leasehold.engines"  # how other packages register engines: scheme = "package.module:open"

BUILT_IN: Final[dict[str, str]] = {
    "memory": "leasehold.engines.memory",
    "mariadb": "leasehold.engines.mysql",
    "mysql": "leasehold.engines.mysql",
    "postgresql": "leasehold.engines.postgresql",
    "sqlite": "leasehold.engines.sqlite",
    "etcd": "leasehold.engines.etcd",
    "etcds": "leasehold.engines.etcd",
    "zk": "leasehold.engines.zookeeper",
    "zookeeper": "leasehold.engines.zookeeper",
    "redis": "leasehold.engines.redis",
    "rediss": "leasehold.engines.redis",
    "redis+unix": "leasehold.engines.redis",
    "redis+sentinel": "leasehold.engines.redis",
    "redis+cluster": "leasehold.engines.redis",
    "redlock": "leasehold.engines.redlock",
    "http": "leasehold.engines.remote",
    "https": "leasehold.engines.remote",
}


# The module of an engine that needs a driver -> the extra that installs the driver.
EXTRAS: Final[dict[str, str]] = {
    "leasehold.engines.mysql": "mysql",
    "leasehold.engines.postgresql": "postgresql",
    "leasehold.engines.redis": "redis",
    "leasehold.engines.redlock": "redis",
    "leasehold.engines.zookeeper": "zookeeper",
}


# Engines that pass descriptors, lock files or ask for the owner of a file in ways that Windows does not have.
POSIX_ONLY: Final = frozenset({"leasehold.engines.mysql", "leasehold.engines.postgresql", "leasehold.engines.sqlite"})

# Engines that can check or release a lease inside the caller's own SQL transaction.
TRANSACTION_SCHEMES: Final = frozenset({"mariadb", "mysql", "postgresql"})


def lease_check_sql(config: EngineConfig) -> tuple[str, str]:
    """Two SQL statements that check a lease in the caller's transaction. The first, with the parameters `:namespace`,
    `:name` (or both in hex, `:namespace_hex` and `:name_hex`) and `:token`, returns a row if the lease is held; the
    second, run right after it, returns a row if both ran in one transaction."""
    engine = _transactional(
        config, "cannot check a lease inside your SQL transaction; use a fence (leasehold.fences) instead"
    )
    return cast("tuple[str, str]", engine.lease_check_sql(config))


def release_on_commit_sql(config: EngineConfig) -> Sequence[str]:
    """SQL statements, to be run in order, that make the commit of the caller's transaction release a lease. The last
    one, with these parameters and `:id_hash`, returns one value: 'held', or, if nothing was changed, 'not held', 'no
    transaction' or 'isolation'."""
    engine = _transactional(
        config,
        "cannot release a lease with the commit of your SQL transaction: it is not that database; "
        "release the lease after the commit",
    )
    return cast("Sequence[str]", engine.release_on_commit_sql(config))


def _transactional(config: EngineConfig, refusal: str) -> ModuleType:
    """The engine, if it is a database whose transactions can check and release a lease."""
    if config.scheme not in TRANSACTION_SCHEMES:
        raise Unsupported(f"{config.scheme}:// {refusal}", engine=config.scheme)
    return import_module(BUILT_IN[config.scheme])


async def health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    """Probe every server that the URL names, on connections that no lock uses. A server that does not answer by the
    deadline is part of the result; an invalid URL raises ConfigError."""
    opener(config.scheme)  # raises for an unknown scheme and a missing driver
    module = BUILT_IN.get(config.scheme)
    if module is None:
        raise Unsupported(f"{config.scheme}:// has no health probe", engine=config.scheme)
    if config.scheme == "memory":
        from leasehold.engines.probe import Health, MemberHealth

        return Health("memory", up=True, members=(MemberHealth("this process", up=True),), has_leader=True)
    return cast("Health", await import_module(f"{module}.health").health(config, runtime, deadline))


def opener(scheme: str) -> Opener:
    """The `open(config, runtime, registry)` of a scheme. Raises a ConfigError that lists the known schemes."""
    if module := BUILT_IN.get(scheme):
        if sys.platform == "win32" and module in POSIX_ONLY:
            raise ConfigError(
                f"{scheme}:// does not work on Windows: use memory://, redis://, etcd:// or a lock server, http://HOST"
            )
        try:
            return cast(Opener, import_module(module).open)
        except ModuleNotFoundError as error:
            if module not in EXTRAS or (error.name or "").startswith("leasehold"):
                raise
            hint = f'pip install "leasehold[{EXTRAS[module]}]"'
            raise ConfigError(f"{scheme}:// needs {error.name}, which is not installed: {hint}") from error
    from importlib.metadata import entry_points  # only here: it would add a tenth to the time of `import leasehold`

    plugins = {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    if entry_point := plugins.get(scheme):
        return cast(Opener, entry_point.load())
    known = ", ".join(f"{name}://" for name in sorted({*BUILT_IN, *plugins}))
    hint = did_you_mean(scheme, sorted({*BUILT_IN, *SCHEME_ALIASES, *plugins}), "{}://")
    raise ConfigError(f"no engine for {scheme}://{hint}; known: {known}")
