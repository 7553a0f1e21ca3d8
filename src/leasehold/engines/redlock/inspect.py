"""Inspection: merges the nodes' views of a name. Read-only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from leasehold.core.listing import ListingBudget
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.redis.protocol import decode_holdings, decode_scan, scan_pattern, unexpected_reply
from leasehold.engines.redis.server import encode_command
from leasehold.engines.redlock import quorum
from leasehold.engines.redlock.broadcast import Broadcaster, Packed, RoundResult
from leasehold.engines.redlock.protocol import RedlockRequests
from leasehold.model import Holding
from leasehold.runtime.net.blocking import RepliesTooLong

_SCAN_COUNT: Final = 1000  # keys per SCAN
_MAX_PAGE: Final = 4 * _SCAN_COUNT  # keys of one reply: a server adds those of one bucket of its hash table
_BATCH: Final = 100  # names per round


class _TooManyAtOnce(Exception):
    """The replies of a node are too long for one round: ask for fewer names."""


class RedlockInspector:
    """Inspects names for one engine instance."""

    def __init__(self, requests: RedlockRequests, broadcaster: Broadcaster) -> None:
        self._requests, self._broadcaster = requests, broadcaster

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        names = [prefix] if exact else sorted(await self._scan_names(namespace, prefix, deadline))
        names.reverse()
        found: list[Holding] = []
        size, budget = _BATCH, ListingBudget("redlock")
        while batch := names[: -size - 1 : -1]:
            try:
                found += map(budget.spend_holding, await self._inspect_names(namespace, batch, deadline))
            except _TooManyAtOnce:
                size //= 2
                continue
            del names[-len(batch) :]
        return found

    async def _inspect_names(self, namespace: str, names: Sequence[str], deadline: float) -> list[Holding]:
        packed = [self._requests.inspect(self._requests.name_keys(namespace, name)) for name in names]
        result = await self._broadcaster.run_round(
            self._requests.scripts.inspect, packed, deadline, WAITER_TTL, self._has_majority
        )
        if len(names) > 1 and any(isinstance(error.__cause__, RepliesTooLong) for error in result.errors.values()):
            raise _TooManyAtOnce
        views = result.decode_all(
            lambda replies: [decode_holdings(namespace, *each) for each in zip(names, replies, strict=True)]
        )
        self._require_majority(result)
        by_name = zip(*views.values(), strict=True)
        return [each for views in by_name for each in quorum.merge_holdings(views, len(self._broadcaster.nodes))]

    async def _scan_names(self, namespace: str, prefix: str, deadline: float) -> set[str]:
        """The names that have a key on any node. There is no index of names: SCAN goes through all keys of a node."""
        found, budget = set[str](), ListingBudget("redlock")
        key_pattern = scan_pattern(namespace, prefix)
        calls: Packed | dict[int, Packed] = [encode_command("SCAN", "0", "MATCH", key_pattern, "COUNT", _SCAN_COUNT)]
        finished: set[int] = set()
        while calls:
            result = await self._broadcaster.run_round(None, calls, deadline, WAITER_TTL, self._has_majority)
            calls = {}
            for node, (cursor, names) in result.decode_first(_decode_page).items():
                for found_namespace, name in names:
                    if found_namespace == namespace and name not in found:
                        budget.spend(name)
                        found.add(name)
                if cursor == b"0":
                    finished.add(node)
                else:
                    calls[node] = [encode_command("SCAN", cursor, "MATCH", key_pattern, "COUNT", _SCAN_COUNT)]
        if len(finished) < self._broadcaster.quorum:
            self._require_majority(result)
        return found

    def _has_majority(self, replies: object) -> bool:
        return len(replies) >= self._broadcaster.quorum  # type: ignore[arg-type]

    def _require_majority(self, result: RoundResult) -> None:
        if len(result.replies) < self._broadcaster.quorum:
            raise self._broadcaster.no_majority_error(result, "could not inspect names")


def _decode_page(reply: Any) -> tuple[bytes, list[tuple[str, str]]]:
    """Refuses a long list before it is decoded: under asyncio no other task runs meanwhile."""
    if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], list) and len(reply[1]) > _MAX_PAGE:
        raise unexpected_reply()
    return decode_scan(reply)
