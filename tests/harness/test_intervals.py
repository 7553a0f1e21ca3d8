"""Both checkers on runs of a small lock, correct or with a planted bug; and cases only for the quick check."""

import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkers.history import History, Kind, Mode, Op
from harness.checkers.intervals import check
from harness.checkers.linearizable import search
from tests.support.timing import check_seconds

SEEDS = st.integers(0, 2**32)


@dataclass
class Grant:
    """A grant in the engine: held until released or, if it is no longer renewed (`unrenewed`), until it expires."""

    process: str
    mode: Mode
    token: int
    slot: int | None
    claim: str | None
    unrenewed: bool = False


@dataclass
class Client:
    process: str
    op: Op | None = None
    action: str = ""
    mode: Mode = "exclusive"
    claim: str | None = None
    stage: str = "idle"  # sent, waiting, answered
    answer: Grant | bool | None = None
    lease: Grant | None = None
    depth: int = 0
    lost_at: float | None = None
    repeat: str | None = None  # the claim of a call that got no answer


@dataclass
class LockSimulation:
    """A correct lock with a strict queue, and clients whose calls overlap at random. `bug` plants a bug in it."""

    seed: int
    kind: Kind = "lock"
    limit: int = 1
    seam: bool = False  # engine calls, with claims and repeats (E2); otherwise client calls, with reentrancy
    faults: bool = True
    bug: str = ""
    now: float = 0.0
    token: int = 0
    claims: int = 0
    held: list[Grant] = field(default_factory=list)
    queue: list[Client | Grant] = field(default_factory=list)  # a Grant here is the claim of a waiter that gave up

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.history = History(lambda: self.now)
        self.clients = [Client(f"p{n}") for n in range(4)]

    def run(self, steps: int) -> History:
        for _ in range(steps):
            self.now += self.rng.choice([0, 0, 0.5, 1])
            self.step(self.rng.choice(self.clients))
            if self.rng.random() < 0.2:
                self.expire()
        for client in self.clients:
            self.report_lost(client)
        return self.history

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # the engine

    def can_admit(self, mode: Mode) -> bool:
        if self.kind == "semaphore":
            return len(self.held) < self.limit + (self.bug == "limit exceeded")
        if mode == "shared":
            return self.bug == "shared beside exclusive" or all(grant.mode == "shared" for grant in self.held)
        return not self.held or (self.bug == "two exclusive" and self.chance(0.3))

    def grant(self, process: str, mode: Mode, claim: str | None) -> Grant:
        if self.bug == "token falls" and self.chance(0.3) and self.token > 3:
            self.token -= 3
        self.token += not (self.bug == "token reused" and self.chance(0.3))
        free = [slot for slot in range(self.limit + 1) if slot not in [grant.slot for grant in self.held]]
        slot = (0 if self.bug == "slot shared" else free[0]) if self.kind == "semaphore" else None
        grant = Grant(process, mode, self.token, slot, claim)
        self.held.append(grant)
        return grant

    def advance(self) -> None:
        while self.queue:
            first = self.queue[0]
            if not self.can_admit(first.mode):
                return
            self.queue.pop(0)
            if isinstance(first, Client):
                first.answer, first.stage = self.grant(first.process, first.mode, first.claim), "answered"
            else:
                self.grant(first.process, first.mode, first.claim).unrenewed = True

    def expire(self) -> None:
        unrenewed_grants = [grant for grant in self.held if grant.unrenewed]
        if unrenewed_grants:
            self.held.remove(self.rng.choice(unrenewed_grants))
        abandoned_waiters = [waiter for waiter in self.queue if isinstance(waiter, Grant)]
        if abandoned_waiters and self.chance(0.5):
            self.queue.remove(self.rng.choice(abandoned_waiters))
        self.advance()

    def attempt(self, client: Client) -> None:
        live = [grant for grant in self.held if grant.claim is not None and grant.claim == client.claim]
        if live:
            live[0].unrenewed = False
            if self.bug == "repeat regrants":
                self.held.remove(live[0])
                live[0] = self.grant(client.process, client.mode, client.claim)
            client.answer, client.stage = live[0], "answered"
        elif (
            not self.queue
            and self.can_admit(client.mode)
            and not (self.bug == "fails for nothing" and self.chance(0.3))
        ):
            client.answer, client.stage = self.grant(client.process, client.mode, client.claim), "answered"
        elif client.action == "try":
            client.answer, client.stage = False, "answered"
        else:
            client.stage = "waiting"
            self.queue.append(client)

    def release(self, client: Client) -> None:
        lease, client.stage = client.lease, "answered"
        assert lease is not None
        client.depth -= 1
        early = self.bug == "depth ignored"
        client.answer = lease in self.held or self.bug == "release always succeeds"
        if lease in self.held and (client.depth == 0 or early):
            self.held.remove(lease)
        self.advance()

    # the clients

    def step(self, client: Client) -> None:
        if self.report_lost(client):
            return
        if client.op is not None:
            self.proceed(client, client.op)
        elif client.lease is not None:
            self.hold(client, client.lease)
        else:
            self.ask(client)

    def report_lost(self, client: Client) -> bool:
        """A client learns late of a loss, but with its exact time. Some clients release all the same."""
        if client.lost_at is None or client.lease is None:
            return False
        self.history.lost(client.process, "x", client.lease.token, client.lost_at)
        client.lost_at = None
        if self.chance(0.5) and client.depth == 1:
            self.call(client, "release", client.lease.token)
        else:
            client.lease, client.depth = None, 0
        return True

    def call(self, client: Client, action: str, token: int | None = None) -> None:
        client.action, client.stage = action, "sent"
        client.op = self.history.invoke(
            client.process,
            action,
            "x",
            mode=client.mode,
            kind=self.kind,
            limit=self.limit,
            claim=client.claim,
            token=token,
        )

    def ask(self, client: Client) -> None:
        if client.repeat is None or self.chance(0.3):
            client.mode = "shared" if self.kind == "lock" and self.chance(0.4) else "exclusive"
            self.claims += 1
            client.claim = f"c{self.claims}" if self.seam else None
        client.repeat = None
        self.call(client, self.rng.choice(["try", "acquire"]))

    def hold(self, client: Client, lease: Grant) -> None:
        draw = self.rng.random()
        if draw < 0.4:
            self.call(client, "release", self.rng.choice([None, lease.token]))
        elif draw < 0.5:
            self.call(client, "renew", lease.token)
        elif draw < 0.6 and self.seam:
            self.call(client, "try")  # repeated (E2)
        elif draw < 0.65 and self.kind == "lock" and not self.seam:  # the client handles reentrancy, not the engine
            client.depth += 1
            self.history.invoke(client.process, "acquire", "x", mode=lease.mode).ok(
                token=lease.token, depth=client.depth
            )
        elif draw < 0.75 and self.faults:
            lease.unrenewed, client.lost_at = True, self.now
        elif draw < 0.8 and self.faults:
            self.history.crashed(client.process)
            lease.unrenewed, client.lease, client.depth = True, None, 0

    def proceed(self, client: Client, op: Op) -> None:
        if client.stage != "answered" and self.faults and self.chance(0.05):
            self.lose_answer(client, op)
        elif client.stage == "sent":
            if client.action == "release":
                self.release(client)
            elif client.action == "renew":
                client.answer, client.stage = client.lease in self.held, "answered"
            else:
                self.attempt(client)
        elif client.stage == "waiting" and self.chance(0.2):  # gives up
            self.queue.remove(client)
            client.answer, client.stage = False, "answered"
            self.advance()
        elif client.stage == "answered":
            if self.faults and self.chance(0.1):
                self.lose_answer(client, op)
            else:
                self.receive_answer(client, op)

    def lose_answer(self, client: Client, op: Op) -> None:
        """The answer or the request was lost, or the client died and left the call open."""
        if client in self.queue:
            index = self.queue.index(client)
            self.queue[index] = Grant(client.process, client.mode, 0, None, client.claim)
        for grant in (client.answer, client.lease if client.action == "release" else None):
            if isinstance(grant, Grant) and (client.action == "release" or grant is not client.lease):
                grant.unrenewed = True
        if client.action in ("try", "acquire"):
            client.repeat = client.claim
        if client.action == "release":
            client.lease, client.depth = None, 0
        if self.chance(0.7) or client.lease is not None:
            op.unknown("no answer")
        else:
            self.history.crashed(client.process)
        client.op, client.answer, client.stage = None, None, "idle"

    def receive_answer(self, client: Client, op: Op) -> None:
        client.op, client.stage = None, "idle"
        if isinstance(client.answer, Grant):
            client.lease, client.depth = client.answer, 1
            op.ok(token=client.lease.token, slot=client.lease.slot)
        elif client.action in ("try", "acquire"):
            op.fail("busy")
        else:
            op.ok(bool(client.answer), token=client.lease.token if client.lease else None)
            if client.action == "release" and client.depth == 0:
                client.lease = None
        client.answer = None


