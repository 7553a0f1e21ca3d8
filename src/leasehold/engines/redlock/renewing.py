"""Renewal by majority, and taking part again where a node has lost a grant.

A lease lives on when a majority of the nodes still had it and pushed its end back; it is gone when so many do not have
it that no majority can. A node that answered without having it, because it was down too long, lost its data, or was
never asked, is then offered the grant again. That can let nobody in beside the holder, and no token out of order: the
majority has just said that the grant lives, and the offer is good only for a moment, by the node's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from leasehold.book import Book
from leasehold.engines.redis.requests import Name, spelled_out
from leasehold.engines.redlock import agreement, requests
from leasehold.engines.redlock.asking import Asking, Heard
from leasehold.engines.redlock.requests import Renewed, Requests
from leasehold.engines.redlock.shared import Numbers
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Alive, Claim, Gone

_OFFER: Final = 500_000  # microseconds that an offer is good for


class Asked(NamedTuple):
    """A claim, and what each node says about it, by its own clock."""

    claim: Claim
    answers: dict[int, Renewed]
    clocks: dict[int, int]


class Renewing:
    """Of one engine."""

    def __init__(self, book: Book, packs: Requests, asking: Asking, numbers: Numbers) -> None:
        self._book, self._requests, self._asking, self._numbers = book, packs, asking, numbers

    async def renew(self, claims: Sequence[Claim], deadline: float) -> list[Alive | Gone | Unavailable]:
        """One trip to each node for all claims: a script for each name."""
        names: dict[tuple[str, str], list[int]] = {}
        for place, claim in enumerate(claims):
            names.setdefault((claim.namespace, claim.name), []).append(place)
        number, groups = self._numbers.next(), list(names.values())
        packed = [self._requests.renew(self._name(claims[g[0]]), [claims[n] for n in g], number) for g in groups]
        ttl = min((claim.ttl for claim in claims), default=0.0)

        def decided(replies: Mapping[int, list[Any]]) -> bool:
            return None not in map(self._verdict, self._read(claims, groups, Heard(dict(replies), {})))

        try:
            heard = await self._asking.round(self._requests.scripts.renew, packed, deadline, ttl, decided)
            found = self._read(claims, groups, heard)
        except LeaseholdError as error:
            return [Unavailable(str(error), engine="redlock")] * len(claims)
        await self._retake(found, deadline)
        return [self._answer(asked, heard) for asked in found]

    def _read(self, claims: Sequence[Claim], groups: Sequence[Sequence[int]], heard: Heard) -> list[Asked]:
        found = [Asked(claim, {}, {}) for claim in claims]
        sizes = [len(group) for group in groups]
        said = heard.whole(lambda replies: [requests.renewed(*each) for each in zip(sizes, replies, strict=True)])
        for node, by_group in said.items():
            for group, (renewed, now) in zip(groups, by_group, strict=True):
                for number, answer in zip(group, renewed, strict=True):
                    found[number].answers[node], found[number].clocks[node] = answer, now
        return found

    def _verdict(self, asked: Asked) -> Alive | Gone | None:
        judge = agreement.held if asked.claim.token else agreement.waits
        return judge(asked.answers, len(self._asking.nodes))

    async def _retake(self, found: Sequence[Asked], deadline: float) -> None:
        """A trip to each node that lacks any, for all that it lacks."""
        lacking: dict[int, dict[Claim, bytes]] = {}
        ttl, number = float("inf"), self._numbers.next()
        for asked in found:
            claim = asked.claim
            if claim.token and claim.mark in self._book.held and isinstance(self._verdict(asked), Alive):
                for node, answer in asked.answers.items():
                    if answer.life is None:
                        until = asked.clocks[node] + _OFFER
                        packed = self._requests.retake(self._name(claim), claim, number, until)
                        lacking.setdefault(node, {})[claim] = packed
                        ttl = min(ttl, claim.ttl)
        retake = self._requests.scripts.retake
        for node, offers in lacking.items():
            regret = partial(self._regret, list(offers), number)
            await self._asking.round(retake, {node: list(offers.values())}, deadline, ttl, lambda _: True, regret)
            await self._take_back(node, [claim for claim in offers if claim.mark not in self._book.held], deadline)

    def _regret(self, claims: Sequence[Claim], number: int) -> bytes:
        release, packs = self._requests.scripts.release, self._requests
        return b"".join(spelled_out(release, packs.give_back(self._name(each), each, number)) for each in claims)

    async def _take_back(self, node: int, over: Sequence[Claim], deadline: float) -> None:
        """What was released while it was offered: the release may have come first, and the offer would stay (E6). One
        that is held by now is released after this, and behind the offer."""
        if not over:
            return
        release, packs = self._requests.scripts.release, self._requests
        packed = {each.mark: packs.release(self._name(each), each._replace(min_hold=0.0)) for each in over}
        heard = await self._asking.round(release, {node: list(packed.values())}, deadline, over[0].ttl, lambda _: True)
        if heard.errors.get(node):
            for mark, each in packed.items():
                self._asking.nodes[node].owe(mark, release, each)

    def _name(self, claim: Claim) -> Name:
        return self._requests.name(claim.namespace, claim.name)

    def _answer(self, asked: Asked, heard: Heard) -> Alive | Gone | Unavailable:
        verdict, claim = self._verdict(asked), asked.claim
        if verdict is None:
            why = self._asking.too_few(heard, f"{claim.name} could not be renewed")
            return Unavailable(str(why), engine="redlock")
        left_over = any(answer.life is not None for answer in asked.answers.values())
        if claim.token and claim.id and left_over and isinstance(verdict, Gone):
            self._book.owe(claim)  # the few that still have it would keep it for as long as it was to live
        return verdict
