"""A line with a clock to turn by hand."""

from __future__ import annotations

import pytest

from leasehold.core.admission import Line
from leasehold.core.party import Counter, Moment, Word
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder


def claim(who: str, **fields: object) -> Claim:
    made = Claim("", "n", f"secret {who}", who, Holder(who), 10.0, queue=True)
    return made._replace(**fields)


class Bench:
    """A line with a clock to turn by hand. Each claim's client is called as the claim."""

    def __init__(self, kind: str = "lock", limit: int = 1) -> None:
        self.at = Moment(100.0, lambda: self.counter.next(0), lambda client: client not in self.deaf)
        self.counter, self.deaf, self.words = Counter(), set[str](), list[Word]()
        self.line = Line(100.0, kind, limit)  # type: ignore[arg-type]

    def attempt(self, who: str, **fields: object) -> Grant | Busy:
        fields = {"kind": self.line.kind, "limit": self.line.limit} | fields
        reply, words = self.line.attempt(self.at, claim(who, **fields), who)
        self.words = words
        return reply

    def release(self, who: str, min_hold: float = 0.0) -> bool:
        done, self.words = self.line.release(self.at, who, min_hold)
        return done

    def renew(self, who: str, token: int, ttl: float = 10.0) -> Alive | Gone:
        reply, self.words = self.line.renew(self.at, claim(who, token=token, ttl=ttl))
        return reply

    def break_(self, token: int) -> bool:
        done, self.words = self.line.break_(self.at, token)
        return done

    def pass_time(self, seconds: float) -> None:
        self.at.now += seconds

    def told(self) -> list[tuple[str, str, float]]:
        return [(word.kind, word.mark, round(word.seconds, 3)) for word in self.words]

    def state(self, who: str) -> int:
        return self.line.parties[who].state


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def bench_of() -> type[Bench]:
    return Bench
