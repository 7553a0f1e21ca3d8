"""The recorder: what it records, in which order, and which holds follow from that."""

import itertools
import math
import threading
from dataclasses import FrozenInstanceError

import pytest

from harness.checkers.history import Ended, History, Hold, Invoked, Lost


def history_with_counting_clock() -> History:
    """A history whose clock returns 0, 1, 2, ...: the time of a record is its index."""
    return History(itertools.count().__next__)


def only_hold(history: History) -> Hold:
    (hold,) = history.holds()
    return hold


def test_invocation_is_recorded_before_the_call_ends() -> None:
    history = history_with_counting_clock()
    op = history.invoke("a", "acquire", "x", mode="shared", claim="f00d", node=3)
    (began,) = history.records
    assert began == Invoked(0, op.id, "a", "acquire", "x", "shared", claim="f00d", detail=(("node", 3),))
    op.ok(token=7, slot=1, ttl=2.5)
    assert history.records[1] == Ended(1, op.id, "ok", token=7, slot=1, detail=(("ttl", 2.5),))


def test_ending_a_call_twice_raises() -> None:
    history = history_with_counting_clock()
    op = history.invoke("a", "try", "x")
    op.fail("busy")
    with pytest.raises(RuntimeError, match="ended twice"):
        op.ok()
    with pytest.raises(RuntimeError, match="ended twice"):
        op.fail("busy")
    with pytest.raises(RuntimeError, match="ended twice"):
        op.unknown("no answer")
    assert len(history.records) == 2


def test_records_are_immutable() -> None:
    history = history_with_counting_clock()
    history.invoke("a", "try", "x")
    with pytest.raises(FrozenInstanceError):
        history.records[0].at = 5  # type: ignore[misc]


def test_history_refuses_a_clock_that_goes_backwards() -> None:
    times = iter([5.0, 4.0])
    history = History(times.__next__)
    history.crashed("a")
    with pytest.raises(RuntimeError, match="went back"):
        history.crashed("a")


def test_loss_may_be_recorded_late_but_never_early() -> None:
    history = history_with_counting_clock()
    history.invoke("a", "acquire", "x").ok(token=1)
    with pytest.raises(ValueError, match="cannot be known"):
        history.lost("a", "x", 1, at=100)
    history.lost("a", "x", 1, at=1.5)
    assert history.records[-1] == Lost(1.5, "a", "x", 1)


def test_threads_record_into_one_ordered_history() -> None:
    history = history_with_counting_clock()

    def work(process: str) -> None:
        for token in range(200):
            history.invoke(process, "acquire", process).ok(token=token)

    threads = [threading.Thread(target=work, args=(f"p{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.at for record in history.records] == list(range(3200))
    assert [call.began.op for call in history.calls()] == list(range(1600))
    assert all(call.succeeded and call.start_index < call.end_index for call in history.calls())


def test_history_survives_json_round_trip() -> None:
    history = history_with_counting_clock()
    history.invoke("a", "acquire", "ü", limit=3, kind="semaphore", claim="f00d", node="n1").ok(token=1, slot=2)
    history.invoke("b", "try", "ü").fail("busy", refused=True)
    history.invoke("b", "try", "ü").unknown("no answer")
    history.lost("a", "ü", 1, at=1.5)
    history.crashed("b")
    open_call = history.invoke("c", "acquire", "ü")
    text = history.to_json()
    assert len(text.splitlines()) == len(history.records)
    again = History.from_json(text)
    assert again.records == history.records
    assert again.holds() == history.holds()
    assert again.calls()[open_call.id].unknown


def test_json_ending_a_call_twice_is_refused() -> None:
    history = history_with_counting_clock()
    history.invoke("a", "try", "x").ok(token=1)
    text = history.to_json()
    with pytest.raises(RuntimeError, match="ended twice"):
        History.from_json(text + text.splitlines()[-1])


def test_hold_lasts_from_end_of_acquire_to_start_of_release() -> None:
    history = history_with_counting_clock()
    history.invoke("a", "acquire", "x", claim="f00d").ok(token=7)
    release = history.invoke("a", "release", "x")
    release.ok()
    hold = only_hold(history)
    assert (hold.name, hold.process, hold.token, hold.claim) == ("x", "a", 7, "f00d")
    assert (hold.start, hold.end, hold.cause) == (1, 2, "release")


@pytest.mark.parametrize("at", [1.5, 2.0])
def test_hold_ends_at_the_earlier_of_release_and_loss(at: float) -> None:
    history = history_with_counting_clock()
    history.invoke("a", "acquire", "x").ok(token=7)
    history.invoke("a", "release", "x")
    history.lost("a", "x", 7, at=at)
    assert (only_hold(history).end, only_hold(history).cause) == (at, "lost" if at < 2 else "release")


def test_loss_recorded_before_acquire_returned_counts() -> None:
    history = history_with_counting_clock()
    op = history.invoke("a", "acquire", "x")
    history.lost("a", "x", 7)
    op.ok(token=7)
    assert not only_hold(history).believed


def test_unended_hold_lasts_forever_unless_process_crashed() -> None:
    history = history_with_counting_clock()
    history.invoke("a", "acquire", "x").ok(token=1)
    history.invoke("b", "acquire", "y").ok(token=2)
    history.crashed("b")
    assert [(hold.end, hold.cause) for hold in history.holds()] == [(math.inf, "open"), (4, "crash")]


@pytest.mark.parametrize(("answer", "end"), [(True, 2), (False, math.inf)])
def test_break_ends_the_hold_only_if_it_succeeded(answer: bool, end: float) -> None:
    history = history_with_counting_clock()
    history.invoke("a", "acquire", "x").ok(token=7)
    history.invoke("operator", "break", "x", token=7).ok(answer)
    assert only_hold(history).end == end


def test_reentrant_holds_merge_into_the_outermost() -> None:
    history = history_with_counting_clock()
    for _ in range(3):
        history.invoke("a", "acquire", "x").ok(token=7)
    for _ in range(3):
        history.invoke("a", "release", "x").ok()
    assert (only_hold(history).start, only_hold(history).end) == (1, 10)
    assert len(only_hold(history).calls) == 3
    assert list(history.analyze().depths.values()) == [1, 2, 3, 2, 1, 0]


def test_repeated_attempt_of_a_claim_is_not_reentrancy() -> None:
    history = history_with_counting_clock()
    for _ in range(2):
        history.invoke("a", "try", "x", claim="f00d").ok(token=7)
    history.invoke("a", "release", "x", claim="f00d").ok()
    assert (only_hold(history).start, only_hold(history).end) == (1, 4)


def test_second_acquire_of_semaphore_is_another_permit() -> None:
    history = history_with_counting_clock()
    for token in (1, 2):
        history.invoke("a", "acquire", "x", kind="semaphore", limit=2).ok(token=token)
    history.invoke("a", "release", "x", token=1).ok()
    assert [hold.end for hold in history.holds()] == [4, math.inf]


def test_calls_without_matching_hold_are_unmatched() -> None:
    history = history_with_counting_clock()
    history.invoke("a", "acquire", "x").ok(token=7)
    history.invoke("b", "release", "x").ok()
    history.invoke("a", "renew", "x", token=8).ok()
    assert [call.began.action for call in history.analyze().unmatched] == ["release", "renew"]
