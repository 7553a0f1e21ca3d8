"""The exact search: it agrees with brute force, and what no correct lock can show is found by whoever can see it."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.testing.checker import check
from leasehold.testing.history import NEVER, History, Kind, Mode, Op
from leasehold.testing.search import search


@dataclass(frozen=True)
class Item:
    """A call for the brute force. `since` and `until` are places in the history; without `must` it may never be."""

    verb: str
    hold: int
    process: str
    mode: str
    since: float
    until: float
    must: bool = True


def brute(items: list[Item], held: dict[int, Item], limit: int) -> bool:
    """Every order there is, without any of the search's economies. A limit of 0 is a lock."""
    if not any(item.must for item in items):
        return True
    first_end = min(item.until for item in items if item.must)
    for place, item in enumerate(items):
        if item.since < first_end and any(
            brute(items[:place] + items[place + 1 :], after, limit) for after in outcomes(item, held, limit)
        ):
            return True
    return False


def outcomes(item: Item, held: dict[int, Item], limit: int) -> list[dict[int, Item]]:
    alone = any("exclusive" in (item.mode, other.mode) for other in held.values())
    busy = len(held) >= limit if limit else alone
    gone = [item.hold] if item.verb == "give" and item.hold in held else []
    match item.verb:
        case "take":
            return [] if busy else [held | {item.hold: item}]
        case "busy":
            return [held] if busy else []
        case "stray":
            gone = [hold for hold, other in held.items() if hold < 0 and other.process == item.process]
    return [{hold: other for hold, other in held.items() if hold != one} for one in gone]


def items_of(history: History) -> list[Item]:
    ledger, items = history.ledger(), []
    for call in ledger.calls:
        began, hold = call.began, ledger.hold_of.get(call.began.op, -1 - call.began.op)
        who = (hold, began.process, began.mode, call.opened)
        if began.action == "release":
            items.append(Item("give" if hold >= 0 else "stray", *who, call.closed, call.yes))
        elif call.unknown:  # granted or not, and if so gone again at any time
            items += [Item(verb, *who, math.inf, False) for verb in ("take", "give")]
        else:
            items.append(Item("take" if call.granted else "busy", *who, call.closed))
    for place, one in enumerate(ledger.holds):
        if one.doubtful != NEVER:
            items.append(Item("give", place, one.process, one.mode, one.doubtful - 0.5, math.inf, False))
    return items


def guesswork(seed: int, limit: int) -> History:
    """Tries and releases whose answers are drawn at random, so that half of the histories are wrong."""
    rng, tokens, history = random.Random(seed), itertools.count(1), ticking()
    kind: Kind = "semaphore" if limit else "lock"
    under_way: dict[str, tuple[str, Op]] = {}
    leases: dict[str, int | None] = {}  # None: perhaps
    for _ in range(rng.randint(4, 16)):
        process, answer = rng.choice("abc"), rng.random()
        if process in under_way:
            action, op = under_way.pop(process)
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
            under_way[process] = "try", op
        elif (lease := leases.pop(process)) is not None and answer < 0.3:
            history.lost(process, "x", lease)
        else:
            claim = "unheard" if lease is None else None
            under_way[process] = "release", history.invoke(process, "release", "x", token=lease, claim=claim)
    return history


@given(st.integers(0, 2**32), st.integers(0, 2))
@settings(max_examples=500, deadline=None)
def test_the_search_agrees_with_brute_force(seed: int, limit: int) -> None:
    history = guesswork(seed, limit)
    assert (search(history, "x").result == "valid") == brute(items_of(history), {}, limit)


def ticking() -> History:
    return History(itertools.count().__next__)


@pytest.mark.parametrize("action", ["try", "acquire"])
@pytest.mark.parametrize("heard", [True, False])
def test_an_unanswered_acquire_explains_a_later_failed_try(action: str, heard: bool) -> None:
    history = History(itertools.count().__next__)
    call = history.invoke("a", action, "x")
    call.fail("busy", refused=True) if heard else call.unknown("no answer")
    history.invoke("b", "try", "x").fail("busy")
    verdict = search(history, "x")
    assert verdict.result == ("invalid" if heard else "valid")
    assert not heard or "b's try" in verdict.violations[0].text


def test_a_search_that_uses_up_its_budget_does_not_know() -> None:
    history = History(itertools.count().__next__)
    calls = [history.invoke(f"p{n}", "try", "x", kind="semaphore", limit=9) for n in range(9)]
    for token, call in enumerate(calls):
        call.ok(token=token)
    assert search(history, "x", budget=5).result == "unknown"
    assert search(history, "x").result == "valid"


class Script:
    """A run written by hand, after any number of quiet turns."""

    def __init__(self, turns: list[str]) -> None:
        self.history = ticking()
        self.token = 0
        for process in turns:
            self.take(process)
            self.give(process)

    def take(self, process: str, token: int | None = None, mode: Mode = "exclusive", depth: int | None = None) -> int:
        self.token = self.token + 1 if token is None else token
        self.history.invoke(process, "acquire", "x", mode=mode).ok(token=self.token, depth=depth)
        return self.token

    def permit(self, process: str, slot: int | None = None, limit: int = 2) -> None:
        self.token += 1
        self.history.invoke(process, "try", "x", kind="semaphore", limit=limit).ok(token=self.token, slot=slot)

    def give(self, process: str, depth: int | None = None) -> None:
        self.history.invoke(process, "release", "x").ok(depth=depth)


