"""One server: where it is, how to sign in, and what its settings turned out to be.

Signing in and asking for the settings are one trip on every new connection, under the deadline of the call that needed
it. What is secret stays in here: nothing of it is in an error, a log line or a `repr`.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import hiredis

from leasehold.engines.redis.settings import ASK, Refused, Settings, Unreached, read
from leasehold.errors import ConfigError, Unavailable
from leasehold.runtime.base import Runtime, settle
from leasehold.runtime.loopstream import LoopStream, dial_in_loop
from leasehold.runtime.streams import Address, SocketStream, dial

_log = logging.getLogger("leasehold.redis")

# Trying again will not help: the user, the password, the database or the server's protected mode is in the way.
_FOR_GOOD: Final = (
    *("NOAUTH", "WRONGPASS", "NOPERM", "DENIED"),
    *("ERR AUTH", "ERR DB index", "ERR SELECT", "ERR unknown command"),
)
_MIDWAY: Final = ("ACL failure in script", "ERR The user executing the script")  # nor here; but it was begun

BROKEN: Final = (OSError, hiredis.ProtocolError)  # what a call raises that got no answer; TimeoutError is among them

_SAID: Final[set[str]] = set()  # warnings, once in a process


def described(error: Exception) -> str:
    return str(error) or type(error).__name__


def says(reply: Any, words: str | tuple[str, ...]) -> bool:
    """Whether it is an error reply that begins so."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(words)


def pack(*words: bytes | str | int) -> bytes:
    """One request in the server's protocol."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


class Server:
    """A place to open connections to. Shared by the twins of an engine and by the listener."""

    asks: ClassVar[Sequence[tuple[str, ...]]] = ASK  # of whoever is met there, behind the sign-in

    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
        database: int = 0,
        allow_eviction: bool = False,
    ) -> None:
        self.address, self._tls, self._secret, self._allow_eviction = address, tls, password, allow_eviction
        self.settings: Settings | None = None  # None: not asked yet
        sign_in = [("AUTH", user, password) if user else ("AUTH", password)] if user or password else []
        sign_in += [("SELECT", str(database))] if database else []
        self._greeting = b"".join(pack(*words) for words in (*sign_in, *self.asks))
        self._steps = len(sign_in)

    def __str__(self) -> str:
        return f"the Redis server at {self.address}"

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        """A new connection, signed in, to a server fit for locks."""
        try:
            return await self._open(runtime, deadline)
        except (*BROKEN, UnicodeError) as error:  # a name that is none
            raise Unreached(f"{self} cannot be reached: {described(error)}", engine="redis") from error

    async def _open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        parser = hiredis.Reader()
        stream: SocketStream | LoopStream
        if runtime.blocking:
            stream = dial(self.address, self._tls, parser, runtime.now, deadline)
        else:
            stream = await dial_in_loop(self.address, self._tls, parser, runtime.now, deadline)
        try:
            replies = await settle(stream.calls(self._greeting, self._steps + len(self.asks), deadline))
            self._meet(replies)
        except BaseException:
            stream.close()
            raise
        return stream

    def _meet(self, replies: list[Any]) -> None:
        info, sync = replies[self._steps :]
        self._signed_in(replies[: self._steps] if says(info, "NOPERM") else replies[: self._steps + 1])
        self.settings = settings = read(info, sync)
        settings.check(str(self), self._allow_eviction)
        warning = self._warning(settings)
        if warning is not None and warning not in _SAID:
            _SAID.add(warning)
            _log.warning("%s", warning)

    def _warning(self, settings: Settings) -> str | None:
        return settings.warning(str(self))

    def _signed_in(self, replies: list[Any]) -> None:
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                refusal = self.refusal(reply)
                raise refusal if isinstance(refusal, ConfigError) else Unreached(str(refusal), engine="redis")

    def refusal(self, error: Exception) -> ConfigError | Unavailable:
        """What an error reply means: try again later, or never."""
        said = str(error).partition(", with args")[0]  # a server that does not know AUTH says what it was given
        if self._secret:
            said = said.replace(self._secret, "***")
        if said.startswith(_FOR_GOOD):
            return Refused(f"{self} does not permit this by the URL given: {said}")
        if said.startswith(_MIDWAY):
            return ConfigError(f"{self} does not permit what its user needs for this: {said}")
        return Unavailable(f"{self} refused: {said}", engine="redis")
