"""The verbs of the Redis engine. Each is one script: one atomic step of the server, at one reading of its clock.

Safety, in four lines. `lock_state.lua`, which is `core/lock_state.py` over keys, decides who may hold (E1). A token is
the bucket's last token plus 1, or the server's clock, whichever is higher (E3). A claim is identified by its id hash
alone, so a repeated request finds it (E2, E6). A request without a reply is neither yes nor no: it is given up (E5).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import CoroutineType
from typing import Any, Final

from leasehold.config import EngineConfig
from leasehold.core.listing import ListingBudget
from leasehold.core.lock_state import mismatch
from leasehold.core.timing import RESERVATION_PROBE, WAKEUP_SLACK
from leasehold.engines.redis import protocol
from leasehold.engines.redis.connections import Connections
from leasehold.engines.redis.deployment import Deployment, make_deployment
from leasehold.engines.redis.executor import REPEATED_RELEASE, Executor, ScriptCall, ScriptResult
from leasehold.engines.redis.protocol import NameKeys, RedisRequests
from leasehold.engines.redis.pubsub import Subscription
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import encode_command
from leasehold.engines.redis.server_settings import SHORT_MIN_HOLD, NotPermitted, Unreachable
from leasehold.engines.registry import ClaimRegistry, wait_for_wakeup
from leasehold.engines.repeated_logs import log_once
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import NO_MIN_HOLD, Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime, maybe_await
from leasehold.runtime.net.blocking import RepliesTooLong

TRAITS: Final = Traits(survives="restart")  # at best: depends on the server's settings
_TRAITS_WITHOUT_PERSISTENCE: Final = TRAITS._replace(survives="nothing")

_log = logging.getLogger("leasehold.redis")

_SCAN_COUNT: Final = 1000  # keys per SCAN
_INSPECT_BATCH: Final = 100  # names per batch


class RedisEngine:
    def __init__(self, runtime: Runtime, registry: ClaimRegistry, deployment: Deployment, call_timeout: float) -> None:
        self._runtime, self._registry, self._call_timeout = runtime, registry, call_timeout
        self._topology, self._subscriptions = deployment.make_topology(runtime), deployment.subscriptions
        self._requests = RedisRequests(self._topology.pubsub_commands, registry.client_id)
        self._scripts = self._requests.scripts
        self.executor = Executor(runtime, self._topology, deployment.options.min_replicas)
        self._never_executed: set[str] = set()  # id hashes of attempts that no server executed
        registry.engines.add(self)

    @property
    def traits(self) -> Traits:
        return _TRAITS_WITHOUT_PERSISTENCE if self._topology.survives == "nothing" else TRAITS

    @property
    def queues_at_once(self) -> bool:
        """Whether this client has met contention: then its claims queue at their first attempt."""
        return "contended" in self._registry.shared

    # ---------------------------------------------------------------- verbs

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        keys = self._requests.name_keys(claim.namespace, claim.name)
        subscription, was_waiting, retry_until = self._subscriptions.for_bucket(keys.tag), False, None
        if claim.queue:
            was_waiting = claim.id_hash in self._registry.waiting
            self._registry.shared["contended"] = True
            waiter = self._registry.add_waiter(claim, self._runtime)  # before the request (E4)
            retry_until = lambda: 0.0 if waiter.cancelled else claim.wait_deadline  # noqa: E731  # close() cancels
            if not subscription.active:
                await subscription.wait_active(self._runtime, deadline)
        elif not subscription.active:
            subscription.start()
        packed = self._requests.attempt(keys, claim)
        compensation = partial(self._compensation, claim) if self._registry.undo_unanswered else None
        try:
            if self.executor.min_replicas:
                call = ScriptCall(
                    keys.tag,
                    self._scripts.attempt,
                    packed,
                    deadline,
                    compensation,
                    retry_until=retry_until,
                    confirm=True,
                )
                return await self._attempt_confirmed(claim, call, subscription)
            reply = self.executor.execute(
                keys.tag, self._scripts.attempt, packed, deadline, compensation, retry_until=retry_until
            )
            if reply.__class__ is CoroutineType:
                reply = await reply
        except (NotPermitted, Unreachable):
            if not was_waiting:
                self._never_executed.add(claim.id_hash)
            raise
        answer = protocol.decode_attempt(claim, reply)
        if claim.min_hold > SHORT_MIN_HOLD:
            self._warn_if_min_hold_may_be_lost(keys.tag)
        if not subscription.active or answer.__class__ is Busy:
            await self._ensure_subscribed(claim, subscription, answer, reply, deadline)
        return answer

    def _warn_if_min_hold_may_be_lost(self, tag: str) -> None:
        connections = self._topology.connections(tag)
        settings = None if connections is None else connections.server.settings
        if connections is not None and settings is not None and settings.appendonly is False:
            log_once(
                _log,
                logging.WARNING,
                f"{connections.server} has no AOF (appendonly no): a restart frees even names that min_hold still "
                "keeps; set appendonly yes and appendfsync always to keep them",
            )

    async def _attempt_confirmed(self, claim: Claim, call: ScriptCall, subscription: Subscription) -> Grant | Busy:
        """An attempt with `min_replicas`: a grant that too few replicas have confirmed does not count."""
        reply, confirmed = await self.executor.execute_with_retries(call)
        answer = protocol.decode_attempt(claim, reply)
        if isinstance(answer, Grant) and not confirmed:
            raise self._unconfirmed_error()
        if claim.min_hold > SHORT_MIN_HOLD:
            self._warn_if_min_hold_may_be_lost(call.tag)
        await self._ensure_subscribed(claim, subscription, answer, reply, call.deadline)
        return answer

    async def _ensure_subscribed(
        self, claim: Claim, subscription: Subscription, answer: Grant | Busy, reply: Any, deadline: float
    ) -> None:
        """Make sure that a waiter can be woken, and that a holder is notified of a break (`traits.break_notice`)."""
        if isinstance(answer, Busy):
            if claim.queue and subscription.reconnect_if_lost(protocol.not_subscribed(reply)):
                await subscription.wait_active(self._runtime, deadline)
            elif protocol.must_recheck(reply) and (waiter := self._registry.waiting.get(claim.id_hash)) is not None:
                waiter.recheck_by = self._runtime.now() + RESERVATION_PROBE
        elif not subscription.active:
            await subscription.wait_active(self._runtime, min(deadline, self._runtime.now() + claim.ttl / 4))

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._registry.waiting.get(claim.id_hash):
            bucket = self._requests.name_keys(claim.namespace, claim.name).tag
            polls = not self._subscriptions.for_bucket(bucket).active
            if waiter.recheck_by is not None:
                seconds = min(seconds, waiter.recheck_by + WAKEUP_SLACK - self._runtime.now())
            await wait_for_wakeup(self._runtime, waiter, busy, seconds, polls=polls)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        requests, script = self._requests, self._scripts.renew
        names: dict[tuple[str, ...], list[int]] = {}
        for index, claim in enumerate(claims):
            names.setdefault(claim[:2], []).append(index)  # by namespace and name
        calls = []
        for name_id, indexes in names.items():
            keys = requests.name_keys(*name_id)
            packed = requests.renew(keys, [claims[n] for n in indexes])
            calls.append(ScriptCall(keys.tag, script, packed, deadline, confirm=True))
        answers: list[Alive | Gone | Unavailable] = [Unavailable("renewal not sent", engine="redis")] * len(claims)
        for indexes, result in zip(names.values(), await self.executor.execute_batch(calls), strict=True):
            for index, answer in zip(indexes, self._decode_renewals([claims[n] for n in indexes], result), strict=True):
                answers[index] = answer
        return answers

    def _decode_renewals(
        self, claims: Sequence[Claim], result: ScriptResult | LeaseholdError
    ) -> list[Alive | Gone | Unavailable]:
        """The answers for the claims of one name, which one script renews."""
        if not isinstance(result, LeaseholdError):
            try:
                answers: list[Alive | Gone] = protocol.decode_renewals(claims, result.reply)
                if result.confirmed:
                    return [*answers]
                return [
                    self._unconfirmed_error() if claim.token and isinstance(answer, Alive) else answer
                    for claim, answer in zip(claims, answers, strict=True)
                ]
            except Unavailable as error:
                result = error
        return [Unavailable(str(result), engine="redis")] * len(claims)

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        if self._registry.waiting:
            self._registry.remove_waiter(claim.id_hash)
        keys = self._requests.name_keys(claim.namespace, claim.name)
        try:
            reply = self.executor.execute(
                keys.tag, self._scripts.release, self._requests.release(keys, claim), deadline
            )
            if reply.__class__ is CoroutineType:
                reply = await reply
        except ConfigError as error:  # the attempt was permitted, so a retry may be permitted, too
            raise Unavailable(str(error), engine="redis") from error
        return None if reply is REPEATED_RELEASE else protocol.decode_bool(reply)

    async def decline(self, claim: Claim, deadline: float) -> bool:
        keys = self._requests.name_keys(claim.namespace, claim.name)
        reply = self.executor.execute(
            keys.tag, self._scripts.decline, self._requests.decline(keys, claim), deadline, retries_left=0
        )
        return protocol.decode_bool(await maybe_await(reply))

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        keys = self._requests.name_keys(namespace, name)
        return await self._execute_once(keys, self._scripts.break_, self._requests.break_(keys, token), deadline)

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        keys = self._requests.name_keys(namespace, name)
        packed = self._requests.set_limit(keys, limit)
        if not await self._execute_once(keys, self._scripts.set_limit, packed, deadline):
            raise mismatch(name, "semaphore", limit or 1, "lock", 1)

    async def _execute_once(self, keys: NameKeys, script: Script, packed: bytes, deadline: float) -> bool:
        """For operators' verbs, which are not retried: another operator may have acted in between."""
        connections = self._topology.connections(keys.tag)
        if connections is not None:  # first replace a connection that the server closed for idling
            with suppress(Unreachable):
                await self.executor.send_to(connections, encode_command("PING"), deadline)
        reply = self.executor.execute(keys.tag, script, packed, deadline, retries_left=0)
        return protocol.decode_bool(await maybe_await(reply))

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        names, budget = {prefix} if exact else await self._scan_all(namespace, prefix, deadline), ListingBudget("redis")
        ordered = sorted(names, reverse=True)
        found: list[Holding] = []
        size = _INSPECT_BATCH
        while batch := ordered[: -size - 1 : -1]:
            try:
                replies = await self._inspect_names(namespace, batch, deadline)
            except Unavailable as error:
                if size == 1 or not isinstance(error.__cause__, RepliesTooLong):
                    raise
                size //= 2
                continue
            for name, reply in zip(batch, replies, strict=True):
                found += map(budget.spend_holding, protocol.decode_holdings(namespace, name, reply))
            del ordered[-len(batch) :], replies
        return found

    async def _inspect_names(self, namespace: str, names: Sequence[str], deadline: float) -> list[Any]:
        """The replies for these names."""
        all_keys = [self._requests.name_keys(namespace, name) for name in names]
        calls = [
            ScriptCall(name.tag, self._scripts.inspect, self._requests.inspect(name), deadline) for name in all_keys
        ]
        replies = []
        for result in await self.executor.execute_batch(calls):
            if isinstance(result, LeaseholdError):
                raise result
            replies.append(result.reply)
        return replies

    async def _scan_all(self, namespace: str, prefix: str, deadline: float) -> set[str]:
        names, budget = set[str](), ListingBudget("redis")
        for connections in await self._topology.all_connections(deadline):
            await self._scan_names(connections, namespace, prefix, names, budget, deadline)
        return names

    async def _scan_names(
        self,
        connections: Connections,
        namespace: str,
        prefix: str,
        found: set[str],
        budget: ListingBudget,
        deadline: float,
    ) -> None:
        """Add the names that have a key. There is no index of names: SCAN goes through all keys of the server."""
        cursor = b"0"
        while True:
            packed = encode_command(
                "SCAN", cursor, "MATCH", protocol.scan_pattern(namespace, prefix), "COUNT", _SCAN_COUNT
            )
            cursor, names = protocol.decode_scan(await self.executor.send_to(connections, packed, deadline))
            for space, name in names:
                if space == namespace and name not in found:
                    budget.spend(name)
                    found.add(name)
            if cursor == b"0":
                return

    async def ping(self, deadline: float) -> None:
        for connections in await self._topology.all_connections(deadline):
            await self.executor.send_to(connections, encode_command("PING"), deadline)

    def forget(self, claim: Claim) -> None:
        if claim.id_hash in self._never_executed:  # nothing to release
            self._never_executed.discard(claim.id_hash)
            self._registry.remove_waiter(claim.id_hash)
            return
        connections = self._topology.connections(self._requests.name_keys(claim.namespace, claim.name).tag)
        pending = self._registry.retry_release(claim, wake_now=False)  # first: an interrupt must not lose it
        self._registry.remove_waiter(claim.id_hash)

        def on_reply(reply: Any) -> None:
            if reply.__class__ is int and self._registry.pending_releases.get(claim.id_hash) is pending:
                del self._registry.pending_releases[claim.id_hash]
            elif reply.__class__ is not int:
                self._registry.wake_watchdog(self._runtime.now())

        # Sent on the attempt's connection, the release cannot overtake it. If that fails, the watchdog retries.
        if connections is None or not connections.post(
            self._compensation(claim), self._runtime.now() + self._call_timeout, on_reply
        ):
            self._registry.wake_watchdog(self._runtime.now())

    def disown(self, claim: Claim) -> None:
        self._registry.disown_waiter(claim.id_hash)
        self._never_executed.discard(claim.id_hash)

    def after_fork(self) -> None:
        self._topology.after_fork()
        self._subscriptions.after_fork()
        self._requests.set_client(self._registry.client_id)

    async def close(self) -> None:
        self._topology.close()
        if self._registry.remove_engine(self):
            self._subscriptions.close()

    # -------------------------------------------------------------- answers

    def _compensation(self, claim: Claim) -> bytes:
        without_min_hold = claim._replace(min_hold=NO_MIN_HOLD) if claim.min_hold else claim
        return self._requests.release(
            self._requests.name_keys(without_min_hold.namespace, without_min_hold.name), without_min_hold
        )

    def _unconfirmed_error(self) -> Unavailable:
        min_replicas = self.executor.min_replicas
        return Unavailable(
            f"the Redis server could not confirm that {min_replicas} of its replicas have this write", engine="redis"
        )


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> RedisEngine:
    """Open an engine instance for a URL with one of the schemes in `deployment.py`."""
    deployment = registry.shared.get("redis")
    if not isinstance(deployment, Deployment):  # the client's first engine instance
        deployment = registry.shared["redis"] = make_deployment(config, runtime, registry)
    return RedisEngine(runtime, registry, deployment, config.call_timeout)
