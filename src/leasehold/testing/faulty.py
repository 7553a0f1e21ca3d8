"""An engine that loses, delays and repeats calls on demand: a wrapper around any engine, in every runtime.

    faults = Faults()
    client = leasehold.Client("memory://", engine=faulty(opener, faults))
    faults.next("attempt", drop_answer)     # the next attempt is carried out, but its caller gets Unavailable

To cover every call of a scenario:

    for faults in each_call(drop_answer):   # drop the answer of the first call, then of the second, ...
        run_the_scenario(faulty(opener, faults))

Both engine instances of a client use the same `Faults`. The wrapper does what a network may do, not what a wrong engine
would: it invents no answers. `repeat_answer` returns an earlier answer to the same claim.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, TypeVar

from leasehold.config import EngineConfig
from leasehold.engines.base import Engine, Opener, WrappedEngine
from leasehold.engines.registry import ClaimRegistry
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding
from leasehold.runtime.base import Runtime

T = TypeVar("T")
Verb: TypeAlias = Literal[
    "attempt", "renew", "release", "decline", "break_", "set_limit", "inspect", "ping", "wait", "forget"
]
CALL_VERBS: Final[frozenset[Verb]] = frozenset(
    {"attempt", "renew", "release", "decline", "break_", "set_limit", "inspect", "ping"}
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one call. A value, so that tests can create, name and list faults."""

    label: str
    sent: int = 1  # how often the request reaches the engine: 0 drops it, 2 repeats it
    answered: bool = True  # False: the caller gets Unavailable
    silent: bool = False  # ... not at once, but at its deadline
    before: float = 0.0  # seconds until the request arrives
    after: float = 0.0  # seconds until the answer arrives; after the deadline, it is lost
    echo: bool = False  # the answer is the previous one to this claim and verb, if there is one
    again: int = 0  # after this many further calls the request reaches the engine once more; its answer is dropped


drop_request: Final = Fault("drop_request", sent=0, answered=False)
drop_answer: Final = Fault("drop_answer", answered=False)
cannot_tell: Final = replace(drop_request, label="cannot_tell")  # for renewals: the state of the claims is unknown (E5)
duplicate: Final = Fault("duplicate", sent=2)
repeat_answer: Final = Fault("repeat_answer", echo=True)


def silently(fault: Fault) -> Fault:
    """The same fault, but the caller learns of it only at its deadline: a lost packet, not a closed connection."""
    return replace(fault, label=f"silently {fault.label}", silent=True)


def delay(*, request: float = 0.0, answer: float = 0.0) -> Fault:
    """Delay the request, the answer, or both, by seconds."""
    return Fault(f"delay {request:g}+{answer:g}", before=request, after=answer)


def repeat_later(calls: int) -> Fault:
    """The request arrives a second time, after this many other calls. Only the ttl ends such a late attempt (E6)."""
    return Fault(f"repeat after {calls}", again=calls)


@dataclass(slots=True)
class _Countdown:
    number: int
    fault: Fault
    verbs: Collection[Verb]

    def meet(self, verb: Verb) -> Fault | None:
        if verb not in self.verbs:
            return None
        self.number -= 1
        return self.fault if self.number == -1 else None


