"""The exact checker: could a correct lock have produced the calls on one name, in any order?

Intervals cannot tell whether a failed try was justified, or whether a release came in time for the next grant: that
depends on the order of overlapping calls. So all orders are tried with the algorithm of Wing and Gong, and Lowe's cache
of visited states: each call takes effect at one instant between its start and its end, and `Model` says what it may do.

Two rules keep the search small, and neither misses an order:

- Calls are put in order only when one of them ends; until then no order is needed.
- A call that changes nothing (a failed try, a renewal) is marked as done at the first instant that explains it. An
  effect that is uncertain (an unanswered try, the end of a lost hold) is assumed only when another call needs it.

It follows the order of the records. A name with few clients is checked in milliseconds. If very many calls overlap, the
search uses up its budget and the verdict is `unknown`.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from harness.checkers.history import ACQUIRE_ACTIONS, NEVER, Call, History, HistoryAnalysis, Kind, Mode
from harness.checkers.intervals import Verdict, Violation, describe_call

Verb = Literal["grant", "reenter", "release", "unmatched", "drop", "busy", "held", "unheard"]
READ_ONLY = frozenset({"busy", "held"})
EXPLAINED_BY_UNHEARD = frozenset({"busy", "unmatched"})  # what a grant with a lost answer may explain
REASONS: dict[Verb, str] = {
    "grant": "the name was not free",
    "reenter": "its process did not hold the name, or not at that depth",
    "release": "its process did not hold the name, or not at that depth",
    "unmatched": "its process had no grant to release",
    "busy": "the name was free and no claim was queued",
    "held": "its hold had ended",
}


@dataclass(frozen=True, slots=True)
class ModelHolder:
    """One holder in the model. `hold` distinguishes holders of one process; negative: the answer was lost."""

    hold: int
    process: str
    mode: Mode
    kind: Kind
    limit: int
    slot: int | None = None
    depth: int = 1


State = frozenset[ModelHolder]


class Model:
    """What a correct lock allows. Pure; subclass it for engines that promise less."""

    def admit(self, state: State, holder: ModelHolder, maybe_expired: Collection[int]) -> list[State]:
        """The states after a grant. Holds in `maybe_expired` may have expired unnoticed, and are assumed to if they
        block it."""
        conflicting = {other for other in state if self.conflicts(other, holder)}
        if any(other.hold not in maybe_expired for other in conflicting):
            return []
        left = state - conflicting
        excess = len(left) + 1 - holder.limit if holder.kind == "semaphore" else 0
        expiring = combinations([other for other in left if other.hold in maybe_expired], max(excess, 0))
        return [left - set(expired) | {holder} for expired in expiring]

    def is_blocked(self, state: State, holder: ModelHolder) -> bool:
        """Whether a holder blocks this claim."""
        full = holder.kind == "semaphore" and len(state) >= holder.limit
        return full or any(self.conflicts(other, holder) for other in state)

    def conflicts(self, first: ModelHolder, other: ModelHolder) -> bool:
        """Whether two holders exclude each other by kind, mode or slot. `admit` checks the limit."""
        if first.kind != other.kind:
            return True
        if first.kind == "lock":
            return "exclusive" in (first.mode, other.mode)
        return first.limit != other.limit or (first.slot is not None and first.slot == other.slot)


@dataclass(frozen=True, slots=True)
class _Task:
    """A call as the model sees it."""

    call: Call
    verb: Verb
    holder: ModelHolder

    @property
    def op(self) -> int:
        return self.call.began.op

    @property
    def depth(self) -> int | None:
        return None if self.call.ended is None else self.call.ended.depth


@dataclass(frozen=True, slots=True)
class _Config:
    """One possible state: the holders, and which of the open calls have taken effect."""

    state: State
    done: frozenset[int]


class _Exhausted(Exception):
    pass


def search(history: History, name: str, model: Model | None = None, budget: int = 200_000) -> Verdict:
    """Check the calls on one name. `budget` is the number of states to visit before giving up as `unknown`.

    A failed try or acquire is justified if a holder blocked it, or if another acquire was in progress meanwhile: that
    one may have been queued. A hold that was lost or broken, whose process crashed, or whose grant got no answer, may
    expire at any later time.
    """
    analysis, searcher = history.analyze(), _Searcher(model or Model(), budget)
    maybe_dropped = {index: hold.maybe_dropped_index for index, hold in enumerate(analysis.holds) if hold.name == name}
    try:
        violation = searcher.run(list(_tasks(analysis, name)), maybe_dropped)
    except _Exhausted:
        return Verdict("unknown", visited=searcher.visited)
    if violation is None:
        return Verdict("valid", visited=searcher.visited)
    return Verdict("invalid", (violation,), searcher.visited)


class _Searcher:
    """Carries the set of possible states along the history, from one record to the next."""

    def __init__(self, model: Model, budget: int) -> None:
        self._model = model
        self._budget = budget
        self._open: dict[int, _Task] = {}
        self._unheard: dict[int, ModelHolder] = {}  # by op, possible grants whose answer was lost
        self._maybe_expired: set[int] = set()  # holds that may have expired
        self._unmatched: set[str] = set()  # processes with a release that only such a grant can explain
        self.visited = 0

    def run(self, tasks: Sequence[_Task], maybe_dropped: dict[int, int]) -> Violation | None:
        configs = {_Config(frozenset(), frozenset())}
        self._unmatched = {task.holder.process for task in tasks if task.verb == "unmatched"}
        upcoming = sorted(((since, hold) for hold, since in maybe_dropped.items()), reverse=True)
        for index, closing, task in _events(tasks):
            while upcoming and upcoming[-1][0] <= index:
                self._maybe_expired.add(upcoming.pop()[1])
            if closing:
                reached = self._close(task, configs)
                if not reached:
                    return _unexplained_call(task, configs)
                configs = reached
            elif task.verb == "unheard":
                self._unheard[task.op] = task.holder
                self._maybe_expired.add(task.holder.hold)
            else:
                self._open[task.op] = task
            configs = {self._apply_reads(config) for config in configs}
        return None

    def _close(self, task: _Task, configs: set[_Config]) -> set[_Config]:
        """Every possible state in which the call has taken effect."""
        todo = [self._apply_reads(config) for config in configs]
        seen, reached = set(todo), set[_Config]()
        while todo:
            config = todo.pop()
            if task.op in config.done:
                reached.add(_Config(config.state, config.done - {task.op}))
                continue
            for after in self._successors(config):
                if after not in seen:
                    self._visit()
                    seen.add(after)
                    todo.append(after)
        del self._open[task.op]
        return reached

    def _visit(self) -> None:
        self.visited += 1
        if self.visited > self._budget:
            raise _Exhausted

    def _successors(self, config: _Config) -> Iterator[_Config]:
        wanted = False
        for op, task in self._open.items():
            if op not in config.done:
                wanted = wanted or task.verb in EXPLAINED_BY_UNHEARD
                for state in self._effects(task, config.state):
                    yield self._apply_reads(_Config(state, config.done | {op}))
        for op, holder in self._unused_unheard(config) if wanted else ():
            for state in self._model.admit(config.state, holder, self._maybe_expired):
                yield self._apply_reads(_Config(state, config.done | {op}))

    def _unused_unheard(self, config: _Config) -> Iterable[tuple[int, ModelHolder]]:
        """Possible grants with a lost answer, not used yet; of equal ones only one, as they lead to equal states."""
        alike: dict[ModelHolder, tuple[int, ModelHolder]] = {}
        for op, holder in self._unheard.items():
            if op not in config.done:
                process = holder.process if holder.process in self._unmatched else ""
                alike.setdefault(replace(holder, hold=0, process=process), (op, holder))
        return alike.values()

    def _effects(self, task: _Task, state: State) -> Iterable[State]:
        """The states a call may lead to; empty if it cannot have taken effect."""
        holder = _find_holder(state, task.holder.hold)
        match task.verb:
            case "grant" if holder is None and task.depth in (None, 1):
                return self._model.admit(state, task.holder, self._maybe_expired)
            case "grant" if holder is not None and task.call.began.claim is not None:  # a repeat (E2)
                return [state]
            case "reenter" if holder is not None and task.depth in (None, holder.depth + 1):
                return [_with_depth(state, holder, 1)]
            case "release" if holder is not None and task.depth in (None, holder.depth - 1):
                return [_with_depth(state, holder, -1)]
            case "drop":
                return [state - {holder} if holder else state]
            case "unmatched":
                return [
                    state - {candidate}
                    for candidate in state
                    if candidate.hold < 0 and candidate.process == task.holder.process
                ]
        return []

    def _apply_reads(self, config: _Config) -> _Config:
        """Mark calls that change nothing as done at the first instant that explains them: earlier is never worse."""
        reads = [task for op, task in self._open.items() if task.verb in READ_ONLY and op not in config.done]
        seen = frozenset(task.op for task in reads if self._is_explained(task, config))
        return _Config(config.state, config.done | seen) if seen else config

    def _is_explained(self, task: _Task, config: _Config) -> bool:
        if task.verb == "held":
            return _find_holder(config.state, task.holder.hold) is not None
        return self._model.is_blocked(config.state, task.holder)


def _find_holder(state: State, hold: int) -> ModelHolder | None:
    return next((holder for holder in state if holder.hold == hold), None)


def _with_depth(state: State, holder: ModelHolder, by: int) -> State:
    depth = holder.depth + by
    return state - {holder} | ({replace(holder, depth=depth)} if depth else set())


def _events(tasks: Iterable[_Task]) -> list[tuple[int, bool, _Task]]:
    events = []
    for task in tasks:
        events.append((task.call.start_index, False, task))
        if task.verb != "unheard":
            events.append((task.call.end_index, True, task))
    return sorted(events, key=lambda event: event[0])


def _tasks(analysis: HistoryAnalysis, name: str) -> Iterator[_Task]:
    waiters = _Waiters(call for call in analysis.calls if call.began.name == name)
    for call in analysis.calls:
        if call.began.name == name:
            verb = _verb(analysis, call)
            if verb is not None and not (verb == "busy" and waiters.other_waits(call)):
                hold = analysis.hold_index.get(call.began.op, -1 - call.began.op)
                yield _Task(call, verb, _holder_of(call, hold))


def _verb(analysis: HistoryAnalysis, call: Call) -> Verb | None:
    """What a call does in the model; None if it proves nothing, or only sets `Hold.maybe_dropped_index`."""
    began, ended = call.began, call.ended
    tied = began.op in analysis.hold_index
    if began.action in ACQUIRE_ACTIONS:
        if call.granted:
            return "reenter" if analysis.depths[began.op] > 1 else "grant"
        if ended is None or call.unknown:
            return "unheard"
        return None if ended.refused else "busy"
    if began.action == "release" and ended is not None and ended.outcome == "ok":
        if call.succeeded:
            return "release" if tied else "unmatched"
        return "drop" if tied else None
    return "held" if began.action == "renew" and call.succeeded and tied else None


def _holder_of(call: Call, hold: int) -> ModelHolder:
    began = call.began
    return ModelHolder(
        hold, began.process, began.mode, began.kind, began.limit, call.ended.slot if call.ended else None
    )


class _Waiters:
    """Which acquires may have been queued, and when: one in progress explains a failed try, even without a holder."""

    def __init__(self, calls: Iterable[Call]) -> None:
        waiters = [call for call in calls if call.began.action == "acquire" and not (call.ended and call.ended.refused)]
        self._opened = [call.start_index for call in waiters]
        self._last: list[list[tuple[int, int]]] = []  # of the waiters up to each, the two that end last
        best: list[tuple[int, int]] = []
        for call in waiters:
            until = NEVER if call.unknown else call.end_index
            best = sorted([*best, (until, call.began.op)])[-2:]
            self._last.append(best)

    def other_waits(self, call: Call) -> bool:
        before = bisect_left(self._opened, call.end_index)
        waiting = self._last[before - 1] if before else []
        return any(until > call.start_index and op != call.began.op for until, op in waiting)


def _unexplained_call(task: _Task, configs: set[_Config]) -> Violation:
    """The search failed: this call cannot have ended as it did, in any order of the others."""
    began, ended = task.call.began, task.call.ended
    states = {" and ".join(sorted(holder.process for holder in config.state)) or "no process" for config in configs}
    held = " or ".join(sorted(states)[:5])
    why = REASONS.get(task.verb, "")
    text = f"no order of the calls explains {describe_call(task.call)}: {why}; before it ended, held by {held}"
    return Violation("order", began.name, began.at if ended is None else ended.at, text)
