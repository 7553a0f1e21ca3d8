"""One question to all nodes, at once, and what each of them made of it.

Blocking, a caller has a bundle of connections, one to each node, for as long as a call lasts. Under asyncio all tasks
share one connection to each. Either way the nodes are asked by the caller's own thread or task, before any answer is
awaited.

A round lasts until all nodes have answered, but not for long: once their answers decide it, the others have only their
patience, which is short against the ttl; undecided, until the deadline. Who has not answered by then is sent the
`regret`, behind what it was asked, and rests for a while.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import hiredis

from leasehold.engines.redis.requests import spelled_out
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import described, says
from leasehold.engines.redis.wire import SharedWire
from leasehold.engines.redlock.agreement import majority
from leasehold.engines.redlock.node import Node, nobody_waits
from leasehold.errors import ConfigError, LeaseholdError, Mismatch, Unavailable
from leasehold.runtime.base import Runtime
from leasehold.runtime.loopscatter import gathering
from leasehold.runtime.scatter import Answers, Bundle, Limit, Questions

T = TypeVar("T")

_IDLE: Final = 64  # bundles kept while nobody uses them
_PATIENCE: Final = (0.05, 0.5)  # seconds: the least and the most that is waited for a node whose answer is not needed
_SHARE: Final = 0.1  # of the ttl
_LINGER: Final = 0.5  # that a connection is kept beyond the deadline: the regret goes behind what was asked
_NOBODY: Final[Mapping[int, Sequence[bytes]]] = {}


class Heard(NamedTuple):
    """What the nodes said, by number; and why the others did not."""

    replies: dict[int, list[Any]]
    errors: dict[int, Exception]

    def each(self, read: Callable[[Any], T]) -> dict[int, T]:
        """The first reply of each, as it is to be read."""
        return self._read({number: replies[0] for number, replies in self.replies.items()}, read)

    def whole(self, read: Callable[[list[Any]], T]) -> dict[int, T]:
        """All replies of each."""
        return self._read(dict(self.replies), read)

    def _read(self, said: dict[int, Any], read: Callable[[Any], T]) -> dict[int, T]:
        """What cannot be read is no answer, whatever the others say."""
        found: dict[int, T] = {}
        for number, reply in said.items():
            try:
                found[number] = read(reply)
            except LeaseholdError as error:
                self.errors[number] = error
                del self.replies[number]
        return found


Packed: TypeAlias = Sequence[bytes]
Decided: TypeAlias = Callable[[Mapping[int, list[Any]]], bool]


class Way(Protocol):
    """How the nodes are reached."""

    async def ask(self, asked: Questions, count: int, limit: Limit) -> Answers: ...

    def post(self, number: int, packed: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        """Send behind everything sent so far, and wait for nothing. False: cannot be done here."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


