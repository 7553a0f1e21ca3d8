"""The checker of fences: did a fence accept a stale token?

The history has the calls at one resource, each with its token: `read` (which raises the highest token), `write`,
`claim`. A write that is based on a read names what was read in its detail `based_on`. As in `intervals.py`, only
certain facts count: a call comes after another if it began after the other had ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from harness.checkers.history import Call, History
from harness.checkers.intervals import Verdict, Violation, describe_call


def check_fence(history: History) -> Verdict:
    """Check every resource of a history: no accepted token below an earlier one, no refusal without a reason, no two
    writes based on the same state."""
    names: defaultdict[str, list[Call]] = defaultdict(list)
    for call in history.calls():
        names[call.began.name].append(call)
    found = [
        problem
        for calls in names.values()
        for problem in (*_falling_tokens(calls), *_unfounded_refusals(calls), *_lost_updates(calls))
    ]
    found.sort(key=lambda violation: violation.at)
    return Verdict("invalid" if found else "valid", tuple(found))


def _token(call: Call) -> int:
    assert call.token is not None, "every call at a fence has a token"
    return call.token


def _falling_tokens(calls: Sequence[Call]) -> Iterator[Violation]:
    """Rule 1: in order of their starts, each call is compared with the highest token of the calls that had ended."""
    accepted = [call for call in calls if call.succeeded]
    ends = sorted(accepted, key=lambda call: call.end_index)
    done, highest = 0, None
    for call in sorted(accepted, key=lambda call: call.start_index):
        while done < len(ends) and ends[done].end_index < call.start_index:
            if highest is None or _token(ends[done]) > _token(highest):
                highest = ends[done]
            done += 1
        if highest is not None and _token(call) < _token(highest):
            text = f"{describe_call(call)} was accepted after {describe_call(highest)}"
            yield Violation("token", call.began.name, call.began.at, text)


def _unfounded_refusals(calls: Sequence[Call]) -> Iterator[Violation]:
    """A call may be refused only if its token is lower than that of a call which began before the refusal ended. That
    call may itself be refused: it may have raised the highest token while it waited, before a newer one arrived."""
    by_start = sorted(calls, key=lambda call: call.start_index)
    refused = [call for call in calls if call.ended is not None and call.ended.outcome == "fail"]
    seen, highest = 0, 0
    for call in sorted(refused, key=lambda call: call.end_index):
        while seen < len(by_start) and by_start[seen].start_index < call.end_index:
            highest = max(highest, _token(by_start[seen]))
            seen += 1
        if _token(call) >= highest and call.ended is not None:
            yield Violation(
                "refusal", call.began.name, call.ended.at, f"{describe_call(call)} was refused without a reason"
            )


def _lost_updates(calls: Sequence[Call]) -> Iterator[Violation]:
    """Two writes based on the same state: the first of them is lost."""
    writes = [(dict(call.began.detail)["based_on"], call) for call in calls if call.succeeded and call.began.detail]
    for state, same in groupby(
        sorted(writes, key=lambda write: (str(write[0]), write[1].start_index)), key=lambda write: write[0]
    ):
        first, *others = [call for _, call in same]
        for other in others:
            text = f"{describe_call(other)} and {describe_call(first)} were both based on {state!r}: one update is lost"
            yield Violation("update", other.began.name, other.began.at, text)
