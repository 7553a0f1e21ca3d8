"""What a server's settings mean for locks, read whenever a connection is opened: they may differ after a restart.

An eviction policy may drop a lock that is held: refused, unless asked for. Without a log written at every commit a
crash forgets grants: said in the traits, and in a warning that names the consequence.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from leasehold.errors import ConfigError, Unavailable

SETTINGS_COMMANDS: Final = (  # one trip, behind the sign-in
    ("INFO", "server", "memory", "persistence", "replication"),
    ("CONFIG", "GET", "appendfsync"),
)
_MIN_MAJOR_VERSION: Final = 7  # scripts that say what they may do, and PXAT


class Unreachable(Unavailable):
    """No connection could be had: what was to be asked has certainly not been done."""


class NotPermitted(ConfigError):
    """Not permitted, by rights or by settings: what was asked has certainly not been done."""


class ServerSettings(NamedTuple):
    """None: this user may not ask."""

    version: str | None = None
    role: str | None = None
    eviction_policy: str | None = None
    appendonly: bool | None = None  # appendonly
    appendfsync: str | None = None  # appendfsync

    @property
    def survives(self) -> Literal["nothing", "restart"]:
        return "restart" if self.appendonly and self.appendfsync == "always" else "nothing"

    def check(self, server: str, allow_eviction: bool) -> None:
        """Raise for a server on which locks would not be what they promise."""
        major = (self.version or "").partition(".")[0]
        if major.isdecimal() and int(major) < _MIN_MAJOR_VERSION:
            raise NotPermitted(f"{server} runs Redis {self.version}: Leasehold needs Redis 7 or newer, or any Valkey")
        if self.role == "slave":
            raise Unreachable(
                f"{server} is a replica: it takes no locks; the URL must lead to its primary", engine="redis"
            )
        if self.eviction_policy not in (None, "noeviction") and not allow_eviction:
            raise NotPermitted(
                f"{server} has maxmemory-policy {self.eviction_policy}, which may drop a held lock: set it to "
                "noeviction, or accept that with allow_eviction=yes in the URL"
            )

    def warning(self, server: str) -> str | None:
        """What the owner of this server should know, if anything."""
        if self.appendonly is False:
            return (
                f"{server} keeps no log (appendonly no): when it restarts, every lock is free, also those still held; "
                "appendonly yes with appendfsync always keeps them"
            )
        if self.eviction_policy is None:
            return f"{server} does not let this user ask for its settings: whether it evicts locks is not known"
        return None


def parse_settings(info: object, fsync_reply: object) -> ServerSettings:
    """From the replies to ASK; an error instead of a reply leaves its part unknown."""
    fields: dict[str, str] = {}
    if isinstance(info, bytes):
        pairs = (line.partition(":") for line in info.decode(errors="replace").splitlines())
        fields = {name: value for name, _, value in pairs}
    appendfsync = (
        fsync_reply[1].decode()
        if isinstance(fsync_reply, list) and len(fsync_reply) == 2 and isinstance(fsync_reply[1], bytes)
        else None
    )
    aof_enabled = fields.get("aof_enabled")
    return ServerSettings(
        fields.get("redis_version"),
        fields.get("role"),
        fields.get("maxmemory_policy"),
        None if aof_enabled is None else aof_enabled == "1",
        appendfsync,
    )
