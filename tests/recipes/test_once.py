"""`once`: first caller runs, others wait or get the stored result; failing runners (late: test_once_late.py)."""

from __future__ import annotations

import asyncio
import threading

import pytest

import leasehold
from leasehold import Client, ConfigError, LeaseLost, Mismatch, NotAcquired, RunFailed, SelfDeadlock
from leasehold.errors import Unavailable
from leasehold.runtime.threads import Threads
from leasehold.store import Record
from leasehold.stores.memory import MemoryStore


@pytest.fixture
def client():
    with Client("memory://") as client:
        yield client


def test_the_first_call_runs_and_the_others_get_its_result(client, counted):
    work = counted({"id": 7, "lines": (1, 2)})
    results = [client.once("a", work) for _ in range(3)]
    assert results == [{"id": 7, "lines": [1, 2]}] * 3, "the first caller gets it through JSON, too"
    assert work.runs == 1


def test_arguments_the_lease_and_its_token(client):
    def work(a, b, lease):
        assert lease.held
        assert lease.name == "once:k"
        return [a, b, lease.token]

    first = client.once("k", work, 1, 2)
    assert first[:2] == [1, 2]
    outcome = client.outcome("k")
    assert (outcome.state, outcome.token, outcome.result, outcome.runs) == ("done", first[2], first, 1)


def test_keys_and_namespaces_do_not_meet(counted):
    work = counted(1, 2, 3)
    with Client("memory://shop", namespace="a") as one, Client("memory://shop", namespace="b") as other:
        assert [one.once("k", work), one.once("k2", work), other.once("k", work)] == [1, 2, 3]
        assert one.once("k", work) == 1


