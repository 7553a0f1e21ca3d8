"""One server: its address, the sign-in, and its settings.

Sign-in and settings take one round trip on every new connection, within the deadline of the call that opened it.
Credentials never appear in an error, a log line or a `repr`.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import hiredis

from leasehold.core.texts import escape, server_text
from leasehold.credentials import Password
from leasehold.engines.redis.bounded_reader import BoundedReader
from leasehold.engines.redis.server_settings import (
    SETTINGS_COMMANDS,
    CommandDenied,
    NotPermitted,
    ServerSettings,
    Unreachable,
    parse_settings,
)
from leasehold.engines.repeated_logs import log_once
from leasehold.errors import AccessDenied, ConfigError, Unavailable
from leasehold.runtime.base import Runtime, maybe_await
from leasehold.runtime.net.blocking import ReplyUnasked, SocketAddress, SocketStream, connect_blocking
from leasehold.runtime.net.event_loop import LoopStream, connect_in_loop

_log = logging.getLogger("leasehold.redis")

# A retry will not help: the user, password, database or protected mode of the server is the reason.
_PERMANENT_ERRORS: Final = (
    *("NOAUTH", "WRONGPASS", "NOPERM", "DENIED"),
    *("ERR AUTH", "ERR DB index", "ERR SELECT", "ERR unknown command"),
)
# Nor here, but the script has started.
_ERRORS_INSIDE_SCRIPT: Final = ("ACL failure in script", "ERR The user executing the script")

CONNECTION_ERRORS: Final = (OSError, hiredis.ProtocolError)  # raised by a call without a reply; includes TimeoutError


def describe_error(error: Exception) -> str:
    return server_text(getattr(error, "strerror", None) or error) or type(error).__name__


def is_error_reply(reply: Any, prefixes: str | tuple[str, ...]) -> bool:
    """Whether this is an error reply that starts with one of the prefixes."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(prefixes)


def nothing_to_confirm(replies: list[Any]) -> bool:
    """Whether all replies are errors or the busy replies of attempts, which name a holder at index 4 (protocol.py)."""
    return all(
        isinstance(reply, hiredis.ReplyError)
        or (isinstance(reply, list) and len(reply) == 6 and isinstance(reply[4], bytes))
        for reply in replies
    )