class Asking:
    """Of one engine."""

    def __init__(self, nodes: Sequence[Node], runtime: Runtime) -> None:
        self.nodes, self._runtime, self.quorum = nodes, runtime, majority(len(nodes))
        self.way: Way = Bundles(nodes, runtime) if runtime.blocking else Wires(nodes, runtime)

    async def round(
        self,
        script: Script | None,
        packed: Packed | Mapping[int, Packed],
        deadline: float,
        ttl: float,
        decided: Decided,
        regret: Callable[[], bytes] = bytes,
    ) -> Heard:
        """Ask all nodes the same, or some of them each its own; what is packed are calls of one script, as many for
        each."""
        now = self._runtime.now()
        asked, resting = (packed, _NOBODY) if isinstance(packed, Mapping) else self._chosen(now, packed)
        patience = now + min(max(ttl * _SHARE, _PATIENCE[0]), _PATIENCE[1], (deadline - now) / 2)

        def enough(answers: Answers) -> bool:
            # Those that do not know the script have to be asked once more, and not by the deadline.
            return bool(_unknowing(answers)) or decided(_said(answers))

        answers = await self._ask(asked, Limit(patience, deadline, enough), regret, resting)
        if script is not None and (unknowing := _unknowing(answers)):
            limit = Limit(patience, deadline, lambda answers: decided(_said(answers)))
            for number in unknowing:
                del answers[number]
            again = {n: each for n, each in {**asked, **resting}.items() if n in unknowing}
            others = {n: each for n, each in resting.items() if n not in answers and n not in again}
            answers |= await self._taught(script, again, others, limit.beside(answers), regret)
        errors: dict[int, Exception] = {}
        replies: dict[int, list[Any]] = {}
        for number in range(len(self.nodes)):
            found = answers.get(number)
            if isinstance(found, list):
                self._hear(number, found, replies, errors)
            else:
                errors[number] = self._missed(number, found)
        return Heard(replies, errors)

    async def _ask(
        self,
        asked: Mapping[int, Packed],
        limit: Limit,
        regret: Callable[[], bytes],
        later: Mapping[int, Packed] = _NOBODY,
    ) -> Answers:
        count = max(map(len, (*asked.values(), *later.values())), default=0)
        return await self.way.ask(Questions(_joined(asked), _joined(later), regret), count, limit)

    async def _taught(
        self,
        script: Script,
        asked: Mapping[int, Packed],
        later: Mapping[int, Packed],
        limit: Limit,
        regret: Callable[[], bytes],
    ) -> Answers:
        """The same question to nodes that do not know the script, or forgot it: they learn it by its text."""

        def text(each: Mapping[int, Packed]) -> dict[int, Packed]:
            return {number: [spelled_out(script, first), *rest] for number, (first, *rest) in each.items()}

        return await self._ask(text(asked), limit, regret, text(later))

    def _chosen(self, now: float, packed: Packed) -> tuple[dict[int, Packed], dict[int, Packed]]:
        """Those worth asking, and the others. One whose rest is over is asked by one call first."""
        awake, resting = {}, {}
        for number, node in enumerate(self.nodes):
            if node.rests_until <= now:
                awake[number] = packed
                if node.rests_until:
                    node.rests_until = now + _PATIENCE[1]
            else:
                resting[number] = packed
        return awake, resting

    def _hear(self, number: int, found: list[Any], replies: dict[int, list[Any]], errors: dict[int, Exception]) -> None:
        node = self.nodes[number]
        node.answered()
        for reply in found:
            if isinstance(reply, hiredis.ReplyError):
                errors[number] = node.refusal(reply)
                return
        replies[number] = found

    def _missed(self, number: int, found: Exception | None) -> Exception:
        node = self.nodes[number]
        if found is None:
            return Unavailable(f"{node} was not asked: it did not answer lately", engine="redlock")
        node.silent(self._runtime.now(), self._runtime.fraction())
        if isinstance(found, LeaseholdError):
            if isinstance(found, ConfigError) and not node.met:
                raise found  # never fit for locks: whoever configured this has to know, whatever the others say
            return found
        error = Unavailable(f"{node} did not answer: {described(found)}", engine="redlock")
        error.__cause__ = found
        return error

    def too_few(self, heard: Heard, what: str) -> LeaseholdError:
        """Nothing can be said without a majority: which node said what."""
        said = f"{len(heard.replies)} of {len(self.nodes)} nodes answered, {self.quorum} are needed"
        why = "; ".join(str(error) for _, error in sorted(heard.errors.items()))
        if sum(isinstance(error, ConfigError) for error in heard.errors.values()) >= self.quorum:
            return ConfigError(f"{what}: {said}: {why}")
        mismatches = [error for error in heard.errors.values() if isinstance(error, Mismatch)]
        if len(mismatches) >= self.quorum:
            return mismatches[0]
        return Unavailable(f"{what}: {said}: {why}", engine="redlock")

    def close(self) -> None:
        self.way.close()

    def after_fork(self) -> None:
        self.way.after_fork()


def _joined(packed: Mapping[int, Packed]) -> dict[int, bytes]:
    return {number: each[0] if len(each) == 1 else b"".join(each) for number, each in packed.items()}


