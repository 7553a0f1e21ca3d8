"""A script's reply, or an error of ours: the one place where what a wire raises, or a server refuses, is mapped (E9).

- A server that does not know a script, or forgot it, is sent its text.
- A connection that broke in the middle is replaced and the request repeated, once: scripts find what they did before by
  the claim's mark (E2, E6). A request that was not answered by its deadline is not repeated: it is unknown.
- With `min_replicas`, a grant or renewal counts once so many replicas have it. WAIT knows only the writes of its own
  connection, so it goes down the same one, and nobody else uses that meanwhile. It follows the answer: a release sent
  behind an attempt that was given up would stand behind a WAIT too, and go with the connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Final, NoReturn

import hiredis

from leasehold.engines.redis.requests import spelled_out
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import BROKEN, described, pack
from leasehold.engines.redis.topology import Topology
from leasehold.engines.redis.wire import Regret, Wire
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime, settle

# The server at this address does not serve us now; another may be there in a moment.
_ELSEWHERE: Final = ("READONLY", "MASTERDOWN", "CLUSTERDOWN")
_WAIT_SHARE: Final = 0.8  # of the time left: the answer to WAIT must arrive in time too


class Asking:
    """Of one engine."""

    def __init__(self, runtime: Runtime, topology: Topology, min_replicas: int) -> None:
        self._runtime, self._topology, self.min_replicas = runtime, topology, min_replicas

    def one(
        self,
        wire: Wire,
        script: Script,
        packed: bytes,
        deadline: float,
        regret: Regret = None,
        again: bool = True,
    ) -> Any | Awaitable[Any]:
        """The reply to one script: at once if a blocking call is all it took, else to be awaited.

        `again=False`: a repeated request would not get the same answer.
        """
        try:
            reply = wire.call(packed, deadline, regret)
        except BROKEN as error:
            return self._once_more(error, wire, script, packed, deadline, regret, again)
        if reply.__class__ is list or reply.__class__ is int:
            return reply
        return self._settled(reply, wire, script, packed, deadline, regret, again)

    async def _settled(
        self, reply: Any, wire: Wire, script: Script, packed: bytes, deadline: float, regret: Regret, again: bool
    ) -> Any:
        if hasattr(reply, "__await__"):  # as `settle` does, without a coroutine more
            try:
                reply = await reply
            except BROKEN as error:
                return await self._once_more(error, wire, script, packed, deadline, regret, again)
        if not isinstance(reply, hiredis.ReplyError):
            return reply
        text = spelled_out(script, packed)
        if not _says(reply, "NOSCRIPT") or text == packed:
            self._refuse(wire, reply)
        return await settle(self.one(wire, script, text, deadline, regret, again))

    async def _once_more(
        self, error: Exception, wire: Wire, script: Script, packed: bytes, deadline: float, regret: Regret, again: bool
    ) -> Any:
        if isinstance(error, TimeoutError) or not again:
            raise self._silence(wire, error) from error
        try:
            return await settle(self.one(wire, script, packed, deadline, regret, again=False))
        except LeaseholdError as refusal:  # of the new connection: what became of the first request is not known
            raise Unavailable(str(refusal), engine="redis") from refusal

    async def many(
        self,
        wire: Wire,
        script: Script,
        packed: Sequence[bytes],
        deadline: float,
        *,
        confirm: bool = False,
        regret: Regret = None,
    ) -> tuple[list[Any], bool]:
        """The replies to many calls of one script, in one trip; and whether enough replicas have what they wrote."""
        replies, confirmed = await self._trip(wire, packed, deadline, confirm, regret, again=True)
        unknown = [n for n, reply in enumerate(replies) if _says(reply, "NOSCRIPT")]
        if unknown:
            text = spelled_out(script, packed[unknown[0]])
            rest = [text, *(packed[n] for n in unknown[1:])]
            more, too = await self._trip(wire, rest, deadline, confirm, regret, again=True)
            confirmed = confirmed and too
            for n, reply in zip(unknown, more, strict=True):
                replies[n] = reply
        for reply in replies:
            if reply.__class__ is hiredis.ReplyError:
                self._refuse(wire, reply)
        return replies, confirmed

    async def _trip(
        self, wire: Wire, packed: Sequence[bytes], deadline: float, confirm: bool, regret: Regret, again: bool
    ) -> tuple[list[Any], bool]:
        confirm = confirm and self.min_replicas > 0
        requests, wait = b"".join(packed), b""
        if confirm:
            share = (deadline - self._runtime.now()) * _WAIT_SHARE
            wait = pack("WAIT", self.min_replicas, max(1, int(share * 1000)))
        try:
            replies = list(await settle(wire.calls(requests, len(packed), deadline, wait, regret)))
        except BROKEN as broken:
            if isinstance(broken, TimeoutError) or not again:
                raise self._silence(wire, broken) from broken
            try:
                return await self._trip(wire, packed, deadline, confirm, regret, again=False)
            except LeaseholdError as refusal:
                raise Unavailable(str(refusal), engine="redis") from refusal
        if not confirm:
            return replies, True
        count = replies.pop()
        if isinstance(count, hiredis.ReplyError) and not any(isinstance(each, hiredis.ReplyError) for each in replies):
            error = wire.server.refusal(count)
            # What was asked is done: nobody may take this for a refusal of it.
            raise ConfigError(str(error)) if isinstance(error, ConfigError) else error
        return replies, isinstance(count, int) and count >= self.min_replicas

    def _silence(self, wire: Wire, error: Exception) -> Unavailable:
        return Unavailable(f"{wire.server} did not answer: {described(error)}", engine="redis")

    def _refuse(self, wire: Wire, reply: Exception) -> NoReturn:
        if _says(reply, _ELSEWHERE):
            self._topology.doubt(wire)
        raise wire.server.refusal(reply)


def _says(reply: Any, words: str | tuple[str, ...]) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(words)
