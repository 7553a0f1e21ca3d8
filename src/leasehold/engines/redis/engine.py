"""The verbs of the Redis engine: each is one script, so one atomic step of the server, at one reading of its clock.

Safety, in four lines. Who may hold is decided in `machine.lua`, which is `core/admission.py` over keys (E1). A token is
the bucket's last one plus 1, or the server's clock, whichever is higher (E3). A claim is known by its mark alone, so
whatever is repeated finds it (E2, E6). A request without an answer is neither yes nor no: it is given up (E5).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import CoroutineType
from typing import Any, Final

from leasehold.book import Book, turn
from leasehold.config import EngineConfig
from leasehold.engines.redis import requests
from leasehold.engines.redis.asking import Answer, Asked, Asking
from leasehold.engines.redis.deployment import Deployment, deployed
from leasehold.engines.redis.listener import Ear
from leasehold.engines.redis.requests import Requests
from leasehold.engines.redis.server import pack
from leasehold.engines.redis.settings import Refused, Unreached
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


class RedisEngine:
    def __init__(self, runtime: Runtime, book: Book, deployment: Deployment, call_timeout: float) -> None:
        self._runtime, self._book, self._call_timeout = runtime, book, call_timeout
        self._topology, self._listener = deployment.topology(runtime), deployment.listener
        self._requests = Requests(self._topology.publishing, book.client)
        self._scripts = self._requests.scripts
        self._asking = Asking(runtime, self._topology, deployment.options.min_replicas)
        self._refused: set[str] = set()  # marks of attempts that were never carried out
        book.twins.add(self)

    @property
    def traits(self) -> Traits:
        return _FORGETFUL if self._topology.survives == "nothing" else TRAITS

    @property
    def listening(self) -> bool:
        return "contended" in self._book.shelf

    # ---------------------------------------------------------------- verbs

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        name = self._requests.name(claim.namespace, claim.name)
        ear, asked_before, patient = self._listener.at(name.tag), False, None
        if claim.queue:
            asked_before = claim.mark in self._book.waiting
            self._book.shelf["contended"] = True
            waiter = self._book.enter(claim, self._runtime)  # before asking (E4)
            patient = lambda: 0.0 if waiter.over else claim.until  # noqa: E731  # until close() tells it
            if not ear.on:
                await ear.ready(self._runtime, deadline)
        elif not ear.on:
            ear.start()
        packed = self._requests.attempt(name, claim)
        try:
            if self._asking.min_replicas:
                regret = partial(self._given_up, claim)
                asked = Asked(name.tag, self._scripts.attempt, packed, deadline, regret, patient=patient, confirm=True)
                return await self._confirmed(claim, asked, ear)
            reply = self._asking.one(
                name.tag, self._scripts.attempt, packed, deadline, lambda: self._given_up(claim), patient=patient
            )
            if reply.__class__ is CoroutineType:
                reply = await reply
        except (Refused, Unreached):
            if not asked_before:
                self._refused.add(claim.mark)
            raise
        answer = requests.granted(claim, reply)
        if not ear.on or answer.__class__ is Busy:
            await self._listening(claim, ear, answer, reply, deadline)
        return answer

    async def _confirmed(self, claim: Claim, asked: Asked, ear: Ear) -> Grant | Busy:
        """The same, with `min_replicas`: a grant that too few of them have is none."""
        reply, confirmed = await self._asking.confirmed(asked)
        answer = requests.granted(claim, reply)
        if isinstance(answer, Grant) and not confirmed:
            raise self._unconfirmed()
        await self._listening(claim, ear, answer, reply, asked.deadline)
        return answer

    async def _listening(self, claim: Claim, ear: Ear, answer: Grant | Busy, reply: Any, deadline: float) -> None:
        """See that whoever waits can be woken, and that whoever holds is told of a break: the trait `told`."""
        if isinstance(answer, Busy):
            if claim.queue and ear.miscounted(requests.unheard(reply)):
                await ear.ready(self._runtime, deadline)
        elif not ear.on:
            await ear.ready(self._runtime, min(deadline, self._runtime.now() + claim.ttl / 4))

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._book.waiting.get(claim.mark):
            if not self._listener.at(self._requests.name(claim.namespace, claim.name).tag).on:
                seconds = min(seconds, _DEAF * (0.5 + self._runtime.fraction()))
            await turn(self._runtime, waiter, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        names: dict[tuple[str, str], list[int]] = {}
        for number, claim in enumerate(claims):
            names.setdefault((claim.namespace, claim.name), []).append(number)
        work = [(self._requests.name(*whose), [claims[n] for n in numbers]) for whose, numbers in names.items()]
        script = self._scripts.renew
        asked = [Asked(name.tag, script, self._requests.renew(name, of), deadline, confirm=True) for name, of in work]
        answers: list[Alive | Gone | Unavailable] = [Unavailable("not asked", engine="redis")] * len(claims)
        for numbers, (_, of), said in zip(names.values(), work, await self._asking.many(asked), strict=True):
            for number, answer in zip(numbers, self._renewed(of, said), strict=True):
                answers[number] = answer
        return answers

    def _renewed(self, claims: Sequence[Claim], said: Answer | LeaseholdError) -> list[Alive | Gone | Unavailable]:
        """Of one name: a script for all its claims."""
        if not isinstance(said, LeaseholdError):
            try:
                told = zip(claims, requests.renewed(claims, said.reply), strict=True)
                few = not said.confirmed
                return [self._unconfirmed() if few and c.token and isinstance(a, Alive) else a for c, a in told]
            except Unavailable as error:
                said = error
        return [Unavailable(str(said), engine="redis")] * len(claims)

    async def release(self, claim: Claim, deadline: float) -> bool:
        self._book.leave(claim.mark)
        name = self._requests.name(claim.namespace, claim.name)
        try:
            reply = self._asking.one(name.tag, self._scripts.release, self._requests.release(name, claim), deadline)
            if reply.__class__ is CoroutineType:
                reply = await reply
        except ConfigError as error:  # it was permitted when the claim was granted: it may be so again
            raise Unavailable(str(error), engine="redis") from error
        return requests.yes(reply)

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        found = self._requests.name(namespace, name)
        packed, wire = self._requests.break_(found, token), self._topology.wire(found.tag)
        if wire is not None:  # not repeated, it must not meet a connection that the server closed for being idle
            with suppress(Unreached):
                await self._asking.at(wire, pack("PING"), deadline)
        reply = self._asking.one(found.tag, self._scripts.break_, packed, deadline, again=0)
        return requests.yes(await settle(reply))

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        if exact:
            return await self._look(namespace, [prefix], deadline)
        names: set[str] = set()
        for wire in await self._topology.wires(deadline):
            names |= await self._names(wire, namespace, prefix, deadline)
        ordered, found = sorted(names), []
        for start in range(0, len(ordered), _BATCH):
            found += await self._look(namespace, ordered[start : start + _BATCH], deadline)
        return found

    async def _look(self, namespace: str, names: Sequence[str], deadline: float) -> list[Holding]:
        known = [self._requests.name(namespace, name) for name in names]
        asked = [Asked(name.tag, self._scripts.inspect, self._requests.inspect(name), deadline) for name in known]
        found: list[Holding] = []
        for name, answer in zip(names, await self._asking.many(asked), strict=True):
            if isinstance(answer, LeaseholdError):
                raise answer
            found += requests.holdings(namespace, name, answer.reply)
        return found

    async def _names(self, wire: Wire, namespace: str, prefix: str, deadline: float) -> set[str]:
        """Those with a key of their own. There is no index of names: the server goes through all its keys."""
        found: set[str] = set()
        cursor = b"0"
        while True:
            packed = pack("SCAN", cursor, "MATCH", requests.pattern(namespace, prefix), "COUNT", _SCAN)
            cursor, names = requests.scanned(await self._asking.at(wire, packed, deadline))
            found.update(name for space, name in names if space == namespace)
            if cursor == b"0":
                return found

    async def ping(self, deadline: float) -> None:
        for wire in await self._topology.wires(deadline):
            await self._asking.at(wire, pack("PING"), deadline)

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
        if wire is None or not wire.post(self._given_up(claim), self._runtime.now() + self._call_timeout, answered):
            self._book.stir(self._runtime.now())

    def after_fork(self) -> None:
        self._topology.after_fork()
        self._listener.after_fork()
        self._requests.moved(self._book.client)

    async def close(self) -> None:
        self._topology.close()
        if self._book.last(self):
            self._listener.close()

    # -------------------------------------------------------------- answers

    def _given_up(self, claim: Claim) -> bytes:
        bare = claim._replace(min_hold=0.0) if claim.min_hold else claim
        return self._requests.release(self._requests.name(bare.namespace, bare.name), bare)

    def _unconfirmed(self) -> Unavailable:
        few = self._asking.min_replicas
        return Unavailable(f"the Redis server could not show that {few} of its replicas have this", engine="redis")


def open(config: EngineConfig, runtime: Runtime, book: Book) -> RedisEngine:
    """Of the schemes in `deployment.py`."""
    deployment = book.shelf.get("redis")
    if not isinstance(deployment, Deployment):  # the first of the twins
        deployment = book.shelf["redis"] = deployed(config, runtime, book)
    return RedisEngine(runtime, book, deployment, config.call_timeout)
