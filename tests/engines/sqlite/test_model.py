"""`RowLockState` against `LockState`: the same verbs at the same times give the same answers and notifications.

`RowLockState` loads only the rows that a verb needs. These tests show that no verb needs a row that was not loaded, and
that what needs no decision (`fast_path.py`, `hand_off.py`) has the same answers."""

from __future__ import annotations

import sqlite3
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from random import Random
from weakref import finalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.core.listing import ListingBudget
from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import COOLING, HELD, RESERVED, Context, Notification, TokenCounter
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.sqlite import schema
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.fast_path import acquire_uncontended, release_uncontended
from leasehold.engines.sqlite.hand_off import claim_reserved, hand_over, join_queue
from leasehold.engines.sqlite.rows import RowLockState, find_expired, page_of_holdings
from leasehold.errors import Mismatch
from leasehold.model import NO_MIN_HOLD, Claim, Holder
from tests.support import probe_lock_state
from tests.support.lock_histories import HISTORIES

ID_HASHES = "abcdefgh"


@dataclass
class ModelComparison:
    """One name kept both in rows and in a `LockState`, with the same clock and the same unreachable clients."""

    now: float = 1000.0
    unreachable: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    counter: TokenCounter = field(default_factory=TokenCounter)

    def __post_init__(self) -> None:
        self.boot_clock = BootClock("machine", "boot", "", lambda: self.now, lambda: 0.0)
        self.db = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )  # any thread may collect it
        finalize(self, self.db.close)  # from 3.13 on, Python warns of one that is dropped
        schema.prepare_schema(self.db, ":memory:", self.boot_clock)
        self.db.execute("update lh_meta set ceiling = 1000")
        self.state: LockState | None = None

    def is_reachable(self, client: str) -> bool:
        return client not in self.unreachable and client not in self.dead

    def run_model(self, verb, kind="lock", limit=1):
        context = Context(self.now, lambda: self.counter.next(0), self.is_reachable, self.dead.__contains__)
        state = self.state or LockState(self.now, kind, limit)
        state.holders = dict(sorted(state.holders.items()))  # if two expire together, rows report the older
        queued = any(entry.heartbeat_expires_at and not entry.token for entry in state.entries.values())
        try:
            answer = verb(state, context)
        except Mismatch as error:
            return str(error)
        if not queued:  # rows are scanned for expired waiters only once there is a waiter
            probe_lock_state.plan_waiter_scan(state, self.now + WAITER_TTL)
        self.state = None if state.empty and not state.limit_set else state
        return answer

    def run_on_rows(self, verb, id_hash="", kind="lock", limit=1, usual=lambda *_: None):
        """As the engine does: try what needs no decision, and load the name's state if that fails."""
        self.db.execute("begin immediate")
        try:
            if answer := usual(self.db, self.boot_clock):
                self.db.execute("commit")
                return answer
            state = RowLockState(self.db, self.boot_clock, "ns", "name", id_hash, kind, limit)
            answer = verb(state, state.context(self.boot_clock.wall, self.is_reachable, self.dead.__contains__))
            state.save()
        except Mismatch as error:
            self.db.execute("rollback")
            return str(error)
        self.db.execute("commit")
        return answer

    def attempt_usual(self, db, boot_clock, claim: Claim):
        client = f"client {claim.id_hash}"
        reply = acquire_uncontended(db, boot_clock, claim, client)
        if reply is None and claim.queue:
            reply = claim_reserved(db, boot_clock, claim, client)
        if reply is None and claim.queue:
            joined = join_queue(db, boot_clock, claim, client, self.is_reachable, self.dead.__contains__)
            reply = joined and joined[0]
            if joined:
                (holder,) = self.state.holders.values()
                ends_with_process = holder.process_bound or holder.state == RESERVED
                assert joined[1] == ((holder.client,) if ends_with_process else ())
        return reply and (reply, [])

    def release_usual(self, db, boot_clock, claim: Claim):
        if notifications := hand_over(db, boot_clock, claim, self.is_reachable):
            return True, notifications
        return (True, []) if release_uncontended(db, boot_clock, claim) else None

    def check_inspect(self):
        """`inspect` shows the same holdings for both and changes nothing."""
        holdings_found = page_of_holdings(self.db, self.boot_clock, ListingBudget("sqlite"), "ns", "name", True)[0]
        state = deepcopy(self.state) or LockState(self.now)
        state.expire(self.now)
        assert holdings_found == list(state.holdings("ns", "name", self.now))

    def row_count(self) -> int:
        tables = ("lh_grant", "lh_waiter", "lh_queue")
        return sum(self.db.execute(f"select count(*) from {table}").fetchone()[0] for table in tables)


