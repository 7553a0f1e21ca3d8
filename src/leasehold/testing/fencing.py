"""The judge of fences: was anything let through that came from the past?

A history of calls at one resource, each with the token it showed: `read` (one that claims the fence), `write`, `claim`.
A write that was decided by a read says so in its detail `based_on`. As in `checker.py`, only what is certain counts: a
call comes after another when it began after that one had ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from leasehold.testing.checker import Verdict, Violation, what
from leasehold.testing.history import Call, History


def check_fence(history: History) -> Verdict:
    """Judge every resource of a history: no accepted token below an earlier one, no refusal without a reason, no two
    writes that were decided by the same state."""
    names: defaultdict[str, list[Call]] = defaultdict(list)
    for call in history.calls():
        names[call.began.name].append(call)
    found = [one for calls in names.values() for one in (*_fallen(calls), *_unjust(calls), *_lost(calls))]
    found.sort(key=lambda violation: violation.at)
    return Verdict("invalid" if found else "valid", tuple(found))


def _token(call: Call) -> int:
    assert call.token is not None, "a call at a fence shows a token"
    return call.token


def _fallen(calls: Sequence[Call]) -> Iterator[Violation]:
    """The rule itself. In order of their starts, each is compared with the highest of those that had ended."""
    accepted = [call for call in calls if call.yes]
    ends = sorted(accepted, key=lambda call: call.closed)
    done, highest = 0, None
    for call in sorted(accepted, key=lambda call: call.opened):
        while done < len(ends) and ends[done].closed < call.opened:
            if highest is None or _token(ends[done]) > _token(highest):
                highest = ends[done]
            done += 1
        if highest is not None and _token(call) < _token(highest):
            text = f"{what(call)} was let through after {what(highest)}"
            yield Violation("token", call.began.name, call.began.at, text)


def _unjust(calls: Sequence[Call]) -> Iterator[Violation]:
    """Refused is only what is lower than a token that was shown before the refusal ended. By whomever: one that is
    refused itself in the end, by a still newer one, may have raised the mark while it waited to be let in."""
    shown = sorted(calls, key=lambda call: call.opened)
    refused = [call for call in calls if call.ended is not None and call.ended.outcome == "fail"]
    seen, highest = 0, 0
    for call in sorted(refused, key=lambda call: call.closed):
        while seen < len(shown) and shown[seen].opened < call.closed:
            highest = max(highest, _token(shown[seen]))
            seen += 1
        if _token(call) >= highest and call.ended is not None:
            yield Violation("refusal", call.began.name, call.ended.at, f"{what(call)} was refused without a reason")


def _lost(calls: Sequence[Call]) -> Iterator[Violation]:
    """Two writes that were decided by the same state: the first of them is lost."""
    writes = [(dict(call.began.detail)["based_on"], call) for call in calls if call.yes and call.began.detail]
    for state, same in groupby(sorted(writes, key=lambda one: (str(one[0]), one[1].opened)), key=lambda one: one[0]):
        first, *others = [call for _, call in same]
        for other in others:
            text = f"{what(other)} and {what(first)} were both decided by {state!r}: one update is lost"
            yield Violation("update", other.began.name, other.began.at, text)
