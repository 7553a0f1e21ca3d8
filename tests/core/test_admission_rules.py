"""The reference state machine over random runs: what must hold of every answer, and of the line after it."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from leasehold.core.party import COOLING, HELD, RESERVED, WAITING
from leasehold.model import Alive, Grant


class Rules(RuleBasedStateMachine):
    """Random claims of every kind, at random times."""

    WHO = st.sampled_from("abcdefgh")

    def __init__(self, bench_of: Any) -> None:
        super().__init__()
        self.bench_of = bench_of

    @initialize(kind=st.sampled_from([("lock", 1), ("semaphore", 2), ("semaphore", 3)]))
    def begin(self, kind: tuple[str, int]) -> None:
        self.bench = self.bench_of(*kind)
        self.alive: dict[str, tuple[int, float]] = {}  # who was promised what: token, and until when
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
        mode = self.modes.get(who) or ("shared" if shared and self.bench.line.kind == "lock" else "exclusive")
        before = self.alive.get(who)
        reply = self.bench.attempt(who, queue=queue, mode=mode, ttl=ttl, delay=delay)
        if who in self.bench.line.parties:
            self.modes[who] = mode
        now = self.bench.at.now
        if isinstance(reply, Grant):
            if before is not None and before[1] > now:
                assert reply.token == before[0]  # E2
                assert now + reply.ttl >= before[1]  # E8
            else:
                # E3. Holders beside each other may learn of their tokens in another order than they were issued in.
                alone = self.bench.line.kind == "lock" and mode == "exclusive"
                assert reply.token > max(self.tokens, default=0) if alone else reply.token not in self.tokens
                self.tokens.append(reply.token)
            self.alive[who] = (reply.token, now + reply.ttl)
        else:
            assert before is None or before[1] <= now

    @rule(who=WHO)
    def releases(self, who: str) -> None:
        self.bench.release(who)
        self.alive.pop(who, None)
        self.modes.pop(who, None)

    @rule(who=WHO, ttl=st.sampled_from([1.0, 10.0]))
    def renews(self, who: str, ttl: float) -> None:
        token, until = self.alive.get(who, (0, 0.0))
        now = self.bench.at.now
        reply = self.bench.renew(who, token, ttl)
        if token:
            assert isinstance(reply, Alive) == (until > now)  # E5
        if token and isinstance(reply, Alive):
            assert now + reply.ttl >= until
            self.alive[who] = (token, now + reply.ttl)

    @rule(who=WHO)
    def breaks(self, who: str) -> None:
        token, until = self.alive.get(who, (0, 0.0))
        if self.bench.break_(token):
            assert until > self.bench.at.now
            del self.alive[who]
            self.modes.pop(who, None)

    @rule(seconds=st.sampled_from([0.1, 0.9, 3.0, 7.0, 16.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.pass_time(seconds)

    @rule(who=WHO)
    def goes_deaf_or_hears_again(self, who: str) -> None:
        self.bench.deaf ^= {who}

    @invariant()
    def never_too_many(self) -> None:  # E1, by promises made rather than by the line's own books
        if not hasattr(self, "bench"):
            return
        now, line = self.bench.at.now, self.bench.line
        live = [who for who, (_, until) in self.alive.items() if until > now]
        if line.kind == "semaphore":
            assert len(live) <= line.limit
        elif len(live) > 1:
            assert all(self.modes.get(who) == "shared" for who in live)

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "bench"):
            return
        line = self.bench.line
        assert [ticket for ticket, _ in line.waiters] == sorted(ticket for ticket, _ in line.waiters)
        assert all(party.state == WAITING for _, party in line.waiters)
        waiting = {party.mark for party in line.parties.values() if party.state == WAITING}
        assert waiting == {party.mark for _, party in line.waiters}
        owned = {party.token for party in line.parties.values() if party.state in (RESERVED, HELD)}
        cooling = {token for token, party in line.occupiers.items() if party.state == COOLING}
        assert set(line.occupiers) == owned | cooling
        slots = [party.slot for party in line.occupiers.values() if party.slot is not None]
        assert len(slots) == len(set(slots))

    @invariant()
    def nobody_who_fits_is_left_waiting(self) -> None:
        if not hasattr(self, "bench"):
            return
        line, now = self.bench.line, self.bench.at.now
        live = [party for _, party in line.waiters if party.beat > now]
        if live and not [party for party in line.occupiers.values() if party.until > now]:
            line.look(self.bench.at)
            assert not line.waiters or line.occupiers


def test_what_must_hold_of_every_answer_and_of_the_line_after_it(bench_of) -> None:
    long = settings(max_examples=150, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(lambda: Rules(bench_of), settings=long)