def claim(id_hash: str, **fields) -> Claim:
    fields = {"ttl": 10.0, "queue": True} | fields
    return Claim("ns", "name", f"secret {id_hash}", id_hash, Holder(f"holder {id_hash}", "h", 1, "p"), **fields)


id_hashes = st.sampled_from(ID_HASHES)
shapes = st.sampled_from(
    [
        {},
        {},
        {"mode": "shared"},
        {"process_bound": True},
        {"process_bound": True, "mode": "shared"},
        {"process_bound": True, "delay": 2.0},
        {"delay": 2.0},
        {"min_hold": 4.0},
    ]
)
semaphores = st.sampled_from(
    [{"kind": "semaphore", "limit": 2, "mode": "exclusive", "process_bound": bound} for bound in (False, True)]
)
limits = st.tuples(st.just("set_limit"), st.sampled_from([None, 1, 2, 3]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("attempt"), id_hashes, st.booleans(), shapes, st.sampled_from([1.0, 10.0])),
        st.tuples(st.just("attempt"), id_hashes, st.just(True), shapes, st.just(10.0)),
        st.tuples(st.just("renew"), id_hashes, st.booleans()),
        st.tuples(st.just("release"), id_hashes, st.booleans(), st.sampled_from([True, True, True, False])),
        st.tuples(st.just("break"), id_hashes),
        limits,
        st.tuples(st.just("look")),
        st.tuples(st.just("decline"), id_hashes),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 0.5, 3.0, 5.0, 16.0])),
        st.tuples(st.just("unreachable"), id_hashes),
        st.tuples(st.just("hears"), id_hashes),
        st.tuples(st.just("dies"), id_hashes),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=60)
def test_row_lock_state_agrees_with_the_pure_model(kind: str, data) -> None:
    comparison = ModelComparison()
    tokens: dict[str, int] = {}
    for step in data.draw(steps):
        run_both(comparison, step, tokens, kind, data)
        comparison.check_inspect()
    run_both(comparison, ("set_limit", None), tokens, kind, data)
    # Long after the last call, a sweep removes every row.
    comparison.now += 1000.0
    comparison.run_on_rows(lambda state, context: state.sweep(context))
    assert comparison.row_count() == 0


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "lasting"])
@pytest.mark.parametrize("name", HISTORIES)
def test_rows_agree_with_the_model_on_known_histories(name: str, bound: bool) -> None:
    """Claims that end with their process are claimed without loading the queue, others are not."""
    comparison, tokens = ModelComparison(), {}
    for step in HISTORIES[name]:
        if step[0] == "attempt" and not step[3].keys() & {"delay", "min_hold"}:
            step = (*step[:3], {"process_bound": bound, **step[3]}, step[4])
        run_both(comparison, step, tokens, "lock", None)
        comparison.check_inspect()


CROWD_SHAPES = [*[{"process_bound": True}] * 4, {"mode": "shared"}, {}, {"delay": 2.0}, {"min_hold": 4.0}]


