"""Renewal by majority, and rejoining on nodes that have lost a grant.

A lease is alive if a majority of the nodes still had it and renewed it. It is gone if so many nodes do not have it that
no majority can. If the lease is alive, the client offers the grant again to nodes that answered but do not have it,
because they were down too long, lost their data, or never got the request. This cannot admit a second holder or break
the order of tokens: the majority has just confirmed that the grant is alive, and the offer is valid only for a moment,
by the node's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from leasehold.engines.redis.protocol import NameKeys, as_eval
from leasehold.engines.redlock import protocol, quorum
from leasehold.engines.redlock.broadcast import Broadcaster, RoundResult
from leasehold.engines.redlock.client_state import ProposalClock
from leasehold.engines.redlock.protocol import NodeRenewal, RedlockRequests
from leasehold.engines.registry import ClaimRegistry
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Alive, Claim, Gone

_OFFER_LIFETIME: Final = 500_000  # microseconds that an offer is valid


class ClaimAnswers(NamedTuple):
    """A claim, each node's answer about it, and each node's clock."""

    claim: Claim
    answers: dict[int, NodeRenewal]
    clocks: dict[int, int]


class RedlockRenewer:
    """Renews the claims of one engine instance."""

    def __init__(
        self, registry: ClaimRegistry, requests: RedlockRequests, broadcaster: Broadcaster, proposals: ProposalClock
    ) -> None:
        self._registry, self._requests, self._broadcaster, self._proposals = registry, requests, broadcaster, proposals

    async def renew(self, claims: Sequence[Claim], deadline: float) -> list[Alive | Gone | Unavailable]:
        """One round trip to each node for all claims, with one script per name."""
        names: dict[tuple[str, str], list[int]] = {}
        for index, claim in enumerate(claims):
            names.setdefault((claim.namespace, claim.name), []).append(index)
        number, groups = self._proposals.next_number(), list(names.values())
        packed = [self._requests.renew(self._name_keys(claims[g[0]]), [claims[n] for n in g], number) for g in groups]
        ttl = min((claim.ttl for claim in claims), default=0.0)

        def decided(replies: Mapping[int, list[Any]]) -> bool:
            return None not in map(self._verdict, self._collect_answers(claims, groups, RoundResult(dict(replies), {})))

        try:
            result = await self._broadcaster.run_round(self._requests.scripts.renew, packed, deadline, ttl, decided)
            answers = self._collect_answers(claims, groups, result)
        except LeaseholdError as error:
            return [Unavailable(str(error), engine="redlock")] * len(claims)
        await self._rejoin(answers, deadline)
        return [self._answer(claim_answers, result) for claim_answers in answers]

    def _collect_answers(
        self, claims: Sequence[Claim], groups: Sequence[Sequence[int]], result: RoundResult
    ) -> list[ClaimAnswers]:
        answers = [ClaimAnswers(claim, {}, {}) for claim in claims]
        sizes = [len(group) for group in groups]
        by_node = result.decode_all(
            lambda replies: [protocol.decode_renewals(*sized_reply) for sized_reply in zip(sizes, replies, strict=True)]
        )
        for node, by_group in by_node.items():
            for group, (renewed, now) in zip(groups, by_group, strict=True):
                for index, answer in zip(group, renewed, strict=True):
                    answers[index].answers[node], answers[index].clocks[node] = answer, now
        return answers

    def _verdict(self, claim_answers: ClaimAnswers) -> Alive | Gone | None:
        judge = quorum.judge_held if claim_answers.claim.token else quorum.judge_waiting
        return judge(claim_answers.answers, len(self._broadcaster.nodes))

    async def _rejoin(self, answers: Sequence[ClaimAnswers], deadline: float) -> None:
        """One round trip to each node that lacks live grants, with all it lacks."""
        lacking: dict[int, dict[Claim, bytes]] = {}
        ttl, number = float("inf"), self._proposals.next_number()
        for claim_answers in answers:
            claim = claim_answers.claim
            if claim.token and claim.id_hash in self._registry.held and isinstance(self._verdict(claim_answers), Alive):
                for node, answer in claim_answers.answers.items():
                    if answer.life is None:
                        valid_until = claim_answers.clocks[node] + _OFFER_LIFETIME
                        packed = self._requests.rejoin(self._name_keys(claim), claim, number, valid_until)
                        lacking.setdefault(node, {})[claim] = packed
                        ttl = min(ttl, claim.ttl)
        rejoin = self._requests.scripts.rejoin
        for node, offers in lacking.items():
            compensation = partial(self._compensation, list(offers), number)
            await self._broadcaster.run_round(
                rejoin, {node: list(offers.values())}, deadline, ttl, lambda _: True, compensation
            )
            released = [claim for claim in offers if claim.id_hash not in self._registry.held]
            await self._withdraw_released(node, released, number, deadline)

    def _compensation(self, claims: Sequence[Claim], number: int) -> bytes:
        if not self._registry.undo_unanswered:  # then an offer that arrives late is refused after its lifetime
            return b""
        return b"".join(as_eval(self._requests.scripts.release, self._undo(claim, number)) for claim in claims)

    def _undo(self, claim: Claim, number: int) -> bytes:
        """Withdraws the offer with this number, and no vote that a later request or another client got since."""
        return self._requests.undo_attempt(self._name_keys(claim), claim, number)

    async def _withdraw_released(self, node: int, released: Sequence[Claim], number: int, deadline: float) -> None:
        """Withdraw offers of what was released during the offer: the release may have arrived before the offer, which
        would then stay (E6). A claim still held is released later, and so after the offer."""
        if not released:
            return
        release, packed = self._requests.scripts.release, {each.id_hash: self._undo(each, number) for each in released}
        result = await self._broadcaster.run_round(
            release, {node: list(packed.values())}, deadline, released[0].ttl, lambda _: True
        )
        missed = self._broadcaster.nodes[node]
        if result.errors.get(node):
            for id_hash, each in packed.items():
                if id_hash not in missed.missed_releases:  # the claim's own release ends more than this
                    missed.add_missed_release(id_hash, release, each)

    def _name_keys(self, claim: Claim) -> NameKeys:
        return self._requests.name_keys(claim.namespace, claim.name)

    def _answer(self, claim_answers: ClaimAnswers, result: RoundResult) -> Alive | Gone | Unavailable:
        verdict, claim = self._verdict(claim_answers), claim_answers.claim
        if verdict is None:
            why = self._broadcaster.no_majority_error(result, f"could not renew {claim.name}")
            return Unavailable(str(why), engine="redlock")
        left_over = any(answer.life is not None for answer in claim_answers.answers.values())
        if claim.token and claim.id and left_over and isinstance(verdict, Gone):
            self._registry.retry_release(claim)  # else the few nodes that have it keep it until its ttl is over
        return verdict
