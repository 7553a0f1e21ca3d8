"""What the clients of a lock observed, recorded in order.

A lock is checked from outside: not by the engine's state, but by the answers its holders got, and when. The start of a
call is recorded *before* anything is sent. A call without an answer therefore stays open, and the checkers
(`intervals.py`, `linearizable.py`) know that it may or may not have taken effect.

How to record, so that the checkers miss no error and report no false one:

- A call that may still take effect later is `unknown`: a lost answer, an acquire that was given up with a pending
  release (E6), a release that leaves the name cooling (`min_hold`). `fail` means that the engine answered no.
- `claim` is for calls of the engine interface, where a repeat (E2) returns the same grant again. Callers of the client
  API leave it out: the same token again, while held, then means reentrancy.
- `now` is the true clock of the run, never the clock of one process, which may be wrong.
"""

import json
import math
import sys
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal

Mode = Literal["exclusive", "shared"]
Kind = Literal["lock", "semaphore"]
Cause = Literal["release", "lost", "crash", "break", "open"]
Number = int | None  # a token, slot or depth; None if not given
Detail = str | int | float | bool | None
Details = tuple[tuple[str, Detail], ...]

ACQUIRE_ACTIONS = frozenset({"acquire", "try"})
NEVER = sys.maxsize  # the index of a record that does not exist


@dataclass(frozen=True, slots=True)
class Invoked:
    """A call is about to be sent. `token`: the lease it is about, for renew, release and break."""

    at: float
    op: int
    process: str
    action: str
    name: str
    mode: Mode = "exclusive"
    kind: Kind = "lock"
    limit: int = 1
    claim: str | None = None
    token: Number = None
    detail: Details = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended. `answer`: the engine's yes or no. `refused`: the call never reached the engine."""

    at: float
    op: int
    outcome: Literal["ok", "fail", "unknown"]
    answer: bool = True
    token: Number = None
    slot: Number = None
    depth: Number = None
    reason: str = ""
    refused: bool = False
    detail: Details = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """The holder stopped trusting its lease at `at`. The record may be written later, when that became known."""

    at: float
    process: str
    name: str
    token: Number


@dataclass(frozen=True, slots=True)
class Crashed:
    """The process died: it holds nothing any more, and its open calls stay open."""

    at: float
    process: str


Record = Invoked | Ended | Lost | Crashed
_RECORD_TYPES: dict[str, type[Record]] = {"invoked": Invoked, "ended": Ended, "lost": Lost, "crashed": Crashed}


@dataclass(frozen=True, slots=True)
class Call:
    """One call, from start to end. `start_index` and `end_index` are the positions of its records in the history."""

    began: Invoked
    ended: Ended | None
    start_index: int
    end_index: int

    @property
    def succeeded(self) -> bool:
        return self.ended is not None and self.ended.outcome == "ok" and self.ended.answer

    @property
    def granted(self) -> bool:
        return self.began.action in ACQUIRE_ACTIONS and self.succeeded

    @property
    def unknown(self) -> bool:
        return self.ended is None or self.ended.outcome == "unknown"

    @property
    def token(self) -> Number:
        answered_token = None if self.ended is None else self.ended.token
        return self.began.token if answered_token is None else answered_token


@dataclass(frozen=True, slots=True)
class Hold:
    """The time in which a holder *certainly trusted* its lease, from `start` up to but without `end`.

    It starts when the acquire returned. It ends when the release started, the lease was lost, the process died or an
    operator broke the lock; `math.inf` if none of these was recorded. Reentrant acquires and repeats (E2) are in
    `calls`.
    """

    name: str
    process: str
    token: Number
    slot: Number
    mode: Mode
    kind: Kind
    limit: int
    claim: str | None
    start: float
    end: float
    cause: Cause
    lost: float  # when the holder lost the lease; math.inf: never
    released_index: int  # the index of the record that confirmed the release
    maybe_dropped_index: int  # the first index from which the engine may have ended it without a confirmed release
    calls: tuple[Call, ...]

    @property
    def believed(self) -> bool:
        """False if the grant had expired on arrival (E8). A lease that was released at once, with no length, counts."""
        return self.start < self.end or (self.start == self.end and self.cause == "release")


@dataclass(frozen=True, slots=True)
class Op:
    """One call in progress. Exactly one of `ok`, `fail`, `unknown` must end it; a second end raises an error."""

    id: int
    _end: Callable[[Ended], None]

    def ok(
        self, answer: bool = True, *, token: Number = None, slot: Number = None, depth: Number = None, **detail: Detail
    ) -> None:
        """The engine answered. `answer=False`: it answered no to a release or renewal. `depth`: the reentrancy now."""
        self._end(Ended(0.0, self.id, "ok", answer, token, slot, depth, detail=tuple(detail.items())))

    def fail(self, reason: str, *, refused: bool = False, **detail: Detail) -> None:
        """The call certainly had no effect. A `refused` call never reached the engine, so it proves no other holder."""
        self._end(Ended(0.0, self.id, "fail", False, reason=reason, refused=refused, detail=tuple(detail.items())))

    def unknown(self, reason: str, **detail: Detail) -> None:
        """The call may have taken effect at any time since its start, may do so later, or never."""
        self._end(Ended(0.0, self.id, "unknown", False, reason=reason, detail=tuple(detail.items())))


