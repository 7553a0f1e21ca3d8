"""How much one `inspect` may list. A broken or hostile server could name locks without end, and the client would keep
them all in memory until its deadline."""

from __future__ import annotations

from typing import Final

from leasehold.errors import ListingTooLong
from leasehold.model import Holding

MAX_MEMORY: Final = 24 << 20  # bytes, estimated: some thirty thousand claims
_FIXED: Final = 640  # bytes of a claim without its texts
_PER_CHARACTER: Final = 4  # bytes: what Python needs for each character of a text with a single emoji
_CENTURY: Final = 100 * 365 * 86_400.0  # seconds


def listed_seconds(seconds: float) -> float:
    """A time of a claim: 0 instead of a negative one or NaN, and a century at most. A broken or hostile client, or a
    server, may state times for which there are no dates."""
    return min(max(0.0, seconds), _CENTURY)


class ListingBudget:
    """Counts what one call lists."""

    def __init__(self, engine: str, memory: int = MAX_MEMORY) -> None:
        self._engine = engine
        self._count, self._left = 0, memory

    def spend(self, *texts: str) -> None:
        """Count a claim, or a name, with these texts, before it is kept. Raises ListingTooLong for one too many."""
        self.spend_bytes(_FIXED + _PER_CHARACTER * sum(map(len, texts)))

    def spend_bytes(self, size: int) -> None:
        """The same of something that takes so much memory."""
        self._left -= size
        if self._left < 0:
            text = f"more than {self._count:,} claims are live: ask for the names with one prefix"
            raise ListingTooLong(text, engine=self._engine)
        self._count += 1

    def spend_holding(self, holding: Holding) -> Holding:
        holder = holding.holder
        self.spend(holding.name, holder.label, holder.host, holder.purpose)
        return holding
