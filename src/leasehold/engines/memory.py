"""The memory engine: locks within one process, and the reference for every engine with a table of queue entries.

`memory://` is private to its client; `memory://name` is shared by every client of the process, blocking and asyncio
alike. The decisions are in `core/lock_state.py`; this module adds a mutex, a clock and the delivery of wake-ups.

Between the engine and its server is a `Transport`. Here it is a plain function call. The simulator replaces it with a
network that loses, repeats and delays messages; the engine's code stays the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from leasehold.config import EngineConfig
from leasehold.core.lock_state import LockState, mismatch
from leasehold.core.queue_entry import Context, Notification, TokenCounter
from leasehold.engines.registry import ClaimRegistry, make_unknown_claim, wait_for_wakeup
from leasehold.errors import Mismatch, Reentered, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime, maybe_await

T = TypeVar("T")
NotifyCallback: TypeAlias = Callable[[Notification, str, str], None]  # with the namespace and name of the notification

TRAITS = Traits(survives="nothing")


class MemoryServer:
    """The state that all clients of one memory engine share. Every verb is one atomic step under the mutex."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._counter = TokenCounter()
        self.lock_states: dict[tuple[str, str], LockState] = {}
        self._to_sweep: list[tuple[str, str]] = []  # names still to sweep in this round
        # By client. A client without a callback cannot be notified, so its waiters are passed over.
        self.notify_callbacks: dict[str, NotifyCallback] = {}
        # Only used under the mutex.
        self._context = Context(0.0, self._issue_token, self.notify_callbacks.__contains__)

    def attempt(self, claim: Claim, client: str) -> Grant | Busy:
        if self._mutex.held_by_me():
            raise Reentered
        key = claim[:2]
        extra_notifications: list[tuple[str, str, Notification]] = []
        with self._mutex:
            context = self._current_context()
            lock_state = self.lock_states.get(key)
            if lock_state is None:
                if self.lock_states:
                    extra_notifications = self._sweep(context)
                lock_state = self.lock_states[key] = LockState(context.now, claim.kind, claim.limit)
            try:
                reply, notifications = lock_state.attempt(context, claim, client)
            except Mismatch:
                raise
            except BaseException:
                extra_notifications += self._repair(key)
                raise
            finally:
                if not lock_state.holders and lock_state.empty and not lock_state.limit_set:
                    self.lock_states.pop(key, None)
                if extra_notifications:
                    self._send_notifications(extra_notifications)
        if notifications:
            self._send_notifications([(*key, notification) for notification in notifications])
        return reply

    def renew(self, claims: Sequence[Claim]) -> list[Alive | Gone]:
        gone: Alive | Gone = Gone()
        return [self._apply((claim.namespace, claim.name), LockState.renew, gone, claim) for claim in claims]

    def release(self, claim: Claim) -> bool:
        return self._apply(claim[:2], LockState.release, False, claim.id_hash, claim.min_hold >= 0, bool(claim.id))

    def decline(self, claim: Claim, client: str) -> bool:
        return self._apply(claim[:2], LockState.decline, False, claim.id_hash, client)

    def break_(self, namespace: str, name: str, token: int) -> bool:
        return self._apply((namespace, name), LockState.break_, False, token)

    def set_limit(self, namespace: str, name: str, limit: int | None) -> None:
        key = (namespace, name)
        while (done := self._apply(key, LockState.set_limit, None, limit)) is None and limit is not None:
            with self._mutex:
                self.lock_states.setdefault(key, LockState(self._runtime.now(), "semaphore", limit))
        if done is False:
            raise mismatch(name, "semaphore", limit or 1, "lock", 1)

    def inspect(self, namespace: str, prefix: str, exact: bool) -> list[Holding]:
        if self._mutex.held_by_me():
            raise Reentered
        with self._mutex:
            if exact:
                keys = [(namespace, prefix)] if (namespace, prefix) in self.lock_states else []
            else:
                keys = sorted(key for key in self.lock_states if key[0] == namespace and key[1].startswith(prefix))
            context = self._current_context()
            notifications = [notification for key in keys for notification in self._sweep_name(context, key)]
            found = [
                h for key in keys if key in self.lock_states for h in self.lock_states[key].holdings(*key, context.now)
            ]
        self._send_notifications(notifications)
        return found

    def after_fork(self) -> None:
        """Forget all claims: they are the parent's, not this child's. Tokens continue from where they were."""
        self._mutex = self._runtime.mutex()
        self.lock_states.clear()
        self._to_sweep.clear()
        self.notify_callbacks.clear()

    def _apply(
        self, key: tuple[str, str], verb: Callable[..., tuple[T, list[Notification]]], absent: T, *args: object
    ) -> T:
        if self._mutex.held_by_me():
            raise Reentered
        repair_notifications: list[tuple[str, str, Notification]] = []
        with self._mutex:
            lock_state = self.lock_states.get(key)
            if lock_state is None:
                return absent
            try:
                answer, notifications = verb(lock_state, self._current_context(), *args)
            except BaseException:
                repair_notifications = self._repair(key)
                raise
            finally:
                if lock_state.empty and not lock_state.limit_set:
                    self.lock_states.pop(key, None)
                if repair_notifications:
                    self._send_notifications(repair_notifications)
        if notifications:
            self._send_notifications([(*key, notification) for notification in notifications])
        return answer

    def _repair(self, key: tuple[str, str]) -> list[tuple[str, str, Notification]]:
        return [(*key, notification) for notification in self.lock_states[key].repair(self._current_context())]

    def _current_context(self) -> Context:
        context = self._context
        context.now = self._runtime.now()
        return context

    def _issue_token(self) -> int:
        # The wall clock is only a floor: a fence that outlives this process or this boot still sees rising tokens.
        return self._counter.next(int(self._runtime.wall() * 1_000_000))

    def _sweep(self, context: Context) -> list[tuple[str, str, Notification]]:
        """Sweep two other names for each new one, in rounds, so that expired leases do not accumulate."""
        notifications = []
        for _ in range(2):
            if not self._to_sweep:  # a list: iterating a dictionary is slow to start if its first entries come and go
                self._to_sweep = list(self.lock_states)
            if self._to_sweep and (key := self._to_sweep.pop()) in self.lock_states:
                notifications += self._sweep_name(context, key)
        return notifications

    def _sweep_name(self, context: Context, key: tuple[str, str]) -> list[tuple[str, str, Notification]]:
        lock_state = self.lock_states[key]
        try:
            notifications = lock_state.sweep(context)
        except BaseException:
            lock_state.repair(context)
            raise
        if lock_state.empty and not lock_state.limit_set:
            del self.lock_states[key]
        return [(*key, notification) for notification in notifications]

    def _send_notifications(self, notifications: list[tuple[str, str, Notification]]) -> None:
        """Callbacks only record and signal; they never call the server."""
        for namespace, name, notification in notifications:
            if notify := self.notify_callbacks.get(notification.client):
                notify(notification, namespace, name)


