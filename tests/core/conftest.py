"""A `LockState` with a manual clock."""

from __future__ import annotations

import pytest

from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import Context, Notification, TokenCounter
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder


def claim(who: str, **fields: object) -> Claim:
    new_claim = Claim("", "n", f"secret {who}", who, Holder(who), 10.0, queue=True)
    return new_claim._replace(**fields)


class Bench:
    """A `LockState` with a manual clock. The client of each claim is named after the claim."""

    def __init__(self, kind: str = "lock", limit: int = 1) -> None:
        self.context = Context(100.0, lambda: self.counter.next(0), lambda client: client not in self.unreachable)
        self.counter, self.unreachable, self.notifications = TokenCounter(), set[str](), list[Notification]()
        self.lock_state = LockState(100.0, kind, limit)  # type: ignore[arg-type]

    def attempt(self, who: str, **fields: object) -> Grant | Busy:
        fields = {"kind": self.lock_state.kind, "limit": self.lock_state.limit} | fields
        reply, notifications = self.lock_state.attempt(self.context, claim(who, **fields), who)
        self.notifications = notifications
        return reply

    def release(self, who: str, keep_min_hold: bool = True) -> bool:
        done, self.notifications = self.lock_state.release(self.context, who, keep_min_hold)
        return done

    def renew(self, who: str, token: int, ttl: float = 10.0) -> Alive | Gone:
        reply, self.notifications = self.lock_state.renew(self.context, claim(who, token=token, ttl=ttl))
        return reply

    def break_(self, token: int) -> bool:
        done, self.notifications = self.lock_state.break_(self.context, token)
        return done

    def set_limit(self, limit: int | None) -> bool:
        done, self.notifications = self.lock_state.set_limit(self.context, limit)
        return done

    def pass_time(self, seconds: float) -> None:
        self.context.now += seconds

    def sent_notifications(self) -> list[tuple[str, str, float]]:
        return [
            (notification.kind, notification.id_hash, round(notification.seconds, 3))
            for notification in self.notifications
        ]

    def state(self, who: str) -> int:
        return self.lock_state.entries[who].state


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def bench_type() -> type[Bench]:
    return Bench