locks = st.builds(LockSimulation, SEEDS, seam=st.booleans(), faults=st.booleans())
semaphores = st.builds(
    LockSimulation, SEEDS, kind=st.just("semaphore"), limit=st.integers(1, 3), seam=st.booleans(), faults=st.booleans()
)


@given(locks | semaphores, st.integers(1, 200))
@settings(max_examples=300)
def test_history_of_correct_lock_is_valid(simulation: LockSimulation, steps: int) -> None:
    history = simulation.run(steps)
    assert str(check(history)) == "valid"
    assert str(search(history, "x")) == "valid"


@pytest.mark.parametrize(
    ("bug", "options", "checker"),
    [
        ("two exclusive", {}, "both"),
        ("shared beside exclusive", {}, "both"),
        ("limit exceeded", {"kind": "semaphore", "limit": 2}, "both"),
        ("slot shared", {"kind": "semaphore", "limit": 2}, "both"),
        ("depth ignored", {}, "both"),
        ("repeat regrants", {"seam": True}, "both"),
        ("token falls", {}, "check"),
        ("token reused", {}, "check"),
        ("fails for nothing", {"faults": False}, "search"),
        ("release always succeeds", {}, "search"),
    ],
)
def test_checkers_find_bugs_in_lock_histories(bug: str, options: dict[str, Any], checker: str) -> None:
    """At least 3 of 40 runs must show the bug to each checker that can see it. A run may never trigger the bug."""
    found = {"check": 0, "search": 0}
    for seed in range(40):
        history = LockSimulation(seed, bug=bug, **options).run(300)
        found["check"] += check(history).result == "invalid"
        found["search"] += search(history, "x").result == "invalid"
    assert all(count >= 3 for name, count in found.items() if checker in (name, "both")), found


