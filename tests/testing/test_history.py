"""The recorder: what is written, in which order, and which holds follow from it."""

import itertools
import math
import threading
from dataclasses import FrozenInstanceError

import pytest

from leasehold.testing.history import Ended, History, Hold, Invoked, Lost


def ticking() -> History:
    """A clock that says 0, 1, 2, ...: the time of a record is its place."""
    return History(itertools.count().__next__)


def the_hold(history: History) -> Hold:
    (hold,) = history.holds()
    return hold


def test_the_start_is_written_before_the_end_is_known() -> None:
    history = ticking()
    op = history.invoke("a", "acquire", "x", mode="shared", claim="f00d", node=3)
    (began,) = history.records
    assert began == Invoked(0, op.id, "a", "acquire", "x", "shared", claim="f00d", detail=(("node", 3),))
    op.ok(token=7, slot=1, ttl=2.5)
    assert history.records[1] == Ended(1, op.id, "ok", token=7, slot=1, detail=(("ttl", 2.5),))


def test_a_call_ends_once() -> None:
    history = ticking()
    op = history.invoke("a", "try", "x")
    op.fail("busy")
    with pytest.raises(RuntimeError, match="ended twice"):
        op.ok()
    with pytest.raises(RuntimeError, match="ended twice"):
        op.fail("busy")
    with pytest.raises(RuntimeError, match="ended twice"):
        op.unknown("no answer")
    assert len(history.records) == 2


def test_records_are_values() -> None:
    history = ticking()
    history.invoke("a", "try", "x")
    with pytest.raises(FrozenInstanceError):
        history.records[0].at = 5  # type: ignore[misc]


def test_a_clock_that_goes_back_is_refused() -> None:
    times = iter([5.0, 4.0])
    history = History(times.__next__)
    history.crashed("a")
    with pytest.raises(RuntimeError, match="went back"):
        history.crashed("a")


def test_a_loss_may_be_told_late_but_never_early() -> None:
    history = ticking()
    history.invoke("a", "acquire", "x").ok(token=1)
    with pytest.raises(ValueError, match="cannot be known"):
        history.lost("a", "x", 1, at=100)
    history.lost("a", "x", 1, at=1.5)
    assert history.records[-1] == Lost(1.5, "a", "x", 1)


def test_threads_write_one_ordered_list() -> None:
    history = ticking()

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
    assert all(call.yes and call.opened < call.closed for call in history.calls())


def test_a_history_survives_json() -> None:
    history = ticking()
    history.invoke("a", "acquire", "ü", limit=3, kind="semaphore", claim="f00d", node="n1").ok(token=1, slot=2)
    history.invoke("b", "try", "ü").fail("busy", refused=True)
    history.invoke("b", "try", "ü").unknown("no answer")
    history.lost("a", "ü", 1, at=1.5)
    history.crashed("b")
    open_ = history.invoke("c", "acquire", "ü")
    text = history.to_json()
    assert len(text.splitlines()) == len(history.records)
    again = History.from_json(text)
    assert again.records == history.records
    assert again.holds() == history.holds()
    assert again.calls()[open_.id].unknown


def test_json_that_ends_a_call_twice_is_refused() -> None:
    history = ticking()
    history.invoke("a", "try", "x").ok(token=1)
    text = history.to_json()
    with pytest.raises(RuntimeError, match="ended twice"):
        History.from_json(text + text.splitlines()[-1])


def test_a_hold_lasts_from_the_end_of_acquire_to_the_start_of_release() -> None:
    history = ticking()
    history.invoke("a", "acquire", "x", claim="f00d").ok(token=7)
    release = history.invoke("a", "release", "x")
    release.ok()
    hold = the_hold(history)
    assert (hold.name, hold.process, hold.token, hold.claim) == ("x", "a", 7, "f00d")
    assert (hold.start, hold.end, hold.cause) == (1, 2, "release")


@pytest.mark.parametrize("at", [1.5, 2.0])
def test_a_hold_ends_with_the_earlier_of_release_and_loss(at: float) -> None:
    history = ticking()
    history.invoke("a", "acquire", "x").ok(token=7)
    history.invoke("a", "release", "x")
    history.lost("a", "x", 7, at=at)
    assert (the_hold(history).end, the_hold(history).cause) == (at, "lost" if at < 2 else "release")


def test_a_loss_told_before_the_acquire_returned_counts() -> None:
    history = ticking()
    op = history.invoke("a", "acquire", "x")
    history.lost("a", "x", 7)
    op.ok(token=7)
    assert not the_hold(history).believed


def test_what_nothing_ended_lasts_for_ever_but_the_dead_believe_nothing() -> None:
    history = ticking()
    history.invoke("a", "acquire", "x").ok(token=1)
    history.invoke("b", "acquire", "y").ok(token=2)
    history.crashed("b")
    assert [(hold.end, hold.cause) for hold in history.holds()] == [(math.inf, "open"), (4, "crash")]


@pytest.mark.parametrize(("answer", "end"), [(True, 2), (False, math.inf)])
def test_a_break_ends_what_the_holder_may_rely_on(answer: bool, end: float) -> None:
    history = ticking()
    history.invoke("a", "acquire", "x").ok(token=7)
    history.invoke("operator", "break", "x", token=7).ok(answer)
    assert the_hold(history).end == end


def test_reentrant_holds_merge_into_the_outermost() -> None:
    history = ticking()
    for _ in range(3):
        history.invoke("a", "acquire", "x").ok(token=7)
    for _ in range(3):
        history.invoke("a", "release", "x").ok()
    assert (the_hold(history).start, the_hold(history).end) == (1, 10)
    assert len(the_hold(history).calls) == 3
    assert list(history.ledger().depths.values()) == [1, 2, 3, 2, 1, 0]


def test_a_claim_asked_again_is_not_reentrancy() -> None:
    history = ticking()
    for _ in range(2):
        history.invoke("a", "try", "x", claim="f00d").ok(token=7)
    history.invoke("a", "release", "x", claim="f00d").ok()
    assert (the_hold(history).start, the_hold(history).end) == (1, 4)


def test_a_semaphore_taken_again_is_another_permit() -> None:
    history = ticking()
    for token in (1, 2):
        history.invoke("a", "acquire", "x", kind="semaphore", limit=2).ok(token=token)
    history.invoke("a", "release", "x", token=1).ok()
    assert [hold.end for hold in history.holds()] == [4, math.inf]


def test_calls_that_speak_of_no_hold_are_strays() -> None:
    history = ticking()
    history.invoke("a", "acquire", "x").ok(token=7)
    history.invoke("b", "release", "x").ok()
    history.invoke("a", "renew", "x", token=8).ok()
    assert [call.began.action for call in history.ledger().strays] == ["release", "renew"]
