"""The exact search agrees with brute force. Each planted violation is found by every checker that can see it."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkers.history import NEVER, History, Kind, Mode, Op
from harness.checkers.intervals import check
from harness.checkers.linearizable import search


@dataclass(frozen=True)
class Item:
    """A call for the brute force. `since` and `until` are indexes in the history. Without `must` it may never
    happen."""

    verb: str
    hold: int
    process: str
    mode: str
    since: float
    until: float
    must: bool = True


def brute_force(items: list[Item], held: dict[int, Item], limit: int) -> bool:
    """Try every order, without the optimizations of the search. A limit of 0 is a lock."""
    if not any(item.must for item in items):
        return True
    first_end = min(item.until for item in items if item.must)
    for index, item in enumerate(items):
        if item.since < first_end and any(
            brute_force(items[:index] + items[index + 1 :], after, limit) for after in outcomes(item, held, limit)
        ):
            return True
    return False


def outcomes(item: Item, held: dict[int, Item], limit: int) -> list[dict[int, Item]]:
    conflicts = any("exclusive" in (item.mode, other.mode) for other in held.values())
    busy = len(held) >= limit if limit else conflicts
    removable = [item.hold] if item.verb == "give" and item.hold in held else []
    match item.verb:
        case "take":
            return [] if busy else [held | {item.hold: item}]
        case "busy":
            return [held] if busy else []
        case "unmatched":
            removable = [hold for hold, other in held.items() if hold < 0 and other.process == item.process]
    return [{hold: other for hold, other in held.items() if hold != removed} for removed in removable]


def items_of(history: History) -> list[Item]:
    ledger, items = history.analyze(), []
    for call in ledger.calls:
        began, hold = call.began, ledger.hold_index.get(call.began.op, -1 - call.began.op)
        common_fields = (hold, began.process, began.mode, call.start_index)
        if began.action == "release":
            items.append(Item("give" if hold >= 0 else "unmatched", *common_fields, call.end_index, call.succeeded))
        elif call.unknown:  # granted or not; if granted, it may end at any time
            items += [Item(verb, *common_fields, math.inf, False) for verb in ("take", "give")]
        else:
            items.append(Item("take" if call.granted else "busy", *common_fields, call.end_index))
    for index, recorded_hold in enumerate(ledger.holds):
        if recorded_hold.maybe_dropped_index != NEVER:
            items.append(
                Item(
                    "give",
                    index,
                    recorded_hold.process,
                    recorded_hold.mode,
                    recorded_hold.maybe_dropped_index - 0.5,
                    math.inf,
                    False,
                )
            )
    return items


def random_history(seed: int, limit: int) -> History:
    """Attempts and releases with random answers, so that half of the histories are wrong."""
    rng, tokens, history = random.Random(seed), itertools.count(1), history_with_counting_clock()
    kind: Kind = "semaphore" if limit else "lock"
    in_flight: dict[str, tuple[str, Op]] = {}
    leases: dict[str, int | None] = {}  # None: unknown
    for _ in range(rng.randint(4, 16)):
        process, answer = rng.choice("abc"), rng.random()
        if process in in_flight:
            action, op = in_flight.pop(process)
            if answer < 0.15:
                op.unknown("no answer")
                if action == "try" and rng.random() < 0.3:
                    leases[process] = None
            elif action == "release":
                op.ok()
            elif answer < 0.6:
                leases[process] = token = next(tokens)
                op.ok(token=token)
            else:
                op.fail("busy")
        elif process not in leases:
            mode: Mode = "exclusive" if limit else rng.choice(["exclusive", "shared"])
            op = history.invoke(process, "try", "x", mode=mode, kind=kind, limit=limit or 1)
            in_flight[process] = "try", op
        elif (lease := leases.pop(process)) is not None and answer < 0.3:
            history.lost(process, "x", lease)
        else:
            claim = "unheard" if lease is None else None
            in_flight[process] = "release", history.invoke(process, "release", "x", token=lease, claim=claim)
    return history


@given(st.integers(0, 2**32), st.integers(0, 2))
@settings(max_examples=500)
def test_search_agrees_with_brute_force(seed: int, limit: int) -> None:
    history = random_history(seed, limit)
    assert (search(history, "x").result == "valid") == brute_force(items_of(history), {}, limit)


def history_with_counting_clock() -> History:
    return History(itertools.count().__next__)


@pytest.mark.parametrize("action", ["try", "acquire"])
@pytest.mark.parametrize("answered", [True, False])
def test_unanswered_acquire_explains_a_later_failed_try(action: str, answered: bool) -> None:
    history = History(itertools.count().__next__)
    call = history.invoke("a", action, "x")
    call.fail("busy", refused=True) if answered else call.unknown("no answer")
    history.invoke("b", "try", "x").fail("busy")
    verdict = search(history, "x")
    assert verdict.result == ("invalid" if answered else "valid")
    assert not answered or "b's try" in verdict.violations[0].text


def test_search_out_of_budget_answers_unknown() -> None:
    history = History(itertools.count().__next__)
    calls = [history.invoke(f"p{n}", "try", "x", kind="semaphore", limit=9) for n in range(9)]
    for token, call in enumerate(calls):
        call.ok(token=token)
    assert search(history, "x", budget=5).result == "unknown"
    assert search(history, "x").result == "valid"


class ScriptedHistory:
    """A history written by hand, after any number of uncontended acquires and releases."""

    def __init__(self, turns: list[str]) -> None:
        self.history = history_with_counting_clock()
        self.token = 0
        for process in turns:
            self.acquire(process)
            self.release(process)

    def acquire(
        self, process: str, token: int | None = None, mode: Mode = "exclusive", depth: int | None = None
    ) -> int:
        self.token = self.token + 1 if token is None else token
        self.history.invoke(process, "acquire", "x", mode=mode).ok(token=self.token, depth=depth)
        return self.token

    def permit(self, process: str, slot: int | None = None, limit: int = 2) -> None:
        self.token += 1
        self.history.invoke(process, "try", "x", kind="semaphore", limit=limit).ok(token=self.token, slot=slot)

    def release(self, process: str, depth: int | None = None) -> None:
        self.history.invoke(process, "release", "x").ok(depth=depth)


def two_exclusive(run: ScriptedHistory) -> None:
    run.acquire("a")
    run.acquire("b")


def shared_beside_exclusive(run: ScriptedHistory) -> None:
    run.acquire("a")
    run.acquire("b", mode="shared")


def exclusive_beside_shared(run: ScriptedHistory) -> None:
    run.acquire("a", mode="shared")
    run.acquire("b")


def limit_exceeded(run: ScriptedHistory) -> None:
    for process in "abc":
        run.permit(process)


def slot_given_twice(run: ScriptedHistory) -> None:
    run.permit("a", slot=1)
    run.permit("b", slot=1)


def two_limits(run: ScriptedHistory) -> None:
    run.permit("a", limit=2)
    run.permit("b", limit=3)


def two_kinds(run: ScriptedHistory) -> None:
    run.acquire("a", mode="shared")
    run.permit("b")


def token_reused(run: ScriptedHistory) -> None:
    token = run.acquire("a")
    run.release("a")
    run.acquire("b", token=token)


def token_fell(run: ScriptedHistory) -> None:
    run.acquire("a", token=1000)
    run.release("a")
    run.acquire("b", token=999)


def token_fell_among_readers(run: ScriptedHistory) -> None:
    run.acquire("a", token=1000, mode="shared")
    run.acquire("b", token=999, mode="shared")


def failed_for_nothing(run: ScriptedHistory) -> None:
    run.history.invoke("a", "try", "x").fail("busy")


def waited_out_for_nothing(run: ScriptedHistory) -> None:
    run.history.invoke("a", "acquire", "x").fail("waited out")


def permit_refused_with_one_free(run: ScriptedHistory) -> None:
    run.permit("a")
    run.history.invoke("b", "try", "x", kind="semaphore", limit=2).fail("busy")


def reader_refused_beside_a_reader(run: ScriptedHistory) -> None:
    run.acquire("a", mode="shared")
    run.history.invoke("b", "try", "x", mode="shared").fail("busy")


def released_by_another(run: ScriptedHistory) -> None:
    run.acquire("a")
    run.release("stranger")


def released_twice(run: ScriptedHistory) -> None:
    run.acquire("a")
    run.release("a")
    run.release("a")


def freed_while_still_reentered(run: ScriptedHistory) -> None:
    token = run.acquire("a")
    run.acquire("a", token=token)
    run.release("a")
    run.acquire("b", token=token + 1)


def depth_miscounted(run: ScriptedHistory) -> None:
    token = run.acquire("a", depth=1)
    run.acquire("a", token=token, depth=2)
    run.release("a", depth=0)


def renewed_after_release(run: ScriptedHistory) -> None:
    token = run.acquire("a")
    run.release("a")
    run.history.invoke("a", "renew", "x", token=token).ok()


def renewed_after_loss(run: ScriptedHistory) -> None:
    token = run.acquire("a")
    run.history.lost("a", "x", token)
    run.history.invoke("a", "renew", "x", token=token).ok()


def renewed_after_another_was_granted(run: ScriptedHistory) -> None:
    token = run.acquire("a")
    run.history.lost("a", "x", token)
    run.acquire("b", token=token + 1)
    run.history.invoke("a", "renew", "x", token=token).ok()


def renewed_without_a_grant(run: ScriptedHistory) -> None:
    run.history.invoke("a", "renew", "x", token=1000).ok()


def claim_granted_twice(run: ScriptedHistory) -> None:
    for token in (1000, 1001):
        run.history.invoke("a", "try", "x", claim="c1").ok(token=token)


PLANTED_VIOLATIONS: dict[
    Callable[[ScriptedHistory], None], tuple[set[str], bool]
] = {  # the rules that the check reports; whether the search finds it
    two_exclusive: ({"exclusion"}, True),
    shared_beside_exclusive: ({"exclusion"}, True),
    exclusive_beside_shared: ({"exclusion"}, True),
    limit_exceeded: ({"limit"}, True),
    slot_given_twice: ({"slot"}, True),
    two_limits: ({"kind"}, True),
    two_kinds: ({"kind"}, True),
    token_reused: ({"token"}, False),
    token_fell: ({"token"}, False),
    token_fell_among_readers: ({"token"}, False),
    failed_for_nothing: (set(), True),
    waited_out_for_nothing: (set(), True),
    permit_refused_with_one_free: (set(), True),
    reader_refused_beside_a_reader: (set(), True),
    released_by_another: ({"release"}, True),
    released_twice: ({"release"}, True),
    freed_while_still_reentered: ({"exclusion"}, True),
    depth_miscounted: ({"depth"}, True),
    renewed_after_release: ({"renew"}, True),
    renewed_after_loss: ({"renew"}, False),  # the engine's clock ends it a little later: only the holder was wrong
    renewed_after_another_was_granted: ({"renew"}, True),
    renewed_without_a_grant: ({"renew"}, False),
    claim_granted_twice: ({"exclusion", "repeat"}, True),
}


@pytest.mark.parametrize("plant_violation", PLANTED_VIOLATIONS, ids=lambda plant_violation: plant_violation.__name__)
@given(turns=st.lists(st.sampled_from("abc"), max_size=6))
@settings(max_examples=20)
def test_checkers_find_planted_violation(plant_violation: Callable[[ScriptedHistory], None], turns: list[str]) -> None:
    run = ScriptedHistory(turns)
    assert (check(run.history).result, search(run.history, "x").result) == ("valid", "valid")
    plant_violation(run)
    rules, found_by_search = PLANTED_VIOLATIONS[plant_violation]
    assert {violation.rule for violation in check(run.history).violations} == rules
    assert search(run.history, "x").result == ("invalid" if found_by_search else "valid")


def test_hold_of_crashed_process_may_linger_or_not() -> None:
    """The engine ends a hold some time after the holder stopped trusting it. Until then attempts fail."""
    for lingers in (True, False):
        run = ScriptedHistory([])
        run.acquire("a")
        run.history.crashed("a")
        if lingers:
            run.history.invoke("b", "try", "x").fail("busy")
        run.acquire("b")
        assert (check(run.history).result, search(run.history, "x").result) == ("valid", "valid")
        run.history.invoke("a", "release", "x", token=1).ok()  # by then another process held it
        assert search(run.history, "x").result == "invalid"


def test_waiting_writer_explains_a_failed_try_of_a_reader() -> None:
    run = ScriptedHistory([])
    run.acquire("a", mode="shared")
    writer = run.history.invoke("b", "acquire", "x")
    run.history.invoke("c", "try", "x", mode="shared").fail("busy")
    run.release("a")
    writer.ok(token=2)
    assert str(search(run.history, "x")) == "valid"