def encode_command(*arguments: bytes | str | int) -> bytes:
    """One request in the server's protocol (RESP)."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        raw = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


class RedisEndpoint:
    """Opens connections to one server. Shared by a client's engine instances and its listener."""

    handshake_commands: ClassVar[Sequence[tuple[str, ...]]] = SETTINGS_COMMANDS  # sent after the sign-in
    servers_at_once = 1  # that a call is sent to: each may send its share of what the client keeps in memory

    def __init__(
        self,
        address: SocketAddress,
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: Password | None = None,
        database: int = 0,
        allow_eviction: bool = False,
    ) -> None:
        self.address, self._tls, self._allow_eviction = address, tls, allow_eviction
        self.settings: ServerSettings | None = None  # None: not read yet
        self.known_scripts = set[str]()  # names of scripts whose text was sent with a batch
        self._user, self._password, self._database = user, password, database
        self._last_password = ""  # that was sent: error texts must not show it
        self._sign_in_count = (user != "" or password is not None) + (database != 0)
        self._handshake = b"".join(encode_command(*command) for command in self.handshake_commands)

    @property
    def anonymous(self) -> bool:
        """Clients do not sign in."""
        return not self._user and self._password is None

    async def sign_in(self, runtime: Runtime, deadline: float) -> bytes:
        """The requests that begin a connection, with the password as it is now."""
        password = self._password
        try:
            return self._encode_sign_in("" if password is None else await password.read_with(runtime, deadline))
        except ConfigError as error:
            raise NotPermitted(str(error)) from error
        except Unavailable as error:
            raise Unreachable(str(error), engine="redis") from error

    def _encode_sign_in(self, password: str) -> bytes:
        self._last_password, commands = password, list[tuple[str, ...]]()
        if self._user or self._password is not None:
            commands.append(("AUTH", self._user, password) if self._user else ("AUTH", password))
        if self._database:
            commands.append(("SELECT", str(self._database)))
        return b"".join(encode_command(*command) for command in commands)

    def __str__(self) -> str:
        return f"the Redis server at {self.address}"

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        """A new connection, signed in. Raises `ConfigError` if the server's settings are not safe for locks."""
        try:
            return await self._open(runtime, deadline)
        except (*CONNECTION_ERRORS, UnicodeError) as error:  # UnicodeError: not a host name
            raise Unreachable(f"{self} cannot be reached: {self.describe_failure(error)}", engine="redis") from error

    def describe_failure(self, error: Exception) -> str:
        if self._tls is not None and self.settings is None and isinstance(error, TimeoutError):
            # A port without TLS takes the handshake for the beginning of a command, and waits for the rest.
            return "no reply in time; check that its port expects TLS"
        if isinstance(error, ReplyUnasked):  # the error with which it refused the connection
            return f"{error}; check its maxclients and protected-mode, for which a server refuses connections"
        return describe_error(error)

    async def _open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        stream = await self._connect(runtime, deadline)
        try:
            # Only now: tools that report local variables would show the password whenever the server is down.
            handshake = await self.sign_in(runtime, deadline) + self._handshake
            replies = await maybe_await(
                stream.calls(handshake, self._sign_in_count + len(self.handshake_commands), deadline)
            )
            self._check_handshake(replies)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _connect(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        parser = BoundedReader(self.servers_at_once)
        if runtime.blocking:
            return connect_blocking(self.address, self._tls, parser, runtime.now, deadline)
        return await connect_in_loop(self.address, self._tls, parser, runtime.now, deadline)

    async def open_unchecked(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        """A new connection, signed in, whatever the server's settings and role. Not for locks."""
        try:
            stream = await self._connect(runtime, deadline)
            try:
                sign_in_and_ping = await self.sign_in(runtime, deadline) + encode_command("PING")
                self._check_sign_in(
                    await maybe_await(stream.calls(sign_in_and_ping, self._sign_in_count + 1, deadline))
                )
            except BaseException:
                stream.close()
                raise
        except (*CONNECTION_ERRORS, UnicodeError) as error:
            raise Unreachable(f"{self} cannot be reached: {self.describe_failure(error)}", engine="redis") from error
        return stream

    def _check_handshake(self, replies: list[Any]) -> None:
        info, fsync_reply = replies[self._sign_in_count :]
        self._check_sign_in(
            replies[: self._sign_in_count] if is_error_reply(info, "NOPERM") else replies[: self._sign_in_count + 1]
        )
        self.settings = settings = parse_settings(info, fsync_reply)
        settings.check(str(self), self._allow_eviction)
        self._log_settings(settings)

    def _log_settings(self, settings: ServerSettings) -> None:
        """Tell the operator of this server what its settings mean for locks."""
        if settings.appendonly is False:
            log_once(
                _log,
                logging.INFO,
                f"{self} has no AOF (appendonly no): a restart frees every lock, even those still held; set appendonly "
                "yes and appendfsync always to keep them",
            )
        if settings.eviction_policy is None:
            log_once(
                _log,
                logging.WARNING,
                f"{self} does not let this user read its settings (INFO): it may evict held locks",
            )

    def _check_sign_in(self, replies: list[Any]) -> None:
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                mapped_error = self.map_error(reply)
                raise (
                    mapped_error
                    if isinstance(mapped_error, ConfigError)
                    else Unreachable(str(mapped_error), engine="redis")
                )

    def map_error(self, error: Exception) -> ConfigError | Unavailable:
        """`Unavailable` if a retry may help, else `ConfigError`."""
        text = str(error).partition(", with args")[0]  # a server that does not know AUTH repeats its arguments
        if self._last_password and (shown := escape(self._last_password)) in text:
            text = text.replace(shown, "***")
            error.args = (text,)  # it will be the cause of ours, and a log shows the texts of both
        text = server_text(text)  # last: half a password would not be found
        if text.startswith(_PERMANENT_ERRORS):
            kind = CommandDenied if text.startswith("NOPERM") else NotPermitted
            if text.startswith("ERR unknown command"):
                return kind(f"{self} lacks a command; check that it is the kind of server that the URL names: {text}")
            return kind(f"{self} denied access; check user, password, permissions and database: {text}")
        if text.startswith(_ERRORS_INSIDE_SCRIPT):
            return AccessDenied(f"{self} denied a command inside a script; check the permissions of its user: {text}")
        return Unavailable(f"{self} refused the request: {text}", engine="redis")
