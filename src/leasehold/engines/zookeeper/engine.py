"""The verbs of the ZooKeeper engine. Each is one or a few flights of requests, tried again after a broken connection
until its deadline: the claim's mark is in its node's name, so whatever was carried out is found again (E2, E6).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from kazoo.exceptions import BadVersionError, NoAuthError, NodeExistsError, NoNodeError
from kazoo.protocol.serialization import Create2, Delete, GetChildren, GetData, SetData, Sync

from leasehold.book import Book, turn
from leasehold.config import EngineConfig
from leasehold.core.timing import BEAT_EVERY
from leasehold.engines.zookeeper import nodes
from leasehold.engines.zookeeper.address import located
from leasehold.engines.zookeeper.inspecting import holdings
from leasehold.engines.zookeeper.line import Visit, found, line_of, make_root
from leasehold.engines.zookeeper.nodes import BASE, Line
from leasehold.engines.zookeeper.session import Mine, Session
from leasehold.engines.zookeeper.wire import Lost, Reply
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime

T = TypeVar("T")

TRAITS: Final = Traits(
    liveness="session",
    clock="engine",
    fencing=True,
    fair=True,
    push=True,
    shared=True,
    max_limit=None,
    slots=True,
    outlives=False,
    told=False,
    min_ttl=0.0,
    ttl_step=0.0,
    survives="minority",
)

_AGAIN: Final = 0.01  # a pause before a request that was lost is sent anew
_ENSEMBLE: Final = "/zookeeper/config"
_AHEAD: Final = 10**13  # over two thousand elections
_ROOM: Final = 2**40  # tokens to be left: over two hundred elections


class ZookeeperEngine:
    listening = True  # a watch costs no connection of its own: every claim that waits may queue at once

    def __init__(self, runtime: Runtime, book: Book, session: Session) -> None:
        self._runtime, self._book, self._session = runtime, book, session
        self.traits = TRAITS
        book.twins.add(self)

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        asked = self._runtime.now()
        waiter = self._book.waiting.get(claim.mark)
        woken = waiter is not None and waiter.go
        if claim.queue:
            self._book.enter(claim, self._runtime)  # before asking (E4)

        async def visit() -> Grant | Busy:
            return await Visit(self._session, self._runtime, claim, asked, deadline).attempt(woken)

        return await self._until(deadline, visit)

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._book.waiting.get(claim.mark):
            # Nobody tells the next but one that the next does not take its turn: it looks now and then.
            await turn(self._runtime, waiter, busy, min(seconds, BEAT_EVERY) if (busy.place or 0) < 2 else seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        async def once() -> list[Alive | Gone | Unavailable]:
            return await self._renew(claims, deadline)

        if not claims:
            return []
        try:
            return await self._until(deadline, once)
        except LeaseholdError as error:
            silence = error if isinstance(error, Unavailable) else Unavailable(str(error), engine="zookeeper")
            return [silence] * len(claims)

    async def release(self, claim: Claim, deadline: float) -> bool:
        async def once() -> bool:
            return await self._release(claim, deadline)

        self._book.leave(claim.mark)
        try:
            return await self._until(deadline, once)
        except ConfigError as error:  # it was permitted when the claim was granted: it may be so again
            raise Unavailable(str(error), engine="zookeeper") from error

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        async def once() -> bool:
            parent = line_of(self._session, namespace, name)
            read = (Sync(parent), GetChildren(parent, None), GetData(self._base, None))
            _, children, base = await self._flight(deadline, *read)
            offset = nodes.base_of((base.get(NoNodeError) or (b"0", None))[0])
            paths = [f"{parent}/{node.name}" for node in Line(children.get(NoNodeError) or ()).holders]
            looks = await self._flight(deadline, *(GetData(path, None) for path in paths)) if paths else []
            for path, look in zip(paths, looks, strict=True):
                data, stat = look.get(NoNodeError) or (b"", None)
                if stat is not None and offset + stat.czxid == token and not nodes.read(data).waits:
                    (gone,) = await self._flight(deadline, Delete(path, -1))  # a path names one claim for ever
                    return gone.get(NoNodeError) is not None
            return False

        return await self._until(deadline, once)

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        async def once() -> list[Holding]:
            return await holdings(self._session, self._runtime, namespace, prefix, exact, deadline)

        return await self._until(deadline, once)

    async def ping(self, deadline: float) -> None:
        """To the leader and back. Also learns whether this is an ensemble or one server."""

        async def once() -> None:
            synced, config = await self._flight(deadline, Sync("/"), GetData(_ENSEMBLE, None))
            synced.get()
            data, _ = config.get(NoNodeError, NoAuthError) or (b"", None)
            voters = data.count(b":participant")
            self.traits = replace(TRAITS, survives="minority" if voters >= 3 else "restart")

        await self._until(deadline, once)

    async def rebase(self, floor: int, deadline: float) -> int:
        """Have every new token exceed `floor`, after the ensemble's data were lost; without one, all that may have been
        given. Gives the number that tokens now begin after. Never lowers it.

        A transaction's number grows by 2^32 with each election: that many tokens are far ahead of any clock, so what is
        not known is guessed well above it.
        """
        floor = floor or int(self._runtime.wall() * 1_000_000) + _AHEAD
        if not 0 < floor < nodes.TOKENS - _ROOM:
            raise ConfigError(f"tokens must stay below 2^53, which they would not if they began at {floor}")

        async def once() -> int:
            while True:
                (look,) = await self._flight(deadline, GetData(self._base, None))
                data, stat = look.get(NoNodeError) or (b"0", None)
                new = max(floor, old := nodes.base_of(data))
                if stat is not None and new == old:
                    return old
                text, acl = str(new).encode(), self._session.address.acl
                if stat is None:
                    (done,) = await self._flight(deadline, Create2(self._base, text, acl, 0))
                else:
                    (done,) = await self._flight(deadline, SetData(self._base, text, stat.version))
                if done.get(BadVersionError, NodeExistsError, NoNodeError) is not None:
                    return new
                if isinstance(done.error, NoNodeError):
                    await make_root(self._session, self._runtime, deadline)

        return await self._until(deadline, once)

    def forget(self, claim: Claim) -> None:
        mine = self._session.mine.get(claim.mark)
        if mine is None and claim.mark not in self._session.doubts:
            self._book.leave(claim.mark)  # whatever was sent was answered, and nothing is there
            return
        self._book.owe(claim)  # first: torn between, it is still owed
        self._book.leave(claim.mark)
        if mine is not None:  # else its node is to be looked for first: the watchdog does that
            self._session.delete(claim.mark, mine, lambda: self._book.owed.pop(claim.mark, None))

    def after_fork(self) -> None:
        self._session.after_fork()

    async def close(self) -> None:
        if self._book.last(self):
            await self._session.close(self._runtime)

    # --------------------------------------------------------------- flights

    @property
    def _base(self) -> str:
        return self._session.address.chroot + BASE

    async def _flight(self, deadline: float, *requests: Any) -> list[Reply]:
        return await self._session.flight(self._runtime, requests, deadline)

    async def _until(self, deadline: float, verb: Callable[[], Awaitable[T]]) -> T:
        """The verb's answer, however often the connection breaks meanwhile."""
        while True:
            try:
                return await verb()
            except Lost as lost:
                left = deadline - self._runtime.now()
                if left <= 0:
                    raise Unavailable("the connection to ZooKeeper broke", engine="zookeeper") from lost
                await self._runtime.sleep(min(_AGAIN, left))

    async def _renew(self, claims: Sequence[Claim], deadline: float) -> list[Alive | Gone | Unavailable]:
        """One flight for all. To each node that holds a write, which proves it there and starts its ttl anew; of each
        line that claims wait in, a list."""
        asked = self._runtime.now()
        session, replies = self._session, dict[int, Alive | Gone | Unavailable]()
        held: list[tuple[int, Mine, float]] = []
        queued: list[tuple[int, Mine, str]] = []
        for at, claim in enumerate(claims):
            if not claim.token and claim.mark in session.doubts:
                replies[at] = Unavailable("its attempt has not been answered yet", engine="zookeeper")
                continue
            mine = session.mine.get(claim.mark) or await found(session, self._runtime, claim, deadline)
            if mine is None or claim.token != mine.token:
                replies[at] = Gone("unknown")
            elif claim.token:
                held.append((at, mine, max(claim.ttl, mine.until - asked)))  # never shorter than was promised (E8)
            else:
                queued.append((at, mine, line_of(session, claim.namespace, claim.name)))
        writes = [SetData(mine.path, nodes.written(mine.claim.holder, life, False), -1) for _, mine, life in held]
        parents = list(dict.fromkeys(parent for _, _, parent in queued))
        reads = [each for parent in parents for each in (Sync(parent), GetChildren(parent, None))]
        answers = await self._flight(deadline, *writes, *reads) if held or queued else []
        for (at, mine, life), answer in zip(held, answers, strict=False):
            replies[at] = self._alive(mine, asked, life, answer.get(NoNodeError))
        lines = [Line(answer.get(NoNodeError) or ()) for answer in answers[len(held) + 1 :: 2]]
        for at, mine, parent in queued:
            replies[at] = self._in_line(mine, lines[parents.index(parent)])
        return [replies[at] for at in range(len(claims))]

    def _alive(self, mine: Mine, asked: float, life: float, stat: Any) -> Alive | Gone:
        if stat is None:
            self._session.forget(mine.claim.mark)
            return Gone("lapsed" if asked >= mine.until else "broken")
        mine.until = max(mine.until, asked + life)
        return Alive(max(0.0, self._session.trusted(mine) - asked))

    def _in_line(self, mine: Mine, line: Line) -> Alive | Gone:
        """A place lasts as long as its session; without one, its turn has come."""
        if (at := line.index(mine.name)) is None:
            self._session.forget(mine.claim.mark)
            return Gone("unknown")
        return Alive(self._session.trust.timeout, None if line.holds(at) else line.place(at))

    async def _release(self, claim: Claim, deadline: float) -> bool:
        session = self._session
        mine = session.mine.get(claim.mark)
        if mine is not None and claim.id:
            (gone,) = await self._flight(deadline, Delete(mine.path, -1))
            ended = gone.get(NoNodeError) is not None
            session.forget(claim.mark)
            return ended and mine.token > 0
        parent = line_of(session, claim.namespace, claim.name)
        _, children = await self._flight(deadline, Sync(parent), GetChildren(parent, None))
        line = Line(children.get(NoNodeError) or ())
        ended = kept = False
        for node in line.by_mark(claim.mark):
            path, version = f"{parent}/{node.name}", -1
            if not claim.id:  # a stray gives up a place or a turn, never a grant
                (look,) = await self._flight(deadline, GetData(path, None))
                data, stat = look.get(NoNodeError) or (b"", None)
                if stat is None or (node in line.holders and not nodes.read(data).waits):
                    kept = stat is not None
                    continue
                version = stat.version
            (gone,) = await self._flight(deadline, Delete(path, version))
            ended |= gone.get(NoNodeError, BadVersionError) is not None and node in line.holders
        if not kept:
            session.forget(claim.mark)
        return ended


def open(config: EngineConfig, runtime: Runtime, book: Book) -> ZookeeperEngine:
    """`zookeeper://host:port,host:port/chroot`; the options are in `address.py`."""
    address = located(config)
    session = book.shelf.get("zookeeper")
    if not isinstance(session, Session):  # the first of the twins
        session = book.shelf["zookeeper"] = Session(address, runtime, book, config.call_timeout)
    return ZookeeperEngine(runtime, book, session)
