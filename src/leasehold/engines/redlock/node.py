"""One node: a Redis server of its own, whether it is worth waiting for, and what it has to be told when it is back.

A node that did not answer rests: for a while nobody asks it, so that it costs one call its patience and not every call.
Releases it missed are the first thing it hears on a new connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from leasehold.book import every
from leasehold.core.timing import backoff
from leasehold.engines.redis.requests import spelled_out
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import Server
from leasehold.engines.redis.settings import ASK, Settings
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.runtime.loopstream import LoopStream
from leasehold.runtime.streams import SocketStream

_REST: Final = 0.1  # after the first miss; more after each further one
_LONGEST_REST: Final = 5.0
_MOST_MISSED: Final = 10_000  # releases; what is beyond that lapses


class Node(Server):
    """Shared by the twins of a client and its listener. Changed by any thread, in single steps."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.tls = self._tls
        self.peers: Sequence[Node] = ()
        self.run_id = ""  # of the server that was met here last
        self.met = False  # it was fit for locks once
        self.rests_until, self._misses = 0.0, 0
        self.missed: dict[str, bytes] = {}  # by mark: releases, which are calls of one script
        self._script: Script | None = None

    def answered(self) -> None:
        self.rests_until, self._misses = 0.0, 0

    def silent(self, now: float, fraction: float) -> None:
        self._misses += 1
        self.rests_until = now + backoff(self._misses, _REST, _LONGEST_REST, 0.5 + fraction / 2)

    def owe(self, mark: str, script: Script, release: bytes) -> None:
        """Have it told of this release when it is back. With too many of them the oldest are left to lapse."""
        self._script, self.missed[mark] = script, release
        if len(self.missed) > _MOST_MISSED:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread is at it
                del self.missed[next(iter(self.missed))]

    def after_fork(self) -> None:
        """What was missed is the parent's to say."""
        self.missed = {}

    # ------------------------------------------------------------ a connection

    def greeting(self) -> tuple[bytes, int, Callable[[list[Any]], None]]:
        missed, known = self._missed(), self._steps + len(ASK)

        def meet(replies: list[Any]) -> None:
            self._meet(replies[:known])
            for (mark, release, _), reply in zip(missed, replies[known:], strict=True):
                self._heard(mark, release, reply)

        return self._greeting + b"".join([said for _, _, said in missed]), known + len(missed), meet

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        stream = await super().open(runtime, deadline)
        if isinstance(stream, LoopStream):
            for mark, release, said in self._missed():
                stream.post(said, deadline, partial(self._heard, mark, release))
        return stream

    def _missed(self) -> list[tuple[str, bytes, bytes]]:
        """And how each is said: a node that was down has forgotten the script, and learns it by the first."""
        missed, script = every(self.missed), self._script
        return [
            (mark, release, release if number or script is None else spelled_out(script, release))
            for number, (mark, release) in enumerate(missed)
        ]

    def _heard(self, mark: str, release: bytes, reply: Any) -> None:
        if isinstance(reply, int) and self.missed.get(mark) is release:  # not while it is still reading its log
            self.missed.pop(mark, None)

    def _meet(self, replies: list[Any]) -> None:
        super()._meet(replies)
        self.run_id = _run_id(replies[self._steps])
        for other in self.peers:
            if self.run_id and other is not self and other.run_id == self.run_id:
                raise ConfigError(
                    f"{other.address} and {self.address} are one Redis server under two addresses: a redlock needs "
                    "servers that fail apart"
                )
        self.met = True

    def _warning(self, settings: Settings) -> str | None:
        if settings.log is False:
            return (
                f"{self} keeps no log (appendonly no): restarted, it has forgotten its part of every lock, and may "
                "make up a majority for a second holder while the first still trusts its lease; appendonly yes with "
                "appendfsync always keeps it"
            )
        return super()._warning(settings)


def _run_id(info: object) -> str:
    if not isinstance(info, bytes):
        return ""
    return info.partition(b"\nrun_id:")[2].partition(b"\r")[0].decode(errors="replace")


def nobody_waits(_reply: object) -> None:
    """For an answer that decides nothing."""