def two_exclusive(run: Script) -> None:
    run.take("a")
    run.take("b")


def shared_beside_exclusive(run: Script) -> None:
    run.take("a")
    run.take("b", mode="shared")


def exclusive_beside_shared(run: Script) -> None:
    run.take("a", mode="shared")
    run.take("b")


def limit_exceeded(run: Script) -> None:
    for process in "abc":
        run.permit(process)


def slot_given_twice(run: Script) -> None:
    run.permit("a", slot=1)
    run.permit("b", slot=1)


def two_limits(run: Script) -> None:
    run.permit("a", limit=2)
    run.permit("b", limit=3)


def two_kinds(run: Script) -> None:
    run.take("a", mode="shared")
    run.permit("b")


def token_reused(run: Script) -> None:
    token = run.take("a")
    run.give("a")
    run.take("b", token=token)


def token_fell(run: Script) -> None:
    run.take("a", token=1000)
    run.give("a")
    run.take("b", token=999)


def token_fell_among_readers(run: Script) -> None:
    run.take("a", token=1000, mode="shared")
    run.take("b", token=999, mode="shared")


def failed_for_nothing(run: Script) -> None:
    run.history.invoke("a", "try", "x").fail("busy")


def waited_out_for_nothing(run: Script) -> None:
    run.history.invoke("a", "acquire", "x").fail("waited out")


def permit_refused_with_one_free(run: Script) -> None:
    run.permit("a")
    run.history.invoke("b", "try", "x", kind="semaphore", limit=2).fail("busy")


def reader_refused_beside_a_reader(run: Script) -> None:
    run.take("a", mode="shared")
    run.history.invoke("b", "try", "x", mode="shared").fail("busy")


def released_by_another(run: Script) -> None:
    run.take("a")
    run.give("stranger")


def released_twice(run: Script) -> None:
    run.take("a")
    run.give("a")
    run.give("a")


def freed_while_still_reentered(run: Script) -> None:
    token = run.take("a")
    run.take("a", token=token)
    run.give("a")
    run.take("b", token=token + 1)


def depth_miscounted(run: Script) -> None:
    token = run.take("a", depth=1)
    run.take("a", token=token, depth=2)
    run.give("a", depth=0)


def renewed_after_release(run: Script) -> None:
    token = run.take("a")
    run.give("a")
    run.history.invoke("a", "renew", "x", token=token).ok()


def renewed_after_loss(run: Script) -> None:
    token = run.take("a")
    run.history.lost("a", "x", token)
    run.history.invoke("a", "renew", "x", token=token).ok()


def renewed_after_another_was_granted(run: Script) -> None:
    token = run.take("a")
    run.history.lost("a", "x", token)
    run.take("b", token=token + 1)
    run.history.invoke("a", "renew", "x", token=token).ok()


def renewed_without_a_grant(run: Script) -> None:
    run.history.invoke("a", "renew", "x", token=1000).ok()


def claim_granted_twice(run: Script) -> None:
    for token in (1000, 1001):
        run.history.invoke("a", "try", "x", claim="c1").ok(token=token)


PLANTS: dict[
    Callable[[Script], None], tuple[set[str], bool]
] = {  # the rules the check names; whether the search sees it
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


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@given(turns=st.lists(st.sampled_from("abc"), max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_planted_violation_is_found(plant: Callable[[Script], None], turns: list[str]) -> None:
    run = Script(turns)
    assert (check(run.history).result, search(run.history, "x").result) == ("valid", "valid")
    plant(run)
    rules, seen = PLANTS[plant]
    assert {violation.rule for violation in check(run.history).violations} == rules
    assert search(run.history, "x").result == ("invalid" if seen else "valid")


def test_what_lapsed_or_crashed_may_linger_or_not() -> None:
    """The engine ends a hold some time after the holder stopped trusting it: before that, tries fail."""
    for lingers in (True, False):
        run = Script([])
        run.take("a")
        run.history.crashed("a")
        if lingers:
            run.history.invoke("b", "try", "x").fail("busy")
        run.take("b")
        assert (check(run.history).result, search(run.history, "x").result) == ("valid", "valid")
        run.history.invoke("a", "release", "x", token=1).ok()  # by then it was another's
        assert search(run.history, "x").result == "invalid"


def test_a_waiter_explains_a_failed_try_whoever_holds() -> None:
    run = Script([])
    run.take("a", mode="shared")
    writer = run.history.invoke("b", "acquire", "x")
    run.history.invoke("c", "try", "x", mode="shared").fail("busy")
    run.give("a")
    writer.ok(token=2)
    assert str(search(run.history, "x")) == "valid"