@pytest.mark.parametrize("seed", range(20))
def test_disturbed_hand_offs_agree_with_the_pure_model(seed: int) -> None:
    """A crowd keeps handing over, so that each condition of `hand_off.py` is often met, and often not."""
    random, comparison, tokens = Random(seed), ModelComparison(), {}

    def draw_steps() -> list:
        id_hash = random.choice(ID_HASHES)
        if random.random() < 0.5:
            return next_hand_off(comparison.state)
        if random.random() < 0.5:
            return [("attempt", id_hash, True, random.choice(CROWD_SHAPES), random.choice([0.5, 1.0, 10.0]))]
        renewals = [("renew", each, False) for each in random.sample(ID_HASHES, 4)]
        return random.choice(
            [
                [("pass", random.choice([0.1, 0.5, 1.0, 2.5]))],
                [*renewals, ("pass", random.choice([5.0, 9.0]))],
                [("break", id_hash), ("release", id_hash, True, True)],
                [("release", id_hash, random.random() < 0.5, random.random() < 0.8)],
                [("renew", id_hash, True)],
                [(random.choice(["unreachable", "dies", "break", "decline"]), id_hash)],
                [("hears", each) for each in ID_HASHES],
            ]
        )

    for _ in range(250):
        for step in draw_steps():
            run_both(comparison, step, tokens, "lock", None)
            comparison.check_inspect()


def join(id_hash: str):
    return ("attempt", id_hash, True, {"process_bound": True}, 10.0)


def next_hand_off(state: LockState | None) -> list:
    """What a crowd does next: the holder releases and queues again, or the next waiter claims its reservation."""
    holder = next(iter(state.holders.values()), None) if state is not None else None
    if holder is None or holder.state not in (RESERVED, HELD):
        return []
    return (
        [join(holder.id_hash)]
        if holder.state == RESERVED
        else [("release", holder.id_hash, True, True), join(holder.id_hash)]
    )


def run_both(comparison: ModelComparison, step, tokens: dict[str, int], kind: str, data) -> None:
    what, *args = step
    if what == "pass":
        comparison.now += args[0]
    elif what == "unreachable":
        comparison.unreachable.add(f"client {args[0]}")
    elif what == "hears":
        comparison.unreachable.discard(f"client {args[0]}")
        comparison.dead.discard(f"client {args[0]}")
    elif what == "dies":
        comparison.dead.add(f"client {args[0]}")
    elif what == "look":
        assert comparison.run_on_rows(lambda state, context: state.sweep(context)) == comparison.run_model(
            lambda state, context: state.sweep(context)
        )
    elif what == "set_limit":
        actual = comparison.run_on_rows(lambda state, context: state.set_limit(context, args[0]))
        assert actual == comparison.run_model(lambda state, context: state.set_limit(context, args[0]))
    elif what == "decline":
        id_hash, client = args[0], f"client {args[-1]}"
        actual = comparison.run_on_rows(lambda state, context: state.decline(context, id_hash, client), id_hash)
        assert actual == comparison.run_model(lambda state, context: state.decline(context, id_hash, client))
    elif what == "attempt":
        id_hash, queue, shape, ttl = args
        if kind == "semaphore" or (kind == "either" and data.draw(st.booleans())):
            shape = data.draw(semaphores)
        current_claim = claim(id_hash, queue=queue, ttl=ttl, **shape)
        actual = comparison.run_on_rows(
            lambda state, context: state.attempt(context, current_claim, f"client {id_hash}"),
            id_hash,
            current_claim.kind,
            current_claim.limit,
            partial(comparison.attempt_usual, claim=current_claim),
        )
        assert actual == comparison.run_model(
            lambda state, context: state.attempt(context, current_claim, f"client {id_hash}"),
            current_claim.kind,
            current_claim.limit,
        )
        if not isinstance(actual, str) and getattr(actual[0], "token", None) and hasattr(actual[0], "ttl"):
            tokens[id_hash] = actual[0].token
    elif what == "renew":
        id_hash, held = args
        current_claim = claim(id_hash, token=tokens.get(id_hash, 7) if held else 0)
        assert comparison.run_on_rows(
            lambda state, context: state.renew(context, current_claim), id_hash
        ) == comparison.run_model(lambda state, context: state.renew(context, current_claim))
    elif what == "release":
        id_hash, keep, held = args
        current_claim = claim(id_hash, min_hold=0.0 if keep else NO_MIN_HOLD)
        if not held:
            current_claim = current_claim._replace(id="")
        actual = comparison.run_on_rows(
            lambda state, context: state.release(context, id_hash, keep, held),
            id_hash,
            usual=partial(comparison.release_usual, claim=current_claim),
        )
        assert actual == comparison.run_model(lambda state, context: state.release(context, id_hash, keep, held))
    else:
        token = tokens.get(args[0], 7)
        actual = comparison.run_on_rows(lambda state, context: state.break_(context, token))
        assert actual == comparison.run_model(lambda state, context: state.break_(context, token))


