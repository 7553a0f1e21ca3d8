"""What a server's settings mean for locks. They are read on every new connection, since a restart may change them.

An eviction policy may drop a held lock: such a server is refused, unless the URL allows it. Unless the AOF (append-only
file) is synced at every write, a crash loses grants: the traits say so, and a log line names the consequence.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from leasehold.errors import AccessDenied, ConfigError, Unavailable

SETTINGS_COMMANDS: Final = (  # one round trip, together with the sign-in
    ("INFO", "server", "memory", "persistence", "replication"),
    ("CONFIG", "GET", "appendfsync"),
)
SHORT_MIN_HOLD: Final = 2.0  # seconds: no longer than a restart takes; elections use one of their own
_MIN_MAJOR_VERSION: Final = 7  # script flags, and PXAT
_MAX_INFO: Final = 65_536  # bytes that are read: a server sends a few thousand, and a line for each replica


class Unreachable(Unavailable):
    """No connection could be opened: the request was certainly not executed."""


class NotPermitted(ConfigError):
    """Denied by permissions or settings: the request was certainly not executed."""


class CommandDenied(NotPermitted, AccessDenied):
    """The user of the URL lacks a permission."""


class ServerSettings(NamedTuple):
    """Fields are None if this user may not read them."""

    version: str | None = None
    role: str | None = None
    eviction_policy: str | None = None
    appendonly: bool | None = None
    appendfsync: str | None = None

    @property
    def survives(self) -> Literal["nothing", "restart"]:
        return "restart" if self.appendonly and self.appendfsync == "always" else "nothing"

    def check(self, server: str, allow_eviction: bool) -> None:
        """Raise if locks on this server could not keep their promises."""
        major = (self.version or "").partition(".")[0]
        if major.isdecimal() and int(major) < _MIN_MAJOR_VERSION:
            raise NotPermitted(f"{server} runs Redis {self.version}: Leasehold needs Redis 7 or newer, or any Valkey")
        if self.role == "slave":
            raise Unreachable(
                f"{server} is a replica and cannot grant locks; use the URL of its primary", engine="redis"
            )
        if self.eviction_policy not in (None, "noeviction") and not allow_eviction:
            raise NotPermitted(
                f"{server} has maxmemory-policy {self.eviction_policy}, which may evict a held lock; set it to "
                "noeviction, or accept this with allow_eviction=yes in the URL"
            )


def info_fields(reply: object) -> dict[str, str]:
    """The fields in a reply to INFO or CLUSTER INFO; none if it is an error. Each line becomes an object, so a reply of
    millions of lines must not be split."""
    if not isinstance(reply, bytes):
        return {}
    lines = reply[:_MAX_INFO].decode(errors="replace").split("\r\n")
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def parse_settings(info: object, fsync_reply: object) -> ServerSettings:
    """From the replies to SETTINGS_COMMANDS. If a reply is an error, its fields stay unknown."""
    fields = info_fields(info)
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
