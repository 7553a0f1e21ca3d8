"""One attempt: a claim joins its line or looks where it stands, and is granted the name, or told what is in its way.

    join       create2 own node | get children | get base        one flight: 3 requests
    told       set own node | get children | get base            one flight; the set starts the ttl
    waiting    watch the one before | look at who holds          one flight, then asleep

Whoever holds is never asked to go by a clock alone. Its node is deleted by its version, once three things agree: its
version has stood unchanged for the whole ttl by our own clock, the leader's clock says so too, and the leader still has
that version when it deletes. The first alone is safe among honest clocks: the holder counts from before it wrote the
version that we saw later. The second keeps one waiter's wrong clock from deciding. A renewal in between wins.
"""

from __future__ import annotations

from typing import Any, Final

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError
from kazoo.protocol.serialization import Create2, Delete, Exists, GetChildren, GetChildren2, GetData, SetData, Sync

from leasehold.core.admission import described
from leasehold.core.names import key
from leasehold.core.timing import DRIFT
from leasehold.engines.zookeeper import nodes, slots
from leasehold.engines.zookeeper.nodes import BASE, ROOT, Line, Node
from leasehold.engines.zookeeper.session import Mine, Session, remember
from leasehold.engines.zookeeper.wire import CONTAINER, EPHEMERAL_SEQUENTIAL, CreateContainer, Reply
from leasehold.errors import ConfigError, Mismatch
from leasehold.model import Busy, Claim, Grant
from leasehold.runtime.base import Runtime

LAST: Final = 2**31 - 10**6  # a server that has counted to 2^31 gives the same number again and again
_KNOWN: Final = 20.0  # seconds for which a line is taken to be there still: the server sweeps empty ones each minute
_DRAINING: Final = 0.2  # how often to look whether a line out of numbers is empty


def line_of(session: Session, namespace: str, name: str) -> str:
    return f"{session.address.chroot}{ROOT}/{key(namespace, name)}"


