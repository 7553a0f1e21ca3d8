"""The reference state machine over random runs: what must hold for every reply, and for the state after it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from leasehold.core.queue_entry import COOLING, HELD, RESERVED, WAITING
from leasehold.model import Alive, Grant


class LockStateRules(RuleBasedStateMachine):
    """Random claims of every kind, at random times."""

    WHO = st.sampled_from("abcdefgh")

    def __init__(self, bench_type: Any) -> None:
        super().__init__()
        self.bench_type = bench_type

    @initialize(kind=st.sampled_from([("lock", 1), ("semaphore", 2), ("semaphore", 3)]))
    def begin(self, kind: tuple[str, int]) -> None:
        self.bench = self.bench_type(*kind)
        self.promised: dict[str, tuple[int, float]] = {}  # the token and expiry that each client was promised
        self.modes: dict[str, str] = {}
        self.tokens: list[int] = []

    @rule(
        who=WHO,
        queue=st.booleans(),
        shared=st.booleans(),
        ttl=st.sampled_from([1.0, 4.0, 20.0]),
        delay=st.sampled_from([0.0, 0.0, 2.0]),
    )
    def attempts(self, who: str, queue: bool, shared: bool, ttl: float, delay: float) -> None:
        mode = self.modes.get(who) or ("shared" if shared and self.bench.lock_state.kind == "lock" else "exclusive")
        before = self.promised.get(who)
        reply = self.bench.attempt(who, queue=queue, mode=mode, ttl=ttl, delay=delay)
        if who in self.bench.lock_state.entries:
            self.modes[who] = mode
        now = self.bench.context.now
        if isinstance(reply, Grant):
            if before is not None and before[1] > now:
                assert reply.token == before[0]  # E2
                assert now + reply.ttl >= before[1]  # E8
            else:
                # E3. Concurrent holders may receive their tokens in another order than they were issued.
                exclusive = self.bench.lock_state.kind == "lock" and mode == "exclusive"
                assert reply.token > max(self.tokens, default=0) if exclusive else reply.token not in self.tokens
                self.tokens.append(reply.token)
            self.promised[who] = (reply.token, now + reply.ttl)
        else:
            assert before is None or before[1] <= now

    @rule(who=WHO)
    def releases(self, who: str) -> None:
        self.bench.release(who)
        self.promised.pop(who, None)
        self.modes.pop(who, None)

    @rule(who=WHO, ttl=st.sampled_from([1.0, 10.0]))
    def renews(self, who: str, ttl: float) -> None:
        token, expires_at = self.promised.get(who, (0, 0.0))
        now = self.bench.context.now
        reply = self.bench.renew(who, token, ttl)
        if token:
            assert isinstance(reply, Alive) == (expires_at > now)  # E5
        if token and isinstance(reply, Alive):
            assert now + reply.ttl >= expires_at
            self.promised[who] = (token, now + reply.ttl)

    @rule(who=WHO)
    def breaks(self, who: str) -> None:
        token, expires_at = self.promised.get(who, (0, 0.0))
        if self.bench.break_(token):
            assert expires_at > self.bench.context.now
            del self.promised[who]
            self.modes.pop(who, None)

    @rule(seconds=st.sampled_from([0.1, 0.9, 3.0, 7.0, 16.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.pass_time(seconds)

    @rule(who=WHO)
    def toggles_reachability(self, who: str) -> None:
        self.bench.unreachable ^= {who}

    @invariant()
    def limit_is_never_exceeded(self) -> None:  # E1, by the promises made, not by the state's own collections
        if not hasattr(self, "bench"):
            return
        now, lock_state = self.bench.context.now, self.bench.lock_state
        live = [who for who, (_, expires_at) in self.promised.items() if expires_at > now]
        if lock_state.kind == "semaphore":
            assert len(live) <= lock_state.limit
        elif len(live) > 1:
            assert all(self.modes.get(who) == "shared" for who in live)

    @invariant()
    def queue_and_holders_are_consistent(self) -> None:
        if not hasattr(self, "bench"):
            return
        lock_state = self.bench.lock_state
        assert [ticket for ticket, _ in lock_state.waiters] == sorted(ticket for ticket, _ in lock_state.waiters)
        assert all(entry.state == WAITING for _, entry in lock_state.waiters)
        waiting = {entry.id_hash for entry in lock_state.entries.values() if entry.state == WAITING}
        assert waiting == {entry.id_hash for _, entry in lock_state.waiters}
        owned = {entry.token for entry in lock_state.entries.values() if entry.state in (RESERVED, HELD)}
        cooling = {token for token, entry in lock_state.holders.items() if entry.state == COOLING}
        assert set(lock_state.holders) == owned | cooling
        slots = [entry.slot for entry in lock_state.holders.values() if entry.slot is not None]
        assert len(slots) == len(set(slots))

    @invariant()
    def waiter_that_fits_is_admitted(self) -> None:
        if not hasattr(self, "bench"):
            return
        lock_state, now = self.bench.lock_state, self.bench.context.now
        live = [entry for _, entry in lock_state.waiters if entry.heartbeat_expires_at > now]
        if live and not [entry for entry in lock_state.holders.values() if entry.expires_at > now]:
            lock_state.sweep(self.bench.context)
            assert not lock_state.waiters or lock_state.holders


@pytest.mark.parametrize("runs", [50, pytest.param(150, marks=pytest.mark.extended)])
def test_lock_state_invariants_hold_over_random_runs(bench_type, runs: int) -> None:
    long_run = settings(max_examples=runs, stateful_step_count=40)
    run_state_machine_as_test(lambda: LockStateRules(bench_type), settings=long_run)
