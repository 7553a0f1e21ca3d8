"""The grants that went through a server: whom to notify of a break, and how many count for each caller.

A lease counts as long as it keeps its name occupied at the engine, which takes memory there: also while `min_hold` or
`delay` keep the name, and for each name, even if a caller uses one id for many.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeAlias

from leasehold.engines.registry import ClaimRegistry
from leasehold.model import NO_MIN_HOLD, Claim, Reason
from leasehold.runtime.loop import Loop
from leasehold.server.routes import ClientKey

Key: TypeAlias = tuple[str, str, str]  # namespace, name and id hash


class GrantRoute:
    """A claim granted through this server, and the client to notify if an operator breaks it. For the registry it is a
    lease."""

    __slots__ = ("_notify", "claim", "client", "expires_at", "granted_at", "who")

    def __init__(self, claim: Claim, client: ClientKey | None, who: str, notify: Callable[[], None]) -> None:
        self.claim, self.client, self._notify = claim, client, notify
        self.who = who  # whose lease it is, if this server granted it
        self.granted_at = self.expires_at = 0.0

    def _end_lost(self, reason: Reason) -> bool:  # from any thread
        self._notify()
        return True

    def _mark_at_risk(self, why: str) -> None:
        """Nothing to do: the client learns it from its own renewals."""


class Grants:
    """`notify_lost` is called with a client and an id hash, from any thread."""

    def __init__(self, runtime: Loop, registry: ClaimRegistry, notify_lost: Callable[[ClientKey, str], None]) -> None:
        self._runtime, self._registry, self._notify_lost = runtime, registry, notify_lost
        self.held: dict[Key, GrantRoute] = {}
        # By caller: how many of `held` this server granted to it, and how many names its former ones keep occupied.
        self.leases: dict[str, int] = {}
        self._occupied: list[tuple[float, str]] = []  # a heap: until when, by whose former lease

    def __contains__(self, claim: Claim) -> bool:
        return _key(claim) in self.held

    def record(self, claim: Claim, client: ClientKey | None, ttl: float, who: str = "") -> None:
        """Record a grant until it would expire unrenewed. `who`: an attempt of this caller got it, now or before."""
        held, now = self.held.get(_key(claim)), self._runtime.now()
        if held is None or (client is not None and held.client != client):
            granted_at = now if held is None else held.granted_at
            who = who or ("" if held is None else held.who)
            self.remove(claim)
            held = self._add(claim, client, who)
            held.granted_at = granted_at
        elif who:
            held.claim = claim  # a repeated attempt may have another `delay` and `min_hold`
        held.expires_at = now + ttl

    def release(self, claim: Claim) -> None:
        """The claim is given up by its holder."""
        held = self.held.get(_key(claim))
        min_hold = held.claim.min_hold if held is not None and claim.min_hold != NO_MIN_HOLD else 0.0
        self.remove(claim, 0.0 if held is None else held.granted_at + min_hold)

    def expire(self, claim: Claim) -> None:
        """The claim is over, or is forgotten here."""
        held = self.held.get(_key(claim))
        self.remove(claim, 0.0 if held is None else held.expires_at + held.claim.delay)

    def expired(self, now: float) -> list[Claim]:
        """The claims that are over by now, for `expire`. What no longer occupies its name counts no longer."""
        while self._occupied and self._occupied[0][0] <= now:
            self._uncount(heappop(self._occupied)[1])
        return [held.claim for held in self.held.values() if held.expires_at <= now]

    def remove(self, claim: Claim, occupied_until: float = 0.0) -> None:
        """Forget a grant. It counts until `occupied_until`."""
        held = self.held.pop(_key(claim), None)
        if held is None:
            return
        registered = self._registry.held.get(claim.id_hash)
        if registered is not None and registered() is held:
            del self._registry.held[claim.id_hash]
        if held.who and occupied_until > self._runtime.now():
            heappush(self._occupied, (occupied_until, held.who))
        elif held.who:
            self._uncount(held.who)

    def _add(self, claim: Claim, client: ClientKey | None, who: str) -> GrantRoute:
        def notify() -> None:
            if client is not None:
                self._notify_lost(client, claim.id_hash)

        held = self.held[_key(claim)] = GrantRoute(claim, client, who, notify)
        self._registry.held.setdefault(claim.id_hash, lambda: held)  # of several names with this id, the first
        if who:
            self.leases[who] = self.leases.get(who, 0) + 1
        return held

    def _uncount(self, who: str) -> None:
        self.leases[who] -= 1
        if not self.leases[who]:
            del self.leases[who]


def _key(claim: Claim) -> Key:
    return claim.namespace, claim.name, claim.id_hash
