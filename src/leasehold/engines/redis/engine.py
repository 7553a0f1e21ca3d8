"""The verbs of the Redis engine: each is one script, so one atomic step of the server, at one reading of its clock.

Safety, in four lines. Who may hold is decided in `machine.lua`, which is `core/admission.py` over keys (E1). A token is
the bucket's last one plus 1, or the server's clock, whichever is higher (E3). A claim is known by its mark alone, so
whatever is repeated finds it (E2, E6). A request without an answer is neither yes nor no: it is given up (E5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import CoroutineType
from typing import Any, Final, NamedTuple

from leasehold.book import Book, turn
from leasehold.config import EngineConfig
from leasehold.engines.redis import requests
from leasehold.engines.redis.asking import Asking
from leasehold.engines.redis.listener import Listener
from leasehold.engines.redis.requests import Name, Requests
from leasehold.engines.redis.server import Server, pack
from leasehold.engines.redis.settings import Refused, Unreached
from leasehold.engines.redis.topology import Options, Single, Topology, single
from leasehold.engines.redis.wire import Wire
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime, settle

TRAITS: Final = Traits(
    liveness="ttl",
    clock="engine",
    fencing=True,
    fair=True,
    push=True,
    shared=True,
    max_limit=None,
    slots=True,
    outlives=True,
    told=True,
    min_ttl=0.0,
    ttl_step=0.0,
    survives="restart",  # at best: the server's settings decide
)
_FORGETFUL: Final = replace(TRAITS, survives="nothing")

_DEAF: Final = 0.2  # a client without a subscription looks about so often
_SCAN: Final = 1000  # keys the server goes through at a time
_BATCH: Final = 100  # names asked about at a time


class Shared(NamedTuple):
    """What the twins of one client share, on the shelf of their book."""

    server: Server
    options: Options
    listener: Listener


class RedisEngine:
    def __init__(self, runtime: Runtime, book: Book, topology: Topology, shared: Shared, call_timeout: float) -> None:
        self._runtime, self._book, self._topology, self._call_timeout = runtime, book, topology, call_timeout
        self._server, options, self._listener = shared
        self._requests = Requests(topology.publishing, book.client)
        self._scripts = self._requests.scripts
        self._asking = Asking(runtime, topology, options.min_replicas)
        self._refused: set[str] = set()  # marks of attempts that were never carried out
        self._listener.twins.add(self)

    @property
    def traits(self) -> Traits:
        settings = self._server.settings
        return TRAITS if settings is None or settings.survives == "restart" else _FORGETFUL

    @property
    def listening(self) -> bool:
        return "contended" in self._book.shelf

    # ---------------------------------------------------------------- verbs

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        listener = self._listener
        asked_before = claim.mark in self._book.waiting
        if claim.queue:
            self._book.shelf["contended"] = True
            self._book.enter(claim, self._runtime)  # before asking (E4)
            if not listener.on:
                await listener.ready(self._runtime, deadline)
        elif not listener.on:
            listener.start()
        name = self._requests.name(claim.namespace, claim.name)
        wire, packed = self._topology.wire(name.tag), self._requests.attempt(name, claim)
        try:
            if self._asking.min_replicas:
                return await self._confirmed(claim, wire, packed, deadline)
            reply = self._asking.one(wire, self._scripts.attempt, packed, deadline, lambda: self._given_up(claim))
            if reply.__class__ is CoroutineType:
                reply = await reply
        except (Refused, Unreached):
            if not asked_before:
                self._refused.add(claim.mark)
            raise
        answer = requests.granted(claim, reply)
        if not listener.on or answer.__class__ is Busy:
            await self._listening(claim, answer, reply, deadline)
        return answer

    async def _confirmed(self, claim: Claim, wire: Wire, packed: bytes, deadline: float) -> Grant | Busy:
        """The same, with `min_replicas`: a grant that too few of them have is none."""
        regret = partial(self._given_up, claim)
        asked = self._asking.many(wire, self._scripts.attempt, [packed], deadline, confirm=True, regret=regret)
        (reply,), confirmed = await asked
        answer = requests.granted(claim, reply)
        if isinstance(answer, Grant) and not confirmed:
            raise self._unconfirmed()
        await self._listening(claim, answer, reply, deadline)
        return answer

    async def _listening(self, claim: Claim, answer: Grant | Busy, reply: Any, deadline: float) -> None:
        """See that whoever waits can be woken, and that whoever holds is told of a break: the trait `told`."""
        if isinstance(answer, Busy):
            if claim.queue and self._listener.miscounted(requests.unheard(reply)):
                await self._listener.ready(self._runtime, deadline)
        elif not self._listener.on:
            await self._listener.ready(self._runtime, min(deadline, self._runtime.now() + claim.ttl / 4))

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._book.waiting.get(claim.mark):
            if not self._listener.on:
                seconds = min(seconds, _DEAF * (0.5 + self._runtime.fraction()))
            await turn(self._runtime, waiter, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        names: dict[tuple[str, str], list[int]] = {}
        for number, claim in enumerate(claims):
            names.setdefault((claim.namespace, claim.name), []).append(number)
        by_wire: dict[Wire, list[tuple[Name, list[int]]]] = {}
        for whose, numbers in names.items():
            found = self._requests.name(*whose)
            by_wire.setdefault(self._topology.wire(found.tag), []).append((found, numbers))
        answers: list[Alive | Gone | Unavailable] = [Unavailable("not asked", engine="redis")] * len(claims)
        for wire, work in by_wire.items():
            try:
                await self._renew(wire, work, claims, answers, deadline)
            except LeaseholdError as error:
                silence = Unavailable(str(error), engine="redis")
                for number in (n for _, numbers in work for n in numbers):
                    answers[number] = silence
        return answers

    async def _renew(
        self,
        wire: Wire,
        work: list[tuple[Name, list[int]]],
        claims: Sequence[Claim],
        answers: list[Alive | Gone | Unavailable],
        deadline: float,
    ) -> None:
        """One trip for all names of one server: a script each, for all claims of that name."""
        packed = [self._requests.renew(found, [claims[n] for n in numbers]) for found, numbers in work]
        replies, confirmed = await self._asking.many(wire, self._scripts.renew, packed, deadline, confirm=True)
        for (_, numbers), reply in zip(work, replies, strict=True):
            renewed = requests.renewed([claims[n] for n in numbers], reply)
            for n, answer in zip(numbers, renewed, strict=True):
                told = confirmed or not claims[n].token or isinstance(answer, Gone)
                answers[n] = answer if told else self._unconfirmed()

    async def release(self, claim: Claim, deadline: float) -> bool:
        self._book.leave(claim.mark)
        name = self._requests.name(claim.namespace, claim.name)
        wire = self._topology.wire(name.tag)
        try:
            reply = self._asking.one(wire, self._scripts.release, self._requests.release(name, claim), deadline)
            if reply.__class__ is CoroutineType:
                reply = await reply
        except ConfigError as error:  # it was permitted when the claim was granted: it may be so again
            raise Unavailable(str(error), engine="redis") from error
        return requests.yes(reply)

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        found = self._requests.name(namespace, name)
        wire, packed = self._topology.wire(found.tag), self._requests.break_(found, token)
        # It is not repeated, so it must not meet a connection that the server closed long ago for being idle.
        await self._hear_from(wire, deadline)
        return requests.yes(await settle(self._asking.one(wire, self._scripts.break_, packed, deadline, again=False)))

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        if exact:
            wire = self._topology.wire(self._requests.name(namespace, prefix).tag)
            return await self._look(wire, namespace, [prefix], deadline)
        found: list[Holding] = []
        for wire in self._topology.wires():
            names = sorted(await self._names(wire, namespace, prefix, deadline))
            for start in range(0, len(names), _BATCH):
                found += await self._look(wire, namespace, names[start : start + _BATCH], deadline)
        return sorted(found, key=lambda holding: holding.name)

    async def _look(self, wire: Wire, namespace: str, names: Sequence[str], deadline: float) -> list[Holding]:
        packed = [self._requests.inspect(self._requests.name(namespace, name)) for name in names]
        replies, _ = await self._asking.many(wire, self._scripts.inspect, packed, deadline)
        pairs = zip(names, replies, strict=True)
        return [holding for name, reply in pairs for holding in requests.holdings(namespace, name, reply)]

    async def _names(self, wire: Wire, namespace: str, prefix: str, deadline: float) -> set[str]:
        """Those with a key of their own. There is no index of names: the server goes through all its keys."""
        found: set[str] = set()
        cursor = b"0"
        while True:
            packed = pack("SCAN", cursor, "MATCH", requests.pattern(namespace, prefix), "COUNT", _SCAN)
            reply = await settle(self._asking.one(wire, self._scripts.inspect, packed, deadline))
            cursor, names = requests.scanned(reply)
            found.update(name for space, name in names if space == namespace)
            if cursor == b"0":
                return found

    async def ping(self, deadline: float) -> None:
        for wire in self._topology.wires():
            await self._hear_from(wire, deadline)

    async def _hear_from(self, wire: Wire, deadline: float) -> None:
        await settle(self._asking.one(wire, self._scripts.inspect, pack("PING"), deadline))

    def forget(self, claim: Claim) -> None:
        if claim.mark in self._refused:  # nothing was ever written
            self._refused.discard(claim.mark)
            self._book.leave(claim.mark)
            return
        wire = self._topology.wire(self._requests.name(claim.namespace, claim.name).tag)
        owed = self._book.owe(claim, soon=False)  # first: torn between, it is still owed
        self._book.leave(claim.mark)

        def answered(reply: Any) -> None:
            if reply.__class__ is int and self._book.owed.get(claim.mark) is owed:
                del self._book.owed[claim.mark]
            elif reply.__class__ is not int:
                self._book.stir(self._runtime.now())

        # Behind the attempt, on its own connection, where it cannot overtake it; else the watchdog asks for an answer.
        if not wire.post(self._given_up(claim), self._runtime.now() + self._call_timeout, answered):
            self._book.stir(self._runtime.now())

    def after_fork(self) -> None:
        self._topology.after_fork()
        self._listener.after_fork()
        self._requests.moved(self._book.client)

    async def close(self) -> None:
        self._topology.close()
        self._listener.twins.discard(self)
        if not self._listener.twins:  # the watchdog's twin comes and goes
            self._listener.close()

    # -------------------------------------------------------------- answers

    def _given_up(self, claim: Claim) -> bytes:
        bare = claim._replace(min_hold=0.0) if claim.min_hold else claim
        return self._requests.release(self._requests.name(bare.namespace, bare.name), bare)

    def _unconfirmed(self) -> Unavailable:
        few = self._asking.min_replicas
        return Unavailable(f"the Redis server could not show that {few} of its replicas have this", engine="redis")


def open(config: EngineConfig, runtime: Runtime, book: Book) -> RedisEngine:
    """`redis://[user:password@]host:port/db`, `rediss://`, `redis+unix:///path`; options: `min_replicas`,
    `allow_eviction`, and those of TLS."""
    shared = book.shelf.get("redis")
    if not isinstance(shared, Shared):  # the first of the twins
        server, options = single(config)
        listener = Listener(server, Single(server, runtime).publishing, runtime, book, config.call_timeout)
        shared = book.shelf["redis"] = Shared(server, options, listener)
    return RedisEngine(runtime, book, Single(shared.server, runtime), shared, config.call_timeout)
