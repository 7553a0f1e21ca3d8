"""The verbs of the engines on SQL servers: one stored procedure, one round trip and one transaction each.

Servers differ in their `SerialConnection`, which sends a call and returns its rows, and in their `SqlListener`, which
receives wake-ups. The server makes all decisions: what a verb reads, decides and writes there is one transaction, and
this module compares nothing that was read earlier. So the safety argument is in each server's SQL: `verbs.sql` says
what a verb does under the lock of its bucket's row, and `lock_state.sql` is the state machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from leasehold.core.lock_state import mismatch
from leasehold.core.names import bucket
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.base import fixed_limits
from leasehold.engines.registry import ClaimRegistry, wait_for_wakeup
from leasehold.engines.sql.codec import holdings, key, micros, seconds, whole
from leasehold.engines.sql.connection import SerialConnection
from leasehold.engines.sql.listener import SqlListener
from leasehold.engines.sql.session import Decoding, Row
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder, Holding, Kind, Traits
from leasehold.runtime.base import Runtime

_GRANTED: Final = "1"
_MISMATCH: Final = "2"

SWEEP_EVERY: Final = 8  # attempts: removes expired grants of names that no client asks for any more
_SWEEP_QUEUES_EVERY: Final = 64  # attempts: removes queues whose waiters are all dead, too
_BATCH: Final = 100  # claims in one call, so that other calls get in between
_COMPENSATION_TIMEOUT: Final = 5.0  # seconds the server may wait for row locks in a compensation
_MAX_LOCK_TIMEOUT_MS: Final = 2**31 - 1  # a server's largest lock timeout
_LISTENER_SHARE: Final = 0.5  # of a call's time; the rest is for the call itself


class SqlEngine:
    """`best_traits`: what the server promises if it is configured as it should be."""

    name: ClassVar[str]

    def __init__(
        self,
        runtime: Runtime,
        registry: ClaimRegistry,
        connection: SerialConnection,
        listener: SqlListener,
        best_traits: Traits,
    ) -> None:
        self._runtime, self._registry, self._connection, self._listener, self._best_traits = (
            runtime,
            registry,
            connection,
            listener,
            best_traits,
        )
        self._attempts = 0
        self._decoding = Decoding(self._connection.server_name, self.name)
        self._never_applied: set[str] = set()  # id hashes of attempts that the server never applied
        registry.engines.add(self)

    @property
    def traits(self) -> Traits:
        """Durability is a setting of the server, known after the first call; wake-ups may prove to be unavailable."""
        server, best_traits, push = self._connection.server, self._best_traits, not self._listener.unavailable
        durable = server is None or server.durable
        if durable and push is best_traits.push:
            return best_traits
        return best_traits._replace(
            push=push,
            break_notice=push and best_traits.break_notice,
            survives=best_traits.survives if durable else "nothing",
        )

    async def _wakeup_address(self, will_wait: bool, deadline: float) -> str:
        """Where to notify this client; starts the listener if necessary. Empty: the client cannot be notified, and
        polls."""
        self._listener.check_same_server(self._connection.server)
        # A client that does not wait may still be notified of a break.
        if self._listener.address or not (will_wait or self._best_traits.break_notice):
            return self._listener.address
        call_server = await self._connection.ensure_connected(deadline)
        now = self._runtime.now()
        return await self._listener.ensure_listening(
            self._runtime, now + (deadline - now) * _LISTENER_SHARE, call_server
        )

    @property
    def queues_at_once(self) -> bool:
        """Whether this client has met contention: then its claims queue at their first attempt."""
        return "contended" in self._registry.shared

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        waiter = self._registry.waiting.get(claim.id_hash)
        already_queued = waiter is not None
        # It may have a reservation, which all other waiters of the name wait for.
        notified = waiter is not None and (waiter.woken or waiter.recheck_at is not None)
        if claim.queue:
            self._registry.shared["contended"] = True
            self._registry.add_waiter(claim, self._runtime)  # before the request is sent (E4)
        try:
            address = await self._wakeup_address(claim.queue, deadline)
            values = (*key(claim), address, *claim.holder, claim.mode, claim.kind, claim.limit, micros(claim.ttl))
            options = (
                micros(claim.delay),
                micros(max(0.0, claim.min_hold)),
                claim.queue,
                self._sweep_round(),
                self._lock_timeout_ms(deadline),
            )
            rows = await self._connection.call("attempt", (*values, *options), deadline, claim, first=notified)
        except (ConfigError, Unavailable) as error:
            # Refused, or this client never reached a server.
            not_applied = isinstance(error, ConfigError) or self._connection.server is None
            # An earlier attempt of a queued claim was applied: it is queued, or has a reservation.
            if not_applied and not already_queued:
                self._never_applied.add(claim.id_hash)
            raise
        with self._decoding:
            (row,) = rows
            return _reply(claim, self._connection.decode_reply(row))

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._registry.waiting.get(claim.id_hash):
            await wait_for_wakeup(self._runtime, waiter, busy, seconds, polls=not self._listener.address)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        replies: dict[int, Alive | Gone | Unavailable] = {}
        held = [number for number, claim in enumerate(claims) if claim.token]
        queued = [number for number, claim in enumerate(claims) if not claim.token]
        for numbers, renew in ((held, self._renew), (queued, self._heartbeat)):
            for start in range(0, len(numbers), _BATCH):
                batch = numbers[start : start + _BATCH]
                try:
                    found: Sequence[Alive | Gone | Unavailable] = await renew([claims[n] for n in batch], deadline)
                except LeaseholdError as error:
                    unavailable = error if isinstance(error, Unavailable) else Unavailable(str(error), engine=self.name)
                    found = [unavailable] * len(batch)
                replies.update(zip(batch, found, strict=True))
        return [replies[number] for number in range(len(claims))]

    async def _renew(self, claims: list[Claim], deadline: float) -> list[Alive | Gone]:
        values: tuple[Any, ...] = (*self._renewal_columns(claims), self._lock_timeout_ms(deadline))
        rows = await self._connection.call("renew", values, deadline)
        with self._decoding:
            return [_renewal(life, why) for life, why in _in_order(rows, len(claims))]

    def _renewal_columns(self, claims: list[Claim]) -> list[list[Any]]:
        columns = [[c.namespace for c in claims], [c.name for c in claims], [c.id_hash for c in claims]]
        return [*columns, [c.token for c in claims], [micros(c.ttl) for c in claims]]

    async def _heartbeat(self, claims: list[Claim], deadline: float) -> list[Alive | Gone]:
        buckets = [bucket(c.name) for c in claims]
        columns = ([c.namespace for c in claims], buckets, [c.name for c in claims], [c.id_hash for c in claims])
        rows = await self._connection.call("heartbeat", (*columns, self._lock_timeout_ms(deadline)), deadline)
        with self._decoding:
            return [
                # Position 1 stands for any position but the head.
                Alive(WAITER_TTL, 1 if behind == "t" else None) if known == "t" else Gone()
                for known, behind in _in_order(rows, len(claims))
            ]

    async def release(self, claim: Claim, deadline: float) -> bool:
        self._registry.remove_waiter(claim.id_hash)
        try:
            rows = await self._connection.call("release", self._release_args(claim, deadline), deadline, first=True)
        except ConfigError as error:  # the server was usable when it granted the claim, so a retry may succeed
            raise Unavailable(str(error), engine=self.name) from error
        with self._decoding:
            return not rows or rows[0][0] == "t"

    async def decline(self, claim: Claim, deadline: float) -> bool:
        values = (*key(claim), self._listener.address, self._lock_timeout_ms(deadline))
        rows = await self._connection.call("decline", values, deadline, first=True)
        with self._decoding:
            return rows[0][0] == "t"

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        values = (namespace, bucket(name), name, token, self._lock_timeout_ms(deadline))
        rows = await self._connection.call("break", values, deadline)
        with self._decoding:
            return rows[0][0] == "t"

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        if not self.traits.resizable:
            raise fixed_limits(self.traits, self.name)
        values = (namespace, bucket(name), name, limit, self._lock_timeout_ms(deadline))
        rows = await self._connection.call("set_limit", values, deadline)
        with self._decoding:
            done = rows[0][0] == "t"
        if not done:
            raise mismatch(name, "semaphore", limit or 1, "lock", 1)

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        rows = await self._connection.list_rows((namespace, prefix, exact), deadline)
        with self._decoding:
            return holdings(namespace, rows, self._connection.decode_listed, self.name)

    async def ping(self, deadline: float) -> None:
        await self._connection.ping(deadline)
        await self._wakeup_address(False, deadline)

    def forget(self, claim: Claim) -> None:
        self._registry.remove_waiter(claim.id_hash)
        if claim.id_hash in self._never_applied:  # nothing to release
            self._never_applied.discard(claim.id_hash)
            return
        self._registry.retry_release(claim)  # first: if an interrupt comes between, the release is still pending
        self._connection.compensate(
            claim.id_hash, self._release_args(claim, self._runtime.now() + _COMPENSATION_TIMEOUT)
        )

    def disown(self, claim: Claim) -> None:
        self._registry.disown_waiter(claim.id_hash)
        self._never_applied.discard(claim.id_hash)

    def _release_args(self, claim: Claim, deadline: float) -> tuple[Any, ...]:
        return (*key(claim), claim.min_hold >= 0, bool(claim.id), self._lock_timeout_ms(deadline))

    def after_fork(self) -> None:
        self._connection.after_fork()
        self._listener.after_fork()

    async def close(self) -> None:
        self._connection.close()
        if self._registry.remove_engine(self):
            self._listener.close()

    def _sweep_round(self) -> int:
        self._attempts += 1
        if self._attempts % SWEEP_EVERY:
            return 0
        return 1 if self._attempts % _SWEEP_QUEUES_EVERY else 2

    def _lock_timeout_ms(self, deadline: float) -> int:
        """Milliseconds the server may wait for a row lock of another transaction."""
        return min(max(1, int((deadline - self._runtime.now()) * 1000)), _MAX_LOCK_TIMEOUT_MS)


def _in_order(rows: Sequence[Row], count: int) -> list[Row]:
    """The rows of a batch without their numbers, which must be 1 to `count`: a claim without a row was not answered for
    (E5)."""
    by_number = {int(number or 0): rest for number, *rest in rows}
    return [tuple(by_number[number]) for number in range(1, count + 1)]


def _renewal(life: str | None, why: str | None) -> Alive | Gone:
    if life is not None:
        return Alive(seconds(life))
    return Gone("expired") if why == "t" else Gone("broken") if why == "b" else Gone()


def _reply(claim: Claim, row: tuple[str | None, ...]) -> Grant | Busy:
    if row[0] == _GRANTED:
        _, token, life, slot, *_ = row
        return Grant(whole(token or "", 1), seconds(life or ""), None if slot is None else whole(slot, 0))
    answer, token, life, _, position, label, host, pid, purpose, kind, limit = row
    if answer == _MISMATCH:
        found: Kind = "semaphore" if kind == "semaphore" else "lock"
        raise mismatch(claim.name, claim.kind, claim.limit, found, whole(limit or 1))
    holder = None if label is None else Holder(label, host or "", whole(pid or 0), purpose or "")
    left = None if life is None else seconds(life)
    return Busy(left, None if position is None else whole(position, 0), None if token is None else whole(token), holder)
