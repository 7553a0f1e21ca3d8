"""One node: a Redis server of its own, whether it is worth waiting for, and what it has to be told when it is back.

A node that did not answer rests: for a while nobody asks it, so that it costs one call its patience and not every call.
Releases it missed are the first thing it hears on a new connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from leasehold.core.timing import backoff
from leasehold.engines.redis.protocol import as_eval
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import RedisEndpoint
from leasehold.engines.redis.server_settings import SETTINGS_COMMANDS, ServerSettings
from leasehold.engines.registry import snapshot_items
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketStream
from leasehold.runtime.net.event_loop import LoopStream

_MIN_BACKOFF: Final = 0.1  # after the first miss; more after each further one
_MAX_BACKOFF: Final = 5.0
_MAX_MISSED_RELEASES: Final = 10_000  # releases; what is beyond that lapses


class RedlockNode(RedisEndpoint):
    """Shared by the twins of a client and its listener. Changed by any thread, in single steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tls = self._tls
        self.peers: Sequence[RedlockNode] = ()
        self.run_id = ""  # of the server that was met here last
        self.accepted_once = False  # it was fit for locks once
        self.backoff_until, self._failures = 0.0, 0
        self.missed_releases: dict[str, bytes] = {}  # by mark: releases, which are calls of one script
        self._release_script: Script | None = None

    def on_answer(self) -> None:
        self.backoff_until, self._failures = 0.0, 0

    def on_failure(self, now: float, random: float) -> None:
        self._failures += 1
        self.backoff_until = now + backoff(self._failures, _MIN_BACKOFF, _MAX_BACKOFF, 0.5 + random / 2)

    def add_missed_release(self, id_hash: str, script: Script, release: bytes) -> None:
        """Have it told of this release when it is back. With too many of them the oldest are left to lapse."""
        self._release_script, self.missed_releases[id_hash] = script, release
        if len(self.missed_releases) > _MAX_MISSED_RELEASES:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread is at it
                del self.missed_releases[next(iter(self.missed_releases))]

    def after_fork(self) -> None:
        """What was missed is the parent's to say."""
        self.missed_releases = {}

    # ------------------------------------------------------------ a connection

    def handshake(self) -> tuple[bytes, int, Callable[[list[Any]], None]]:
        missed, handshake_count = self._missed_release_calls(), self._sign_in_count + len(SETTINGS_COMMANDS)

        def on_replies(replies: list[Any]) -> None:
            self._check_handshake(replies[:handshake_count])
            for (id_hash, release, _), reply in zip(missed, replies[handshake_count:], strict=True):
                self._on_release_reply(id_hash, release, reply)

        return self._handshake + b"".join([call for _, _, call in missed]), handshake_count + len(missed), on_replies

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        stream = await super().open(runtime, deadline)
        if isinstance(stream, LoopStream):
            for id_hash, release, call in self._missed_release_calls():
                stream.post(call, deadline, partial(self._on_release_reply, id_hash, release))
        return stream

    def _missed_release_calls(self) -> list[tuple[str, bytes, bytes]]:
        """And how each is said: a node that was down has forgotten the script, and learns it by the first."""
        missed, script = snapshot_items(self.missed_releases), self._release_script
        return [
            (id_hash, release, release if index or script is None else as_eval(script, release))
            for index, (id_hash, release) in enumerate(missed)
        ]

    def _on_release_reply(self, id_hash: str, release: bytes, reply: Any) -> None:
        if (
            isinstance(reply, int) and self.missed_releases.get(id_hash) is release
        ):  # not while it is still reading its log
            self.missed_releases.pop(id_hash, None)

    def _check_handshake(self, replies: list[Any]) -> None:
        super()._check_handshake(replies)
        self.run_id = _parse_run_id(replies[self._sign_in_count])
        for peer in self.peers:
            if self.run_id and peer is not self and peer.run_id == self.run_id:
                raise ConfigError(
                    f"{peer.address} and {self.address} are one Redis server under two addresses: a redlock needs "
                    "servers that fail apart"
                )
        self.accepted_once = True

    def _warning(self, settings: ServerSettings) -> str | None:
        if settings.appendonly is False:
            return (
                f"{self} keeps no log (appendonly no): restarted, it has forgotten its part of every lock, and may "
                "make up a majority for a second holder while the first still trusts its lease; appendonly yes with "
                "appendfsync always keeps it"
            )
        return super()._warning(settings)


def _parse_run_id(info: object) -> str:
    if not isinstance(info, bytes):
        return ""
    return info.partition(b"\nrun_id:")[2].partition(b"\r")[0].decode(errors="replace")


def ignore_reply(_reply: object) -> None:
    """For an answer that decides nothing."""
