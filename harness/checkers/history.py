"""What the clients of a lock saw, written down in the order they saw it.

A lock is judged from outside: not by what the engine believes, but by what its holders were told and when. The start of
a call is written *before* anything is sent, so an answer that never came leaves an open call rather than no trace, and
the judges (`checker.py`, `search.py`) know that it may or may not have happened.

How to record, so that the judges are neither blind nor unjust:

- A call whose effect may linger is `unknown`: a lost answer, an acquire given up with its release owed (E6), a
  release that leaves the name cooling (`min_hold`). `fail` says that the engine answered no.
- `claim` is for calls at the seam, where a repeat (E2) gives the same grant once more. Callers of a recipe leave it
  out: the same token again, while held, is then reentrancy.
- `now` is the one true clock of the run, never the clock of one process that may be wrong.
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
Number = int | None  # a token, slot or depth; None where it was not said
Detail = str | int | float | bool | None
Details = tuple[tuple[str, Detail], ...]

ACQUIRE_ACTIONS = frozenset({"acquire", "try"})
NEVER = sys.maxsize  # the place of a record that was never written


@dataclass(frozen=True, slots=True)
class Invoked:
    """A call is about to be sent. `token` is the one it speaks of: renew, release, break."""

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
    """How a call ended. `answer` is the engine's yes or no; `refused` means that the engine was never asked."""

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
    """From `at` on the holder no longer believed; written when it was known, which may be later."""

    at: float
    process: str
    name: str
    token: Number


@dataclass(frozen=True, slots=True)
class Crashed:
    """The process died: it believes nothing, and its open calls stay open."""

    at: float
    process: str


Record = Invoked | Ended | Lost | Crashed
_RECORD_TYPES: dict[str, type[Record]] = {"invoked": Invoked, "ended": Ended, "lost": Lost, "crashed": Crashed}


@dataclass(frozen=True, slots=True)
class Call:
    """One call, start and end together. `start_index` and `end_index` are their places in the history."""

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
    """The time in which a holder *certainly believed* that it held, from `start` up to but without `end`.

    It starts when the acquire has ended, and stops when the release starts, the loss came, the process died or an
    operator broke it; `math.inf` when none of these was seen. Reentrant acquires and repeats (E2) are in `calls`.
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
    lost: float  # when the holder stopped believing unasked; math.inf: it never did
    released_index: int  # the place in the history where a release was confirmed
    maybe_dropped_index: int  # the first place from which the engine may have dropped it without a confirmed release
    calls: tuple[Call, ...]

    @property
    def believed(self) -> bool:
        """False for a grant already out of trust on arrival (E8). A hold of no length, released at once, counts."""
        return self.start < self.end or (self.start == self.end and self.cause == "release")


@dataclass(frozen=True, slots=True)
class Op:
    """One call under way. Exactly one of `ok`, `fail`, `unknown` ends it; a second end is a mistake and raises."""

    id: int
    _end: Callable[[Ended], None]

    def ok(
        self, answer: bool = True, *, token: Number = None, slot: Number = None, depth: Number = None, **detail: Detail
    ) -> None:
        """The engine answered. `answer=False`: its no to a release or renewal; `depth`: the reentrancy after this."""
        self._end(Ended(0.0, self.id, "ok", answer, token, slot, depth, detail=tuple(detail.items())))

    def fail(self, reason: str, *, refused: bool = False, **detail: Detail) -> None:
        """It certainly had no effect. `refused` calls never reached the engine, so they say nothing about who holds."""
        self._end(Ended(0.0, self.id, "fail", False, reason=reason, refused=refused, detail=tuple(detail.items())))

    def unknown(self, reason: str, **detail: Detail) -> None:
        """It may have happened at any time since its start, may happen later, or never."""
        self._end(Ended(0.0, self.id, "unknown", False, reason=reason, detail=tuple(detail.items())))


class History:
    """A thread-safe recorder. `now` must never go back: the order of the records is the order of time."""

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
        """Write the start of a call, before the caller sends anything. `claim` is a fingerprint, never the id."""
        with self._mutex:
            op, asked = len(self._ended), (mode, kind, limit, claim, token)
            self._records.append(Invoked(self._read_clock(), op, process, action, name, *asked, tuple(detail.items())))
            self._ended.append(False)
        return Op(op, self._end)

    def lost(self, process: str, name: str, token: Number, at: float | None = None) -> None:
        """The holder stopped believing at `at`: now, or earlier, as a local deadline is known exactly afterwards."""
        with self._mutex:
            now = self._read_clock()
            if at is not None and at > now:
                raise ValueError(f"a loss at {at} cannot be known at {now}")
            self._records.append(Lost(now if at is None else at, process, name, token))

    def crashed(self, process: str) -> None:
        """The process died now. Without this, a dead holder would seem to believe until the end of the history."""
        with self._mutex:
            self._records.append(Crashed(self._read_clock(), process))

    def _end(self, ended: Ended) -> None:
        with self._mutex:
            if self._ended[ended.op]:
                raise RuntimeError(f"call {ended.op} was ended twice: the recording is wrong, not the lock")
            self._records.append(replace(ended, at=self._read_clock()))
            self._ended[ended.op] = True

    def _read_clock(self) -> float:
        now = self._now()  # read under the guard, so that the order of records and of times agree
        if now < self._latest:
            raise RuntimeError(f"the recorder's clock went back from {self._latest} to {now}")
        self._latest = now
        return now

    @property
    def records(self) -> tuple[Record, ...]:
        with self._mutex:
            return tuple(self._records)

    def calls(self) -> list[Call]:
        """Every call in order of its start; one without an end is still open, so unknown."""
        return _calls(self.records)

    def holds(self) -> list[Hold]:
        """Who certainly believed to hold what, and when, in order of grant."""
        return list(self.analyze().holds)

    def analyze(self) -> "HistoryAnalysis":
        """The holds, and which call speaks of which: what both judges start from."""
        return HistoryAnalysis(self.records)

    def to_json(self) -> str:
        """One record per line, so that a failing history can be kept as a regression case."""
        lines = ({"record": type(record).__name__.lower()} | asdict(record) for record in self.records)
        return "".join(json.dumps(line) + "\n" for line in lines)

    @classmethod
    def from_json(cls, text: str) -> "History":
        """Read `to_json` back. What is recorded further is written at the last time read."""
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
    """A hold while its end is still being looked for."""

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
    """What follows from a history, in one pass that ties each call to the hold it speaks of.

    `unmatched` are releases and renewals with no hold of their process to speak of; `depths` is the reentrancy each
    call led to; `hold_index` gives the place of a call's hold in `holds`."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.calls: Sequence[Call] = _calls(records)
        self.unmatched: list[Call] = []
        self.depths: dict[int, int] = {}
        self.hold_index: dict[int, int] = {}
        self._times = list(accumulate((record.at for record in records), max))  # a loss is written late
        self._drafts: list[_Draft] = []
        self._open: defaultdict[str, dict[int, _Draft]] = defaultdict(dict)  # by process, in order of grant
        self._known: dict[tuple[str, str, int | str | None], _Draft] = {}  # the last by token, claim, or (None) at all
        self._granted: dict[tuple[str, Number], _Draft] = {}  # whoever holds it, for break
        self._early_losses: dict[tuple[str, str, Number], Lost] = {}  # told lost before the acquire returned
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
        if not call.succeeded:  # it may have been dropped since, by this release or by its ttl
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
    """A repeat of a claim (E2), or reentrancy: a semaphore taken again is another permit."""
    return first.claim == again.claim and (again.claim is not None or again.kind == "lock")
