"""What the twins of one client share: the nodes, the subscriptions, and the numbers that requests carry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from leasehold.engines.redis.scripts import MICROS
from leasehold.engines.redlock.listener import Ears
from leasehold.engines.redlock.node import Node
from leasehold.runtime.base import Runtime

_LEAD: Final = 3_000  # microseconds that a proposal is ahead of the clock at first, so that every node can agree to it
_MOST_LEAD: Final = 1_000_000


class Numbers:
    """Rising numbers near the clock. A request's number is the token it proposes, and tells it from earlier requests of
    its claim: what gives back one of them leaves alone what a later one got."""

    def __init__(self, runtime: Runtime) -> None:
        self._wall, self._runtime = runtime.wall, runtime
        self._last, self._lead, self._ticket = 0, _LEAD, 0
        self._tickets: dict[str, int] = {}  # by mark: of those who wait
        self.after_fork()

    def after_fork(self) -> None:
        self._guard = self._runtime.guard()
        self._tickets.clear()

    def next(self) -> int:
        with self._guard:
            self._last = max(self._last + 1, int(self._wall() * MICROS) + self._lead)
            return self._last

    def learn(self, proposed: int, tokens: Iterable[int], ticket: int) -> None:
        """From answers: nodes whose clocks are ahead of this one's, and lines that others stand in."""
        ahead = [each - proposed for each in tokens if 0 < each - proposed < _MOST_LEAD]
        with self._guard:
            if ahead:
                self._lead = min(self._lead + max(ahead) + _LEAD, _MOST_LEAD)
            self._ticket = max(self._ticket, ticket)

    def seen(self, token: int) -> None:
        with self._guard:
            self._last = max(self._last, token)

    def ticket(self, mark: str) -> int:
        """When it came, the same for all nodes. Later than any that was seen in a line: whose clock is slow does not go
        first."""
        found = self._tickets.get(mark)
        if found is None:
            with self._guard:
                found = self._ticket = max(self._ticket + 1, int(self._wall() * MICROS))
            self._tickets[mark] = found
        return found

    def leaves(self, mark: str) -> None:
        self._tickets.pop(mark, None)


class Shared:
    """On the shelf of their book."""

    def __init__(self, nodes: Sequence[Node], listener: Ears, numbers: Numbers) -> None:
        self.nodes, self.listener, self.numbers = nodes, listener, numbers