def _said(answers: Answers) -> dict[int, list[Any]]:
    """The answers that are one."""
    return {
        number: found
        for number, found in answers.items()
        if found.__class__ is list and found[0].__class__ is not hiredis.ReplyError
    }


def _unknowing(answers: Answers) -> list[int]:
    return [number for number, found in answers.items() if found.__class__ is list and says(found[0], "NOSCRIPT")]


class Bundles:
    """Of the blocking runtime. Used by many threads: single steps on a list."""

    def __init__(self, nodes: Sequence[Node], runtime: Runtime) -> None:
        self._nodes, self._runtime = nodes, runtime
        self._idle: list[Bundle] = []
        self._all: dict[int, Bundle] = {}  # for a fork
        self._closed = False

    async def ask(self, asked: Questions, count: int, limit: Limit) -> Answers:
        try:
            bundle = self._idle.pop()
        except IndexError:
            bundle = Bundle(self._nodes, hiredis.Reader, self._runtime.now)
            self._all[id(bundle)] = bundle
        try:
            answers = bundle.ask(asked, count, limit)
        except BaseException:  # torn apart anywhere: an answer still to come must never be taken for another's
            self._drop(bundle)
            raise
        if len(self._idle) < _IDLE and not self._closed:  # whoever did not answer was dropped from it
            self._idle.append(bundle)
        else:
            self._drop(bundle)
        return answers

    def _drop(self, bundle: Bundle) -> None:
        self._all.pop(id(bundle), None)
        bundle.close()

    def post(self, number: int, packed: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        return False  # what was under way went with its connection, and `regret` behind it

    def close(self) -> None:
        self._closed = True
        while self._idle:
            try:
                bundle = self._idle.pop()
            except IndexError:  # another thread was faster
                return
            self._drop(bundle)

    def after_fork(self) -> None:
        bundles, self._all, self._idle = list(self._all.values()), {}, []
        for bundle in bundles:
            bundle.after_fork()


class Wires:
    """Of the asyncio runtime."""

    def __init__(self, nodes: Sequence[Node], runtime: Runtime) -> None:
        self._now = runtime.now
        self._wires = [SharedWire(node, runtime) for node in nodes]

    async def ask(self, asked: Questions, count: int, limit: Limit) -> Answers:
        answers = await self._gathered(asked, count, limit)
        everyone = {**asked.first, **asked.later}
        broken = [
            n for n, found in answers.items() if isinstance(found, OSError) and not isinstance(found, TimeoutError)
        ]
        if broken:  # in the middle: a new connection is made, and the question repeated, once
            others = {number: found for number, found in answers.items() if number not in broken}
            again = Questions({number: everyone[number] for number in broken})
            answers = others | await self._gathered(again, count, limit.beside(others))
        if regret := b"" if TimeoutError not in map(type, answers.values()) else asked.regret():
            for number, found in answers.items():
                if isinstance(found, TimeoutError):
                    self._wires[number].post(regret, limit.deadline + _LINGER, nobody_waits)
        return answers

    async def _gathered(self, asked: Questions, count: int, limit: Limit) -> Answers:
        if count == 1:
            listed = limit._replace(decided=lambda answers: limit.decided(_listed(answers)))
            return _listed(await gathering(partial(self._one, limit.deadline + _LINGER), asked, listed, self._now))
        return await gathering(partial(self._many, limit.deadline + _LINGER, count), asked, limit, self._now)

    def _one(self, deadline: float, number: int, data: bytes) -> Awaitable[Any]:
        return self._wires[number].call(data, deadline)

    def _many(self, deadline: float, count: int, number: int, data: bytes) -> Awaitable[Any]:
        return self._wires[number].calls(data, count, deadline, then=b"")

    def post(self, number: int, packed: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        return self._wires[number].post(packed, deadline, done)

    def close(self) -> None:
        for wire in self._wires:
            wire.close()

    def after_fork(self) -> None:
        for wire in self._wires:
            wire.after_fork()


def _listed(answers: Answers) -> Answers:
    return {
        n: found if isinstance(found, Exception) and not isinstance(found, hiredis.ReplyError) else [found]
        for n, found in answers.items()
    }