class History:
    """A thread-safe recorder. `now` must never go back: records are in the order of time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._mutex = threading.Lock()
        self._latest = -math.inf
        self._records: list[Record] = []
        self._ended: list[bool] = []  # by op

    def invoke(
        self,
        process: str,
        action: str,
        name: str,
        *,
        mode: Mode = "exclusive",
        limit: int = 1,
        kind: Kind = "lock",
        claim: str | None = None,
        token: Number = None,
        **detail: Detail,
    ) -> Op:
        """Record the start of a call, before the caller sends anything. `claim` is a fingerprint, never the id."""
        with self._mutex:
            op, asked = len(self._ended), (mode, kind, limit, claim, token)
            self._records.append(Invoked(self._read_clock(), op, process, action, name, *asked, tuple(detail.items())))
            self._ended.append(False)
        return Op(op, self._end)

    def lost(self, process: str, name: str, token: Number, at: float | None = None) -> None:
        """The holder lost its lease at `at`: now, or earlier, if its local deadline has passed."""
        with self._mutex:
            now = self._read_clock()
            if at is not None and at > now:
                raise ValueError(f"a loss at {at} cannot be known at {now}, before it happened")
            self._records.append(Lost(now if at is None else at, process, name, token))

    def crashed(self, process: str) -> None:
        """The process died now. Without this record, it would seem to hold its leases until the end of the history."""
        with self._mutex:
            self._records.append(Crashed(self._read_clock(), process))

    def _end(self, ended: Ended) -> None:
        with self._mutex:
            if self._ended[ended.op]:
                raise RuntimeError(f"call {ended.op} was ended twice: the test records it wrongly")
            self._records.append(replace(ended, at=self._read_clock()))
            self._ended[ended.op] = True

    def _read_clock(self) -> float:
        now = self._now()  # read under the mutex, so that records are in the order of their times
        if now < self._latest:
            raise RuntimeError(f"the recorder's clock went back from {self._latest} to {now}")
        self._latest = now
        return now

    @property
    def records(self) -> tuple[Record, ...]:
        with self._mutex:
            return tuple(self._records)

    def calls(self) -> list[Call]:
        """All calls in order of their starts. A call without an end is open, so its outcome is unknown."""
        return _calls(self.records)

    def holds(self) -> list[Hold]:
        """Which process certainly held which name, and when, in order of the grants."""
        return list(self.analyze().holds)

    def analyze(self) -> "HistoryAnalysis":
        """The holds, and which call is about which hold: the input of both checkers."""
        return HistoryAnalysis(self.records)

    def to_json(self) -> str:
        """One record per line, so that a failing history can be kept as a regression case."""
        lines = ({"record": type(record).__name__.lower()} | asdict(record) for record in self.records)
        return "".join(json.dumps(line) + "\n" for line in lines)

    @classmethod
    def from_json(cls, text: str) -> "History":
        """Read the output of `to_json`. The clock of the result stays at the last time read."""
        history = cls(lambda: history._latest)
        for line in filter(str.strip, text.splitlines()):
            history._load(json.loads(line))
        return history

    def _load(self, line: dict[str, Any]) -> None:
        kind = _RECORD_TYPES[line.pop("record")]
        if "detail" in line:
            line["detail"] = tuple(map(tuple, line["detail"]))
        record = kind(**line)
        self._latest = max(self._latest, record.at)
        if isinstance(record, Ended):
            self._end(record)
        else:
            self._records.append(record)
            self._ended += [False] * isinstance(record, Invoked)


def _calls(records: Sequence[Record]) -> list[Call]:
    ends = {record.op: (index, record) for index, record in enumerate(records) if isinstance(record, Ended)}
    calls = []
    for index, record in enumerate(records):
        if isinstance(record, Invoked):
            end_index, ended = ends.get(record.op, (NEVER, None))
            calls.append(Call(record, ended, index, end_index))
    return calls


class _Draft:
    """A hold whose end is not yet known."""

    __slots__ = (
        "call",
        "calls",
        "cause",
        "depth",
        "end",
        "index",
        "lost",
        "maybe_dropped_index",
        "released_index",
        "start",
    )

    def __init__(self, index: int, call: Call, start: float) -> None:
        self.index, self.call, self.calls, self.depth = index, call, [call], 1
        self.start, self.end, self.lost, self.released_index, self.maybe_dropped_index = (
            start,
            math.inf,
            math.inf,
            NEVER,
            NEVER,
        )
        self.cause: Cause = "open"

    def hold(self) -> Hold:
        began, slot = self.call.began, self.call.ended.slot if self.call.ended else None
        what = (began.name, began.process, self.call.token, slot, began.mode, began.kind, began.limit, began.claim)
        ends = (self.start, self.end, self.cause, self.lost, self.released_index, self.maybe_dropped_index)
        return Hold(*what, *ends, tuple(self.calls))


class HistoryAnalysis:
    """The holds of a history, found in one pass that matches each call to its hold.

    `unmatched`: releases and renewals for which their process has no hold. `depths`: the reentrancy after each call.
    `hold_index`: the index in `holds` of a call's hold."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.calls: Sequence[Call] = _calls(records)
        self.unmatched: list[Call] = []
        self.depths: dict[int, int] = {}
        self.hold_index: dict[int, int] = {}
        self._times = list(accumulate((record.at for record in records), max))  # losses are recorded late
        self._drafts: list[_Draft] = []
        self._open: defaultdict[str, dict[int, _Draft]] = defaultdict(dict)  # by process, in order of grant
        self._known: dict[tuple[str, str, int | str | None], _Draft] = {}  # the last by token, by claim, of all
        self._granted: dict[tuple[str, Number], _Draft] = {}  # by name and token, for break
        self._early_losses: dict[tuple[str, str, Number], Lost] = {}  # lost before the acquire returned
        self._read(records)
        self.holds: Sequence[Hold] = [draft.hold() for draft in self._drafts]

    def _read(self, records: Sequence[Record]) -> None:
        for index, record in enumerate(records):
            match record:
                case Invoked(op=op):
                    self._invoked(self.calls[op])
                case Ended(op=op, at=at) if self.calls[op].granted:
                    self._grant(self.calls[op], at)
                case Lost():
                    self._lost(record)
                case Crashed(process=process, at=at):
                    for draft in list(self._open[process].values()):
                        self._close(draft, at, "crash", index)

    def _invoked(self, call: Call) -> None:
        began = call.began
        if began.action == "break":
            broken = self._granted.get((began.name, call.token))
            if broken is not None and (call.succeeded or call.unknown):
                self._close(broken, began.at, "break", call.start_index)
        elif began.action in ("release", "renew"):
            draft = self._find_draft(call)
            if draft is None or (began.action == "release" and draft.released_index != NEVER):
                self.unmatched.append(call)
            else:
                self.hold_index[began.op] = draft.index
                if began.action == "release":
                    self._release(call, draft)

    def _find_draft(self, call: Call) -> _Draft | None:
        process, name = call.began.process, call.began.name
        for identifier in (call.token, call.began.claim):
            if identifier is not None:
                return self._known.get((process, name, identifier))
        held = (draft for draft in reversed(self._open[process].values()) if draft.call.began.name == name)
        return next(held, None) or self._known.get((process, name, None))

    def _release(self, call: Call, draft: _Draft) -> None:
        if not call.succeeded:  # this release or the ttl may have ended it since
            self._close(draft, call.began.at, "release", call.start_index)
            return
        draft.depth -= 1
        self.depths[call.began.op] = draft.depth
        if draft.depth == 0:
            draft.released_index = call.end_index
            self._close(draft, call.began.at, "release")

    def _grant(self, call: Call, at: float) -> None:
        began, key = call.began, (call.began.process, call.began.name, call.token)
        draft = self._known.get(key)
        if draft is not None and call.token is not None and draft.cause == "open" and _same(draft.call.began, began):
            draft.calls.append(call)
            draft.depth += began.claim is None
        else:
            draft = _Draft(len(self._drafts), call, at)
            self._drafts.append(draft)
            self._open[began.process][draft.index] = draft
            self._granted[began.name, call.token] = draft
            for identifier in (call.token, began.claim, None):
                self._known[began.process, began.name, identifier] = draft
            if key in self._early_losses:
                self._lost(self._early_losses.pop(key))
        self.hold_index[began.op], self.depths[began.op] = draft.index, draft.depth

    def _lost(self, record: Lost) -> None:
        key = (record.process, record.name, record.token)
        if (draft := self._known.get(key)) is None:
            self._early_losses[key] = record
        else:
            draft.lost = min(draft.lost, record.at)
            self._close(draft, record.at, "lost", bisect_left(self._times, record.at))

    def _close(self, draft: _Draft, at: float, cause: Cause, maybe_dropped_index: int = NEVER) -> None:
        if at < draft.end:
            draft.end, draft.cause = at, cause
        draft.maybe_dropped_index = min(draft.maybe_dropped_index, maybe_dropped_index)
        self._open[draft.call.began.process].pop(draft.index, None)


def _same(first: Invoked, again: Invoked) -> bool:
    """Whether this is a repeat of a claim (E2) or reentrancy. A second acquire of a semaphore is another permit."""
    return first.claim == again.claim and (again.claim is not None or again.kind == "lock")
