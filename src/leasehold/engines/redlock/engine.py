"""The verbs of the Redlock engine: each is a round of all nodes, and means what their majority says.

Why it is safe is at the top of `agreement.py`: majorities share a node, and tokens are confirmed by one. What a node
decides is one script there, one atomic step (`attempt.lua` and its neighbours, over `machine.lua` of the Redis
engine).

- **Failure leaves nothing.** A claim that got some nodes and no majority gives them back before it is told; what may
  still be on its way is followed by a release on the same connection, or the first thing a node hears when it is back.
- **What gives back is numbered.** It may be carried out late, after the same claim has asked again: a node leaves
  alone what a request with a higher number got. Else a holder would count a node that has just let go.
- **The line.** Nodes order it by the client's ticket, so all agree whose turn it is. Where several came at once and
  none got a majority, each puts its nodes back in line, and every node then turns to the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from leasehold.book import Book, turn
from leasehold.config import EngineConfig
from leasehold.core.timing import BEAT
from leasehold.engines.redis.requests import Name, spelled_out
from leasehold.engines.redis.server import pack
from leasehold.engines.redlock import agreement, requests
from leasehold.engines.redlock.address import nodes
from leasehold.engines.redlock.asking import Asking
from leasehold.engines.redlock.listener import Ears
from leasehold.engines.redlock.looking import Looking
from leasehold.engines.redlock.renewing import Renewing
from leasehold.engines.redlock.requests import Refused, Requests, Taken
from leasehold.engines.redlock.shared import Numbers, Shared
from leasehold.errors import ConfigError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime

TRAITS: Final = Traits(
    liveness="ttl",
    clock="engine",
    fencing=True,
    fair=False,  # as good as the clocks of the clients
    push=True,
    shared=False,
    max_limit=1,
    slots=False,
    outlives=True,
    told=True,
    min_ttl=0.0,
    ttl_step=0.0,
    survives="minority",  # at best: the settings of the nodes decide
)
_FORGETFUL: Final = replace(TRAITS, survives="nothing")

_PING: Final = pack("PING")
_DEAF: Final = 0.2  # a client without subscriptions looks about so often
_TRIES: Final = 3  # of one that does not wait, when perhaps nobody has a majority
_APART: Final = 0.02  # seconds at most between them: whoever comes back first finds the nodes free


class RedlockEngine:
    def __init__(self, runtime: Runtime, book: Book, shared: Shared) -> None:
        self._runtime, self._book, self._shared = runtime, book, shared
        self._nodes, self._listener, self._numbers = shared.nodes, shared.listener, shared.numbers
        self._requests = Requests(book.client)
        self._scripts = self._requests.scripts
        self._asking = Asking(self._nodes, runtime)
        self._quorum = self._asking.quorum
        self._renewing = Renewing(book, self._requests, self._asking, self._numbers)
        self._looking = Looking(self._requests, self._asking)
        book.twins.add(self)

    @property
    def traits(self) -> Traits:
        known = [node.settings for node in self._nodes if node.settings is not None]
        return TRAITS if all(each.survives == "restart" for each in known) else _FORGETFUL

    @property
    def listening(self) -> bool:
        return "contended" in self._book.shelf

    # ---------------------------------------------------------------- attempt

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        listener = self._listener
        if claim.queue:
            self._book.shelf["contended"] = True
            self._book.enter(claim, self._runtime)  # before asking (E4)
            listener.asks(claim.mark)
            if not listener.on:
                await listener.ready(self._runtime, deadline)
        elif not listener.on:
            listener.start()
        answer = await self._try(claim, deadline)
        for _ in range(_TRIES - 1):
            if answer is not None:
                break
            await self._runtime.sleep(_APART * self._runtime.fraction())
            answer = await self._try(claim, deadline)
        if isinstance(answer, Grant):
            listener.leaves(claim.mark)
            self._numbers.leaves(claim.mark)
            if not listener.on:  # whoever holds is told of a break: the trait `told`
                await listener.ready(self._runtime, min(deadline, self._runtime.now() + claim.ttl / 4))
        return answer or Busy()

    async def _try(self, claim: Claim, deadline: float) -> Grant | Busy | None:
        """One round, and what it takes to make it a grant or to undo it. None: perhaps nobody has a majority."""
        name, number = self._requests.name(claim.namespace, claim.name), self._numbers.next()
        ticket = self._numbers.ticket(claim.mark) if claim.queue else 0
        packed = self._requests.attempt(name, claim, number, ticket)
        heard = await self._asking.round(
            self._scripts.attempt,
            [packed],
            deadline,
            claim.ttl,
            self._decided,
            partial(self._regret, name, claim, number),
        )
        parts = heard.each(lambda reply: requests.attempted(claim, reply))
        taken = {n: part for n, part in parts.items() if isinstance(part, Taken)}
        refused = {n: part for n, part in parts.items() if isinstance(part, Refused)}
        tokens = {n: part.token for n, part in taken.items()}
        self._numbers.learn(
            number, tokens.values(), agreement.latest([part.last for part in refused.values()], len(self._nodes))
        )
        if len(taken) >= self._quorum:
            token, by = await self._agreed(claim, name, tokens, number, deadline)
            others = agreement.astray({n: tokens[n] for n in taken if n not in by}, token)
            if claim.queue:
                others += refused
            if others:
                await self._round_off(claim._replace(token=token), name, others, deadline)
            return Grant(token, agreement.life([taken[n].life for n in by], self._quorum))
        if len(parts) < self._quorum:
            raise self._asking.too_few(heard, f"{claim.name} could not be asked for")  # what was taken is forgotten
        if taken:
            turns = await self._undo(claim, name, list(taken), number, ticket, deadline)
            if not agreement.outvoted(refused.values(), self._quorum):
                for n in turns:
                    self._listener.turn(claim.mark, n)
        if not claim.queue:  # nobody asks for it again, or gives it up: what a lost answer told of would stay
            self._owe(claim, self._requests.give_back(name, claim, number), heard.errors)
        for n, part in refused.items():
            if claim.queue:
                self._listener.counted(n, part.heard)
        if agreement.split(taken, refused) and not claim.queue:
            return None
        return agreement.busy(len(taken), list(refused.values()), self._quorum)

    def _regret(self, name: Name, claim: Claim, number: int) -> bytes:
        return spelled_out(self._scripts.release, self._requests.give_back(name, claim, number))

    def _decided(self, replies: Any) -> bool:
        taken = sum(_is_taken(reply) for (reply,) in replies.values())
        return agreement.decided(taken, len(replies) - taken, len(self._nodes))

    async def _agreed(
        self, claim: Claim, name: Name, tokens: dict[int, int], number: int, deadline: float
    ) -> tuple[int, list[int]]:
        """The token of the grant, and the nodes, a majority, that confirmed it. An error leaves it to the caller to
        forget the claim."""
        token, stands = agreement.token(tokens, self._quorum, number)
        by = [n for n, answered in tokens.items() if answered == token]
        if not stands:
            packed = self._requests.confirm(name, claim, token, self._numbers.next())
            among = {n: [packed] for n, answered in tokens.items() if answered <= token}
            heard = await self._asking.round(
                self._scripts.confirm, among, deadline, claim.ttl, lambda replies: self._confirmed(replies)
            )
            if not self._confirmed(heard.replies):
                raise self._asking.too_few(heard, f"the token of {claim.name} could not be agreed on")
            by = [n for n, (reply,) in heard.replies.items() if reply == 1]
        self._numbers.seen(token)
        return token, by

    def _confirmed(self, replies: Any) -> bool:
        return bool(sum(reply[0] == 1 for reply in replies.values()) >= self._quorum)

    async def _round_off(self, claim: Claim, name: Name, refused: list[int], deadline: float) -> None:
        """Nodes that heard of the last release later than others still have this claim in line, and some may have it by
        another token: they are to join in the grant, or to forget the place. The grant does not depend on it."""
        number = self._numbers.next()
        packed = self._requests.retake(name, claim, number)
        await self._asking.round(
            self._scripts.retake,
            {n: [packed] for n in refused},
            deadline,
            claim.ttl,
            lambda _: True,
            partial(self._regret, name, claim, number),
        )

    async def _undo(
        self, claim: Claim, name: Name, taken: list[int], number: int, ticket: int, deadline: float
    ) -> list[int]:
        """Give back too few nodes for a grant: into the line, if it stands there. Those where it has its turn at
        once."""
        packed = self._requests.give_back(name, claim, number, ticket)
        heard = await self._asking.round(
            self._scripts.release, {n: [packed] for n in taken}, deadline, claim.ttl, _all_of_them
        )
        ended = heard.each(requests.ended)
        if not ticket:
            self._owe(claim, packed, [n for n in taken if n in heard.errors])
        return [n for n, reply in ended.items() if reply == 2]

    # ------------------------------------------------------------- other verbs

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._book.waiting.get(claim.mark):
            if not self._listener.on:
                seconds = min(seconds, _DEAF * (0.5 + self._runtime.fraction()))
            await turn(self._runtime, waiter, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        return await self._renewing.renew(claims, deadline)

    async def release(self, claim: Claim, deadline: float) -> bool:
        self._leave(claim.mark)
        packed = self._requests.release(self._requests.name(claim.namespace, claim.name), claim)
        try:
            heard = await self._asking.round(
                self._scripts.release, [packed], deadline, claim.ttl, lambda replies: len(replies) >= self._quorum
            )
        except ConfigError as error:  # it was permitted when the claim was granted: it may be so again
            raise Unavailable(str(error), engine="redlock") from error
        if len(heard.replies) < self._quorum:
            raise Unavailable(str(self._asking.too_few(heard, f"{claim.name} could not be released")), engine="redlock")
        ended = sum(reply > 0 for reply in heard.each(requests.ended).values())
        self._owe(claim, packed, heard.errors)
        return bool(ended > 0 and ended + len(heard.errors) >= self._quorum)

    def _owe(self, claim: Claim, packed: bytes, whom: Any) -> None:
        for number in whom:
            self._nodes[number].owe(claim.mark, self._scripts.release, packed)
            self._listener.owed(number)

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        found = self._requests.name(namespace, name)
        first = await self._break(name, self._requests.break_(found, token), None, deadline)
        marks = {reply for reply in first.values() if reply}
        rest = [n for n, reply in first.items() if not reply]
        for mark in marks:  # where its token is another, the claim is known by its mark
            if rest:
                await self._break(name, self._requests.break_(found, token, mark), rest, deadline)
        return bool(marks)

    async def _break(self, name: str, packed: bytes, among: list[int] | None, deadline: float) -> dict[int, Any]:
        asked = [packed] if among is None else {n: [packed] for n in among}
        heard = await self._asking.round(
            self._scripts.break_, asked, deadline, BEAT, lambda replies: len(replies) >= self._quorum
        )
        if among is None and len(heard.replies) < self._quorum:
            raise self._asking.too_few(heard, f"{name} could not be broken")
        return heard.each(requests.broken)

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        return await self._looking.inspect(namespace, prefix, exact, deadline)

    async def ping(self, deadline: float) -> None:
        heard = await self._asking.round(None, [_PING], deadline, BEAT, lambda replies: len(replies) >= self._quorum)
        if len(heard.replies) < self._quorum:
            raise self._asking.too_few(heard, "there is no majority")

    def forget(self, claim: Claim) -> None:
        if not any(node.met for node in self._nodes):  # a wrong password, say: no node was ever asked for anything
            self._leave(claim.mark)
            return
        owed = self._book.owe(claim, soon=False)  # first: torn between, it is still owed
        self._leave(claim.mark)
        packed = self._requests.release(self._requests.name(claim.namespace, claim.name), claim)
        waiting = set(range(len(self._nodes)))

        def answered(number: int, reply: Any) -> None:
            if reply.__class__ is not int:
                self._book.stir(self._runtime.now())
                return
            waiting.discard(number)
            if not waiting and self._book.owed.get(claim.mark) is owed:
                del self._book.owed[claim.mark]

        deadline = self._runtime.now() + claim.ttl
        sent = [self._asking.way.post(n, packed, deadline, partial(answered, n)) for n in list(waiting)]
        if not all(sent):  # else the watchdog asks for an answer
            self._book.stir(self._runtime.now())

    def _leave(self, mark: str) -> None:
        self._book.leave(mark)
        self._listener.leaves(mark)
        self._numbers.leaves(mark)

    # ------------------------------------------------------- lives of an engine

    def after_fork(self) -> None:
        self._asking.after_fork()
        self._listener.after_fork()
        self._numbers.after_fork()
        for node in self._nodes:
            node.after_fork()
        self._requests.moved(self._book.client)

    async def close(self) -> None:
        self._asking.close()
        if self._book.last(self):
            self._listener.close()


def _is_taken(reply: Any) -> bool:
    return reply.__class__ is list and len(reply) == 2 and reply[0].__class__ is int and reply[0] > 0


def _all_of_them(_replies: object) -> bool:
    return False  # nothing but the deadline ends the round before


def open(config: EngineConfig, runtime: Runtime, book: Book) -> RedlockEngine:
    """`redlock://[user:password@]host1:port,host2:port,host3:port[/db]`; options: `allow_eviction`, `tls` and those of
    TLS."""
    shared = book.shelf.get("redlock")
    if not isinstance(shared, Shared):  # the first of the twins
        found = nodes(config)
        listener = Ears(found, runtime, book, config.call_timeout)
        shared = book.shelf["redlock"] = Shared(found, listener, Numbers(runtime))
    return RedlockEngine(runtime, book, shared)
