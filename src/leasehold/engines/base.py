"""The engine interface. The code above it is written once; the code below it differs by engine.

An engine decides who holds a name. It is opened by `open(config, runtime, registry)` and does no I/O until its first
verb. A client has two instances of its engine, one in the caller's runtime and one on the watchdog's thread; both share
a `ClaimRegistry`. Verbs are coroutines; in blocking mode nothing they await ever suspends. Deadlines are instants of
`runtime.now()`: a verb that has no answer by then raises `Unavailable`.

The contract. Code, tests and the guarantees pages cite these numbers.

E1  At any instant of engine time a claim is granted only if the name has fewer live grants than its limit, and never an
    exclusive grant together with another. One kind (lock, or semaphore of n) per live name; a claim of another kind
    gets `Mismatch`. The limit is that of the claims; once `set_limit` has set one, that counts for all of them. A
    smaller limit ends no grant.
E2  `attempt` is idempotent by `claim.id`: asked again, it gives the same grant and token, or the same position in the
    queue. So it does through any instance of the engine, in any process (session engines: of the same client).
E3  Where `traits.fencing`, a new grant's token exceeds every token the name was ever given.
E4  `wait` is only a hint. It may return early or for nothing, never grants, and misses no change for longer than
    `seconds`. `attempt` of a queued claim registers for the wake-up before it asks; a wake-up that comes before `wait`
    is remembered. Without push, `wait` sleeps for a jittered time: slower, just as correct.
E5  An answer is the engine's reply to this call about this claim, through any instance. A renewal or release counts
    only if namespace, name and id fit, else the claim is not there: `Gone`, False. An answer is never inferred from a
    session or a cached flag. If the engine cannot tell, it is `Unavailable`.
E6  `release` removes every trace of a claim, held or queued, whichever instances it was made through, except for what
    `min_hold` keeps (`cooling`); repeating it is harmless. `min_hold` and `delay` are kept with the grant: a release or
    renewal need not know them. An attempt still in flight may arrive after the release: only the ttl or session ends
    that grant, so give-up paths never assume the name is free.
E7  A queued claim expires 15 s after it was last attempted or renewed (etcd: 4 s after its process died or was cut off;
    ZooKeeper: with its session); a claim that was passed over keeps its position until then.
E8  `Grant.ttl` is the life left when the engine answered, even if the grant is repeated (E2), and for session engines
    never more than the session's. The client reads its own clock *before* asking and counts from there; a grant that
    can no longer be trusted when it arrives is released, not returned. No verb shortens a life that an earlier answer
    promised, because requests and answers may overtake each other.
E9  No driver exception crosses the engine interface. One mapping per engine; always `raise ... from`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from leasehold.errors import Unsupported
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits

if TYPE_CHECKING:
    from leasehold.config import EngineConfig
    from leasehold.engines.registry import ClaimRegistry
    from leasehold.errors import Unavailable
    from leasehold.runtime.base import Runtime


class Engine(Protocol):
    """Seven verbs, most of them keyed by the claim; `ping`; `forget`, a release that does not wait; `decline` and
    `disown`, for servers between engine and clients; and what ends an instance."""

    @property
    def traits(self) -> Traits: ...

    @property
    def queues_at_once(self) -> bool:
        """Whether a claim that may wait joins the queue at its first attempt: once this client has met contention, or
        always."""

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        """Take the name, or join or stay in the queue if `claim.queue` (E1, E2, E3, E8)."""

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        """Return when another attempt may succeed, after `seconds` at the latest (E4)."""

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        """Renew claims that are held (with their token) or queued (token 0). One answer per claim, in the same order.
        Raises nothing (E5, E7)."""

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        """Give up a claim, held or queued. True: this call ended a live grant (E6). False: there was none any more,
        and the request was sent only once. None: there was none when a repeated request arrived, and the request sent
        before may have ended it; or only some of several servers answered. Of all releases of a grant at most one is
        answered True. Namespace, name and id suffice. `min_hold` is that of the grant; NO_MIN_HOLD in the
        claim: it does not apply, because no work was done. A claim without an id, made from a wake-up for an unknown
        claim, gives up a queue position or a reservation, never a grant."""

    async def decline(self, claim: Claim, deadline: float) -> bool:
        """Refuse a reservation whose client cannot be notified: the next waiter gets it at once. True: this call gave
        it on. The claim is passed over: it does not block the queue, and keeps its position (E7). On engines without
        reservations (etcd, ZooKeeper) a claim that is first in the queue leaves it. False: the claim has no
        reservation, or another instance notifies its client by now. Never ends a grant."""

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        """End the grant with this token, whatever its claim. A successor has another token, so it is never broken."""

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        """Where `traits.resizable`: set the limit of a semaphore, which then counts for every claim on the name,
        whatever the claim says, until it is set again (E1). It stays when the name has no claims left. Waiters that
        now fit are notified. None removes it: once the name has no claims, its next claim decides again. Repeating it
        is harmless. Raises `Mismatch` if the name is in use as a lock."""

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        """The live claims on all names of a namespace that begin with `prefix` (`exact`: on the name `prefix`). Per
        name the holders come first, then the queue."""

    async def ping(self, deadline: float) -> None:
        """One round trip; connects first if necessary. Then traits that depend on the server's settings are known."""

    def forget(self, claim: Claim) -> None:
        """Send the release of a claim whose outcome is unknown, or leave it pending in the registry. Never waits."""

    def disown(self, claim: Claim) -> None:
        """Drop what this instance knows of a claim, and send nothing: the claim lives on, served by another instance
        or by none. A `wait` for it returns. A pending release stays."""

    def after_fork(self) -> None:
        """In a forked child: drop every connection without closing its session, replace every mutex. Sends nothing."""

    async def close(self) -> None:
        """Close connections. Releases nothing."""

    # An engine whose tokens would fall if its data were restored from a backup has one more verb, for the operator:
    # async def rebase(self, floor: int, deadline: float) -> int: makes new tokens exceed `floor` and every token that
    # the engine's clock has given so far; returns the number after which they begin.


def fixed_limits(traits: Traits, engine: str) -> Unsupported:
    """The answer to `set_limit` of an engine without the trait `resizable`."""
    if traits.max_limit == 1:
        text = f"{engine}, as configured, has no semaphores, so there is no limit to set: use another engine"
    else:
        text = (
            f"{engine} cannot change the limit of a semaphore in use: each client decides by the limit in its own "
            "claims, so that two limits could count at once. Let the name become idle and start its programs with the "
            "new limit, or use an engine that promises resizable"
        )
    return Unsupported(text, engine=engine, missing=("resizable",))


class WrappedEngine:
    """The methods that send nothing, passed on to another engine: for engines that only add to the other verbs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def traits(self) -> Traits:
        return self._engine.traits

    @property
    def queues_at_once(self) -> bool:
        return self._engine.queues_at_once

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        await self._engine.wait(claim, busy, seconds)

    def forget(self, claim: Claim) -> None:
        self._engine.forget(claim)

    def disown(self, claim: Claim) -> None:
        self._engine.disown(claim)

    def after_fork(self) -> None:
        self._engine.after_fork()

    async def close(self) -> None:
        await self._engine.close()


Opener: TypeAlias = "Callable[[EngineConfig, Runtime, ClaimRegistry], Engine]"
