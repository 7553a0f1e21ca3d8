"""The verbs over one engine, without HTTP. Every caller of the process shares that engine.

The service keeps nothing that matters. Claims' ids are made by callers, and every verb but `break` is idempotent by id:
the service records only which client to wake for which claim, and the claim's next attempt records that again, at any
server.

Three rules:
1. The service never ends a grant by itself. A caller whose connection broke may have repeated its request at another
   server, and may have been told there that it holds the name. So an attempt under way is never cancelled (engines send
   a release behind one), and only a queue position is given up for a caller that left. The exception is a claim whose
   id was made here and never sent: no caller can know it.
2. A release waits for the attempts of the same claim that are under way here, so that it cannot overtake them (E6). It
   ends a long-poll of the claim first: its next attempt would take the name again.
   A claim is its name and its id: what is recorded here for an id under another name, which the caller may
   not be permitted to lock, stays as it is.
3. A route lives for 15 s after the last attempt or renewal of its claim, as the queue entry does (E7): nothing is kept
   for a dead client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from leasehold import engines
from leasehold.config import EngineConfig
from leasehold.core import timing
from leasehold.core.breaker import MAX_UNANSWERED, PROBE_INTERVAL, Breaker
from leasehold.core.texts import escape
from leasehold.engines.base import Engine
from leasehold.engines.registry import snapshot_items
from leasehold.engines.remote.wire import Hello, Lost, Moved, Notification, Wakeup
from leasehold.errors import ConfigError, LeaseholdError, ListingTooLong, NotSent, Reentered, Unavailable, Unsupported
from leasehold.model import NO_MIN_HOLD, Alive, Busy, Claim, Gone, Grant, Holding
from leasehold.runtime.loop import Loop
from leasehold.server.grants import Grants
from leasehold.server.problems import Draining, invalid
from leasehold.server.routes import (
    Admission,
    Attempts,
    ClientKey,
    LongPoll,
    Registry,
    Relay,
    Stream,
    WaiterRoute,
)
from leasehold.server.spans import Spans

T = TypeVar("T")
N = TypeVar("N", Attempts, LongPoll, WaiterRoute)


_log = logging.getLogger("leasehold.server")

_TICK: Final = 1.0  # seconds between two runs of the background work
_MAX_BATCH: Final = 500  # heartbeats in one call
_POLLING_GRACE: Final = 1.0  # seconds that a client without a stream has to attempt again: it polls about every 0.2 s
_READY_SECONDS: Final = 1.0  # that an answer to `ping` is good for /readyz
_MIN_CALL_SECONDS: Final = 0.25  # the least that an engine gets for a call, whatever the caller's deadline
_CONCLUSIVE_SECONDS: Final = 1.0  # the breaker counts a call without an answer only if it waited for about this long
_STOP_SECONDS: Final = 2.0  # that `stop` waits for pending releases


class Service:
    def __init__(self, config: EngineConfig, runtime: Loop | None = None) -> None:
        if config.scheme in ("http", "https"):
            raise ConfigError("a server cannot serve another server: give it the URL of that server's engine")
        self.config, self.call_timeout = config, config.call_timeout
        self.runtime = runtime or Loop()
        self.registry = Registry(self.runtime, self.runtime.random_bytes(8).hex(), self._decline_unknown)
        self.engine: Engine = engines.opener(config.scheme)(config, self.runtime, self.registry)
        if self.engine.traits.liveness != "ttl":
            raise ConfigError(
                f"a server cannot serve {config.scheme}://: that engine ends grants with its session, which would be "
                "the server's own, so a restart of the server would end every caller's lease"
            )
        self.breaker = Breaker()
        self._answered_at = -timing.NEVER  # the engine, last
        self.draining = False
        self.relay: Relay | None = None  # to the other workers of this server
        self.streams: dict[ClientKey, Stream[Notification]] = {}
        self.routes: dict[str, WaiterRoute] = {}  # by id hash
        self.grants = Grants(self.runtime, self.registry, self._notify_lost)
        self.polls: dict[str, LongPoll] = {}
        self._routes_of: dict[ClientKey, set[str]] = {}
        self._waiting: dict[str, asyncio.Task[Any]] = {}  # inside the engine's `wait`, by id hash
        self._attempts: dict[str, Attempts] = {}  # under way, by id hash
        self.measure: Callable[[str, str, float], None] = lambda _call, _outcome, _seconds: None
        self.on_breaker: Callable[[bool], None] = lambda _opened: None
        self.spans = Spans()
        self._ping: asyncio.Task[None] | None = None
        self._pinged_at = -timing.NEVER

    async def start(self) -> None:
        """Run in this loop from now on. The engine need not answer yet; a wrong setting of it raises ConfigError."""
        self.runtime.bind()
        self._loop = asyncio.get_running_loop()
        self._awake = asyncio.Event()
        self.registry.wake_watchdog = lambda _at: self.call_soon(self._awake.set)
        try:
            await self.ping(self.runtime.now() + self.call_timeout)
        except Unavailable as error:
            _log.warning("the engine does not answer yet: %s", error)
        self._background = self._loop.create_task(self._work_in_background())

    async def stop(self) -> None:
        """Close the engine. Grants and positions stay where they are; pending releases get a last chance."""
        self.drain()
        self._background.cancel()
        for route in self.routes.values():
            if route.task is not None:
                route.task.cancel()
        under_way = [task for attempts in self._attempts.values() for task in attempts.tasks]
        if under_way:  # not cancelled (rule 1): each has a deadline
            await asyncio.wait(under_way, timeout=self.call_timeout + 1)
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._retry_releases()
        self.registry.closed = True
        await self.engine.close()
        self.runtime.close()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call it in the loop. From any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def drain(self) -> None:
        """Refuse new attempts, end streams and long-polls. The engine keeps positions, callers continue elsewhere."""
        self.draining = True
        for stream in list(self.streams.values()):
            stream.push(Moved())
            stream.close()
        for poll in list(self.polls.values()):
            poll.end("draining")

    @property
    def waiters(self) -> int:
        """How many requests and clients wait in queues through this server."""
        return len(self.polls) + sum(map(len, self._routes_of.values()))

    # ----------------------------------------------------------------- verbs

    async def attempt(
        self, claim: Claim, client: ClientKey, deadline: float, admission: Admission | None = None
    ) -> Grant | Busy:
        """One attempt of a remote engine. If it queues, the client's stream gets the wake-up, and the claim is
        counted as a waiter while its route lives."""
        try:
            self._admit(claim)
        except BaseException:
            _end_admission(admission)
            raise
        self._replace_poll(claim.id_hash)
        return await self._attempt(
            claim, deadline, lambda reply: self._route(claim, client, reply, admission), admission
        )

    async def acquire(self, poll: LongPoll, wait: float, latest: float) -> tuple[Grant | Busy, float]:
        """Attempt, wait in the queue for at most `wait` seconds, attempt again. Also says how long after the call the
        attempt was made that got the answer: the caller may count the ttl from so much later (E8).

        `latest`: the caller does not wait longer for an attempt. A poll that ends without a grant leaves its position
        for a repetition if the caller made the id, and nothing if the id was made here."""
        began = self.runtime.now()
        wait_deadline = began + wait
        claim = poll.claim = poll.claim._replace(queue=wait > 0, wait_deadline=wait_deadline)
        granted = registered = False
        try:
            self._admit(claim)
            while True:
                asked = self.runtime.now()
                deadline = timing.call_deadline(asked, self.call_timeout, claim.ttl)
                with poll.admit(not registered and claim.id_hash not in self.routes):
                    if not registered:
                        self._replace_poll(claim.id_hash, poll)
                        self._remove_route(claim.id_hash)
                        registered = True
                    reply = await self._attempt(
                        claim, min(deadline, latest), lambda reply: self._on_poll_reply(poll, claim, reply)
                    )
                granted = isinstance(reply, Grant)
                left = wait_deadline - self.runtime.now()
                if isinstance(reply, Grant) or left <= 0 or poll.ended:
                    return reply, asked - began
                seconds = min(left, timing.recheck_interval(reply.position))
                await poll.wait(self._wait(claim, reply, seconds))
                if poll.ended:
                    return reply, asked - began
        finally:
            if registered and self.polls.get(claim.id_hash) is poll:  # else a later request continues with the claim
                del self.polls[claim.id_hash]
                self._settle(poll, granted)
            _end_admission(poll.admission)

    def _replace_poll(self, id_hash: str, poll: LongPoll | None = None) -> None:
        """A later request with the same id continues with the claim: the earlier poll ends, and gives nothing up."""
        if (earlier := self.polls.pop(id_hash, None)) is not None:
            earlier.end("superseded")
        if poll is not None:
            self.polls[id_hash] = poll

    def _settle(self, poll: LongPoll, granted: bool) -> None:
        """The poll has ended. Its queue entry must neither stay for ever nor take a reservation that no caller uses."""
        claim = poll.claim
        if granted and not (poll.ended == "hung up" and not poll.caller_made_id):
            self.registry.remove_waiter(claim.id_hash)
        elif not poll.caller_made_id and poll.ended != "draining":
            self.grants.remove(claim)
            self.engine.forget(
                claim._replace(min_hold=NO_MIN_HOLD)
            )  # made here and never sent: no caller can repeat it
        elif claim.queue and poll.ended not in ("draining", "released"):
            self._watch(claim, None, Busy(), poll.admission)
            poll.admission = None
        else:
            self.registry.remove_waiter(claim.id_hash)

    async def renew(
        self, claims: Sequence[Claim], client: ClientKey | None, deadline: float
    ) -> list[Alive | Gone | Unavailable]:
        """Always passed to the engine: a lease may depend on it."""
        deadline = self._bounded(deadline)
        began = self.runtime.now()
        replies = list(await self.engine.renew(claims, deadline))  # raises nothing (E5)
        if replies and all(isinstance(reply, Unavailable) for reply in replies):
            self._on_silence(replies[0], began, deadline)
            self.measure("renew", "unavailable", self.runtime.now() - began)
        else:
            self._on_answer()
            self.measure("renew", "ok", self.runtime.now() - began)
        for claim, reply in zip(claims, replies, strict=True):
            if isinstance(reply, Gone):
                self._disown(claim)
            elif isinstance(reply, Alive):
                if claim.token:
                    self.grants.record(claim, client, reply.ttl)
                elif (route := self._find(claim, self.routes)) is not None and route.client == client:
                    route.expires_at = self.runtime.now() + timing.WAITER_TTL
        return replies

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        """Give up a claim, after its attempts under way (rule 2). Raises Unavailable if those outlast the deadline."""
        deadline = self._bounded(deadline)
        if claim.id and (poll := self._find(claim, self.polls)) is not None:
            poll.end("released")
        while (under_way := self._find(claim, self._attempts)) is not None:
            left = deadline - self.runtime.now()
            if left <= 0:
                raise Unavailable("an attempt of the same claim is still under way")
            await asyncio.wait(set(under_way.tasks), timeout=left)
        if self._waits_for_another_name(claim) and claim not in self.grants:
            return False
        if claim.id:
            if self._find(claim, self.routes) is not None:
                self._remove_route(claim.id_hash)
            self.grants.release(claim)
        return await self._counted("release", partial(self.engine.release, claim), deadline)

    async def decline(self, claim: Claim, client: ClientKey, deadline: float) -> bool:
        """A remote engine refuses a reservation: it has no client to notify of it. False for a claim that waits here
        for another client, or does not wait here: a hash of its id, which others may see, must not suffice."""
        route = self._find(claim, self.routes)
        if route is None or route.client != client:
            return False
        return await self._counted("decline", partial(self.engine.decline, claim), deadline)

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        self._refuse_if_open()
        return await self._counted("break", partial(self.engine.break_, namespace, name, token), deadline)

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        self._refuse_if_open()
        await self._counted("set_limit", partial(self.engine.set_limit, namespace, name, limit), deadline)

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        self._refuse_if_open()
        return await self._counted("inspect", partial(self.engine.inspect, namespace, prefix, exact), deadline)

    async def ping(self, deadline: float) -> None:
        """One round trip, as a probe of the breaker."""
        await self._counted("ping", self.engine.ping, deadline)
        self._pinged_at = self.runtime.now()

    async def check_ready(self) -> None:
        """Raise unless this server can serve. Many callers, who need no key, cause one ping a second."""
        if self.draining:
            raise Draining(done=False)
        if self.runtime.now() < self._pinged_at + _READY_SECONDS:
            return
        if self._ping is None or self._ping.done():
            self._ping = self._loop.create_task(self.ping(self.runtime.now() + _READY_SECONDS))
            self._ping.add_done_callback(_log_failure)
        await asyncio.shield(self._ping)

    # --------------------------------------------------------------- attempts

    def _admit(self, claim: Claim) -> None:
        """Raise if the engine must not be asked."""
        if not claim.id:
            raise invalid("an attempt needs the claim's id")
        if self._waits_for_another_name(claim):
            raise invalid("this id waits for another name: make a new id for each acquire")
        traits, missing = self.engine.traits, []
        if claim.mode == "shared" and not traits.shared:
            missing.append("shared")
        if traits.max_limit is not None and claim.limit > traits.max_limit:
            missing.append(f"a limit above {traits.max_limit}")
        if (claim.min_hold or claim.delay) and not traits.outlives:
            missing.append("outlives")
        if missing:
            raise Unsupported(f"the engine does not support {missing[0]}", missing=tuple(missing))
        if self.draining:
            raise Draining(done=False)
        self._refuse_if_open()

    async def _attempt(
        self,
        claim: Claim,
        deadline: float,
        on_reply: Callable[[Grant | Busy], None] | None = None,
        admission: Admission | None = None,
    ) -> Grant | Busy:
        """Ask the engine, in a task of its own: if the caller is cancelled, the attempt still runs to its end (rule 1).
        What follows from the reply happens in that task as well, before a release may pass."""

        async def attempt() -> Grant | Busy:
            with self.spans.engine("attempt", claim) as answered:
                reply = await self._counted("attempt", partial(self.engine.attempt, claim), deadline)
                answered(reply)
            if on_reply is not None:
                on_reply(reply)
            return reply

        def done(task: asyncio.Task[Grant | Busy]) -> None:
            under_way.tasks.discard(task)
            if not under_way.tasks and self._attempts.get(claim.id_hash) is under_way:
                del self._attempts[claim.id_hash]
            if task.cancelled() or task.exception() is not None:  # retrieved, even if the caller is gone
                _end_admission(admission)

        task = self._loop.create_task(attempt())
        under_way = self._attempts.setdefault(claim.id_hash, Attempts(claim))
        under_way.tasks.add(task)
        task.add_done_callback(done)
        return await asyncio.shield(task)

    def _refuse_if_open(self) -> None:
        if retry_in := self.breaker.retry_in(self.runtime.now()):
            raise NotSent("the circuit breaker is open", retry_in=retry_in)

    async def _counted(self, name: str, verb: Callable[[float], Awaitable[T]], deadline: float) -> T:
        """The engine's answer, counted by the breaker and measured."""
        began, deadline = self.runtime.now(), self._bounded(deadline)
        outcome = "error"
        try:
            answer = await verb(deadline)
            outcome = "ok"
        except Reentered:
            raise
        except Unavailable as error:
            if isinstance(error, ListingTooLong):  # the engine answered: other callers must not pay for a long list
                outcome = "refused"
                self._on_answer()
            else:
                outcome = "unavailable"
                self._on_silence(error, began, deadline)
            raise
        except LeaseholdError:  # a refusal is an answer
            outcome = "refused"
            self._on_answer()
            raise
        finally:
            self.measure(name, outcome, self.runtime.now() - began)
        self._on_answer()
        return answer

    def _bounded(self, deadline: float) -> float:
        """At least `_MIN_CALL_SECONDS` from now: a call that ends early may cost a connection, which callers share."""
        return max(deadline, self.runtime.now() + _MIN_CALL_SECONDS)

    def _on_answer(self) -> None:
        self._answered_at = self.runtime.now()
        if self.breaker.on_answer():
            _log.warning("the engine answers again: the circuit breaker is closed")
            self.on_breaker(False)

    def _on_silence(self, error: object, began: float, deadline: float) -> None:
        """Count it, unless the call ended at a deadline that says little about the engine, or the engine has answered
        another call meanwhile: many calls of one caller wait for one another, and must not cost the others theirs."""
        now = self.runtime.now()
        if self._answered_at > began:
            return
        if now >= deadline and deadline - began < 0.8 * min(self.call_timeout, _CONCLUSIVE_SECONDS):
            return
        if self.breaker.on_silence(now):
            _log.warning(
                "the engine did not answer %d calls in a row: the circuit breaker is open, new attempts are refused, "
                "and one call in %g s is sent; last: %s",
                MAX_UNANSWERED,
                PROBE_INTERVAL,
                error,
            )
            self.on_breaker(True)

    # --------------------------------------------------------------- wake-ups

    def open_stream(self, client: ClientKey) -> Stream[Notification]:
        """The client's stream; an earlier one of the same client ends. Raises Draining."""
        if self.draining:
            raise Draining(done=False)
        if (earlier := self.streams.get(client)) is not None:
            earlier.close()
        stream = self.streams[client] = Stream[Notification]()
        if self.relay is not None:
            self.relay.opened(client)
        stream.push(Hello(self.engine.traits))
        return stream

    def close_stream(self, client: ClientKey, stream: Stream[Notification]) -> None:
        """The client is gone, or moved."""
        stream.close()
        if self.streams.get(client) is not stream:
            return
        del self.streams[client]
        if self.relay is not None:
            self.relay.closed(client)
        self.on_stream_gone(client)

    def on_stream_gone(self, client: ClientKey) -> None:
        """What the client was woken for and did not claim goes to the next waiter."""
        if not self.draining:
            for id_hash in list(self._routes_of.get(client, ())):
                route = self.routes[id_hash]
                if route.woken:
                    self._start(route, self._decline(route.claim))

    def end_stream(self, client: ClientKey) -> None:
        """The client has another stream, at another worker."""
        if (stream := self.streams.pop(client, None)) is not None:
            stream.close()

    def can_wake(self, client: ClientKey) -> bool:
        """Whether this server can wake the client."""
        return client in self.streams or (self.relay is not None and self.relay.knows(client))

    def notify_here(self, client: ClientKey, notification: Notification) -> bool:
        if (stream := self.streams.get(client)) is None:
            return False
        stream.push(notification)
        return True

    def _notify(self, client: ClientKey, notification: Notification) -> bool:
        if self.notify_here(client, notification):
            return True
        return self.relay is not None and self.relay.notify(client, notification)

    def _route(self, claim: Claim, client: ClientKey, reply: Grant | Busy, admission: Admission | None) -> None:
        """Record what the reply to an attempt of a remote engine means for wake-ups."""
        if isinstance(reply, Busy) and claim.queue and claim.id_hash not in self.polls:
            self._watch(claim, client, reply, admission)
            return
        _end_admission(admission)
        if isinstance(reply, Grant):
            self._remove_route(claim.id_hash)
            self.registry.remove_waiter(claim.id_hash)
            self.grants.record(claim, client, reply.ttl, client[0])

    def _on_poll_reply(self, poll: LongPoll, claim: Claim, reply: Grant | Busy) -> None:
        if isinstance(reply, Grant):
            self.grants.record(claim, None, reply.ttl, poll.who)

    def _watch(self, claim: Claim, client: ClientKey | None, busy: Busy, admission: Admission | None) -> None:
        """Wait for the claim's wake-up, in a task."""
        route = self.routes.get(claim.id_hash)
        if route is None:
            route = self.routes[claim.id_hash] = WaiterRoute(claim, client, self.runtime.now())
        elif route.client is not None and route.client != client:
            self._unlink(route)
        if route.admission is not admission:
            _end_admission(route.admission)
        route.claim, route.client, route.admission, route.woken = claim, client, admission, False
        route.had_stream = client is not None and self.can_wake(client)
        route.expires_at = self.runtime.now() + timing.WAITER_TTL
        if client is not None:
            self._routes_of.setdefault(client, set()).add(claim.id_hash)
        self._start(route, self._wake(route, busy))

    def _start(self, route: WaiterRoute, work: Coroutine[Any, Any, None]) -> None:
        """The route's one task."""
        if route.task is not None:
            route.task.cancel()
        route.task = self._loop.create_task(work)
        route.task.add_done_callback(_log_failure)

    async def _wake(self, route: WaiterRoute, busy: Busy) -> None:
        """Wait with the engine's own `wait`, so that any engine works: if it ends early, the client should attempt."""
        while (left := route.expires_at - self.runtime.now()) > 0:
            ends_at = self.runtime.now() + left
            await self._wait(route.claim, busy, left)
            if self.runtime.now() >= ends_at:
                continue
            claim, client = route.claim, route.client
            if client is not None:
                if self._notify(client, Wakeup(claim.namespace, claim.name, claim.id_hash)):
                    route.woken = True
                    return
                if not route.had_stream:
                    await self.runtime.sleep(_POLLING_GRACE)  # its next attempt ends this task
            waiter = self.registry.waiting.get(claim.id_hash)
            if waiter is not None and waiter.recheck_by is not None and not waiter.woken:
                waiter.recheck_by = None  # no client re-checks for it; it may be reserved for later
                continue
            await self._decline(claim)
            return

    async def _wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        """The engine's `wait`, in a task of its own. A claim has one waiter at a time, so an earlier one ends first."""
        waiting, own = self._waiting, asyncio.current_task()
        while (earlier := waiting.get(claim.id_hash)) is not None:
            earlier.cancel()
            await asyncio.wait({earlier})
        assert own is not None  # noqa: S101  # for the type checker
        waiting[claim.id_hash] = own
        try:
            with self.spans.engine("wait", claim):
                await self.engine.wait(claim, busy, seconds)
        finally:
            del waiting[claim.id_hash]

    async def _decline(self, claim: Claim) -> None:
        """Let the next waiter have the claim's reservation: no client would claim it. The claim keeps its position."""
        with suppress(LeaseholdError):  # then the reservation expires in 3 s
            await self.engine.decline(claim, self.runtime.now() + self.call_timeout)

    def _decline_unknown(self, claim: Claim) -> None:  # from any thread
        self.call_soon(lambda: self.runtime.spawn(self._decline(claim), "decline of an unknown claim"))

    def _notify_lost(self, client: ClientKey, id_hash: str) -> None:  # from any thread
        self.call_soon(self._notify, client, Lost(id_hash))

    def _remove_route(self, id_hash: str) -> None:
        if (route := self.routes.pop(id_hash, None)) is not None:
            if route.task is not None:
                route.task.cancel()
            _end_admission(route.admission)
            self._unlink(route)

    def _find(self, claim: Claim, entries: Mapping[str, N]) -> N | None:
        """The claim's entry. An entry with the same id and another name belongs to another claim."""
        entry = entries.get(claim.id_hash)
        return entry if entry is not None and entry.claim[:2] == claim[:2] else None

    def _waits_for_another_name(self, claim: Claim) -> bool:
        """Whether the id waits here for another name. Engines would forget that waiter: they know it by its id."""
        id_hash = claim.id_hash
        waiting = self.polls.get(id_hash) or self.routes.get(id_hash) or self._attempts.get(id_hash)
        return waiting is not None and waiting.claim[:2] != claim[:2]

    def queued_since(self, claim: Claim) -> float | None:
        """When the claim began to wait here, by an earlier attempt; None: it does not."""
        route = self._find(claim, self.routes)
        return None if route is None else route.began

    def take_admission(self, claim: Claim) -> Admission | None:
        """The admission of a claim that waits here, for a repetition of its request."""
        known = self._find(claim, self.routes) or self._find(claim, self.polls)
        if known is None:
            return None
        admission, known.admission = known.admission, None
        return admission

    def _unlink(self, route: WaiterRoute) -> None:
        if route.client is not None and (known := self._routes_of.get(route.client)) is not None:
            known.discard(route.claim.id_hash)
            if not known:
                del self._routes_of[route.client]

    def _disown(self, claim: Claim) -> None:
        """Forget the claim here. The engine is not asked: the claim may go on at another server."""
        self.grants.expire(claim)
        if claim.id_hash in self.routes and self._find(claim, self.routes) is None:
            return
        self._remove_route(claim.id_hash)
        if claim.id_hash not in self.polls and claim.id_hash not in self._attempts:
            self.engine.disown(claim)

    # ------------------------------------------------------------- background

    async def _work_in_background(self) -> None:
        next_heartbeat = self.runtime.now() + timing.HEARTBEAT_INTERVAL
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK):
                    await self._awake.wait()
            self._awake.clear()
            try:
                self._disown_expired()
                await self._retry_releases()
                if self.runtime.now() >= next_heartbeat:
                    next_heartbeat = self.runtime.now() + timing.HEARTBEAT_INTERVAL
                    await self._send_heartbeats()
            except Exception as error:
                _log.error("unexpected error in the server's background work; continuing", exc_info=error)
                await asyncio.sleep(_TICK)

    def _disown_expired(self) -> None:
        now = self.runtime.now()
        waiters = [route.claim for route in self.routes.values() if route.expires_at <= now]
        for claim in [*waiters, *self.grants.expired(now)]:
            self._disown(claim)

    async def _retry_releases(self) -> None:
        """Retry what `forget` could not send: for claims whose id was made here, and wake-ups for unknown claims."""
        for id_hash, pending in snapshot_items(self.registry.pending_releases):
            if self.runtime.now() < pending.retry_until:
                try:
                    release = partial(self.engine.release, pending.claim)
                    await self._counted("release", release, self.runtime.now() + self.call_timeout)
                except LeaseholdError as error:
                    _log.info("the release of %s is still pending: %s", escape(pending.claim.name), error)
                    return
            if self.registry.pending_releases.get(id_hash) is pending:
                del self.registry.pending_releases[id_hash]

    async def _send_heartbeats(self) -> None:
        """Long-polls stay in the queue (E7). Those that the engine may have passed over attempt again at once."""
        polls = [poll for poll in self.polls.values() if poll.claim.queue and not poll.ended]
        for start in range(0, len(polls), _MAX_BATCH):
            batch = polls[start : start + _MAX_BATCH]
            replies = await self.renew([poll.claim for poll in batch], None, self.runtime.now() + self.call_timeout)
            for poll, reply in zip(batch, replies, strict=True):
                if isinstance(reply, Gone) or (isinstance(reply, Alive) and not reply.position):
                    poll.recheck()


def _end_admission(admission: Admission | None) -> None:
    if admission is not None:
        admission.end()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, LeaseholdError):
        _log.error("unexpected error while a claim waited", exc_info=error)