def test_a_crowd_of_threads_runs_it_once(client, counted):
    work, got = counted("result"), []
    threads = [threading.Thread(target=lambda: got.append(client.once("a", work))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == ["result"] * 20
    assert work.runs == 1


def test_who_does_not_wait_is_told_who_runs_it(client, counted):
    entered, leave = threading.Event(), threading.Event()

    def slow():
        entered.set()
        assert leave.wait(30)
        return 1

    runner = threading.Thread(target=client.once, args=("a", slow))
    runner.start()
    assert entered.wait(30)
    assert client.outcome("a").state == "running"
    with pytest.raises(NotAcquired) as busy:
        client.once("a", counted(2), wait=0)
    assert busy.value.purpose == "once"
    leave.set()
    runner.join(30)
    assert client.once("a", counted(2), wait=0) == 1


def test_after_keep_it_may_run_again(bench, counted):
    client, store, work = bench.client(), MemoryStore(Threads(bench.clock)), counted(1, 2)
    assert client.once("a", work, keep=60, store=store) == 1
    bench.clock.turn(59)
    assert client.once("a", work, keep=60, store=store) == 1
    bench.clock.turn(2)
    assert client.outcome("a", store=store) is None
    assert client.once("a", work, keep=60, store=store) == 2


# ------------------------------------------------------------------------ failures


def test_a_failure_is_recorded_and_the_next_caller_runs_it_again(client, counted):
    work = counted(ValueError("no paper"), "printed")
    with pytest.raises(ValueError, match="no paper"):
        client.once("a", work)
    failed = client.outcome("a")
    assert (failed.state, failed.error, failed.runs) == ("failed", "ValueError: no paper", 1)
    assert client.once("a", work) == "printed"
    assert client.outcome("a").runs == 2


def test_a_failure_that_is_kept_is_told_to_everybody(client, counted):
    work = counted(ValueError("no paper"), "printed")
    with pytest.raises(ValueError, match="no paper"):
        client.once("a", work, on_failure="keep")
    for _ in range(2):
        with pytest.raises(RunFailed, match="no paper") as kept:
            client.once("a", work)
    assert kept.value.error == "ValueError: no paper"
    assert work.runs == 1


@pytest.mark.parametrize(
    ("result", "complaint"),
    [("x" * 101, "103 bytes"), (object(), "not JSON"), (float("nan"), "not JSON"), (b"bytes", "not JSON")],
    ids=["large", "object", "nan", "bytes"],
)
def test_a_result_that_cannot_be_kept_is_an_error_and_it_is_not_run_again(client, result, complaint, counted):
    work = counted(result)
    with pytest.raises(ConfigError, match=complaint.replace("not JSON", "cannot be kept as JSON")):
        client.once("a", work, max_result=100)
    with pytest.raises(RunFailed):
        client.once("a", work, max_result=100)
    assert work.runs == 1


def test_results_may_be_left_out(client, counted):
    work = counted(object())
    assert [client.once("a", work, max_result=0) for _ in range(2)] == [None, None]
    assert work.runs == 1


def test_an_interrupted_run_is_lapsed_and_taken_over(client, counted):
    with pytest.raises(KeyboardInterrupt):
        client.once("a", counted(KeyboardInterrupt()))
    assert client.outcome("a").state == "lapsed"
    assert client.once("a", counted("second")) == "second"
    assert client.outcome("a").runs == 2


# ------------------------------------------------------------------------- requests


def test_another_request_under_the_same_key_is_refused(client, counted):
    assert client.once("a", counted(1), request="sum 10") == 1
    assert client.once("a", counted(2), request="sum 10") == 1
    with pytest.raises(Mismatch, match="use another key") as other:
        client.once("a", counted(3), request="sum 11")
    assert (other.value.wanted, other.value.found) == ("run of sum 11", "run of sum 10")


def test_within_itself_it_is_refused(client, counted):
    with pytest.raises(SelfDeadlock):
        client.once("a", lambda: client.once("a", counted(1)))


# --------------------------------------------------------------------------- stores


class Flaky(MemoryStore):
    """Loses answers, before or after the deed."""

    def __init__(self, runtime, *plan: str) -> None:
        super().__init__(runtime)
        self.plan, self.calls = list(plan), 0

    def write(self, key: str, record: Record, was: str, keep: float | None, seconds: float) -> bool:
        self.calls += 1
        fate = self.plan.pop(0) if self.plan else "well"
        if fate == "request lost":
            raise Unavailable("nothing came through")
        written = super().write(key, record, was, keep, seconds)
        if fate == "answer lost":
            raise Unavailable("nothing came back")
        return written


@pytest.mark.parametrize("at_begin", ["well", "request lost", "answer lost"])
@pytest.mark.parametrize("at_end", ["well", "request lost", "answer lost"])
def test_lost_answers_of_the_store_are_resolved(client, at_begin, at_end, counted):
    plan = [at_begin, *(["well"] if at_begin != "well" else []), at_end]
    store, work = Flaky(Threads(), *plan), counted("once")
    assert client.once("a", work, store=store) == "once"
    assert client.once("a", work, store=store) == "once"
    assert work.runs == 1
    assert client.outcome("a", store=store).runs == 1


def test_a_store_that_stays_silent_is_unavailable_and_nothing_runs(client, counted):
    work = counted(1)
    with pytest.raises(Unavailable):
        client.once("a", work, store=Flaky(Threads(), *["request lost"] * 3))
    assert work.runs == 0


def test_a_store_of_ones_own(client, counted):
    class Own:
        def __init__(self):
            self.kept = {}

        def read(self, key, seconds):
            return self.kept.get(key)

        def write(self, key, record, was, keep, seconds):
            if (self.kept[key].edition if key in self.kept else "") != was:
                return False
            self.kept[key] = record
            return True

    store = Own()
    assert [client.once("a b/{é}", counted(5), store=store) for _ in range(2)] == [5, 5]
    assert list(store.kept) == ["once::a%20b%2F%7B%C3%A9%7D"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep": 0},
        {"keep": "long"},
        {"on_failure": "maybe"},
        {"max_result": -1},
        {"max_result": True},
        {"request": 5},
        {"store": object()},
        {"store": "etcd://x"},
        {"wait": -1},
        {"ttl": 0},
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(client, wrong, counted):
    work = counted(1)
    with pytest.raises(ConfigError):
        client.once("a", work, **wrong)
    for key in ("", "x" * 251, 5):
        with pytest.raises(ConfigError):
            client.once(key, work)
    assert work.runs == 0


def test_a_coroutine_function_is_refused_by_the_blocking_face(client):
    async def work():
        return 1

    with pytest.raises(ConfigError, match="coroutine function"):
        client.once("a", work)


# ------------------------------------------------------------------------ decorator


def test_the_decorator_makes_the_key_of_the_arguments(client):
    runs = []

    @client.once_per("order:{order_id}")
    def pay(order_id, amount, lease, currency="EUR"):
        runs.append((order_id, amount, currency, lease.name))
        return amount

    assert [pay(1, 10), pay(order_id=1, amount=99), pay(2, amount=20, currency="SEK")] == [10, 10, 20]
    assert runs == [(1, 10, "EUR", "once:order:1"), (2, 20, "SEK", "once:order:2")]
    with pytest.raises(ConfigError, match="no argument"):
        client.once_per("order:{id}")(lambda order_id: 1)


# ----------------------------------------------------------------------------- events


def test_runs_replays_and_refusals_are_told(counted):
    events = []
    with Client("memory://", on_event=events.append) as client:
        client.once("a", counted(1))
        client.once("a", counted(1))
    told = [(event.kind, event.name) for event in events if event.kind in ("ran", "replayed")]
    assert told == [("ran", "once:a"), ("replayed", "once:a")]


# ---------------------------------------------------------------------------- asyncio


def test_tasks_wait_for_the_one_that_runs():
    async def main():
        runs = []

        async def work(lease):
            runs.append(lease.token)
            await asyncio.sleep(0.02)
            return [len(runs)]

        async with leasehold.AsyncClient("memory://") as client:
            assert await asyncio.gather(*(client.once("a", work) for _ in range(10))) == [[1]] * 10
            decorated = client.once_per("k:{n}")(lambda n: n + 1)
            assert [await decorated(1), await decorated(n=1), await decorated(2)] == [2, 2, 3]
            assert (await client.outcome("a")).state == "done"
        assert len(runs) == 1

    asyncio.run(main())


def test_a_cancelled_run_is_taken_over(counted):
    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            started = asyncio.Event()

            async def slow():
                started.set()
                await asyncio.sleep(60)

            task = asyncio.create_task(client.once("a", slow))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.outcome("a")).state == "lapsed"
            assert await client.once("a", counted("second")) == "second"

    asyncio.run(main())


def test_a_lost_lease_cancels_the_run(counted):
    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            started = asyncio.Event()

            async def slow(lease):
                started.set()
                await asyncio.sleep(60)

            task = asyncio.create_task(client.once("a", slow))
            await started.wait()
            (holding,) = await client.inspect("once:a", exact=True)
            await client.break_lock("once:a", token=holding.token)
            with pytest.raises(LeaseLost):
                await task
            assert await client.once("a", counted("second")) == "second"

    asyncio.run(main())
