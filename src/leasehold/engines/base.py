"""The seam: what an engine is. Everything above it is written once; everything below it differs.

An engine decides who holds a name. It is opened by `open(config, runtime, book)`, does no I/O until its first
verb, and is used by one client from two sides at once: the caller's runtime and the watchdog's thread each have a
twin, and the two share a `ClaimRegistry`. Verbs are coroutines; in blocking mode nothing they await ever suspends.
Deadlines are instants of `runtime.now()`: a verb that has no answer by then raises `Unavailable`.

The contract. Code, tests and the guarantees pages cite these numbers.

E1  At any instant of engine time a name has at most `claim.limit` live grants, and never an exclusive one beside
    another. One kind (lock, or semaphore of n) per live name; another gets `Mismatch`.
E2  `attempt` is idempotent by `claim.id`: asked again, it gives the same grant and token, or the same place in line.
E3  Where `traits.fencing`, a new grant's token exceeds every token the name was ever given.
E4  `wait` is only a hint. It may return early or for nothing, never grants, and misses no change for longer than
    `seconds`. `attempt` of a queued claim registers for the wake-up before it asks; one that comes before `wait` is
    remembered. Without push it sleeps a jittered while: slower, just as correct.
E5  Answers mean the engine answered this very call, about *this claim*: not its session, not a cached flag. If it
    cannot tell, `Unavailable`.
E6  `release` removes every trace of a claim, held or queued, but for what `min_hold` keeps (`cooling`); repeating it
    is harmless. An attempt still in flight may land after it: only the ttl or session ends that one, so give-up
    paths never assume the name is free.
E7  A queued claim lapses 15 s after it was last attempted or renewed; one passed over keeps its ticket until then.
E8  `Grant.ttl` is the life left as the engine answered, also when repeated (E2), and for session engines never more
    than the session's. The recipe reads its own clock *before* asking and counts from there; a grant already out of
    trust on arrival is released, not returned. No verb ever shortens a life an earlier answer promised: answers and
    requests may pass each other on the way.
E9  No driver exception crosses the seam. One mapping per engine; always `raise ... from`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits

if TYPE_CHECKING:
    from leasehold.config import EngineConfig
    from leasehold.engines.registry import ClaimRegistry
    from leasehold.errors import Unavailable
    from leasehold.runtime.base import Runtime


class Engine(Protocol):
    """Six verbs keyed by the claim, a way to let go without waiting, and a round trip."""

    @property
    def traits(self) -> Traits: ...

    @property
    def listening(self) -> bool:
        """Wake-ups reach this client already: a claim may queue at its first attempt."""

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        """Take the name, or join and keep the line when `claim.queue` (E1, E2, E3, E8)."""

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        """Return when it may be worth attempting again, after `seconds` at the latest (E4)."""

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        """Answer for each claim in turn: held (with its token) or queued (token 0). Raises nothing (E5, E7)."""

    async def release(self, claim: Claim, deadline: float) -> bool:
        """Give up a claim, held or queued. True: a live grant ended by this call (E6). A claim without an id, made from
        a wake-up nobody knew, gives up a place or a turn and never a grant."""

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        """End the grant that has this token, whoever owns it. The token names what was seen: no successor is hit."""

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        """Everything live in a namespace whose name begins with (or, `exact`, is) `prefix`: holders, then the line."""

    async def ping(self, deadline: float) -> None:
        """One round trip; connects first if need be. Traits the server's settings decide are known after it."""

    def forget(self, claim: Claim) -> None:
        """Send the release of a claim whose outcome is unknown, or owe it in the book. Never waits."""

    def after_fork(self) -> None:
        """In a forked child: drop every connection without a goodbye, renew every guard. Sends nothing."""

    async def close(self) -> None:
        """Let connections go. Releases nothing."""

    # One whose tokens would fall if its data were restored from a backup has one verb more, for the operator:
    # async def rebase(self, floor: int, deadline: float) -> int: have new tokens exceed `floor`, and all that its clock
    # gave so far; says after which number they begin.


Opener: TypeAlias = "Callable[[EngineConfig, Runtime, ClaimRegistry], Engine]"
