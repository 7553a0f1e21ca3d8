"""Inspection: every node's view of a name, made one. Nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from leasehold.core.timing import BEAT
from leasehold.engines.redis.requests import holdings, pattern, scanned
from leasehold.engines.redis.server import pack
from leasehold.engines.redlock import agreement
from leasehold.engines.redlock.asking import Asking, Heard, Packed
from leasehold.engines.redlock.requests import Requests
from leasehold.model import Holding

_SCAN: Final = 1000  # keys a node goes through at a time
_BATCH: Final = 100  # names asked about at a time


class Looking:
    """Of one engine."""

    def __init__(self, packs: Requests, asking: Asking) -> None:
        self._requests, self._asking = packs, asking

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        names = [prefix] if exact else sorted(await self._names(namespace, prefix, deadline))
        found: list[Holding] = []
        for start in range(0, len(names), _BATCH):
            found += await self._look(namespace, names[start : start + _BATCH], deadline)
        return found

    async def _look(self, namespace: str, names: Sequence[str], deadline: float) -> list[Holding]:
        packed = [self._requests.inspect(self._requests.name(namespace, name)) for name in names]
        heard = await self._asking.round(self._requests.scripts.inspect, packed, deadline, BEAT, self._enough)
        views = heard.whole(lambda replies: [holdings(namespace, *each) for each in zip(names, replies, strict=True)])
        self._check(heard)
        by_name = zip(*views.values(), strict=True)
        return [each for views in by_name for each in agreement.holdings(views, len(self._asking.nodes))]

    async def _names(self, namespace: str, prefix: str, deadline: float) -> set[str]:
        """Those with a key of their own on any node. There is no index of names: each goes through all its keys."""
        found: set[str] = set()
        sought = pattern(namespace, prefix)
        asked: Packed | dict[int, Packed] = [pack("SCAN", "0", "MATCH", sought, "COUNT", _SCAN)]
        seen: set[int] = set()
        while asked:
            heard = await self._asking.round(None, asked, deadline, BEAT, self._enough)
            asked = {}
            for node, (cursor, names) in heard.each(scanned).items():
                found.update(name for space, name in names if space == namespace)
                if cursor == b"0":
                    seen.add(node)
                else:
                    asked[node] = [pack("SCAN", cursor, "MATCH", sought, "COUNT", _SCAN)]
        if len(seen) < self._asking.quorum:
            self._check(heard)
        return found

    def _enough(self, replies: object) -> bool:
        return len(replies) >= self._asking.quorum  # type: ignore[arg-type]

    def _check(self, heard: Heard) -> None:
        if len(heard.replies) < self._asking.quorum:
            raise self._asking.too_few(heard, "names could not be looked at")
