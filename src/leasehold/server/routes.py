"""What a server records about claims: which client to wake, and which requests wait. Nothing here decides who holds a
name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.remote.wire import Notification
from leasehold.model import Claim
from leasehold.runtime.loop import Loop

T = TypeVar("T")
# The caller's name and its client id. Both: a client id is public, and a caller must not read another one's wake-ups.
ClientKey: TypeAlias = tuple[str, str]

# Why a long-poll ended before its answer: its caller closed the connection, a later request with the same id continues
# with the claim, the claim was released, or the server stops.
PollEnd: TypeAlias = Literal["hung up", "superseded", "released", "draining"]

_MAX_UNSENT: Final = 10_000


class Admission(Protocol):
    """A waiter that the server's limits count, until `end`."""

    def end(self) -> None: ...


class Relay(Protocol):
    """How streams at other workers of the same server are reached."""

    def opened(self, client: ClientKey) -> None: ...

    def closed(self, client: ClientKey) -> None: ...

    def knows(self, client: ClientKey) -> bool: ...

    def notify(self, client: ClientKey, notification: Notification) -> bool: ...


class Stream(Generic[T]):
    """What is to be sent to one reader. A reader that is too slow must reconnect, and ask for the current state."""

    def __init__(self) -> None:
        self.closed = False
        self._unsent: list[T] = []
        self._changed = asyncio.Event()

    def push(self, item: T) -> None:
        if not self.closed:
            self._unsent.append(item)
            self.closed = len(self._unsent) > _MAX_UNSENT
            self._changed.set()

    def close(self) -> None:
        self.closed = True
        self._changed.set()

    async def take(self, seconds: float) -> list[T]:
        """What is to be sent, as soon as there is anything; nothing after `seconds`, or if the stream is closed."""
        if not self._unsent and not self.closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        self._changed.clear()
        unsent, self._unsent = self._unsent, []
        return unsent


class Attempts:
    """The attempts of a claim that are under way."""

    __slots__ = ("claim", "tasks")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.tasks: set[asyncio.Task[Any]] = set()


class WaiterRoute:
    """A queued claim, and the client to wake for it. Without a client: a long-poll's claim, kept for a repetition."""

    __slots__ = ("admission", "began", "claim", "client", "expires_at", "had_stream", "task", "woken")

    def __init__(self, claim: Claim, client: ClientKey | None, began: float) -> None:
        self.claim, self.client, self.began = claim, client, began
        self.expires_at = 0.0
        self.had_stream = False  # the server could wake the client when it last attempted
        self.woken = False  # it has been notified since its last attempt
        self.task: asyncio.Task[None] | None = None  # waits for the wake-up
        self.admission: Admission | None = None


class Registry(ClaimRegistry):
    """A server's claims. A reservation for a claim that is not known here is declined, not released: its client may
    wait at another server and keeps its position then."""

    def __init__(self, runtime: Loop, client_id: str, decline: Callable[[Claim], None]) -> None:
        super().__init__(runtime, client_id)
        self.undo_unanswered = False  # the caller may repeat the claim at another server
        self._decline = decline

    def on_notification(
        self, kind: Literal["reserved", "recheck", "broken"], id_hash: str, seconds: float, unknown_claim: Claim | None
    ) -> None:
        if kind == "reserved" and unknown_claim is not None and not self.knows(id_hash):
            self._decline(unknown_claim)
        else:
            super().on_notification(kind, id_hash, seconds, unknown_claim)


class LongPoll:
    """A request that waits in the queue for its caller. `end` may be called at any time, and stops the waiting."""

    __slots__ = ("_wait", "admission", "admit", "caller_made_id", "claim", "ended", "queued", "who")

    def __init__(
        self,
        claim: Claim,
        caller_made_id: bool,
        admit: Callable[[bool], AbstractContextManager[object]],
        who: str = "",
    ) -> None:
        self.claim, self.caller_made_id, self.who = claim, caller_made_id, who
        self.admit = admit  # counts an attempt; raises if the first is one too many
        self.admission: Admission | None = None  # if it may wait
        self.ended: PollEnd | None = None  # None while it runs
        self.queued = False  # the claim had to wait
        self._wait: asyncio.Task[None] | None = None

    def end(self, why: PollEnd) -> None:
        self.ended = self.ended or why
        self.recheck()

    def recheck(self) -> None:
        """Let the poll attempt again now. Cancels only `wait`, which is a hint (E4), never an attempt."""
        if self._wait is not None:
            self._wait.cancel()

    async def wait(self, waiting: Coroutine[Any, Any, None]) -> None:
        self.queued = True
        self._wait = asyncio.get_running_loop().create_task(waiting)
        try:
            if not self.ended:
                await asyncio.wait({self._wait})
        finally:
            task, self._wait = self._wait, None
            task.cancel()
        if task.done() and not task.cancelled():
            task.result()