def test_name_with_a_passed_over_waiter_is_not_uncontended() -> None:
    """The name has no holder, but the passed-over waiter may return, and it waits for a semaphore."""
    comparison = ModelComparison(unreachable={"client b"})
    for id_hash in "ab":
        current_claim = claim(id_hash, kind="semaphore")
        comparison.run_on_rows(
            lambda state, context, current_claim=current_claim: state.attempt(
                context, current_claim, f"client {current_claim.id_hash}"
            ),
            id_hash,
            "semaphore",
        )
    comparison.run_on_rows(lambda state, context: state.release(context, "a", 0.0), "a")
    assert comparison.row_count() == 2
    assert acquire_uncontended(comparison.db, comparison.boot_clock, claim("c", queue=False), "client c") is None


def test_hand_offs_of_a_crowd_load_no_queue(monkeypatch) -> None:
    comparison, tokens = ModelComparison(), {}

    for id_hash in ID_HASHES[:4]:
        run_both(comparison, join(id_hash), tokens, "lock", None)
    monkeypatch.setattr(RowLockState, "__init__", None)
    for _ in range(40):
        comparison.now += 0.1
        for step in next_hand_off(comparison.state):
            run_both(comparison, step, tokens, "lock", None)
            comparison.check_inspect()
    assert comparison.counter.last == 21  # every other time it was a release


def test_hand_off_leaves_token_ceiling_and_another_clock_to_the_engine() -> None:
    comparison = ModelComparison()
    db, clock, claims = comparison.db, comparison.boot_clock, [claim(each, process_bound=True) for each in "abcd"]
    for id_hash in "abc":
        run_both(comparison, join(id_hash), {}, "lock", None)

    def refused() -> list[bool]:
        return [
            hand_over(db, clock, claims[0], lambda _: True) is None,
            claim_reserved(db, clock, claims[0], "client a") is None,
            join_queue(db, clock, claims[3], "client d", lambda _: True, lambda _: False) is None,
        ]

    db.execute("update lh_meta set ceiling = token")
    assert refused() == [True, True, False]
    db.execute("update lh_meta set ceiling = 1000, clock_id = 'another'")
    db.execute("delete from lh_waiter where id_hash = 'd'")
    assert refused() == [True, True, True]
    db.execute("update lh_grant set state = ?", (RESERVED,))
    assert refused() == [True, True, True]
    db.execute("update lh_meta set clock_id = ?", (clock.clock_id,))
    assert refused() == [True, False, False]


def test_reserved_claim_that_must_survive_is_left_to_the_engine() -> None:
    comparison = ModelComparison()
    for id_hash in "abc":
        run_both(comparison, join(id_hash), {}, "lock", None)
    run_both(comparison, ("release", "a", True, True), {}, "lock", None)
    lasting = [claim("b"), claim("b", process_bound=True, delay=2.0)]
    assert [claim_reserved(comparison.db, comparison.boot_clock, each, "client b") for each in lasting] == [None] * 2
    other_kind = claim("b", process_bound=True, kind="semaphore", limit=2)
    assert claim_reserved(comparison.db, comparison.boot_clock, other_kind, "client b") is None
    assert claim_reserved(comparison.db, comparison.boot_clock, claim("b", process_bound=True), "client b")


