"""A script's reply, or an error of ours: the one place where what a wire raises, or a server refuses, is mapped (E9).

- A server that does not know a script, or forgot it, is sent its text.
- A connection that broke in the middle is replaced and the request repeated: scripts find what they did before by the
  claim's mark (E2, E6). A request that was not answered by its deadline is not repeated: it is unknown.
- A request that was certainly not carried out, because the server said so or was never reached, is asked elsewhere if
  the topology knows where that is, until its deadline.
- Whoever stands in line outlasts a restart, also of the only server: it is asked again, until the deadline, or until
  its `wait` is over.
- An answer of a server that another has taken over from meanwhile is none: it is asked again there.
- With `min_replicas`, a grant or renewal counts once so many replicas have it. WAIT knows only the writes of its own
  connection, so it goes down the same one, and nobody else uses that meanwhile. It follows the answer: a release sent
  behind an attempt that was given up would stand behind a WAIT too, and go with the connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import hiredis

from leasehold.engines.redis.requests import spelled_out
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import BROKEN, described, pack, says
from leasehold.engines.redis.settings import Unreached
from leasehold.engines.redis.topology import ELSEWHERE, Rejected, Topology, pause_before
from leasehold.engines.redis.wire import Regret, Wire
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime, settle

_WAIT_SHARE: Final = 0.8  # of the time left: the answer to WAIT must arrive in time too
_REPEATS: Final = 3  # of a request whose connection broke: a server that has just been promoted hangs up once more


# Until when it is worth asking a server again that cannot be reached; None: it is not.
Patient: TypeAlias = Callable[[], float] | None


class Asked(NamedTuple):
    """A request on its way."""

    tag: str  # of the bucket it is about
    script: Script
    packed: bytes
    deadline: float
    regret: Regret = None
    again: int = _REPEATS  # 0: repeated, it would not get the same answer
    patient: Patient = None
    confirm: bool = False


class Answer(NamedTuple):
    reply: Any
    confirmed: bool = True  # enough replicas have what it wrote


class Asking:
    """Of one engine."""

    def __init__(self, runtime: Runtime, topology: Topology, min_replicas: int) -> None:
        self._runtime, self._topology, self.min_replicas = runtime, topology, min_replicas

    def one(
        self,
        tag: str,
        script: Script,
        packed: bytes,
        deadline: float,
        regret: Regret = None,
        again: int = _REPEATS,
        patient: Patient = None,
    ) -> Any | Awaitable[Any]:
        """The reply to one script: at once if a blocking call is all it took, else to be awaited."""
        topology = self._topology
        wire = topology.wire(tag)
        if wire is not None:
            try:
                reply = wire.call(packed, deadline, regret)
            except BROKEN as error:
                return self._once_more(error, wire, Asked(tag, script, packed, deadline, regret, again, patient))
            answered = reply.__class__ is list or reply.__class__ is int
            if answered and not (topology.follows and topology.replaced(wire)):
                return reply
        request = (tag, script, packed, deadline, regret, again, patient)  # for whoever has to ask once more
        return self._reply(Asked(*request)) if wire is None else self._settled(reply, wire, request)

    async def _settled(self, reply: Any, wire: Wire, request: tuple[Any, ...]) -> Any:
        try:
            if hasattr(reply, "__await__"):  # as `settle` does, without a coroutine more
                reply = await reply
            self._still(wire)
        except BROKEN as error:
            return await self._once_more(error, wire, Asked(*request))
        except Unreached as error:
            return (await self._pursue(Asked(*request), wire, error)).reply
        if not isinstance(reply, hiredis.ReplyError):
            return reply
        return (await self._pursue(Asked(*request), wire, reply)).reply

    async def _reply(self, asked: Asked) -> Any:
        return (await self.confirmed(asked)).reply

    async def confirmed(self, asked: Asked) -> Answer:
        """The same, and whether enough replicas have it, if that is asked for."""
        wire, nobody = self._topology.wire(asked.tag), None
        if wire is None:
            try:
                await self._topology.find(asked.deadline)
            except Unreached as error:
                if asked.patient is None:
                    raise
                nobody = error
            wire = self._topology.wire(asked.tag)
        return await self._pursue(asked, wire, nobody if wire is None else None)

    async def _pursue(self, asked: Asked, wire: Wire | None, error: Exception | None = None) -> Answer:
        """Ask there; or, if `error` says that this was no use, where the name is by now: until the deadline."""
        if wire is None and error is None:
            error = Unreached("no server has this part of the names just now", engine="redis")
        turn = 0
        while True:
            if error is not None:
                asked, wire = await self._instead(asked, wire, error, turn)
                turn += 1
            assert wire is not None
            try:
                answer = await self._send(asked, wire)
            except BROKEN as broken:
                return await self._broken(broken, wire, asked, error)
            except Unreached as unreached:
                error = unreached
                continue
            if not isinstance(answer.reply, hiredis.ReplyError):
                return answer
            error = answer.reply

    async def _instead(self, asked: Asked, wire: Wire | None, error: Exception, turn: int) -> tuple[Asked, Wire]:
        """What to ask, and where, of a request that was not carried out."""
        if wire is not None and says(error, "NOSCRIPT"):
            text = spelled_out(asked.script, asked.packed)
            if text != asked.packed:
                return asked._replace(packed=text), wire
        rejected = Rejected(error, wire)
        patience = 0.0 if asked.patient is None else min(asked.deadline, asked.patient())
        alone = wire is None and asked.patient is not None  # nobody is there who could be followed
        where = await self._topology.elsewhere(asked.tag, rejected, turn, patience if alone else asked.deadline)
        if where is not None:
            return asked, where
        away = isinstance(error, Unreached) or says(error, "LOADING")  # it was not carried out
        if wire is not None and away and await pause_before(self._runtime, turn, patience):
            return asked, wire
        raise rejected.mapped() if wire is None else self._refusal(wire, error)

    async def _send(self, asked: Asked, wire: Wire) -> Answer:
        if not asked.confirm:
            reply = await settle(wire.call(asked.packed, asked.deadline, asked.regret))
            self._still(wire)
            return Answer(reply)
        replies, confirmed = await self._trip(wire, [asked.packed], asked.deadline, True, asked.regret)
        return Answer(replies[0], confirmed)

    async def _once_more(self, error: Exception, wire: Wire, asked: Asked) -> Any:
        return (await self._broken(error, wire, asked)).reply

    async def _broken(self, error: Exception, wire: Wire, asked: Asked, before: Exception | None = None) -> Answer:
        """What became of the request is not known. `before`: why it was not carried out elsewhere."""
        self._lost(wire)
        if isinstance(error, TimeoutError) or not asked.again:
            raise self._silence(wire, error, before) from error
        try:
            return await self.confirmed(asked._replace(again=asked.again - 1))
        except LeaseholdError as refusal:  # of the new connection: it says nothing about the first request
            raise Unavailable(str(refusal), engine="redis") from refusal

    # --------------------------------------------------------------- batches

    async def many(self, asked: Sequence[Asked]) -> list[Answer | LeaseholdError]:
        """The answers to many calls of one script: one trip for all that one server has."""
        answers: list[Answer | LeaseholdError] = [Answer(None)] * len(asked)
        refused = await self._round(asked, range(len(asked)), answers)
        if len(refused) > 1:  # perhaps all of them have moved: the first finds out where to
            first, *rest = refused
            answers[first] = await self._alone(asked[first])
            refused = await self._round(asked, rest, answers)
        for count, number in enumerate(refused):
            if self._runtime.now() >= asked[number].deadline:
                answers[number] = Unavailable("no time was left to ask", engine="redis")
                continue
            share = self._share(asked[number].deadline, len(refused) - count)
            answers[number] = await self._alone(asked[number]._replace(deadline=share))
        return answers

    async def _alone(self, asked: Asked) -> Answer | LeaseholdError:
        try:
            return await self.confirmed(asked)
        except LeaseholdError as error:
            return error

    async def _round(
        self, asked: Sequence[Asked], numbers: Sequence[int], answers: list[Answer | LeaseholdError]
    ) -> list[int]:
        """Ask each server once, and none for longer than its share of the time. Returns what belongs elsewhere."""
        by_wire: dict[Wire | None, list[int]] = {}
        for number in numbers:
            by_wire.setdefault(self._topology.wire(asked[number].tag), []).append(number)
        follows, refused = self._topology.follows, by_wire.pop(None, [])
        for count, (wire, mine) in enumerate(by_wire.items()):
            assert wire is not None
            try:
                batch = [asked[number] for number in mine]
                replies, confirmed = await self._batch(
                    wire, batch, self._share(batch[0].deadline, len(by_wire) - count)
                )
            except LeaseholdError as error:
                if follows and isinstance(error, Unreached):
                    refused += mine
                    continue
                replies, confirmed = [error] * len(mine), True
            for number, reply in zip(mine, replies, strict=True):
                if follows and says(reply, ELSEWHERE):
                    refused.append(number)
                elif isinstance(reply, hiredis.ReplyError):
                    answers[number] = self._refusal(wire, reply)
                else:
                    answers[number] = reply if isinstance(reply, LeaseholdError) else Answer(reply, confirmed)
        return refused

    async def _batch(self, wire: Wire, asked: Sequence[Asked], deadline: float) -> Answer:
        script, confirm = asked[0].script, asked[0].confirm
        replies, confirmed = await self._repeated(wire, [each.packed for each in asked], deadline, confirm)
        unknown = [n for n, reply in enumerate(replies) if says(reply, "NOSCRIPT")]
        if unknown:
            first, *rest = [asked[n].packed for n in unknown]
            more, too = await self._repeated(wire, [spelled_out(script, first), *rest], deadline, confirm)
            confirmed = confirmed and too
            for n, reply in zip(unknown, more, strict=True):
                replies[n] = reply
        return Answer(replies, confirmed)

    async def _repeated(self, wire: Wire, packed: Sequence[bytes], deadline: float, confirm: bool) -> Answer:
        try:
            return await self._trip(wire, packed, deadline, confirm)
        except BROKEN as error:
            self._lost(wire)
            if isinstance(error, TimeoutError):
                raise self._silence(wire, error) from error
            if self._topology.follows:  # batches may be asked again anywhere
                raise Unreached(f"{wire.server} hung up: {described(error)}", engine="redis") from error
        try:
            return await self._trip(wire, packed, deadline, confirm)
        except BROKEN as error:
            raise self._silence(wire, error) from error
        except LeaseholdError as refusal:
            raise Unavailable(str(refusal), engine="redis") from refusal

    async def at(self, wire: Wire, packed: bytes, deadline: float) -> Any:
        """The reply of one server, wherever names are."""
        try:
            replies, _ = await self._repeated(wire, [packed], deadline, confirm=False)
        except Unreached:
            self._lost(wire)
            raise
        if isinstance(replies[0], hiredis.ReplyError):
            raise self._refusal(wire, replies[0])
        return replies[0]

    # ------------------------------------------------------------ one trip

    async def _trip(
        self, wire: Wire, packed: Sequence[bytes], deadline: float, confirm: bool, regret: Regret = None
    ) -> Answer:
        confirm = confirm and self.min_replicas > 0
        requests, wait = b"".join(packed), b""
        if confirm:
            share = (deadline - self._runtime.now()) * _WAIT_SHARE
            wait = pack("WAIT", self.min_replicas, max(1, int(share * 1000)))
        replies = list(await settle(wire.calls(requests, len(packed), deadline, wait, regret)))
        self._still(wire)
        if not confirm:
            return Answer(replies)
        count = replies.pop()
        if isinstance(count, hiredis.ReplyError) and not any(isinstance(each, hiredis.ReplyError) for each in replies):
            error = wire.server.refusal(count)
            # What was asked is done: nobody may take this for a refusal of it.
            raise ConfigError(str(error)) if isinstance(error, ConfigError) else error
        return Answer(replies, isinstance(count, int) and count >= self.min_replicas)

    def _still(self, wire: Wire) -> None:
        """Raise unless what this server answered counts. It does not know that it was replaced; this client does."""
        if self._topology.replaced(wire):
            raise ConnectionAbortedError("another has taken over from it")

    def _share(self, deadline: float, count: int) -> float:
        now = self._runtime.now()
        return now + (deadline - now) / count

    def _silence(self, wire: Wire, error: Exception, before: Exception | None = None) -> Unavailable:
        after = "" if before is None else f"; before that: {before}"
        return Unavailable(f"{wire.server} did not answer: {described(error)}{after}", engine="redis")

    def _lost(self, wire: Wire) -> None:
        if self._topology.follows:
            self._topology.doubt(wire)

    def _refusal(self, wire: Wire, error: Exception) -> LeaseholdError:
        if says(error, ELSEWHERE):
            self._topology.doubt(wire)
        return error if isinstance(error, LeaseholdError) else wire.server.refusal(error)
