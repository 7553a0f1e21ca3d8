"""The verdict on a run: the recorded events as a history, the checkers' findings, and the figures of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from harness.checkers.fences import check_fence
from harness.checkers.history import History, Op
from harness.checkers.intervals import Rule, check
from harness.lab.contender import NAME
from harness.lab.expectations import Expectation

SLACK: Final = 0.5  # seconds beyond `call_timeout` within which a caller is refused


class Event(NamedTuple):
    """What a contender reported, and its cycle: the number of its acquire."""

    at: float
    process: str
    cycle: int
    what: str
    details: tuple[Any, ...]


class Silence(NamedTuple):
    """From `start` to `end` these contenders reached too few servers to be granted anything."""

    processes: frozenset[str]
    start: float
    end: float


@dataclass(slots=True)
class Recording:
    """Everything that a run recorded."""

    events: list[Event]
    crashes: list[tuple[float, str]] = field(default_factory=list)
    pauses: list[tuple[str, float, float]] = field(default_factory=list)
    silences: list[Silence] = field(default_factory=list)
    kept: set[tuple[str, int]] = field(default_factory=set)  # process and cycle of leases that must not be lost
    waits: list[float] = field(default_factory=list)  # after each fault, seconds until the next holder
    failures: list[str] = field(default_factory=list)  # of contenders that ended with an exception, or not at all
    balance: int = 0
    requests: int = 0


@dataclass(slots=True)
class Verdict:
    """`violations`: of safety. `late`: promises in seconds that a slow machine may break as well."""

    operations: int
    grants: int
    refusals: int  # acquires that ended without the lock
    stale: int  # accesses that the fence refused
    lost_updates: int
    overlaps: int  # times that two contenders held the lock, where the guarantees page says that it may happen
    losses: int  # leases that were lost
    longest_gap: float  # seconds without a holder
    refused_in_gap: dict[str, int]  # how often acquires failed in that gap, by error
    longest_wait: float  # seconds from a fault, or its end, to the next holder
    requests_per_grant: float | None
    faults: int
    violations: list[str]
    late: list[str]
    bad_part: list[Event] = field(default_factory=list)


def judge(recording: Recording, expectation: Expectation, *, plain: bool, call_timeout: float) -> Verdict:
    events = sorted(recording.events, key=lambda event: event.at)
    lock, fence = histories(events, recording.crashes)
    grants = [call for call in lock.calls() if call.granted]
    found = check(lock).violations
    overlaps = [violation for violation in found if violation.rule == "exclusion"]
    serious = [violation for violation in found if violation.rule != "exclusion" or not expectation.overlaps]
    if not plain:
        serious += check_fence(fence).violations
    violations = [str(violation) for violation in serious]
    violations += [*recording.failures, *_granted_in_silence(recording, lock)]
    losses = [event for event in events if event.what == "ends" and event.details[1] is not None]
    for event in losses:
        if (event.process, event.cycle) in recording.kept:
            violations.append(f"{event.process} lost its lease ({event.details[1]}) at {event.at:.3f}")
    accepted = sum(call.succeeded for call in fence.calls() if call.began.action == "write")
    lost_updates = max(0, accepted - recording.balance)
    if lost_updates and not plain:
        violations.append(f"{lost_updates} of {accepted} accepted writes are missing from the account")
    late = [
        f"the next holder came after {wait:.1f} s, promised: {expectation.within:.1f} s"
        for wait in recording.waits
        if wait > expectation.within
    ]
    gap_start, gap_end = _longest_gap(lock)
    return Verdict(
        operations=len(lock.calls()) + len(fence.calls()),
        grants=len(grants),
        refusals=sum(event.what == "fails" for event in events),
        stale=sum(event.what == "refused" for event in events),
        lost_updates=lost_updates,
        overlaps=len(overlaps) if expectation.overlaps else 0,
        losses=len(losses),
        longest_gap=round(gap_end - gap_start, 2),
        refused_in_gap=dict(
            Counter(event.details[0] for event in events if event.what == "fails" and gap_start < event.at < gap_end)
        ),
        longest_wait=round(max(recording.waits, default=0.0), 2),
        requests_per_grant=round(recording.requests / len(grants), 1) if recording.requests and grants else None,
        faults=len(recording.waits),
        violations=violations,
        late=[*late, *_late_refusals(recording, lock, call_timeout)],
        bad_part=shortest_bad_part(events, recording.crashes, serious[0].rule) if serious else [],
    )


def histories(events: Sequence[Event], crashes: Sequence[tuple[float, str]]) -> tuple[History, History]:
    """The calls at the lock and those at the fence. Events are in order of time."""
    clock = [0.0]
    lock, fence = History(lambda: clock[0]), History(lambda: clock[0])
    acquires: dict[str, Op] = {}
    accesses: dict[str, Op] = {}
    dead = [Event(at, process, 0, "crashes", ()) for at, process in crashes]
    for at, process, _, what, details in sorted([*events, *dead], key=lambda event: event.at):
        clock[0] = at
        match what:
            case "asks":
                acquires[process] = lock.invoke(process, "acquire", NAME, wait=details[0])
            case "fails":  # also a refusal: the claim may be granted later, until it expires
                acquires[process].unknown(details[0])
            case "holds":
                acquires[process].ok(token=details[0])
            case "ends" if details[1] is None:
                lock.invoke(process, "release", NAME, token=details[0]).unknown("not waited for")
            case "ends":
                lock.lost(process, NAME, details[0])
            case "reads":
                accesses[process] = fence.invoke(process, "read", NAME, token=details[0])
            case "writes":
                accesses[process] = fence.invoke(process, "write", NAME, token=details[0], based_on=details[1])
            case "accepted":
                accesses[process].ok()
            case "refused":
                accesses[process].fail("stale")
            case "crashes":
                lock.crashed(process)
    return lock, fence


def _granted_in_silence(recording: Recording, lock: History) -> Iterator[str]:
    for call in (call for call in lock.calls() if call.granted):
        for processes, start, end in recording.silences:
            assert call.ended is not None
            if call.began.process in processes and start < call.began.at and call.ended.at < end:
                yield f"{call.began.process} was granted the lock at {call.ended.at:.3f}, though it was cut off"


def _late_refusals(recording: Recording, lock: History, call_timeout: float) -> Iterator[str]:
    for call in lock.calls():
        if call.began.action == "acquire" and call.ended is not None and not call.granted:
            paused = any(
                process == call.began.process and start < call.ended.at and call.began.at < end
                for process, start, end in recording.pauses
            )
            waits, took = dict(call.began.detail)["wait"], call.ended.at - call.began.at
            if not paused and isinstance(waits, float) and took > waits + call_timeout + SLACK:
                yield f"{call.began.process} was refused after {took:.1f} s, promised: {waits + call_timeout:.1f} s"


def _longest_gap(lock: History) -> tuple[float, float]:
    gap, until = (0.0, 0.0), None
    for hold in sorted(lock.holds(), key=lambda hold: hold.start):
        if until is not None and hold.start - until > gap[1] - gap[0]:
            gap = until, hold.start
        until = max(until or 0.0, min(hold.end, 1e18))
    return gap


def shortest_bad_part(events: Sequence[Event], crashes: Sequence[tuple[float, str]], rule: Rule) -> list[Event]:
    """The fewest cycles of contenders that still break the same rule, by leaving out ever smaller parts. None for a
    rule about what is missing: leaving out more always breaks it."""
    if rule in ("refusal", "release", "renew"):
        return []

    def is_bad(cycles: Sequence[tuple[str, int]]) -> bool:
        kept = set(cycles)
        lock, fence = histories([event for event in events if (event.process, event.cycle) in kept], crashes)
        return any(each.rule == rule for each in (*check(lock).violations, *check_fence(fence).violations))

    cycles = list(dict.fromkeys((event.process, event.cycle) for event in events))
    kept = set(smallest(cycles, is_bad))
    return [event for event in events if (event.process, event.cycle) in kept]


def smallest(
    items: list[tuple[str, int]], is_bad: Callable[[Sequence[tuple[str, int]]], bool]
) -> list[tuple[str, int]]:
    """A part of the items that is bad, and no longer if one more piece is left out."""
    size = len(items) // 2
    while size:
        start = 0
        while start < len(items):
            rest = items[:start] + items[start + size :]
            if is_bad(rest):
                items = rest
            else:
                start += size
        size //= 2
    return items
