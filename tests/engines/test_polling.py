"""Waiters that no wake-up reaches: how often they attempt in all, and how quickly the name still changes hands."""

from __future__ import annotations

from collections import Counter

from leasehold.core.names import hash_id
from leasehold.core.timing import WAITER_TTL, poll_interval, recheck_interval
from leasehold.engines.memory import MemoryServer
from leasehold.engines.registry import ClaimRegistry, wait_for_wakeup
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.simulated import Process, Simulator

WAITERS = 1_000


class PolledQueue:
    """One name of a server that sends no wake-ups, and waiters that attempt as a client does."""

    def __init__(self) -> None:
        self.world = Simulator(5)
        self.process = Process(self.world, "clients")
        self.server = MemoryServer(self.process)
        self.server.notify_callbacks["polls"] = lambda *_: None  # reachable, but nothing arrives
        self.registry = ClaimRegistry(self.process, "polls")
        self.attempts: Counter[int] = Counter()  # by second
        self.granted_at: list[float] = []

    def claim(self, number: int) -> Claim:
        return Claim("", "job", f"id {number}", hash_id(f"id {number}"), Holder("waiter"), 3600.0, queue=True)

    def attempt(self, claim: Claim) -> Grant | Busy:
        self.attempts[int(self.world.time)] += 1
        return self.server.attempt(claim, "polls")

    async def wait_for(self, claim: Claim, hold: float) -> None:
        waiter = self.registry.add_waiter(claim, self.process)
        while isinstance(busy := self.attempt(claim), Busy):
            await wait_for_wakeup(self.process, waiter, busy, recheck_interval(busy.position), polls=True)
        self.granted_at.append(self.world.time)
        await self.process.sleep(hold)
        self.server.release(claim)


def test_thousand_polling_waiters_attempt_less_than_200_times_a_second() -> None:
    queue = PolledQueue()
    holder = queue.claim(-1)
    assert isinstance(queue.attempt(holder), Grant)
    for number in range(WAITERS):
        queue.process.spawn(queue.wait_for(queue.claim(number), 0.1), f"waiter {number}")
    queue.world.run(62)
    assert queue.attempts[0] >= WAITERS, "each has joined the queue"
    rates = [queue.attempts[second] for second in range(1, 60)]
    assert max(rates) < 200, rates
    released_at = queue.world.time
    queue.server.release(holder)
    queue.world.run(30)
    assert queue.granted_at[0] - released_at < 0.31, "the head polls every 0.2 s, with jitter"
    assert len(queue.granted_at) >= 60, "waiters poll often enough to learn in time that they are next"


def test_poll_interval_grows_with_the_position_up_to_a_limit() -> None:
    intervals = [poll_interval(position, 0, 0.5) for position in range(100)]
    assert intervals == sorted(intervals)
    assert (intervals[0], intervals[-1]) == (0.2, 8.0)
    assert sum(1 / poll_interval(position, 0, 0.5) for position in range(WAITERS)) < 160
    assert [poll_interval(None, polls, 0.5) for polls in (0, 1, 2, 3, 50)] == [0.2, 0.4, 0.8, 1.6, 8.0]
    assert 0.1 <= poll_interval(0, 0, 0.0) < poll_interval(0, 0, 0.999) < 0.3
    assert poll_interval(WAITERS, 0, 0.999) < WAITER_TTL
