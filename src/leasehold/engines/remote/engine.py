"""The remote engine: the verbs of the engine interface, asked of a Leasehold server over HTTP.

Its safety rests on three facts. The engine behind the servers decides; nothing is decided here (E1, E3). Every verb but
those for operators, `break_` and `set_limit`, is idempotent by the claim's id, so it may be sent again, to the same
server or to another, within its deadline (E2, E6). Only a complete answer to this very request counts; anything else is
`Unavailable` (E5, E9).

A release that must not wait (`forget`) is left to the watchdog. A server lets a release wait for an attempt of the same
claim that it is still carrying out, so that the release does not overtake it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from leasehold import tracing
from leasehold.config import EngineConfig
from leasehold.engines.registry import ClaimRegistry, Waiter, wait_for_wakeup
from leasehold.engines.remote import wire
from leasehold.engines.remote.connections import new_connections
from leasehold.engines.remote.listener import Listener
from leasehold.engines.remote.refusals import RefusalReports
from leasehold.engines.remote.servers import Call, Failover, Reply, Servers
from leasehold.engines.remote.url import parse_url
from leasehold.engines.remote.wire import Json
from leasehold.errors import AccessDenied, ConfigError, LeaseholdError, ListingTooLong, Overloaded, Refused, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime

T = TypeVar("T")

_MAX_PAGES: Final = 5  # of one list of locks
_MAX_REFUSALS: Final = 5  # of a waiter by the server in use, before it tries the others


class Shared(NamedTuple):
    """What the engine instances of a client share."""

    servers: Servers
    listener: Listener
    refusals: RefusalReports


class RemoteEngine:
    def __init__(self, runtime: Runtime, registry: ClaimRegistry, shared: Shared, scheme: str) -> None:
        self._runtime, self._registry, self._scheme = runtime, registry, scheme
        self._servers, self._listener, self._refusals = shared
        self._connections = new_connections(runtime, registry, scheme)
        self._failover = Failover(self._servers, self._connections, runtime, scheme)
        self._polling: set[str] = set()  # id hashes of waiters that their server cannot wake, so they poll
        self._denied: set[str] = set()  # id hashes of claims whose attempt was denied, until they are forgotten
        registry.engines.add(self)

    @property
    def traits(self) -> Traits:
        return self._servers.traits

    @property
    def queues_at_once(self) -> bool:
        """Whether this client has met contention: then its claims queue at their first attempt."""
        return "contended" in self._registry.shared

    # ---------------------------------------------------------------- verbs

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        listener, waiter, retry_until = self._listener, None, None
        if claim.queue:
            self._registry.shared["contended"] = True
            if not listener.active:
                await listener.wait_active(self._runtime, deadline)
            waiter = self._registry.add_waiter(claim, self._runtime)  # before the request (E4)
            retry_until = partial(_wait_deadline, waiter)
        elif not listener.active:
            listener.start()
        body = {"do": "attempt", "claim": self._claim(claim)}
        if (parent := tracing.current_parent()) is not None:
            body[tracing.HEADER] = parent  # one request may have calls of several traces
        try:
            # A waiter keeps to its server, which alone can wake it, until that has refused it several times.
            stays = waiter is not None and waiter.refusals < _MAX_REFUSALS
            call = Call(body, deadline, retry_until=retry_until, stays=stays)
            answer = await self._ask(call, wire.attempt_from_json)
        except Overloaded:
            if waiter is not None:
                waiter.refusals += 1
            raise
        except AccessDenied as denied:
            if denied._nothing_done:
                self._denied.add(claim.id_hash)
            raise
        if isinstance(answer, Grant):
            self._polling.discard(claim.id_hash)
            if not listener.active:  # for `traits.break_notice`
                await listener.wait_active(self._runtime, min(deadline, self._runtime.now() + claim.ttl / 4))
            return answer
        (self._polling.discard if answer.can_wake else self._polling.add)(claim.id_hash)
        return answer.busy

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._registry.waiting.get(claim.id_hash):
            polls = not self._listener.active or claim.id_hash in self._polling
            # The server re-checks when the holder's grant ends, and then wakes the head of the queue.
            await wait_for_wakeup(self._runtime, waiter, Busy(None, busy.position), seconds, polls=polls)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        """In parts, because a server takes only so many claims at a time: a client may have thousands of waiters."""
        replies: list[Alive | Gone | Unavailable] = []
        for start in range(0, len(claims), wire.MAX_CALLS):
            replies += await self._renew(claims[start : start + wire.MAX_CALLS], deadline)
        return replies

    async def _renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        now = self._runtime.now()
        body = {"do": "renew", "claims": [wire.claim_to_json(claim, now, with_holder=False) for claim in claims]}
        try:
            answers = await self._ask(
                Call(body, deadline), lambda answer: wire.renewed_from_json(answer, len(claims), self._scheme)
            )
        except LeaseholdError as error:
            return [self._unavailable(error)] * len(claims)
        return [answer if isinstance(answer, (Alive, Gone)) else self._unavailable(answer) for answer in answers]

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        self._registry.remove_waiter(claim.id_hash)
        self._polling.discard(claim.id_hash)
        try:
            reply = await self._failover.ask(Call({"do": "release", "claim": self._claim(claim)}, deadline))
            ended = wire.flag_from_json(reply.answer)
        except ConfigError as error:  # the attempt was permitted, so a retry may be permitted, too
            raise self._unavailable(error) from error
        return None if reply.repeated and not ended else ended

    async def decline(self, claim: Claim, deadline: float) -> bool:
        return bool(
            await self._ask(Call({"do": "decline", "claim": self._claim(claim)}, deadline), wire.flag_from_json)
        )

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        body = {"do": "break", "namespace": namespace, "name": name, "token": token}
        return bool(await self._ask(Call(body, deadline, repeatable=False), wire.flag_from_json))

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        body = {"do": "set_limit", "namespace": namespace, "name": name, "limit": limit}
        await self._ask(Call(body, deadline, repeatable=False), wire.flag_from_json)

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        """In pages, so that no answer of a server takes much memory. What changes from one page to the next may be
        missing, or listed twice."""
        body: Json = {"do": "inspect", "namespace": namespace, "prefix": prefix, "exact": exact}
        found: list[Holding] = []
        for _ in range(_MAX_PAGES):
            page, more = await self._ask(Call(body, deadline), wire.page_from_json)
            found += page
            if more is None:
                return found
            body["after"] = list(more)
        text = f"more than {len(found):,} claims are live: ask for the names with one prefix"
        raise ListingTooLong(text, engine=self._scheme)

    async def ping(self, deadline: float) -> None:
        self._servers.traits = await self._ask(Call({"do": "ping"}, deadline), wire.traits_answer_from_json)

    def forget(self, claim: Claim) -> None:
        if claim.id_hash in self._denied:  # a release would be denied, too, and again until its time is over
            self._denied.discard(claim.id_hash)
        else:
            self._registry.retry_release(claim)  # first: an interrupt must not lose it
        self._registry.remove_waiter(claim.id_hash)
        self._polling.discard(claim.id_hash)

    def disown(self, claim: Claim) -> None:
        self._registry.disown_waiter(claim.id_hash)
        self._polling.discard(claim.id_hash)

    def after_fork(self) -> None:
        self._connections.after_fork()
        self._listener.after_fork()
        self._refusals.after_fork()

    async def close(self) -> None:
        self._connections.close()
        if self._registry.remove_engine(self):
            self._listener.close()
            await self._refusals.flush(self._runtime)

    # --------------------------------------------------------------- asking

    def _claim(self, claim: Claim) -> Json:
        return wire.claim_to_json(claim, self._runtime.now())

    async def _ask(self, call: Call, read: Callable[[object], T]) -> T:
        reply: Reply = await self._failover.ask(call)
        try:
            return read(reply.answer)
        except wire.Malformed as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: LeaseholdError) -> Unavailable:
        if isinstance(error, Unavailable):
            return error
        if isinstance(error, wire.Malformed):
            text = f"the server did not answer as a Leasehold server does: {error}"
            return Unavailable(text, engine=self._scheme)
        refused = Refused(str(error), engine=self._scheme)
        refused.__cause__ = error
        return refused


def _wait_deadline(waiter: Waiter) -> float:
    return 0.0 if waiter.cancelled else waiter.claim.wait_deadline  # close() cancels


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> RemoteEngine:
    """Open an engine instance for a URL with the scheme http or https."""
    shared = registry.shared.get("remote")
    if not isinstance(shared, Shared):  # the client's first engine instance
        servers = Servers(parse_url(config), registry.client_id)
        about = servers, runtime, registry, config.call_timeout
        shared = Shared(servers, Listener(*about), RefusalReports(*about))
        registry.shared["remote"] = shared
        registry.report_refusal = shared.refusals.add
    return RemoteEngine(runtime, registry, shared, config.scheme)
