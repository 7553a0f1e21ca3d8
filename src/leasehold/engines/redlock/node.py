"""One node: an independent Redis server, its backoff, and the releases it missed.

After a node did not answer, the client skips it for a while, so that it delays one call and not every call. On a new
connection the client first sends releases that the node missed, the latest ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from leasehold.core.timing import backoff
from leasehold.engines.redis.bounded_reader import BoundedReader
from leasehold.engines.redis.protocol import as_eval
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import RedisEndpoint
from leasehold.engines.redis.server_settings import SETTINGS_COMMANDS, ServerSettings
from leasehold.engines.registry import snapshot_items
from leasehold.engines.repeated_logs import log_once
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketStream
from leasehold.runtime.net.event_loop import LoopStream

_log = logging.getLogger("leasehold.redlock")

_MIN_BACKOFF: Final = 0.1  # seconds after the first failure; longer after each further one
_MAX_BACKOFF: Final = 5.0
_MAX_MISSED_RELEASES: Final = 10_000  # beyond that, votes are left to expire
_MAX_RELEASES_AT_ONCE: Final = 128  # on a new connection: the replies to all of them are in memory


class RedlockNode(RedisEndpoint):
    """Shared by a client's engine instances and its listener. Any thread may change it, in atomic steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tls = self._tls
        self.peers: Sequence[RedlockNode] = ()
        self.run_id = ""  # of the server that last answered here
        self.accepted_once = False  # its settings once passed the check
        self.backoff_until, self._failures = 0.0, 0
        self.missed_releases: dict[str, bytes] = {}  # by id hash: encoded calls of the release script
        self._release_script: Script | None = None

    def on_answer(self) -> None:
        self.backoff_until, self._failures = 0.0, 0

    def on_failure(self, now: float, random: float) -> None:
        self._failures += 1
        self.backoff_until = now + backoff(self._failures, _MIN_BACKOFF, _MAX_BACKOFF, 0.5 + random / 2)

    def add_missed_release(self, id_hash: str, script: Script, release: bytes) -> None:
        """Send this release when the node is back. If there are too many, drop the oldest: those votes expire."""
        self._release_script, self.missed_releases[id_hash] = script, release
        if len(self.missed_releases) > _MAX_MISSED_RELEASES:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread changed it meanwhile
                del self.missed_releases[next(iter(self.missed_releases))]

    def after_fork(self) -> None:
        """In a forked child: the parent sends the missed releases."""
        self.missed_releases = {}

    # ------------------------------------------------------ a new connection

    def handshake(self) -> tuple[bytes, int, Callable[[list[Any]], None]]:
        missed, handshake_count = self._missed_release_calls(), self._sign_in_count + len(SETTINGS_COMMANDS)

        def on_replies(replies: list[Any]) -> None:
            self._check_handshake(replies[:handshake_count])
            for (id_hash, release, _), reply in zip(missed, replies[handshake_count:], strict=True):
                self._on_release_reply(id_hash, release, reply)

        sign_in = self._encode_sign_in("" if self._password is None else self._password.read())
        requests = sign_in + self._handshake + b"".join([call for _, _, call in missed])
        return requests, handshake_count + len(missed), on_replies

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream:
        stream = await super().open(runtime, deadline)
        if isinstance(stream, LoopStream):
            stream.limit_batches(self.servers_at_once)
            for id_hash, release, call in self._missed_release_calls():
                stream.post(call, deadline, partial(self._on_release_reply, id_hash, release))
        return stream

    def _missed_release_calls(self) -> list[tuple[str, bytes, bytes]]:
        """Id hash, release, and request of each. The first request carries the script's text: a restarted node has
        forgotten the script."""
        missed, script = snapshot_items(self.missed_releases)[-_MAX_RELEASES_AT_ONCE:], self._release_script
        return [
            (id_hash, release, release if index or script is None else as_eval(script, release))
            for index, (id_hash, release) in enumerate(missed)
        ]

    def _on_release_reply(self, id_hash: str, release: bytes, reply: Any) -> None:
        # An error means not yet, such as LOADING: the release is kept.
        if isinstance(reply, int) and self.missed_releases.get(id_hash) is release:
            self.missed_releases.pop(id_hash, None)

    def _check_handshake(self, replies: list[Any]) -> None:
        super()._check_handshake(replies)
        self.run_id = _parse_run_id(replies[self._sign_in_count])
        for peer in self.peers:
            if self.run_id and peer is not self and peer.run_id == self.run_id:
                raise ConfigError(
                    f"{peer.address} and {self.address} are the same Redis server; a redlock:// URL needs independent "
                    "servers"
                )
        self.accepted_once = True

    def _log_settings(self, settings: ServerSettings) -> None:
        if settings.appendonly is False:
            log_once(
                _log,
                logging.INFO,
                f"{self} has no AOF (appendonly no): after a restart it has forgotten its votes, and a second holder "
                "may get a majority while the first still trusts its lease; set appendonly yes and appendfsync always "
                "to prevent that",
            )
            settings = settings._replace(appendonly=None)
        super()._log_settings(settings)


def new_reader(nodes: Sequence[RedlockNode]) -> Callable[[], BoundedReader]:
    """Makes the parser of a connection to one of the nodes."""
    return partial(BoundedReader, len(nodes))


def _parse_run_id(info: object) -> str:
    if not isinstance(info, bytes):
        return ""
    return info.partition(b"\nrun_id:")[2].partition(b"\r")[0].decode(errors="replace")


def ignore_reply(_reply: object) -> None:
    """For a reply that decides nothing."""