def test_claim_that_joins_ends_the_grant_of_a_dead_process() -> None:
    comparison = ModelComparison()
    for id_hash in "ab":
        run_both(comparison, join(id_hash), {}, "lock", None)
    comparison.dead.add("client a")
    run_both(comparison, join("c"), {}, "lock", None)
    comparison.check_inspect()
    assert [each.id_hash for each in comparison.state.holders.values()] == ["b"]


def test_claimed_reservation_ends_only_with_the_process_that_claimed_it() -> None:
    """Not with that of the client that queued the claim, and another one serves it now."""
    comparison, queued = ModelComparison(), claim("b", process_bound=True, min_hold=4.0)
    for each in (join("a"), join("b"), ("release", "a", True, True)):
        run_both(comparison, each, {}, "lock", None)
    assert claim_reserved(comparison.db, comparison.boot_clock, queued, "another client")
    comparison.run_model(lambda state, context: state.attempt(context, queued, "another client"))
    comparison.dead.add("client b")
    run_both(comparison, join("c"), {}, "lock", None)
    assert [each.state for each in comparison.state.holders.values()] == [HELD]
    run_both(comparison, ("release", "b", True, True), {}, "lock", None)
    assert [each.state for each in comparison.state.holders.values()] == [COOLING], "its min_hold was stored"
    comparison.check_inspect()


def test_claim_without_an_id_is_left_to_the_engine() -> None:
    """It is made from a wake-up, and gives up a queue position or a reservation, never a grant."""
    comparison, unknown_claim = ModelComparison(), claim("a")._replace(id="")
    run_both(comparison, join("a"), {}, "lock", None)
    assert not release_uncontended(comparison.db, comparison.boot_clock, unknown_claim)
    run_both(comparison, join("b"), {}, "lock", None)
    assert hand_over(comparison.db, comparison.boot_clock, unknown_claim, lambda _: True) is None
    run_both(comparison, ("release", "a", True, False), {}, "lock", None)


def test_expired_grant_is_not_released_by_the_fast_path() -> None:
    comparison, expired_claim = ModelComparison(), claim("a", queue=False, ttl=1.0)
    assert acquire_uncontended(comparison.db, comparison.boot_clock, expired_claim, "client a")
    comparison.now += 1.0
    assert not release_uncontended(comparison.db, comparison.boot_clock, expired_claim)


def test_release_runs_few_statements_with_a_thousand_waiters() -> None:
    comparison = ModelComparison()
    statements = []
    for number in range(1000):
        comparison.run_on_rows(
            lambda state, context, n=number: state.attempt(context, claim(f"m{n:04}"), "c"), f"m{number:04}"
        )
    comparison.db.set_trace_callback(statements.append)
    answer, notifications = comparison.run_on_rows(lambda state, context: state.release(context, "m0000", 0.0), "m0000")
    comparison.db.set_trace_callback(None)
    assert answer
    assert notifications[0] == Notification("c", "reserved", "m0001")
    assert notifications[1].kind == "recheck"
    assert notifications[1].id_hash == "m0002"
    assert len(statements) < 20


def test_find_expired_returns_every_expired_name() -> None:
    comparison = ModelComparison()
    for number in range(20):
        state = RowLockState(comparison.db, comparison.boot_clock, "ns", f"n{number:02}")
        state.attempt(
            state.context(comparison.boot_clock.wall, lambda _: True), claim("a", ttl=10.0 if number % 2 else 99.0), "c"
        )
        state.save()
    comparison.now += 20.0
    found, after = [], ("", "")
    while True:
        expired, after = find_expired(comparison.db, comparison.now, after, 8)
        found += expired
        if after == ("", ""):
            break
    assert found == [("ns", f"n{number:02}") for number in range(1, 20, 2)]
