"""The verbs of the SQLite engine. Each is one immediate transaction, retried until its deadline while another process
is in a transaction. SQLite's own waiting is off: it has neither deadlines nor jitter.

Atomicity: everything a verb reads, decides and writes happens under SQLite's one write lock, at one reading of the
clock taken while holding that lock. Notifications are sent after COMMIT.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

from leasehold.config import EngineConfig, parse_yes_no
from leasehold.core.listing import ListingBudget
from leasehold.core.lock_state import LockState, mismatch
from leasehold.core.queue_entry import Context, Notification
from leasehold.core.timing import backoff
from leasehold.engines.registry import ClaimRegistry, Waiter, wait_for_wakeup
from leasehold.engines.sql import TRAITS
from leasehold.engines.sql.fair_mutex import ON_BEHALF_OF, FairMutex
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.connection import DatabaseLocked, NeedsSync, SqliteConnection
from leasehold.engines.sqlite.fast_path import acquire_uncontended, release_uncontended
from leasehold.engines.sqlite.hand_off import claim_reserved, hand_over, join_queue
from leasehold.engines.sqlite.location import resolve_path
from leasehold.engines.sqlite.rows import RowLockState, clients_of_holders, find_expired, must_survive, page_of_holdings
from leasehold.engines.sqlite.wakeup_socket import WakeupSocket
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding
from leasehold.runtime.base import Runtime

T = TypeVar("T")
Notifications: TypeAlias = "list[tuple[str, str, Notification]]"  # namespace, name, what to send
Verb: TypeAlias = "Callable[[LockState, Context], tuple[T, list[Notification]]]"

_RETRY_BASE: Final = 0.00003  # doubled for each try: the first tries take as long as a transaction of another client
_LONGEST_RETRY: Final = 0.01
_BATCH: Final = 50  # renewals per transaction: other processes get in between
_SWEEP_EVERY: Final = 8  # attempts between sweeps, and names per sweep: removes expired names that are not used again
_PROBE_INTERVAL: Final = 0.05  # seconds in which the head of the queue notices that a holder's process has ended
_REACHED_FOR: Final = 0.05  # seconds for which a claim that joins the queue need not probe the clients ahead again
_CHECKPOINT_EVERY: Final = 2000  # calls of an event loop: about three thousand pages of the log
_FORGET_TIMEOUT: Final = 1.0  # `forget` has no deadline of its own


class InFlightAttempt:
    """An attempt that has not returned. Under asyncio the worker thread finishes it even if its caller is cancelled."""

    __slots__ = ("abandoned", "sync", "woken")

    def __init__(self, sync: bool, woken: bool = False) -> None:
        self.abandoned = False
        self.woken = woken  # by a notification, so the client's socket works
        self.sync = sync  # a hint: a transaction that has to sync does so in any case


class SqliteEngine:
    def __init__(
        self, runtime: Runtime, registry: ClaimRegistry, connection: SqliteConnection, wakeup_socket: WakeupSocket
    ) -> None:
        self._runtime, self._registry = runtime, registry
        self._connection, self._wakeup_socket = connection, wakeup_socket
        self._boot_clock = connection.boot_clock
        registry.engines.add(self)
        self._attempts = self._calls_on_loop = 0
        self._sweep_cursor = ("", "")
        self._pages = FairMutex(runtime, "sqlite", "lists of locks")
        self._thread = FairMutex(runtime, "sqlite", "the thread")  # that makes a lock server's calls
        self._crowded_name: tuple[str, str] | None = None  # with its namespace: had waiters in the last call about it
        # Verbs that found the file locked. Together they retry only as often as one verb alone would: with fifty
        # threads in each of twenty processes, independent retries kept a busy machine from doing anything else. Of a
        # lock server, the verbs on behalf of each API key retry equally often, however many they are.
        self._retrying: dict[str, set[object]] = {"": set()}  # by key
        self._refused: set[str] = set()  # id hashes of attempts that failed because the file is unusable
        self.traits = TRAITS if connection.durable else TRAITS._replace(survives="nothing")

    @property
    def queues_at_once(self) -> bool:
        return "contended" in self._registry.shared

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        woken = False
        if claim.queue:
            waiter = self._registry.waiting.get(claim.id_hash)
            woken = waiter is not None and waiter.woken
            self._registry.shared["contended"] = True
            self._registry.add_waiter(claim, self._runtime)  # before asking (E4)
        in_flight = InFlightAttempt((woken or not claim.queue) and must_survive(claim), woken)
        try:
            return await self._run_with_retry(deadline, self._attempt, claim, in_flight)
        except BaseException as error:
            in_flight.abandoned = True
            if isinstance(error, ConfigError):
                self._refused.add(claim.id_hash)
            raise

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._registry.waiting.get(claim.id_hash):
            await wait_for_wakeup(
                *(self._runtime, waiter, busy, seconds),
                polls=not self._wakeup_socket.address,
                probe=self._should_attempt,
                probe_interval=_PROBE_INTERVAL * max(1.0, len(waiter.holders) / 10),
            )

    def _should_attempt(self, waiter: Waiter) -> bool:
        """Whether a holder that this waiter waits for may have ended without a release. Also if the waiter has become
        the head of the queue: it does not know its holders yet."""
        return waiter.recheck_at is not None or any(map(self._is_dead, waiter.holders))

    def _is_dead(self, address: str) -> bool:
        # Without a boot id, the holder may be on another machine. Its socket has a file here, but no process.
        return bool(self._boot_clock.boot) and self._wakeup_socket.is_dead(address)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        replies: list[Alive | Gone | Unavailable] = []
        while len(replies) < len(claims):
            batch = claims[len(replies) : len(replies) + _BATCH]
            try:
                replies += await self._run_with_retry(deadline, self._renew, batch)
            except LeaseholdError as error:
                unavailable = error if isinstance(error, Unavailable) else Unavailable(str(error), engine="sqlite")
                replies += [unavailable] * len(batch)
        return replies

    async def release(self, claim: Claim, deadline: float) -> bool:
        self._registry.remove_waiter(claim.id_hash)
        try:
            return await self._run_with_retry(deadline, self._release, claim)
        except ConfigError as error:  # the file was usable when the claim was granted, and may become so again
            raise Unavailable(str(error), engine="sqlite") from error

    async def decline(self, claim: Claim, deadline: float) -> bool:
        return await self._run_with_retry(deadline, self._decline, claim)

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        return await self._run_with_retry(deadline, self._break, namespace, name, token)

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        if not await self._run_with_retry(deadline, self._set_limit, namespace, name, limit):
            raise mismatch(name, "semaphore", limit or 1, "lock", 1)

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        found: list[Holding] = []
        budget, after = ListingBudget("sqlite"), ""
        while True:

            def read(db: sqlite3.Connection, after: str = after) -> tuple[list[Holding], str]:
                return page_of_holdings(db, self._boot_clock, budget, namespace, prefix, exact, after)

            page, after = await self._read_page(read, deadline)
            found += page
            if not after:
                return sorted(found, key=attrgetter("name"))
            if self._runtime.now() >= deadline:
                raise Unavailable(f"{self._connection.path}: the list did not end before the deadline", engine="sqlite")

    async def _read_page(self, read: Callable[[sqlite3.Connection], T], deadline: float) -> T:
        """One page at a time, whatever lists are under way: other verbs wait for no more than that."""
        caller = self._pages.new_caller()
        try:
            await self._pages.acquire(caller, deadline)
            read_all = partial(self._connection.run_transaction, read, write=False)
            return await self._run_with_retry(deadline, read_all, quick=False)
        finally:
            self._pages.release(caller)

    async def ping(self, deadline: float) -> None:
        def read(db: sqlite3.Connection) -> None:
            db.execute("select token from lh_meta").fetchone()

        # A write transaction, because a verb would have to wait for the write lock too.
        await self._run_with_retry(deadline, partial(self._connection.run_transaction, read))

    def forget(self, claim: Claim) -> None:
        self._registry.remove_waiter(claim.id_hash)
        if claim.id_hash in self._refused:  # nothing was ever written
            self._refused.discard(claim.id_hash)
        elif self._runtime.blocking:
            try:
                self._release(claim, self._runtime.now() + _FORGET_TIMEOUT)
            except (DatabaseLocked, LeaseholdError):
                self._registry.retry_release(claim)
        else:  # a loop must not wait for the disk; the watchdog's thread may
            self._registry.retry_release(claim)

    def disown(self, claim: Claim) -> None:
        self._registry.disown_waiter(claim.id_hash)
        self._refused.discard(claim.id_hash)

    def liveness_descriptor(self) -> int | None:
        """While any process has it open, the grants of this client are not ended as those of a dead process."""
        return self._wakeup_socket.descriptor()

    def after_fork(self) -> None:
        self._connection.after_fork()
        self._pages.after_fork()
        self._thread.after_fork()
        self._wakeup_socket.after_fork()

    async def close(self) -> None:
        await self._runtime.call(self._connection.close)
        if self._registry.remove_engine(self):
            self._wakeup_socket.close()

    # ------------------------------------ the same verbs, on a blocking thread

    async def _run_with_retry(self, deadline: float, verb: Callable[..., T], *args: object, quick: bool = True) -> T:
        """Run the verb, which takes the deadline as its last argument, again and again while the file is locked. The
        last try starts before the deadline."""
        call = self._call if quick else self._runtime.call
        try:
            return await call(verb, *args, deadline)
        except DatabaseLocked:
            tries, key, retry_id = 0, ON_BEHALF_OF.get(), object()
        together = self._retrying.setdefault(key, set())
        together.add(retry_id)
        try:
            while (left := deadline - self._runtime.now()) > 0:
                tries += 1
                pause = backoff(tries, _RETRY_BASE, _LONGEST_RETRY, 0.5 + self._runtime.random() / 2)
                keys = sum(map(bool, self._retrying.values()))
                await self._runtime.sleep(min(pause * len(together) * keys, left))
                with suppress(DatabaseLocked):
                    return await call(verb, *args, deadline)
        finally:
            together.discard(retry_id)
            if key and not together:  # on a lock server, which has an event loop: no other thread interferes
                del self._retrying[key]
        raise Unavailable(
            f"{self._connection.path} was locked by other processes until the deadline; "
            "one of them may be stopped inside a transaction",
            engine="sqlite",
        )

    async def _call(self, verb: Callable[..., T], *args: Any) -> T:
        """Run the verb. An event loop does that itself if the verb cannot block, in a fifth of the time: a thread is
        needed to open the file, to wait for the disk, and while another thread uses the connection."""
        if self._runtime.blocking:
            return verb(*args)
        if self._calls_on_loop >= _CHECKPOINT_EVERY:
            self._calls_on_loop = 0
            await self._runtime.call(self._connection.checkpoint)
        if self._connection.enter_loop():
            try:
                answer = verb(*args)
            except NeedsSync:
                pass
            else:
                self._calls_on_loop += 1
                return answer
            finally:
                self._connection.leave_loop()
        if not ON_BEHALF_OF.get():
            return await self._runtime.call(verb, *args)
        caller = self._thread.new_caller()
        try:
            await self._thread.acquire(caller, args[-1])  # the deadline
            return await self._runtime.call(verb, *args)
        finally:
            self._thread.release(caller)

    def _attempt(self, claim: Claim, in_flight: InFlightAttempt, deadline: float) -> Grant | Busy:
        address = self._wakeup_socket.address
        if not address or (claim.queue and not in_flight.woken and not self._wakeup_socket.is_reachable(address)):
            self._connection.open(deadline)
            address = self._wakeup_socket.ensure_bound(self._runtime)

        def decide(db: sqlite3.Connection, notifications: Notifications) -> Grant | Busy:
            if in_flight.abandoned:
                raise Unavailable("the caller gave up before the attempt was made", engine="sqlite")
            reply: Grant | Busy | None
            if claim.queue:
                reply = self._attempt_queued(db, claim, address, in_flight.woken)
            else:
                reply = acquire_uncontended(db, self._boot_clock, claim, address)
            if reply is None:
                reply = self._attempt_contended(db, notifications, claim, address)
            self._attempts += 1
            if not self._attempts % _SWEEP_EVERY:
                self._sweep(db, notifications)
            return reply

        reply = self._decide(decide, deadline, sync=in_flight.sync)
        if self._wakeup_socket.sweep_due:  # after the attempt, which may have to prove that a holder has ended
            with suppress(DatabaseLocked, LeaseholdError):
                holders = self._connection.run_transaction(clients_of_holders, deadline, write=False)
                self._wakeup_socket.remove_stale_sockets(holders)
        if in_flight.abandoned:  # the caller's release may have run before this attempt
            self._release(claim, deadline)
        return reply

    def _attempt_queued(self, db: sqlite3.Connection, claim: Claim, address: str, woken: bool) -> Grant | Busy | None:
        """The attempts of a queued claim that need no decision; None if the name's state has to be loaded."""
        if woken:
            return claim_reserved(db, self._boot_clock, claim, address)
        # What must survive a power cut is not granted here: the transaction of a claim that may have to wait need not
        # sync.
        if self._crowded_name != claim[:2] and not must_survive(claim):
            grant = acquire_uncontended(db, self._boot_clock, claim, address)
            if grant is not None:
                return grant
        self._crowded_name = claim[:2]
        joined = join_queue(db, self._boot_clock, claim, address, self._reachability(_REACHED_FOR), self._is_dead)
        if joined is None:
            return None
        reply, processes = joined
        if (waiter := self._registry.waiting.get(claim.id_hash)) is not None:
            waiter.holders = processes
        return reply

    def _attempt_contended(
        self, db: sqlite3.Connection, notifications: Notifications, claim: Claim, address: str
    ) -> Grant | Busy:
        lock_state = RowLockState(
            db, self._boot_clock, claim.namespace, claim.name, claim.id_hash, claim.kind, claim.limit
        )
        reply, new_notifications = lock_state.attempt(self._context(lock_state), claim, address)
        if isinstance(reply, Busy) and (waiter := self._registry.waiting.get(claim.id_hash)) is not None:
            waiter.holders = lock_state.processes()
        lock_state.save(self._connection.synced)
        notifications.extend((claim.namespace, claim.name, notification) for notification in new_notifications)
        return reply

    def _renew(self, claims: Sequence[Claim], deadline: float) -> list[Alive | Gone]:
        if self._wakeup_socket.address and any(not claim.token for claim in claims):
            self._wakeup_socket.ensure_bound(self._runtime)

        def decide(db: sqlite3.Connection, notifications: Notifications) -> list[Alive | Gone]:
            return [
                self._apply(
                    db, notifications, (each.namespace, each.name, each.id_hash), partial(LockState.renew, claim=each)
                )
                for each in claims
            ]

        return self._decide(decide, deadline, sync=any(claim.token and must_survive(claim) for claim in claims))

    def _release(self, claim: Claim, deadline: float) -> bool:
        def decide(db: sqlite3.Connection, notifications: Notifications) -> bool:
            was_crowded = self._crowded_name is not None and self._crowded_name == claim[:2]
            if not was_crowded and release_uncontended(db, self._boot_clock, claim):
                return True
            if made := hand_over(db, self._boot_clock, claim, self._reachability()):
                self._crowded_name = claim[:2]
                notifications.extend((claim.namespace, claim.name, notification) for notification in made)
                return True
            if was_crowded:
                self._crowded_name = None
                if release_uncontended(db, self._boot_clock, claim):
                    return True
            verb = partial(
                LockState.release,
                id_hash=claim.id_hash,
                keep_min_hold=claim.min_hold >= 0,
                release_held=bool(claim.id),
            )
            return self._apply(db, notifications, (claim.namespace, claim.name, claim.id_hash), verb)

        return self._decide(decide, deadline)

    def _decline(self, claim: Claim, deadline: float) -> bool:
        verb = partial(LockState.decline, id_hash=claim.id_hash, client=self._wakeup_socket.address)
        key = (claim.namespace, claim.name, claim.id_hash)
        return self._decide(partial(self._apply, key=key, verb=verb), deadline)

    def _break(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        verb = partial(LockState.break_, token=token)
        # Synced: what an operator has ended must not be there again after a power cut.
        return self._decide(partial(self._apply, key=(namespace, name, ""), verb=verb), deadline, sync=True)

    def _set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> bool:
        verb = partial(LockState.set_limit, limit=limit)
        return self._decide(partial(self._apply, key=(namespace, name, ""), verb=verb), deadline, sync=True)

    def _decide(
        self, job: Callable[[sqlite3.Connection, Notifications], T], deadline: float, *, sync: bool = False
    ) -> T:
        """Run the job as one transaction, then send the notifications that it made."""
        notifications: Notifications = []

        def decide(db: sqlite3.Connection) -> T:
            notifications.clear()  # of a run that was rolled back, to be repeated with a sync
            return job(db, notifications)

        answer = self._connection.run_transaction(decide, deadline, sync=sync)
        if notifications:
            self._send_notifications(notifications, deadline)
        return answer

    def _apply(
        self, db: sqlite3.Connection, notifications: Notifications, key: tuple[str, str, str], verb: Verb[T]
    ) -> T:
        """Run one verb on the state of one name, as one transaction or a part of it."""
        namespace, name, id_hash = key
        lock_state = RowLockState(db, self._boot_clock, namespace, name, id_hash)
        answer, new_notifications = verb(lock_state, self._context(lock_state))
        lock_state.save(self._connection.synced)
        if new_notifications:
            notifications.extend((namespace, name, notification) for notification in new_notifications)
        return answer

    def _reachability(self, seconds: float = 0.0) -> Callable[[str], bool]:
        """A function that says whether a client can be reached, and probes only once in the verb and these seconds."""
        return partial(self._wakeup_socket.is_reachable, since=self._runtime.now() - seconds)

    def _context(self, lock_state: RowLockState) -> Context:
        return lock_state.context(self._boot_clock.wall, self._reachability(), self._is_dead)

    def _sweep(self, db: sqlite3.Connection, notifications: Notifications) -> None:
        expired, self._sweep_cursor = find_expired(db, self._boot_clock.now(), self._sweep_cursor, _SWEEP_EVERY)
        for namespace, name in expired:
            self._apply(
                db, notifications, (namespace, name, ""), lambda lock_state, context: (None, lock_state.sweep(context))
            )

    def _send_notifications(self, notifications: Notifications, deadline: float) -> None:
        while notifications:
            namespace, name, notification = notifications.pop(0)
            try:
                reached = not notification.client or self._wakeup_socket.send(
                    namespace, name, notification, may_wait=not self._connection.on_loop
                )
            except BlockingIOError:  # a thread may wait until there is room
                rest = [(namespace, name, notification), *notifications]
                self._runtime.spawn(self._runtime.call(self._send_notifications, rest, deadline), "leasehold-wakeup")
                return
            if reached or notification.kind != "reserved":
                continue
            # The waiter died after the transaction reserved the name for it. If it cannot be passed over now, the
            # reservation expires in 3 s.
            more: Notifications = []
            with suppress(DatabaseLocked, LeaseholdError, NeedsSync):
                verb = partial(LockState.decline, id_hash=notification.id_hash, client=notification.client)
                key = (namespace, name, notification.id_hash)
                self._connection.run_transaction(partial(self._apply, notifications=more, key=key, verb=verb), deadline)
            notifications += more


def open_with_clock(
    config: EngineConfig, runtime: Runtime, registry: ClaimRegistry, boot_clock: BootClock
) -> SqliteEngine:
    """Open an engine with this clock; tests pass clocks of their own."""
    options = config.accept(durable=parse_yes_no, trust_folder=parse_yes_no)
    trust_folder = options.get("trust_folder", False)
    wakeup_socket = registry.shared.get("sqlite")
    # The first of the client's two engine instances resolves the path, so a later chdir() does not matter.
    if not isinstance(wakeup_socket, WakeupSocket):
        path = resolve_path(config.target)
        wakeup_socket = WakeupSocket(path, runtime, registry, trust_folder=trust_folder)
        registry.shared["sqlite"] = wakeup_socket
    path, durable = wakeup_socket.database_path, options.get("durable", True)
    connection = SqliteConnection(path, durable, boot_clock, runtime, trust_folder=trust_folder)
    return SqliteEngine(runtime, registry, connection, wakeup_socket)


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> SqliteEngine:
    """Open `sqlite:///path?durable=yes&trust_folder=no`. With `durable=no`, a power cut may lose the last transactions.
    With `trust_folder=yes`, every user who can write the folder is trusted not to replace what is in it."""
    return open_with_clock(config, runtime, registry, BootClock.of_this_machine())