class Faults:
    """Which calls meet which faults. Thread-safe; share one between all engines whose calls are counted together."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._next: dict[Verb, deque[Fault]] = defaultdict(deque)
        self._at: list[_Countdown] = []
        self._always: dict[Verb, Fault] = {}
        self.calls: list[Verb] = []  # every call so far, for tests to inspect
        self.struck: list[tuple[Verb, Fault]] = []  # the calls that met a fault

    def next(self, verb: Verb, *faults: Fault) -> None:
        """The next call of this verb meets the first of these faults, the call after it the second, and so on."""
        with self._mutex:
            self._next[verb].extend(faults)

    def always(self, verb: Verb, fault: Fault) -> None:
        """Every call of this verb meets this fault, until `clear`."""
        with self._mutex:
            self._always[verb] = fault

    def at(self, number: int, fault: Fault, verbs: Collection[Verb] = CALL_VERBS) -> None:
        """The call with this number meets the fault, counted from 0 among calls of these verbs."""
        with self._mutex:
            self._at.append(_Countdown(number, fault, verbs))

    def clear(self) -> None:
        """Remove all planned faults."""
        with self._mutex:
            self._next.clear()
            self._at.clear()
            self._always.clear()

    def next_fault(self, verb: Verb) -> Fault | None:
        """Called by the wrapper: the fault of this call, if any."""
        with self._mutex:
            self.calls.append(verb)
            fault = self._always.get(verb)
            for countdown in self._at:
                fault = countdown.meet(verb) or fault
            if queued := self._next.get(verb):
                fault = queued.popleft()
            if fault is not None:
                self.struck.append((verb, fault))
            return fault


def each_call(fault: Fault, verbs: Collection[Verb] = CALL_VERBS) -> Iterator[Faults]:
    """One `Faults` per call of a scenario: the first strikes the first call, the second the second, and so on. Ends
    after a run in which no call was struck."""
    number = 0
    while True:
        faults = Faults()
        faults.at(number, fault, verbs)
        yield faults
        if not faults.struck:
            return
        number += 1


def faulty(opener: Opener, faults: Faults) -> Opener:
    """The same engine, with faults."""

    def open_(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> FaultyEngine:
        return FaultyEngine(opener(config, runtime, registry), runtime, registry, faults)

    return open_


class FaultyEngine(WrappedEngine):
    """The verbs of another engine, each through `Faults`."""

    def __init__(self, engine: Engine, runtime: Runtime, registry: ClaimRegistry, faults: Faults) -> None:
        super().__init__(engine)
        self._runtime, self._registry, self._faults = runtime, registry, faults
        self._answers: dict[tuple[Verb, str], Any] = {}
        self._repeats: list[tuple[int, str, Callable[[], Awaitable[object]]]] = []

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        return await self._call("attempt", claim.id_hash, deadline, lambda: self._engine.attempt(claim, deadline))

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        return await self._call("release", claim.id_hash, deadline, lambda: self._engine.release(claim, deadline))

    async def decline(self, claim: Claim, deadline: float) -> bool:
        return await self._call("decline", claim.id_hash, deadline, lambda: self._engine.decline(claim, deadline))

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        subject = f"{namespace}\0{name}"
        return await self._call(
            "break_", subject, deadline, lambda: self._engine.break_(namespace, name, token, deadline)
        )

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        subject = f"{namespace}\0{name}\0{limit}"
        await self._call(
            "set_limit", subject, deadline, lambda: self._engine.set_limit(namespace, name, limit, deadline)
        )

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        subject = f"{namespace}\0{prefix}\0{exact}"
        return await self._call(
            "inspect", subject, deadline, lambda: self._engine.inspect(namespace, prefix, exact, deadline)
        )

    async def ping(self, deadline: float) -> None:
        await self._call("ping", "", deadline, lambda: self._engine.ping(deadline))

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        subject = "\0".join(claim.id_hash for claim in claims)
        try:
            return await self._call("renew", subject, deadline, lambda: self._engine.renew(claims, deadline))
        except Unavailable as unavailable:  # renew never raises it: it answers per claim (E5)
            return [unavailable] * len(claims)

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        """If the request is dropped, sleep for the whole time, as if the wake-up were lost. If the answer is dropped,
        return nearly at once, as on a spurious wake-up. A hint may do both (E4)."""
        fault = self._faults.next_fault("wait")
        if fault is None or fault.answered:
            await self._engine.wait(claim, busy, seconds)
        else:
            await self._runtime.sleep(0.001 if fault.sent else seconds)

    def forget(self, claim: Claim) -> None:
        """With any fault that loses a call, the release becomes pending, as if it could not be sent at once."""
        fault = self._faults.next_fault("forget")
        if fault is None or fault.answered:
            self._engine.forget(claim)
        else:
            self._registry.remove_waiter(claim.id_hash)
            self._registry.retry_release(claim)

    async def _call(self, verb: Verb, subject: str, deadline: float, send: Callable[[], Awaitable[T]]) -> T:
        fault = self._faults.next_fault(verb)
        await self._deliver_repeats()
        if fault is None:
            answer = await send()
        else:
            answer = await self._call_with_fault(fault, (verb, subject), deadline, send)
        self._answers[verb, subject] = answer
        return answer

    async def _call_with_fault(
        self, fault: Fault, subject: tuple[Verb, str], deadline: float, send: Callable[[], Awaitable[T]]
    ) -> T:
        now = self._runtime.now
        if fault.before:
            await self._runtime.sleep(min(fault.before, deadline - now()))
        if fault.again:
            self._repeats.append((fault.again, subject[1], send))
        answer: T | None = None
        for _ in range(fault.sent):
            answer = await send()
        if subject[0] == "release" and fault.sent > 1 and not answer:
            answer = None  # the first request may have ended the grant
        if fault.after:
            await self._runtime.sleep(min(fault.after, deadline - now()))
        if not fault.answered or ((fault.before or fault.after) and now() >= deadline):
            if fault.silent:
                await self._runtime.sleep(deadline - now())
            raise Unavailable(f"{subject[0]}: {fault.label}", engine="faulty")
        if fault.echo and subject in self._answers:
            earlier: T = self._answers[subject]
            return earlier
        return answer  # type: ignore[return-value]  # set: every fault that answers also sends

    async def _deliver_repeats(self) -> None:
        """Send the requests that arrive once more, now that enough other calls were made."""
        due = [repeat for repeat in self._repeats if repeat[0] <= 1]
        self._repeats = [(calls - 1, id_hash, send) for calls, id_hash, send in self._repeats if calls > 1]
        for _, id_hash, send in due:
            was_waiting = id_hash in self._registry.waiting
            with suppress(LeaseholdError):
                await send()
            if not was_waiting:  # only the network repeated the request: the client itself is not waiting
                self._registry.remove_waiter(id_hash)
