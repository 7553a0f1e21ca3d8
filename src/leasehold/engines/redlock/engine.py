"""The verbs of the Redlock engine. Each is one round to all nodes, and its result is that of a majority.

The safety argument is at the top of `quorum.py`: majorities share a node, and a majority confirms each token. What one
node decides is one script, an atomic step (`attempt.lua` and its siblings, over `lock_state.lua` of the Redis engine).

- **A failed attempt leaves nothing behind.** A claim that got votes but no majority returns them before the attempt is
  answered. A request that may still be executed late is followed by a release on the same connection, or the node gets
  the release first when it is back.
- **Such a release is numbered.** It may be executed late, after the same claim has attempted again. So a node keeps a
  vote that a request with a higher number got, or one of another client, whose numbers come from another clock; else a
  holder would count on a vote that has just been withdrawn.
- **The queue.** Nodes order it by the clients' tickets, so all agree who is next. If several claims arrive at once and
  none gets a majority, each requeues its votes, and every node then votes for the same claim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from leasehold.config import EngineConfig
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.base import fixed_limits
from leasehold.engines.redis.protocol import NameKeys, as_eval, decode_bool
from leasehold.engines.redis.server import encode_command
from leasehold.engines.redis.server_settings import SHORT_MIN_HOLD
from leasehold.engines.redlock import protocol, quorum
from leasehold.engines.redlock.broadcast import Broadcaster
from leasehold.engines.redlock.client_state import ProposalClock, RedlockClientState
from leasehold.engines.redlock.inspect import RedlockInspector
from leasehold.engines.redlock.protocol import RedlockRequests
from leasehold.engines.redlock.pubsub import NodeSubscriptions
from leasehold.engines.redlock.quorum import Round
from leasehold.engines.redlock.renew import RedlockRenewer
from leasehold.engines.redlock.url import parse_nodes
from leasehold.engines.registry import ClaimRegistry, wait_for_wakeup
from leasehold.engines.repeated_logs import log_once
from leasehold.errors import ConfigError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime

_log = logging.getLogger("leasehold.redlock")

TRAITS: Final = Traits(
    fair=False,  # the order is only as good as the clients' clocks
    shared=False,
    max_limit=1,
    slots=False,
    resizable=False,
    survives="minority",  # at best: depends on the nodes' settings
)
_TRAITS_WITHOUT_PERSISTENCE: Final = TRAITS._replace(survives="nothing")

_PING: Final = encode_command("PING")
_MAX_TRIES: Final = 3  # of an attempt without `queue`, if perhaps no claim has a majority
_RETRY_DELAY: Final = 0.02  # seconds at most between them, random: the first to return finds the nodes free


class NumberedAttempt(NamedTuple):
    """An attempt as it is sent to every node."""

    keys: NameKeys
    claim: Claim
    number: int  # orders the requests of a claim, and is the token it proposes
    ticket: int  # 0: the claim does not queue


class RedlockEngine:
    def __init__(self, runtime: Runtime, registry: ClaimRegistry, client_state: RedlockClientState) -> None:
        self._runtime, self._registry, self._client_state = runtime, registry, client_state
        self._nodes, self._subscriptions, self._proposals = (
            client_state.nodes,
            client_state.subscriptions,
            client_state.proposals,
        )
        self._requests = RedlockRequests(registry.client_id)
        self._scripts = self._requests.scripts
        self._broadcaster = Broadcaster(self._nodes, runtime)
        self._quorum = self._broadcaster.quorum
        self._renewer = RedlockRenewer(registry, self._requests, self._broadcaster, self._proposals)
        self._inspector = RedlockInspector(self._requests, self._broadcaster)
        registry.engines.add(self)

    @property
    def traits(self) -> Traits:
        known = [node.settings for node in self._nodes if node.settings is not None]
        return TRAITS if all(settings.survives == "restart" for settings in known) else _TRAITS_WITHOUT_PERSISTENCE

    @property
    def queues_at_once(self) -> bool:
        return "contended" in self._registry.shared

    # ---------------------------------------------------------------- attempt

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        subscriptions = self._subscriptions
        if claim.queue:
            self._registry.shared["contended"] = True
            self._registry.add_waiter(claim, self._runtime)  # before the request (E4)
            subscriptions.reset_waiter(claim.id_hash)
            if not subscriptions.active:
                await subscriptions.wait_active(self._runtime, deadline)
        elif not subscriptions.active:
            subscriptions.start()
        answer = await self._attempt_round(claim, deadline)
        for _ in range(_MAX_TRIES - 1):
            if answer is not None:
                break
            await self._runtime.sleep(_RETRY_DELAY * self._runtime.random())
            answer = await self._attempt_round(claim, deadline)
        if claim.min_hold > SHORT_MIN_HOLD:
            self._warn_if_min_hold_may_be_lost()
        if isinstance(answer, Grant):
            subscriptions.remove_waiter(claim.id_hash)
            self._proposals.drop_ticket(claim.id_hash)
            if not subscriptions.active:  # the holder must be notified of a break: `traits.break_notice`
                await subscriptions.wait_active(self._runtime, min(deadline, self._runtime.now() + claim.ttl / 4))
        return answer or Busy()

    def _warn_if_min_hold_may_be_lost(self) -> None:
        if any(node.settings is not None and node.settings.appendonly is False for node in self._nodes):
            nodes = ", ".join(str(node.address) for node in self._nodes)
            log_once(
                _log,
                logging.WARNING,
                f"not all of {nodes} have an AOF (appendonly no): restarts free even names that min_hold still keeps; "
                "set appendonly yes and appendfsync always to keep them",
            )

    async def _attempt_round(self, claim: Claim, deadline: float) -> Grant | Busy | None:
        """One round to all nodes, then what follows from their votes. None: perhaps no claim has a majority."""
        ticket = self._proposals.assign_ticket(claim.id_hash) if claim.queue else 0
        keys = self._requests.name_keys(claim.namespace, claim.name)
        attempt = NumberedAttempt(keys, claim, self._proposals.next_number(), ticket)
        result = await self._broadcaster.run_round(
            self._scripts.attempt,
            [self._requests.attempt(*attempt)],
            deadline,
            claim.ttl,
            self._is_decided,
            partial(self._compensation, attempt),
        )
        answers = result.decode_first(lambda reply: protocol.decode_attempt(claim, reply))
        votes = Round.of(answers, result.errors, len(self._nodes))
        tickets = [refusal.last_ticket for refusal in votes.refused.values()]
        self._proposals.observe_answers(
            attempt.number, votes.tokens.values(), quorum.highest_ticket(tickets, len(self._nodes))
        )
        if votes.won:
            return await self._complete_grant(attempt, votes, deadline)
        if votes.lost:
            return await self._return_votes(attempt, votes, deadline)
        # The client then calls forget(), which returns the votes.
        raise self._broadcaster.no_majority_error(result, f"could not attempt {claim.name}")

    async def _complete_grant(self, attempt: NumberedAttempt, votes: Round, deadline: float) -> Grant:
        """A majority votes for the claim: agree on its token, and repair the other nodes."""
        tokens = votes.tokens
        token, confirmed_by = await self._agree_token(attempt, tokens, deadline)
        unconfirmed = {node: answer for node, answer in tokens.items() if node not in confirmed_by}
        to_repair = quorum.mismatched_nodes(unconfirmed, token)
        if attempt.claim.queue:
            to_repair += votes.refused
        if to_repair:
            await self._repair_minority(attempt, token, to_repair, deadline)
        return Grant(token, quorum.majority_life([votes.taken[node].life for node in confirmed_by], self._quorum))

    async def _return_votes(self, attempt: NumberedAttempt, votes: Round, deadline: float) -> Busy | None:
        """The claim has no majority: return the votes it got, or may have got, so that another claim can win."""
        claim = attempt.claim
        if votes.taken:
            reserved_at = await self._undo(attempt, list(votes.taken), deadline)
            if not votes.is_outvoted:
                for node in reserved_at:
                    self._subscriptions.on_node_reservation(claim.id_hash, node)
        if not claim.queue:  # no later attempt or release follows: return votes whose answers were lost
            self._add_missed_releases(claim, self._undo_request(attempt), votes.silent)
            return None if votes.is_split_vote else self._busy(votes)
        for node, refusal in votes.refused.items():
            self._subscriptions.check_node_subscribed(node, refusal.subscribed)
        return self._busy(votes)

    def _busy(self, votes: Round) -> Busy:
        return quorum.merge_busy(len(votes.taken), list(votes.refused.values()), self._quorum)

    def _undo_request(self, attempt: NumberedAttempt, ticket: int = 0) -> bytes:
        return self._requests.undo_attempt(attempt.keys, attempt.claim, attempt.number, ticket)

    def _compensation(self, attempt: NumberedAttempt) -> bytes:
        if not self._registry.undo_unanswered:
            return b""
        return as_eval(self._scripts.release, self._undo_request(attempt))

    def _is_decided(self, replies: Any) -> bool:
        taken = sum(_is_taken(reply) for (reply,) in replies.values())
        return quorum.is_decided(taken, len(replies) - taken, len(self._nodes))

    async def _agree_token(
        self, attempt: NumberedAttempt, tokens: dict[int, int], deadline: float
    ) -> tuple[int, list[int]]:
        """The token of the grant, and the majority of nodes that confirmed it. If this raises, the caller must forget
        the claim."""
        claim = attempt.claim
        token, is_agreed = quorum.agree_token(tokens, self._quorum, attempt.number)
        confirmed_by = [n for n, answer in tokens.items() if answer == token]
        if not is_agreed:
            packed = self._requests.confirm(attempt.keys, claim, token, self._proposals.next_number())
            calls = {n: [packed] for n, answer in tokens.items() if answer <= token}
            result = await self._broadcaster.run_round(
                self._scripts.confirm, calls, deadline, claim.ttl, lambda replies: self._is_confirmed(replies)
            )
            if not self._is_confirmed(result.replies):
                raise self._broadcaster.no_majority_error(result, f"could not agree on a token for {claim.name}")
            confirmed_by = [n for n, (reply,) in result.replies.items() if reply == 1]
        self._proposals.observe_token(token)
        return token, confirmed_by

    def _is_confirmed(self, replies: Any) -> bool:
        return bool(sum(reply[0] == 1 for reply in replies.values()) >= self._quorum)

    async def _repair_minority(
        self, attempt: NumberedAttempt, token: int, to_repair: list[int], deadline: float
    ) -> None:
        """Nodes that got the last release later than others still have this claim queued, and some may have it with
        another token. They join the grant, or drop the claim from the queue. The grant does not depend on it."""
        claim = attempt.claim._replace(token=token)
        offer = attempt._replace(claim=claim, number=self._proposals.next_number())
        packed = self._requests.rejoin(offer.keys, claim, offer.number)
        await self._broadcaster.run_round(
            self._scripts.rejoin,
            {n: [packed] for n in to_repair},
            deadline,
            claim.ttl,
            lambda _: True,
            partial(self._compensation, offer),
        )

    async def _undo(self, attempt: NumberedAttempt, taken: list[int], deadline: float) -> list[int]:
        """Return votes that are too few for a grant; with a ticket, requeue the claim on those nodes. Returns the nodes
        that reserved the name for the claim at once."""
        packed = self._undo_request(attempt, attempt.ticket)
        result = await self._broadcaster.run_round(
            self._scripts.release, {n: [packed] for n in taken}, deadline, attempt.claim.ttl, _never_decided
        )
        ended = result.decode_first(protocol.decode_release)
        if not attempt.ticket:
            self._add_missed_releases(attempt.claim, packed, [n for n in taken if n in result.errors])
        return [n for n, reply in ended.items() if reply == 2]

    # ------------------------------------------------------------- other verbs

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._registry.waiting.get(claim.id_hash):
            await wait_for_wakeup(self._runtime, waiter, busy, seconds, polls=not self._subscriptions.active)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        return await self._renewer.renew(claims, deadline)

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        self._remove_waiter(claim.id_hash)
        packed = self._requests.release(self._requests.name_keys(claim.namespace, claim.name), claim)
        try:
            result = await self._broadcaster.run_round(
                self._scripts.release, [packed], deadline, claim.ttl, lambda replies: len(replies) >= self._quorum
            )
        except ConfigError as error:  # the attempt was permitted, so a retry may be permitted, too
            raise Unavailable(str(error), engine="redlock") from error
        if len(result.replies) < self._quorum:
            raise Unavailable(
                str(self._broadcaster.no_majority_error(result, f"could not release {claim.name}")),
                engine="redlock",
            )
        ended = sum(reply > 0 for reply in result.decode_first(protocol.decode_release).values())
        self._add_missed_releases(claim, packed, result.errors)
        if ended >= self._quorum:  # so at most one release of a grant is answered True
            return True
        may_have_ended = ended > 0 and ended + len(result.errors) >= self._quorum
        return None if result.repeated or may_have_ended else False

    def _add_missed_releases(self, claim: Claim, packed: bytes, indexes: Any) -> None:
        for index in indexes:
            self._nodes[index].add_missed_release(claim.id_hash, self._scripts.release, packed)
            self._subscriptions.probe_node_soon(index)

    async def decline(self, claim: Claim, deadline: float) -> bool:
        packed = self._requests.decline(self._requests.name_keys(claim.namespace, claim.name), claim)
        result = await self._broadcaster.run_round(
            self._scripts.decline, [packed], deadline, WAITER_TTL, lambda replies: len(replies) >= self._quorum
        )
        if len(result.replies) < self._quorum:
            raise self._broadcaster.no_majority_error(result, f"could not decline {claim.name}")
        return any(result.decode_first(decode_bool).values())

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        keys = self._requests.name_keys(namespace, name)
        replies = await self._break(name, self._requests.break_(keys, token), None, deadline)
        id_hashes = {reply for reply in replies.values() if reply}
        others = [n for n, reply in replies.items() if not reply]
        for id_hash in id_hashes:  # a node that has it with another token finds it by its id hash
            if others:
                await self._break(name, self._requests.break_(keys, token, id_hash), others, deadline)
        return bool(id_hashes)

    async def _break(self, name: str, packed: bytes, only_nodes: list[int] | None, deadline: float) -> dict[int, Any]:
        calls = [packed] if only_nodes is None else {n: [packed] for n in only_nodes}
        result = await self._broadcaster.run_round(
            self._scripts.break_, calls, deadline, WAITER_TTL, lambda replies: len(replies) >= self._quorum
        )
        if only_nodes is None and len(result.replies) < self._quorum:
            raise self._broadcaster.no_majority_error(result, f"could not break {name}")
        return result.decode_first(protocol.decode_break)

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        raise fixed_limits(TRAITS, "redlock")

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        return await self._inspector.inspect(namespace, prefix, exact, deadline)

    async def ping(self, deadline: float) -> None:
        result = await self._broadcaster.run_round(
            None, [_PING], deadline, WAITER_TTL, lambda replies: len(replies) >= self._quorum
        )
        if len(result.replies) < self._quorum:
            raise self._broadcaster.no_majority_error(result, "could not reach a majority")

    def forget(self, claim: Claim) -> None:
        if not any(node.accepted_once for node in self._nodes):  # a wrong password, say: no node got a request
            self._remove_waiter(claim.id_hash)
            return
        pending = self._registry.retry_release(claim, wake_now=False)  # first: an interrupt must not lose it
        self._remove_waiter(claim.id_hash)
        packed = self._requests.release(self._requests.name_keys(claim.namespace, claim.name), claim)
        unanswered = set(range(len(self._nodes)))

        def on_reply(index: int, reply: Any) -> None:
            if reply.__class__ is not int:
                self._registry.wake_watchdog(self._runtime.now())
                return
            unanswered.discard(index)
            if not unanswered and self._registry.pending_releases.get(claim.id_hash) is pending:
                del self._registry.pending_releases[claim.id_hash]

        deadline = self._runtime.now() + claim.ttl
        sent = [self._broadcaster.fanout.post(n, packed, deadline, partial(on_reply, n)) for n in list(unanswered)]
        if not all(sent):  # the watchdog retries
            self._registry.wake_watchdog(self._runtime.now())

    def disown(self, claim: Claim) -> None:
        self._registry.disown_waiter(claim.id_hash)
        self._remove_waiter(claim.id_hash)

    def _remove_waiter(self, id_hash: str) -> None:
        self._registry.remove_waiter(id_hash)
        self._subscriptions.remove_waiter(id_hash)
        self._proposals.drop_ticket(id_hash)

    # ---------------------------------------------------------- fork and close

    def after_fork(self) -> None:
        self._broadcaster.after_fork()
        self._subscriptions.after_fork()
        self._proposals.after_fork()
        for node in self._nodes:
            node.after_fork()
        self._requests.set_client(self._registry.client_id)

    async def close(self) -> None:
        self._broadcaster.close()
        if self._registry.remove_engine(self):
            self._subscriptions.close()


def _is_taken(reply: Any) -> bool:
    return reply.__class__ is list and len(reply) == 2 and reply[0].__class__ is int and reply[0] > 0


def _never_decided(_replies: object) -> bool:
    return False  # wait for all nodes, until the deadline


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> RedlockEngine:
    """Open an engine instance for `redlock://[user:password@]host1:port,host2:port,host3:port[/db]`; options:
    `allow_eviction`, `tls` and `ssl_...`."""
    client_state = registry.shared.get("redlock")
    if not isinstance(client_state, RedlockClientState):  # the client's first engine instance
        redlock_nodes = parse_nodes(config)
        subscriptions = NodeSubscriptions(redlock_nodes, runtime, registry, config.call_timeout)
        client_state = registry.shared["redlock"] = RedlockClientState(
            redlock_nodes, subscriptions, ProposalClock(runtime)
        )
    return RedlockEngine(runtime, registry, client_state)