class Visit:
    """Everything one attempt has found out so far."""

    def __init__(self, session: Session, runtime: Runtime, claim: Claim, asked: float, deadline: float) -> None:
        self._session, self._runtime, self._claim = session, runtime, claim
        self._asked, self._deadline = asked, deadline
        self._parent = line_of(session, claim.namespace, claim.name)
        self._base_path = session.address.chroot + BASE
        self._mine: Mine | None = None
        self._line = Line(())
        self._base = 0
        self._slots: tuple[bytes, int] = (b"", 0)  # what the parent says of them, and its version
        self._fresh = False  # the own node was written in the same flight that the line was read in
        self._stamp = 0  # the leader's clock, in ms, when it last wrote for this visit

    async def attempt(self, woken: bool) -> Grant | Busy:
        session, claim = self._session, self._claim
        self._mine = session.mine.get(claim.mark)
        if self._mine is None and claim.mark in session.doubts:
            self._mine = await found(session, self._runtime, claim, self._deadline)
        if self._mine is not None:
            # A semaphore's waiter does not write before it is its turn: whoever is behind it would be woken by that.
            await self._look(write=bool(self._mine.token) or (woken and claim.kind == "lock"))
        odd = False
        while True:
            if self._mine is None and (busy := await self._drained()):
                return busy
            mine = self._mine or await self._join()
            at = self._line.index(mine.name)
            if at is None:  # somebody ended it: it begins anew
                self._forget()
            elif self._line.nodes[at].number > LAST:
                await self._turn_back()
            elif other := self._line.mismatch(at):
                if await self._end_lapsed(self._line.holders) is not None:
                    if odd:
                        await self._flight(Delete(mine.path, -1))
                        self._forget()
                        raise Mismatch(claim.name, wanted=described(claim.kind, claim.limit), found=other)
                    odd = True  # one that is itself refused is gone in a moment: it fixes no kind
                await self._look(write=False)
            elif not self._line.holds(at):
                stays = claim.queue or mine.waits  # it stands in line already: it keeps its place (E2)
                if busy := await (self._stay(at) if stays else self._give_up()):
                    return busy
            elif not self._fresh:
                await self._look(write=True)
            elif grant := await self._granted(mine):
                return grant

    # -------------------------------------------------------------- flights

    async def _flight(self, *requests: Any) -> list[Reply]:
        return await self._session.flight(self._runtime, requests, self._deadline)

    def _reading(self) -> list[Any]:
        """The slots before the line: a mark missing in the line but named in the slots must be one that is gone."""
        reads = [GetChildren(self._parent, None), GetData(self._base_path, None)]
        return [GetData(self._parent, None), *reads] if self._claim.kind == "semaphore" else reads

    def _read(self, replies: list[Reply]) -> None:
        *more, children, base = replies
        self._line = Line(children.get(NoNodeError) or ())
        self._base = nodes.base_of((base.get(NoNodeError) or (b"0", None))[0])
        if more:
            data, stat = more[-1].get(NoNodeError) or (b"", None)
            self._slots = (data, stat.version if stat else 0)

    def _forget(self) -> None:
        self._session.forget(self._claim.mark)
        self._mine = None

    def _wrote(self, mine: Mine, sent: float, life: float, waits: bool, stat: Any) -> None:
        mine.waits, mine.until = waits, max(mine.until, sent + life)
        self._stamp = stat.mtime
        self._session.skew = stat.mtime / 1000 - self._runtime.now()

    async def _join(self) -> Mine:
        """Create the own node and read the line in one flight. Nothing is known of it until that is answered."""
        session, claim, parent = self._session, self._claim, self._parent
        acl = session.address.acl
        data = nodes.written(claim.holder, claim.ttl, False)
        create = Create2(f"{parent}/{nodes.prefix(claim)}", data, acl, EPHEMERAL_SEQUENTIAL)
        while True:
            sent = self._runtime.now()
            known = session.parents.get(parent, float("-inf")) > sent - _KNOWN
            made = () if known else (CreateContainer(parent, b"", acl, CONTAINER),)
            requests = (*made, create, *self._reading())
            replies = await session.flight(self._runtime, requests, self._deadline, creates=claim.mark)
            created = replies[len(made)]
            if created.error is None:
                break
            session.doubts.discard(claim.mark)  # answered, and nothing made
            session.parents.pop(parent, None)
            created.get(NoNodeError)
            if made and isinstance(replies[0].error, NoNodeError):
                await make_root(session, self._runtime, self._deadline)
            elif made and replies[0].error is not None:
                replies[0].get(NodeExistsError)  # raises, unless it was there and swept away in between
        path, stat = created.value
        mine = self._mine = session.mine[claim.mark] = Mine(claim, path, stat, sent + claim.ttl)
        session.doubts.discard(claim.mark)
        remember(session.parents, parent, sent)
        self._wrote(mine, sent, claim.ttl, False, stat)
        self._fresh = True
        self._read(replies[len(made) + 1 :])
        return mine

    async def _look(self, write: bool) -> None:
        mine, claim, sent = self._mine, self._claim, self._runtime.now()
        assert mine is not None
        if not write:  # a follower may be behind: a release answered to somebody else is to be seen all the same
            self._fresh = False
            _, *read = await self._flight(Sync(self._parent), *self._reading())
            self._read(read)
            return
        life = max(claim.ttl, mine.until - sent) if mine.token else claim.ttl  # never shorter than was promised (E8)
        own = SetData(mine.path, nodes.written(claim.holder, life, False), -1)
        wrote, *read = await self._flight(own, *self._reading())
        self._read(read)
        if stat := wrote.get(NoNodeError):
            self._wrote(mine, sent, life, False, stat)
            self._fresh = True

    # -------------------------------------------------------------- answers

    async def _granted(self, mine: Mine) -> Grant | None:
        """None: the slots changed meanwhile, look again."""
        claim = self._claim
        if claim.kind == "semaphore" and mine.slot is None:
            data, version = self._slots
            slot, new = slots.choose(data, self._line, claim.mark, mine.born, claim.limit)
            if new is not None:
                (reply,) = await self._flight(SetData(self._parent, new, version))
                if reply.get(BadVersionError, NoNodeError) is None:
                    await self._look(write=True)
                    return None
            mine.slot = slot
        token = mine.token or self._base + mine.born
        if token >= nodes.TOKENS:
            raise ConfigError(f"{nodes.BASE} is too high: with it tokens would not stay below 2^53")
        mine.token = token
        left = self._session.trusted(mine) - self._asked
        return Grant(mine.token, max(0.0, min(left, claim.ttl)), mine.slot)

    async def _give_up(self) -> Busy | None:
        """Asked once: leave nothing behind, and say who holds."""
        assert self._mine is not None
        path = self._mine.path
        holders = self._line.holders
        gone, *looks = await self._flight(Delete(path, -1), *self._looks(holders))
        gone.get(NoNodeError)
        self._forget()
        return await self._judged(holders, looks, None)

    async def _stay(self, at: int) -> Busy | None:
        """Watch whoever is in the way. None: somebody went meanwhile, decide again."""
        session, claim, mine, line = self._session, self._claim, self._mine, self._line
        assert mine is not None
        place = line.place(at)
        holders = line.holders if place == 0 else line.holders[:1]
        first_of_many = claim.kind == "semaphore" and place == 0
        target = self._parent if first_of_many else f"{self._parent}/{line.before(at).name}"
        watch = session.watch(target, claim.mark)
        # An ephemeral node has no children: watched for them, it tells of its end alone, not of its renewals. A waiter
        # of a semaphore wants to know also that the one before it was let in: that one writes its node then.
        by_data = claim.kind == "semaphore" and not first_of_many
        watching = GetData(target, watch) if by_data else GetChildren(target, watch)
        sent = self._runtime.now()
        waiting = [] if mine.waits else [SetData(mine.path, nodes.written(claim.holder, claim.ttl, True), -1)]
        replies = await self._flight(*waiting, watching, *self._looks(holders))
        if waiting and (stat := replies.pop(0).get(NoNodeError)):
            self._wrote(mine, sent, claim.ttl, True, stat)
        watched, *looks = replies
        self._fresh = False
        found = watched.get(NoNodeError)
        if found is None or (first_of_many and Line(found).nodes != line.nodes):
            await self._look(write=False)
            return None
        return await self._judged(holders, looks, place)

    async def _turn_back(self) -> None:
        """This line is out of numbers: nobody joins it any more, and once it is empty it begins anew."""
        assert self._mine is not None
        gone, parent = await self._flight(Delete(self._mine.path, -1), Exists(self._parent, None))
        gone.get(NoNodeError)
        self._forget()
        if stat := parent.get(NoNodeError):
            self._session.draining[self._parent] = stat.czxid

    async def _drained(self) -> Busy | None:
        session, parent = self._session, self._parent
        while (old := session.draining.get(parent)) is not None:
            (reply,) = await self._flight(GetChildren2(parent, None))
            names, stat = reply.get(NoNodeError) or ((), None)
            if stat is None or stat.czxid != old:
                session.draining.pop(parent, None)
            elif names and not Line(names).nodes:
                raise ConfigError(
                    f"{parent} is out of numbers, and nodes in it that are not ours keep it from beginning anew"
                )
            elif names:
                return Busy(_DRAINING)
            else:
                (gone,) = await self._flight(Delete(parent, -1))
                gone.get(NoNodeError, NotEmptyError)
                session.parents.pop(parent, None)
        return None

    # -------------------------------------------------------- who lapsed

    def _looks(self, holders: list[Node]) -> list[Any]:
        return [GetData(f"{self._parent}/{node.name}", None) for node in holders]

    async def _judged(self, holders: list[Node], looks: list[Reply], place: int | None) -> Busy | None:
        """What is in the way. None: something that was is gone now."""
        left = await self._end_lapsed(holders, looks) if not place else float("inf")
        if left is None:
            if self._mine is not None:
                await self._look(write=False)
            return None
        data, stat = looks[0].get(NoNodeError) or (b"", None)
        if stat is None:
            return Busy(None if place else 0.0, place)
        told = nodes.read(data)
        return Busy(left if left < float("inf") else None, place, self._base + stat.czxid, told.holder)

    async def _end_lapsed(self, holders: list[Node], looks: list[Reply] | None = None) -> float | None:
        """Delete those that nobody renews; None: there was one. Else the time until that may be so."""
        if looks is None:
            looks = await self._flight(*self._looks(holders))
        now, least = self._runtime.now(), float("inf")
        over = []
        for node, look in zip(holders, looks, strict=True):
            data, stat = look.get(NoNodeError) or (b"", None)
            path = f"{self._parent}/{node.name}"
            if stat is None:
                self._session.seen.pop(path, None)
                return None
            life = nodes.read(data).life
            left = life * (1 + DRIFT) - self._session.unchanged(path, stat.version, now)
            if left <= 0:
                over.append((path, stat, life))
            else:
                least = min(least, left, life)  # what a holder has left, for people; a look too early costs little
        for path, stat, life in over:
            if self._stamp == 0:
                await self._touch()
            if (left := (stat.mtime - self._stamp) / 1000 + life) > 0:  # by the leader's clock
                least = min(least, left)
                continue
            (gone,) = await self._flight(Delete(path, stat.version))
            gone.get(NoNodeError, BadVersionError)
            self._session.seen.pop(path, None)
            return None
        return least

    async def _touch(self) -> None:
        """Have the leader write for us, to read its clock. Changes nothing else."""
        mine, claim = self._mine, self._claim
        assert mine is not None
        (wrote,) = await self._flight(SetData(mine.path, nodes.written(claim.holder, claim.ttl, mine.waits), -1))
        if stat := wrote.get(NoNodeError):
            self._stamp = stat.mtime


