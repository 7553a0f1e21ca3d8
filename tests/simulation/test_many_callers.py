"""Thousands of callers of one client, whose calls share one connection: `client/attempt_limit.py`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from leasehold import AsyncClient, LeaseholdError, NotAcquired, Unavailable
from leasehold.client.attempt_limit import MAX_ATTEMPTS
from leasehold.core.timing import RESERVATION_TTL
from leasehold.engines.memory import MemoryEngine
from leasehold.engines.sql.fair_mutex import FairMutex
from leasehold.runtime.simulated import Process, Simulator, Task
from leasehold.testing.network import NetworkTransport, SimulatedServer
from tests.support import probe, probe_acquire

CALLERS = 1000
SECONDS_PER_ATTEMPT = 0.02  # so that 250 attempts are answered within the call_timeout
CALL_TIMEOUT = 5.0


class OneConnectionEngine(MemoryEngine):
    """Sends one attempt at a time, as the engines on SQL servers do."""

    def __init__(self, runtime, registry, transport) -> None:
        super().__init__(runtime, registry, transport)
        self._connection = FairMutex(runtime, "one connection")

    async def attempt(self, claim, deadline):
        caller = self._connection.new_caller()
        try:
            await self._connection.acquire(caller, deadline)
            await self._runtime.sleep(SECONDS_PER_ATTEMPT)
            return await super().attempt(claim, deadline)
        finally:
            self._connection.release(caller)


class Crowd:
    def __init__(self) -> None:
        self.world = Simulator(1)
        self.server, self.process = SimulatedServer(self.world, rate=1.0), Process(self.world, "crowd", rate=1.0)
        self.client = AsyncClient(engine=self._open, runtime=self.process, call_timeout=CALL_TIMEOUT)
        self.ended_at: list[float] = []
        self.outcomes: Counter[str] = Counter()

    def _open(self, _config, runtime, registry):
        return OneConnectionEngine(runtime, registry, NetworkTransport(runtime, self.server, registry))

    async def _acquire_once(self, name: str, wait: float | None, **options: Any) -> None:
        try:
            lease = await self.client.lock(name, wait=wait, ttl=60, **options).acquire()
        except LeaseholdError as error:
            self.outcomes[type(error).__name__] += 1
        else:
            self.outcomes["granted" if lease.guaranteed else "unguaranteed"] += 1
            await lease.release()
        finally:
            self.ended_at.append(self.world.time)

    def start(self, name: str, wait: float | None = None, **options: Any) -> Task:
        return self.process.spawn(self._acquire_once(name, wait, **options), name)

    def finish(self, tasks: list[Task], seconds: float = 600) -> None:
        for task in tasks:
            self.world.run_until_complete(task, seconds)
        assert not probe_acquire.attempts_under_way(probe.core(self.client).attempts)
        assert not probe_acquire.callers_waiting(probe.core(self.client).attempts)


def test_all_callers_are_served_though_all_take_longer_than_call_timeout() -> None:
    crowd = Crowd()
    crowd.finish([crowd.start(f"name {number}") for number in range(CALLERS)])
    assert crowd.outcomes == {"granted": CALLERS}
    assert crowd.world.time > 3 * CALL_TIMEOUT


def test_all_callers_of_one_name_are_served() -> None:
    crowd = Crowd()
    crowd.finish([crowd.start("a") for _ in range(CALLERS)])
    assert crowd.outcomes == {"granted": CALLERS}


def test_callers_that_wait_to_be_sent_queue_at_once_after_contention(monkeypatch) -> None:
    crowd, attempts = Crowd(), Counter[bool]()
    attempt = OneConnectionEngine.attempt

    def counted(self, claim, deadline):
        attempts[claim.queue] += 1
        return attempt(self, claim, deadline)

    monkeypatch.setattr(OneConnectionEngine, "attempt", counted)
    lease = crowd.world.run_until_complete(crowd.process.spawn(crowd.client.lock("a").acquire(), "holder"), 60)
    tasks = [crowd.start("a") for _ in range(CALLERS)]
    crowd.world.run(30.0)
    crowd.world.run_until_complete(crowd.process.spawn(lease.release(), "holder"), 60)
    crowd.finish(tasks)
    assert crowd.outcomes == {"granted": CALLERS}
    assert attempts[False] <= 2 * MAX_ATTEMPTS


def test_callers_end_within_call_timeout_of_a_silent_engines_answer() -> None:
    crowd = Crowd()
    tasks = [crowd.start("a") for _ in range(CALLERS)]
    crowd.world.run(3.0)
    served = crowd.outcomes["granted"]
    crowd.server.cut(crowd.process)
    late = [crowd.start("a", wait=1.0) for _ in range(CALLERS)]
    crowd.finish([*tasks, *late])
    assert crowd.outcomes["granted"] == served
    assert sum(crowd.outcomes.values()) == 2 * CALLERS
    assert crowd.outcomes["NotSent"] > CALLERS  # no release is pending for these
    # A waiter that was queued notices it at its next attempt, within the interval of its heartbeats.
    assert max(crowd.ended_at) < 3.0 + 12.0 + CALL_TIMEOUT + 0.5
    assert sum(at > 3.0 + CALL_TIMEOUT + 0.5 for at in crowd.ended_at) < 200


def test_callers_that_do_not_wait_get_their_answer_within_call_timeout() -> None:
    crowd = Crowd()
    crowd.finish([crowd.start(f"name {number}", wait=0) for number in range(CALLERS)])
    assert set(crowd.outcomes) <= {"granted", "Crowded", "Unavailable"}
    assert crowd.outcomes["granted"] > 200
    assert max(crowd.ended_at) < CALL_TIMEOUT + 0.5


def test_waiter_whose_wait_is_over_gets_its_answer_within_call_timeout() -> None:
    """Its last attempt waits in the client behind others, and has no second `call_timeout` once it is sent."""
    crowd = Crowd()
    lease = crowd.world.run_until_complete(crowd.process.spawn(crowd.client.lock("a").acquire(), "holder"), 60)
    ahead = crowd.start("a")
    crowd.world.run(0.5)
    began, waiter = crowd.world.time, crowd.start("a", wait=8.0)
    crowd.world.run(7.9)
    count = int(CALL_TIMEOUT / SECONDS_PER_ATTEMPT) + 28  # it is sent before `call_timeout` is over, and answered later
    others = [crowd.start(f"name {number}") for number in range(count)]
    crowd.world.run_until_complete(waiter, 60)
    assert crowd.world.time - began < 8.0 + CALL_TIMEOUT + 0.1
    crowd.world.run_until_complete(crowd.process.spawn(lease.release(), "release"), 60)
    crowd.finish([ahead, *others])


def test_callers_run_without_a_grant_only_if_the_engine_is_silent() -> None:
    crowd = Crowd()
    crowd.finish([crowd.start(f"name {number}", wait=0, on_unavailable="run") for number in range(CALLERS)])
    assert crowd.outcomes["Crowded"] > CALLERS // 2
    unguaranteed = crowd.outcomes["unguaranteed"]  # sent, and not answered in time
    assert unguaranteed <= MAX_ATTEMPTS
    crowd.server.cut(crowd.process)
    crowd.finish([crowd.start(f"name {number}", wait=0, on_unavailable="run") for number in range(CALLERS)])
    assert crowd.outcomes["unguaranteed"] == unguaranteed + CALLERS


def test_caller_whose_wait_is_over_is_told_that_it_was_not_sent() -> None:
    crowd = Crowd()
    tasks = [crowd.start(f"name {number}") for number in range(CALLERS)]

    async def wait_briefly() -> str:
        try:
            await crowd.client.lock("late", wait=7).acquire()
        except NotAcquired:
            return "refused"
        except Unavailable as error:
            return str(error)
        return "granted"

    crowd.world.run(0.1)
    outcome = crowd.world.run_until_complete(crowd.process.spawn(wait_briefly(), "late"), 60)
    assert "other calls of this client were waiting to be sent" in outcome
    assert 7.0 < crowd.world.time < 8.0
    crowd.finish(tasks)
    assert crowd.outcomes == {"granted": CALLERS}


def test_notified_waiter_overtakes_callers_that_only_begin() -> None:
    crowd = Crowd()

    async def hand_off() -> list[Task]:
        lease = await crowd.client.lock("a").acquire()
        waiter = crowd.start("a")
        while not probe.registry(crowd.client).waiting:
            await crowd.process.sleep(0.1)
        others = [crowd.start(f"name {number}") for number in range(CALLERS)]
        await crowd.process.sleep(0.1)
        await lease.release()
        await waiter.join()
        return others

    others = crowd.world.run_until_complete(crowd.process.spawn(hand_off(), "hand-off"), 60)
    assert crowd.world.time < 2 * RESERVATION_TTL
    crowd.finish(others)
    assert crowd.outcomes == {"granted": CALLERS + 1}


def test_callers_cancelled_before_they_were_sent_leave_room_for_others() -> None:
    crowd = Crowd()
    tasks = [crowd.start(f"name {number}") for number in range(CALLERS)]
    crowd.world.run(1.0)
    for task in tasks[::2]:
        task.cancel()
    crowd.finish(tasks[1::2])
    assert crowd.outcomes["granted"] >= CALLERS // 2


def test_waiters_far_behind_are_kept_by_heartbeats_and_rarely_attempt() -> None:
    crowd, attempts = Crowd(), Counter[str]()
    attempt = OneConnectionEngine.attempt

    async def counted(self, claim, deadline):
        attempts[claim.id_hash] += 1
        return await attempt(self, claim, deadline)

    async def hold(seconds: float) -> None:
        async with crowd.client.lock("a"):
            await crowd.process.sleep(seconds)

    OneConnectionEngine.attempt = counted
    try:
        crowd.process.spawn(hold(58), "holder")
        crowd.world.run(1.0)
        tasks = [crowd.start("a") for _ in range(300)]
        crowd.world.run(50.0)
        by_count = Counter(attempts.values())
        assert by_count[1] + by_count[2] > 190  # those at position 100 and more
        crowd.finish(tasks)
    finally:
        OneConnectionEngine.attempt = attempt
    assert crowd.outcomes == {"granted": 300}


def test_refusals_are_answers_of_the_engine() -> None:
    """Callers that wait to be sent do not give up while the engine refuses others."""
    crowd = Crowd()
    semaphore = crowd.client.semaphore("a", limit=3)
    lease = crowd.world.run_until_complete(crowd.process.spawn(semaphore.acquire(), "semaphore"), 60)
    crowd.finish([crowd.start("a") for _ in range(CALLERS)])
    assert crowd.outcomes == {"Mismatch": CALLERS}
    crowd.world.run_until_complete(crowd.process.spawn(lease.release(), "release"), 60)


def test_callers_of_a_closed_client_end_with_its_calls_under_way() -> None:
    crowd = Crowd()
    tasks = [crowd.start(f"name {number}") for number in range(CALLERS)]
    crowd.world.run(1.0)
    crowd.finish([crowd.process.spawn(crowd.client.close(), "close"), *tasks])
    assert set(crowd.outcomes) <= {"granted", "ConfigError"}
    assert max(crowd.ended_at) < 1.0 + 2 * MAX_ATTEMPTS * SECONDS_PER_ATTEMPT


def test_candidates_that_resign_unsent_leave_room_for_others() -> None:
    crowd = Crowd()
    tasks = [crowd.start(f"name {number}") for number in range(MAX_ATTEMPTS)]
    elections = [crowd.client.election(f"election {number}") for number in range(MAX_ATTEMPTS)]
    ignore = lambda _term: crowd.process.sleep(0)  # noqa: E731
    candidates = [crowd.process.spawn(election.serve(ignore, ignore), "candidate") for election in elections]
    crowd.world.run(0.1)
    for election in elections:
        election.resign_nowait()
    crowd.finish([*tasks, *candidates])
    crowd.finish([crowd.start(f"name {number}") for number in range(CALLERS)])
    assert crowd.outcomes == {"granted": MAX_ATTEMPTS + CALLERS}