def history_with_counting_clock() -> History:
    return History(itertools.count().__next__)


def test_adjacent_holds_at_one_instant_do_not_overlap() -> None:
    now = 0.0
    history = History(lambda: now)
    history.invoke("a", "acquire", "x").ok(token=1)
    now = 5.0
    waiting = history.invoke("b", "acquire", "x")
    release = history.invoke("a", "release", "x")
    waiting.ok(token=2)
    release.ok()
    assert check(history).result == "valid"


def test_zero_length_hold_within_another_violates_exclusion() -> None:
    now = 0.0
    history = History(lambda: now)
    history.invoke("a", "acquire", "x").ok(token=1)
    now = 5.0
    history.invoke("b", "acquire", "x").ok(token=2)
    history.invoke("b", "release", "x").ok()
    now = 6.0
    history.invoke("a", "release", "x").ok()
    assert [violation.rule for violation in check(history).violations] == ["exclusion"]


def test_grant_lost_before_arrival_is_not_a_hold() -> None:
    history = history_with_counting_clock()
    late = history.invoke("a", "acquire", "x")
    history.invoke("b", "acquire", "x").ok(token=2)
    late.ok(token=1)  # granted long before b's grant
    history.lost("a", "x", 1, at=0)
    assert str(check(history)) == "valid"
    assert str(search(history, "x")) == "valid"


def test_token_of_unanswered_grant_may_be_below_a_later_token() -> None:
    history = history_with_counting_clock()
    history.invoke("a", "try", "x", mode="shared", claim="c1").unknown("no answer")
    history.invoke("b", "try", "x", mode="shared", claim="c2").ok(token=2)
    history.invoke("a", "try", "x", mode="shared", claim="c1").ok(token=1)
    assert str(check(history)) == "valid"


def test_unanswered_grant_explains_exactly_one_release() -> None:
    history = history_with_counting_clock()
    history.invoke("a", "acquire", "x").unknown("no answer")
    history.invoke("a", "release", "x").ok()
    assert (check(history).result, search(history, "x").result) == ("valid", "valid")
    history.invoke("a", "release", "x").ok()
    assert (check(history).result, search(history, "x").result) == ("invalid", "invalid")


def test_queued_claim_may_be_renewed() -> None:
    history = history_with_counting_clock()
    waiting = history.invoke("a", "acquire", "x", claim="c1")
    history.invoke("a", "renew", "x", claim="c1").ok()
    waiting.fail("waited out")
    assert check(history).result == "valid"
    history.invoke("a", "renew", "x", claim="c1").ok()
    assert check(history).result == "invalid"


def test_tokens_need_not_rise_without_fencing() -> None:
    history = history_with_counting_clock()
    for token in (2, 1, 2):
        history.invoke("a", "acquire", "x").ok(token=token)
        history.invoke("a", "release", "x").ok()
    assert check(history).result == "invalid"
    assert check(history, fencing=False).result == "valid"


def test_verdict_text_names_both_holders() -> None:
    history = history_with_counting_clock()
    history.invoke("web-1", "acquire", "orders/42").ok(token=7)
    history.invoke("web-2", "acquire", "orders/42").ok(token=8)
    assert str(check(history)) == (
        "invalid\n[exclusion] 'orders/42' at 3.000000: web-2 (exclusive, token 8, 3.000000 on) "
        "began while held by web-1 (exclusive, token 7, 1.000000 on)"
    )


@pytest.mark.parametrize("permits", [1, pytest.param(10_000, marks=pytest.mark.extended)])
@pytest.mark.usefixtures("untraced")
def test_long_history_is_checked_within_two_seconds(permits: int) -> None:
    history = history_with_counting_clock()
    kind: Kind = "lock" if permits == 1 else "semaphore"
    for token in range(25_000 + permits):
        if token >= permits:
            history.invoke(f"p{(token - permits) % 97}", "release", "x", token=token - permits).ok()
        history.invoke(f"p{token % 97}", "acquire", "x", kind=kind, limit=permits).ok(
            token=token, slot=None if permits == 1 else token % permits
        )
    assert len(history.records) >= 100_000
    started = time.process_time()
    assert str(check(history)) == "valid"
    check_seconds(time.process_time() - started, 2)