class Transport(Protocol):
    """How requests reach the server."""

    def call(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any | Awaitable[Any]:
        """Send a request and return the answer. Raises `Unavailable` if there is none by the deadline."""

    def post(self, verb: str, args: tuple[Any, ...]) -> bool:
        """Send a request without waiting. True: it is already done and answered."""

    def listen(self, client: str, notify: NotifyCallback) -> None:
        """Deliver this client's notifications to `notify`, from any thread."""

    def close(self, client: str) -> None: ...


class InProcessTransport:
    """The transport inside one process: a function call."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server

    def call(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any:
        return getattr(self.server, verb)(*args)

    def post(self, verb: str, args: tuple[Any, ...]) -> bool:
        try:
            getattr(self.server, verb)(*args)
        except Reentered:
            return False
        return True

    def listen(self, client: str, notify: NotifyCallback) -> None:
        self.server.notify_callbacks[client] = notify

    def close(self, client: str) -> None:
        self.server.notify_callbacks.pop(client, None)


class MemoryEngine:
    """The verbs over a transport."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, registry: ClaimRegistry, transport: Transport) -> None:
        self._runtime, self._registry, self._transport = runtime, registry, transport

    @property
    def queues_at_once(self) -> bool:
        return "contended" in self._registry.shared

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        if "notify" not in self._registry.shared:
            self._transport.listen(self._registry.client_id, self._on_notification)
            self._registry.shared["notify"] = True  # last: after an interrupt, listen() is repeated
        if claim.queue:
            self._registry.shared["contended"] = True
            self._registry.add_waiter(claim, self._runtime)  # before asking (E4)
        reply = self._transport.call("attempt", (claim, self._registry.client_id), deadline)
        if isinstance(reply, (Grant, Busy)):  # in one process: saves the call of `maybe_await`
            return reply
        answer: Grant | Busy = await reply
        return answer

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._registry.waiting.get(claim.id_hash):
            await wait_for_wakeup(self._runtime, waiter, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        try:
            replies: list[Alive | Gone] = await maybe_await(self._transport.call("renew", (claims,), deadline))
        except Unavailable as unavailable:
            return [unavailable] * len(claims)
        return replies

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        if self._registry.waiting:
            self._registry.remove_waiter(claim.id_hash)
        ended = self._transport.call("release", (claim,), deadline)
        return ended if isinstance(ended, bool) else cast("bool | None", await ended)

    async def decline(self, claim: Claim, deadline: float) -> bool:
        args = (claim, self._registry.client_id)
        return bool(await maybe_await(self._transport.call("decline", args, deadline)))

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        return bool(await maybe_await(self._transport.call("break_", (namespace, name, token), deadline)))

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        await maybe_await(self._transport.call("set_limit", (namespace, name, limit), deadline))

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        found: list[Holding] = await maybe_await(self._transport.call("inspect", (namespace, prefix, exact), deadline))
        return found

    async def ping(self, deadline: float) -> None:
        await maybe_await(self._transport.call("inspect", ("", "", True), deadline))

    def forget(self, claim: Claim) -> None:
        self._registry.retry_release(claim)  # first: if interrupted here, the release is still pending
        self._registry.remove_waiter(claim.id_hash)
        if self._transport.post("release", (claim,)):
            self._registry.pending_releases.pop(claim.id_hash, None)

    def disown(self, claim: Claim) -> None:
        self._registry.disown_waiter(claim.id_hash)

    def after_fork(self) -> None:
        self._registry.shared.pop("notify", None)
        if isinstance(self._transport, InProcessTransport):
            self._transport.server.after_fork()

    async def close(self) -> None:
        self._transport.close(self._registry.client_id)

    def _on_notification(self, notification: Notification, namespace: str, name: str) -> None:
        kind, id_hash, seconds = notification.kind, notification.id_hash, notification.seconds
        self._registry.on_notification(kind, id_hash, seconds, make_unknown_claim(namespace, name, id_hash))


_SERVERS: dict[str, MemoryServer] = {}  # never removed: a server's token counter must outlive its clients (E3)


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> MemoryEngine:
    """`memory://` or `memory://name`; no options."""
    config.accept()
    if config.target:
        server = _SERVERS.setdefault(config.target, MemoryServer(runtime))
    else:
        private = registry.shared.setdefault("memory_server", MemoryServer(runtime))
        assert isinstance(private, MemoryServer)  # noqa: S101  # for the type checker
        server = private
    return MemoryEngine(runtime, registry, InProcessTransport(server))
