"""What a server's settings mean for locks, read whenever a connection is opened: they may differ after a restart.

An eviction policy may drop a lock that is held: refused, unless asked for. Without a log written at every commit a
crash forgets grants: said in the traits, and in a warning that names the consequence.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from leasehold.errors import ConfigError, Unavailable

ASK: Final = (  # one trip, behind the sign-in
    ("INFO", "server", "memory", "persistence", "replication"),
    ("CONFIG", "GET", "appendfsync"),
)
_OLDEST: Final = 7  # scripts that say what they may do, and PXAT


class Unreached(Unavailable):
    """No connection could be had: what was to be asked has certainly not been done."""


class Refused(ConfigError):
    """Not permitted, by rights or by settings: what was asked has certainly not been done."""


class Settings(NamedTuple):
    """None: this user may not ask."""

    version: str | None = None
    role: str | None = None
    policy: str | None = None
    log: bool | None = None  # appendonly
    sync: str | None = None  # appendfsync

    @property
    def survives(self) -> Literal["nothing", "restart"]:
        return "restart" if self.log and self.sync == "always" else "nothing"

    def check(self, server: str, allow_eviction: bool) -> None:
        """Raise for a server on which locks would not be what they promise."""
        major = (self.version or "").partition(".")[0]
        if major.isdecimal() and int(major) < _OLDEST:
            raise Refused(f"{server} runs Redis {self.version}: Leasehold needs Redis 7 or newer, or any Valkey")
        if self.role == "slave":
            raise Unreached(
                f"{server} is a replica: it takes no locks; the URL must lead to its primary", engine="redis"
            )
        if self.policy not in (None, "noeviction") and not allow_eviction:
            raise Refused(
                f"{server} has maxmemory-policy {self.policy}, which may drop a lock while it is held: set it to "
                "noeviction, or accept that with allow_eviction=yes in the URL"
            )

    def warning(self, server: str) -> str | None:
        """What the owner of this server should know, if anything."""
        if self.log is False:
            return (
                f"{server} keeps no log (appendonly no): when it restarts, every lock is free, also those still held; "
                "appendonly yes with appendfsync always keeps them"
            )
        if self.policy is None:
            return f"{server} does not let this user ask for its settings: whether it evicts locks is not known"
        return None


def read(info: object, sync: object) -> Settings:
    """From the replies to ASK; an error instead of a reply leaves its part unknown."""
    found: dict[str, str] = {}
    if isinstance(info, bytes):
        pairs = (line.partition(":") for line in info.decode(errors="replace").splitlines())
        found = {name: value for name, _, value in pairs}
    always = sync[1].decode() if isinstance(sync, list) and len(sync) == 2 and isinstance(sync[1], bytes) else None
    log = found.get("aof_enabled")
    return Settings(
        found.get("redis_version"),
        found.get("role"),
        found.get("maxmemory_policy"),
        None if log is None else log == "1",
        always,
    )