async def make_root(session: Session, runtime: Runtime, deadline: float) -> None:
    """The node all lines are in, and those above it."""
    path, made = "", []
    for part in (session.address.chroot + ROOT).split("/")[1:]:
        path += f"/{part}"
        made.append(Create2(path, b"", session.address.acl, 0))
    replies = await session.flight(runtime, made, deadline)
    if not isinstance(replies[-1].error, NodeExistsError | None):
        for reply in replies:  # the first trouble is why; else those above may be there, and not ours to make
            reply.get(NodeExistsError)


async def found(session: Session, runtime: Runtime, claim: Claim, deadline: float) -> Mine | None:
    """The node of a claim whose create was never answered, by its mark.

    The sync is for a connection that moved to another server: a create sent by the old one is at the leader by then, or
    will be refused there, for the session has moved; but the new server may not have heard of it yet.
    """
    parent = line_of(session, claim.namespace, claim.name)
    asked = runtime.now()
    _, children = await session.flight(runtime, (Sync(parent), GetChildren(parent, None)), deadline)
    names = [node.name for node in Line(children.get(NoNodeError) or ()).by_mark(claim.mark)]
    if names:
        replies = await session.flight(runtime, [Exists(f"{parent}/{name}", None) for name in names], deadline)
        for name, reply in zip(names, replies, strict=True):
            if (stat := reply.get(NoNodeError)) and stat.ephemeralOwner == session.owner:
                mine = Mine(claim, f"{parent}/{name}", stat, asked + claim.ttl)
                return session.mine.setdefault(claim.mark, mine)
    session.doubts.discard(claim.mark)
    return None
