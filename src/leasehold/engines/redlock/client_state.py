"""What a client's engine instances share: nodes, subscriptions, and the numbers of requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from leasehold.engines.redis.scripts import MICROS
from leasehold.engines.redlock.node import RedlockNode
from leasehold.engines.redlock.pubsub import NodeSubscriptions
from leasehold.runtime.base import Runtime

_INITIAL_LEAD: Final = 3_000  # microseconds that proposals are ahead of the clock at first, so that all nodes can agree
_MAX_LEAD: Final = 1_000_000


class ProposalClock:
    """Rising numbers near the clock. A request's number is the token it proposes, and orders the requests of a claim:
    the release of an earlier request does not affect what a later one got."""

    def __init__(self, runtime: Runtime) -> None:
        self._wall, self._runtime = runtime.wall, runtime
        self._last, self._lead, self._last_ticket = 0, _INITIAL_LEAD, 0
        self._tickets: dict[str, int] = {}  # by id hash, of waiters
        self.after_fork()

    def after_fork(self) -> None:
        self._mutex = self._runtime.mutex()
        self._tickets.clear()

    def next_number(self) -> int:
        with self._mutex:
            self._last = max(self._last + 1, int(self._wall() * MICROS) + self._lead)
            return self._last

    def observe_answers(self, proposed: int, tokens: Iterable[int], ticket: int) -> None:
        """Learn from answers: how far nodes' clocks are ahead of this one, and the highest queued ticket."""
        ahead = [token - proposed for token in tokens if 0 < token - proposed < _MAX_LEAD]
        with self._mutex:
            if ahead:
                self._lead = min(self._lead + max(ahead) + _INITIAL_LEAD, _MAX_LEAD)
            self._last_ticket = max(self._last_ticket, ticket)

    def observe_token(self, token: int) -> None:
        with self._mutex:
            self._last = max(self._last, token)

    def assign_ticket(self, id_hash: str) -> int:
        """The time of arrival, the same for all nodes. Later than any ticket this client has seen in a queue, so that a
        slow clock gives no advantage."""
        ticket = self._tickets.get(id_hash)
        if ticket is None:
            with self._mutex:
                ticket = self._last_ticket = max(self._last_ticket + 1, int(self._wall() * MICROS))
            self._tickets[id_hash] = ticket
        return ticket

    def drop_ticket(self, id_hash: str) -> None:
        self._tickets.pop(id_hash, None)


class RedlockClientState:
    """In `ClaimRegistry.shared`."""

    def __init__(
        self, nodes: Sequence[RedlockNode], subscriptions: NodeSubscriptions, proposals: ProposalClock
    ) -> None:
        self.nodes, self.subscriptions, self.proposals = nodes, subscriptions, proposals
