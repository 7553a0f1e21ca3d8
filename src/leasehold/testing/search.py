"""The exact judge: is there any order of the calls on one name that a correct lock could have shown?

Intervals cannot tell whether a failed try was just, or whether a release came in time for the next grant: that hangs on
the order of calls that overlap. So all orders are tried, after Wing and Gong, with Lowe's memory of what was seen: each
call takes effect at one instant between its start and its end, and `Model` says what it may do there.

Two things keep the search small, and neither loses an order:

- Calls are put in order only when one of them ends; until then nothing forces them.
- What only looks (a failed try, a renewal) is ticked off at the first instant that explains it, and what may or may not
  have happened (an unanswered try, the end of a lost hold) is assumed just when something needs it.

It follows the order of the records. A name with few clients is judged in milliseconds; where very many calls overlap
the budget ends the search, and the verdict is `unknown`.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from leasehold.testing.checker import Verdict, Violation, what
from leasehold.testing.history import NEVER, TAKING, Call, History, Kind, Ledger, Mode

Verb = Literal["grant", "reenter", "release", "stray", "drop", "busy", "held", "unheard"]
LOOKS = frozenset({"busy", "held"})
WANTING = frozenset({"busy", "stray"})  # what a grant that nobody heard of may explain
WHY: dict[Verb, str] = {
    "grant": "the name was not free",
    "reenter": "it did not hold, or not at that depth",
    "release": "it did not hold, or not at that depth",
    "stray": "it had no grant to release",
    "busy": "nobody held it or stood in line",
    "held": "its hold was gone",
}


@dataclass(frozen=True, slots=True)
class Seat:
    """One holder in the model. `hold` tells two of one process apart; negative: granted unheard."""

    hold: int
    process: str
    mode: Mode
    kind: Kind
    limit: int
    slot: int | None = None
    depth: int = 1


State = frozenset[Seat]


class Model:
    """What a correct lock allows. Pure, and open to subclasses for engines that promise less."""

    def admit(self, state: State, seat: Seat, loose: Collection[int]) -> list[State]:
        """The states after a grant. Holds in `loose` may have lapsed unseen, and do so where they are in the way."""
        clashing = {other for other in state if self.clash(other, seat)}
        if any(other.hold not in loose for other in clashing):
            return []
        left = state - clashing
        excess = len(left) + 1 - seat.limit if seat.kind == "semaphore" else 0
        lapsing = combinations([other for other in left if other.hold in loose], max(excess, 0))
        return [left - set(lapsed) | {seat} for lapsed in lapsing]

    def busy(self, state: State, seat: Seat) -> bool:
        """Whether a holder is in the way of this claim."""
        full = seat.kind == "semaphore" and len(state) >= seat.limit
        return full or any(self.clash(other, seat) for other in state)

    def clash(self, one: Seat, other: Seat) -> bool:
        """Whether two may never hold together, by kind, mode or slot; how many may is for `admit` to say."""
        if one.kind != other.kind:
            return True
        if one.kind == "lock":
            return "exclusive" in (one.mode, other.mode)
        return one.limit != other.limit or (one.slot is not None and one.slot == other.slot)


@dataclass(frozen=True, slots=True)
class _Task:
    """A call as the model sees it."""

    call: Call
    verb: Verb
    seat: Seat

    @property
    def op(self) -> int:
        return self.call.began.op

    @property
    def depth(self) -> int | None:
        return None if self.call.ended is None else self.call.ended.depth


@dataclass(frozen=True, slots=True)
class _Config:
    """One way things may stand: who holds, and which of the open calls have taken effect."""

    state: State
    done: frozenset[int]


class _Exhausted(Exception):
    pass


def search(history: History, name: str, model: Model | None = None, budget: int = 200_000) -> Verdict:
    """Judge the calls on one name. `budget` is the number of states to visit before giving up as `unknown`.

    A failed try or acquire is just if a holder was in its way, or if another acquire was under way meanwhile: that one
    may have stood in line. A holder that was lost, broken, crashed or never heard of may lapse at any later time.
    """
    ledger, searcher = history.ledger(), _Searcher(model or Model(), budget)
    doubtful = {place: hold.doubtful for place, hold in enumerate(ledger.holds) if hold.name == name}
    try:
        violation = searcher.run(list(_tasks(ledger, name)), doubtful)
    except _Exhausted:
        return Verdict("unknown", visited=searcher.visited)
    if violation is None:
        return Verdict("valid", visited=searcher.visited)
    return Verdict("invalid", (violation,), searcher.visited)


class _Searcher:
    """All ways things may stand, carried along the history from one record to the next."""

    def __init__(self, model: Model, budget: int) -> None:
        self._model = model
        self._budget = budget
        self._open: dict[int, _Task] = {}
        self._unheard: dict[int, Seat] = {}  # by op, grants that may have been made unheard
        self._loose: set[int] = set()  # holds that may have lapsed
        self._strays: set[str] = set()  # processes with a release that only such a grant explains
        self.visited = 0

    def run(self, tasks: Sequence[_Task], doubtful: dict[int, int]) -> Violation | None:
        configs = {_Config(frozenset(), frozenset())}
        self._strays = {task.seat.process for task in tasks if task.verb == "stray"}
        coming = sorted(((since, hold) for hold, since in doubtful.items()), reverse=True)
        for place, closing, task in _events(tasks):
            while coming and coming[-1][0] <= place:
                self._loose.add(coming.pop()[1])
            if closing:
                reached = self._close(task, configs)
                if not reached:
                    return _unexplained(task, configs)
                configs = reached
            elif task.verb == "unheard":
                self._unheard[task.op] = task.seat
                self._loose.add(task.seat.hold)
            else:
                self._open[task.op] = task
            configs = {self._look(config) for config in configs}
        return None

    def _close(self, task: _Task, configs: set[_Config]) -> set[_Config]:
        """Every way in which the call has taken effect by now."""
        todo = [self._look(config) for config in configs]
        seen, reached = set(todo), set[_Config]()
        while todo:
            config = todo.pop()
            if task.op in config.done:
                reached.add(_Config(config.state, config.done - {task.op}))
                continue
            for after in self._steps(config):
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

    def _steps(self, config: _Config) -> Iterator[_Config]:
        wanted = False
        for op, task in self._open.items():
            if op not in config.done:
                wanted = wanted or task.verb in WANTING
                for state in self._effects(task, config.state):
                    yield self._look(_Config(state, config.done | {op}))
        for op, seat in self._unspent(config) if wanted else ():
            for state in self._model.admit(config.state, seat, self._loose):
                yield self._look(_Config(state, config.done | {op}))

    def _unspent(self, config: _Config) -> Iterable[tuple[int, Seat]]:
        """Grants that may still be made unheard: of those alike only the first, as the others would lead no further."""
        alike: dict[Seat, tuple[int, Seat]] = {}
        for op, seat in self._unheard.items():
            if op not in config.done:
                process = seat.process if seat.process in self._strays else ""
                alike.setdefault(replace(seat, hold=0, process=process), (op, seat))
        return alike.values()

    def _effects(self, task: _Task, state: State) -> Iterable[State]:
        """The states a call may lead to; none where it cannot have taken effect."""
        seat = _held(state, task.seat.hold)
        match task.verb:
            case "grant" if seat is None and task.depth in (None, 1):
                return self._model.admit(state, task.seat, self._loose)
            case "grant" if seat is not None and task.call.began.claim is not None:  # E2: asked again, the same grant
                return [state]
            case "reenter" if seat is not None and task.depth in (None, seat.depth + 1):
                return [_deepened(state, seat, 1)]
            case "release" if seat is not None and task.depth in (None, seat.depth - 1):
                return [_deepened(state, seat, -1)]
            case "drop":
                return [state - {seat} if seat else state]
            case "stray":
                return [state - {one} for one in state if one.hold < 0 and one.process == task.seat.process]
        return []

    def _look(self, config: _Config) -> _Config:
        """Tick off what only looks, at the first instant that explains it: it changes nothing, so soonest is best."""
        looking = [task for op, task in self._open.items() if task.verb in LOOKS and op not in config.done]
        seen = frozenset(task.op for task in looking if self._explained(task, config))
        return _Config(config.state, config.done | seen) if seen else config

    def _explained(self, task: _Task, config: _Config) -> bool:
        if task.verb == "held":
            return _held(config.state, task.seat.hold) is not None
        return self._model.busy(config.state, task.seat)


def _held(state: State, hold: int) -> Seat | None:
    return next((seat for seat in state if seat.hold == hold), None)


def _deepened(state: State, seat: Seat, by: int) -> State:
    depth = seat.depth + by
    return state - {seat} | ({replace(seat, depth=depth)} if depth else set())


def _events(tasks: Iterable[_Task]) -> list[tuple[int, bool, _Task]]:
    events = []
    for task in tasks:
        events.append((task.call.opened, False, task))
        if task.verb != "unheard":
            events.append((task.call.closed, True, task))
    return sorted(events, key=lambda event: event[0])


def _tasks(ledger: Ledger, name: str) -> Iterator[_Task]:
    line = _Line(call for call in ledger.calls if call.began.name == name)
    for call in ledger.calls:
        if call.began.name == name:
            verb = _verb(ledger, call)
            if verb is not None and not (verb == "busy" and line.somebody_else(call)):
                hold = ledger.hold_of.get(call.began.op, -1 - call.began.op)
                yield _Task(call, verb, _seat(call, hold))


def _verb(ledger: Ledger, call: Call) -> Verb | None:
    """What a call does to the model; None for what says nothing, or only that a hold may be gone (`Hold.doubtful`)."""
    began, ended = call.began, call.ended
    tied = began.op in ledger.hold_of
    if began.action in TAKING:
        if call.granted:
            return "reenter" if ledger.depths[began.op] > 1 else "grant"
        if ended is None or call.unknown:
            return "unheard"
        return None if ended.refused else "busy"
    if began.action == "release" and ended is not None and ended.outcome == "ok":
        if call.yes:
            return "release" if tied else "stray"
        return "drop" if tied else None
    return "held" if began.action == "renew" and call.yes and tied else None


def _seat(call: Call, hold: int) -> Seat:
    began = call.began
    return Seat(hold, began.process, began.mode, began.kind, began.limit, call.ended.slot if call.ended else None)


class _Line:
    """Who may have stood in line when: an acquire under way explains a failed try, whoever holds."""

    def __init__(self, calls: Iterable[Call]) -> None:
        waiters = [call for call in calls if call.began.action == "acquire" and not (call.ended and call.ended.refused)]
        self._opened = [call.opened for call in waiters]
        self._last: list[list[tuple[int, int]]] = []  # the two that stay longest, of those up to each
        best: list[tuple[int, int]] = []
        for call in waiters:
            until = NEVER if call.unknown else call.closed
            best = sorted([*best, (until, call.began.op)])[-2:]
            self._last.append(best)

    def somebody_else(self, call: Call) -> bool:
        before = bisect_left(self._opened, call.closed)
        standing = self._last[before - 1] if before else []
        return any(until > call.opened and op != call.began.op for until, op in standing)


def _unexplained(task: _Task, configs: set[_Config]) -> Violation:
    """The end of the search: this call cannot have ended as it did, in whichever order the others are put."""
    began, ended = task.call.began, task.call.ended
    states = {" and ".join(sorted(seat.process for seat in config.state)) or "nobody" for config in configs}
    held = " or ".join(sorted(states)[:5])
    why = WHY.get(task.verb, "")
    text = f"no order of the calls explains {what(task.call)}: {why}; before it ended held by {held}"
    return Violation("order", began.name, began.at if ended is None else ended.at, text)
