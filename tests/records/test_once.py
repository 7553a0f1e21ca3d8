"""`once`: the first caller runs, others wait or get the stored result; failing runners. Late runners:
test_once_late.py."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading

import pytest

import leasehold
from leasehold import Client, ConfigError, LeaseLost, Mismatch, NotAcquired, RunFailed, SelfDeadlock
from leasehold.errors import Unavailable
from leasehold.records.store import Record
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.threads import Threads


@pytest.fixture
def client():
    with Client("memory://") as client:
        yield client


def test_once_runs_first_call_and_others_get_its_result(client, counting_function):
    work = counting_function({"id": 7, "lines": (1, 2)})
    results = [client.once("a", work) for _ in range(3)]
    assert results == [{"id": 7, "lines": [1, 2]}] * 3, "the first caller must get the result through JSON, too"
    assert work.runs == 1


def test_once_passes_arguments_and_lease(client):
    def work(a, b, lease):
        assert lease.held
        assert lease.name == "once:k"
        return [a, b, lease.token]

    first = client.once("k", work, 1, 2)
    assert first[:2] == [1, 2]
    outcome = client.outcome("k")
    assert (outcome.state, outcome.token, outcome.result, outcome.runs) == ("done", first[2], first, 1)


def test_once_keys_and_namespaces_are_isolated(counting_function):
    work = counting_function(1, 2, 3)
    with Client("memory://shop", namespace="a") as first, Client("memory://shop", namespace="b") as second:
        assert [first.once("k", work), first.once("k2", work), second.once("k", work)] == [1, 2, 3]
        assert first.once("k", work) == 1


def test_once_runs_once_among_twenty_threads(client, counting_function):
    work, got = counting_function("result"), []
    threads = [threading.Thread(target=lambda: got.append(client.once("a", work))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == ["result"] * 20
    assert work.runs == 1


def test_once_without_wait_raises_not_acquired_while_running(client, counting_function):
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
        client.once("a", counting_function(2), wait=0)
    assert busy.value.purpose == "once"
    leave.set()
    runner.join(30)
    assert client.once("a", counting_function(2), wait=0) == 1


def test_once_runs_again_after_keep(bench, counting_function):
    client, store, work = bench.client(), MemoryStore(Threads(bench.clock)), counting_function(1, 2)
    assert client.once("a", work, keep=60, store=store) == 1
    bench.clock.advance(59)
    assert client.once("a", work, keep=60, store=store) == 1
    bench.clock.advance(2)
    assert client.outcome("a", store=store) is None
    assert client.once("a", work, keep=60, store=store) == 2


# ------------------------------------------------------------------------ failures


def test_once_failure_is_recorded_and_rerun_by_next_caller(client, counting_function):
    work = counting_function(ValueError("no paper"), "printed")
    with pytest.raises(ValueError, match="no paper"):
        client.once("a", work)
    failed = client.outcome("a")
    assert (failed.state, failed.error, failed.runs) == ("failed", "ValueError: no paper", 1)
    assert client.once("a", work) == "printed"
    assert client.outcome("a").runs == 2


def test_once_kept_failure_is_raised_to_later_callers(client, counting_function):
    work = counting_function(ValueError("no paper"), "printed")
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
def test_once_unstorable_result_fails_and_is_not_rerun(client, result, complaint, counting_function):
    work = counting_function(result)
    with pytest.raises(ConfigError, match=complaint.replace("not JSON", "cannot be stored as JSON")):
        client.once("a", work, max_result=100)
    with pytest.raises(RunFailed):
        client.once("a", work, max_result=100)
    assert work.runs == 1


def test_once_result_too_large_for_the_store_is_not_rerun(client, counting_function):
    work = counting_function("x" * 8_000_000)
    with pytest.raises(ConfigError, match="8,000,000 bytes"):
        client.once("a", work, max_result=9_000_000)
    with pytest.raises(RunFailed, match="8,000,000 bytes"):
        client.once("a", work, max_result=9_000_000)
    assert work.runs == 1


def test_once_result_too_deep_for_its_record_is_not_rerun(client):
    """A record is a few levels deeper than its result."""
    limit = sys.getrecursionlimit()
    for depth in range(limit - 150, limit):
        runs, result = [], 0
        for _ in range(depth):
            result = [result]
        for _ in range(2):
            with contextlib.suppress(ConfigError, RecursionError, RunFailed):
                client.once(f"a{depth}", lambda: runs.append(1) or result)  # noqa: B023
        assert len(runs) == 1


def test_once_with_max_result_zero_stores_no_result(client, counting_function):
    work = counting_function(object())
    assert [client.once("a", work, max_result=0) for _ in range(2)] == [None, None]
    assert work.runs == 1


def test_once_interrupted_run_expires_and_is_rerun(client, counting_function):
    with pytest.raises(KeyboardInterrupt):
        client.once("a", counting_function(KeyboardInterrupt()))
    assert client.outcome("a").state == "expired"
    assert client.once("a", counting_function("second")) == "second"
    assert client.outcome("a").runs == 2


# ------------------------------------------------------------------------- requests


def test_once_loss_found_in_a_task_group_is_no_failure_of_the_run(client, counting_function):
    work = counting_function(ExceptionGroup("of tasks", [LeaseLost("once:a"), ValueError()]), "done")
    with pytest.raises(ExceptionGroup):
        client.once("a", work, on_failure="keep")
    assert client.outcome("a").state == "expired"
    assert client.once("a", work, on_failure="keep") == "done"


def test_once_with_other_request_for_same_key_raises_mismatch(client, counting_function):
    assert client.once("a", counting_function(1), request="sum 10") == 1
    assert client.once("a", counting_function(2), request="sum 10") == 1
    with pytest.raises(Mismatch, match="use another key") as other:
        client.once("a", counting_function(3), request="sum 11")
    assert (other.value.wanted, other.value.found) == ("run of sum 11", "run of sum 10")


def test_once_nested_in_itself_raises_self_deadlock(client, counting_function):
    with pytest.raises(SelfDeadlock):
        client.once("a", lambda: client.once("a", counting_function(1)))


# --------------------------------------------------------------------------- stores


class FlakyStore(MemoryStore):
    """Loses requests or answers, as planned."""

    def __init__(self, runtime, *plan: str) -> None:
        super().__init__(runtime)
        self.plan, self.calls = list(plan), 0

    def write(self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float) -> bool:
        self.calls += 1
        failure = self.plan.pop(0) if self.plan else "well"
        if failure == "request lost":
            raise Unavailable("nothing came through")
        written = super().write(key, record, expected_version, keep, seconds)
        if failure == "answer lost":
            raise Unavailable("nothing came back")
        return written


@pytest.mark.parametrize("at_begin", ["well", "request lost", "answer lost"])
@pytest.mark.parametrize("at_end", ["well", "request lost", "answer lost"])
def test_once_resolves_lost_store_answers(client, at_begin, at_end, counting_function):
    plan = [at_begin, *(["well"] if at_begin != "well" else []), at_end]
    store, work = FlakyStore(Threads(), *plan), counting_function("once")
    assert client.once("a", work, store=store) == "once"
    assert client.once("a", work, store=store) == "once"
    assert work.runs == 1
    assert client.outcome("a", store=store).runs == 1


def test_once_does_not_run_when_store_is_unavailable(client, counting_function):
    work = counting_function(1)
    with pytest.raises(Unavailable):
        client.once("a", work, store=FlakyStore(Threads(), *["request lost"] * 3))
    assert work.runs == 0


def test_once_gives_up_if_the_store_refuses_every_write(client, counting_function):
    class Refusing(MemoryStore):
        def write(self, *args):
            writes.append(args)
            if len(writes) > 1000:
                raise AssertionError("once goes on for ever")
            return False

    writes, work = [], counting_function(1)
    with pytest.raises(Unavailable, match="was not run"):
        client.once("a", work, store=Refusing(Threads()))
    assert work.runs == 0
    assert client.once("a", work) == 1


def test_once_accepts_custom_store(client, counting_function):
    class CustomStore:
        def __init__(self):
            self.kept = {}

        def read(self, key, seconds):
            return self.kept.get(key)

        def write(self, key, record, expected_version, keep, seconds):
            if (self.kept[key].version if key in self.kept else "") != expected_version:
                return False
            self.kept[key] = record
            return True

    store = CustomStore()
    assert [client.once("a b/{é}", counting_function(5), store=store) for _ in range(2)] == [5, 5]
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
        {"store": "redlock://a,b,c"},
        {"wait": -1},
        {"ttl": 0},
    ],
)
def test_once_refuses_invalid_options_before_running(client, wrong, counting_function):
    work = counting_function(1)
    with pytest.raises(ConfigError):
        client.once("a", work, **wrong)
    for key in ("", "x" * 251, 5):
        with pytest.raises(ConfigError):
            client.once(key, work)
    assert work.runs == 0


def test_once_of_blocking_client_refuses_coroutine_function(client):
    async def work():
        return 1

    with pytest.raises(ConfigError, match="coroutine function"):
        client.once("a", work)


# ------------------------------------------------------------------------ decorator


def test_once_decorator_formats_key_from_arguments(client):
    runs = []

    @client.once_per("order:{order_id}")
    def pay(order_id, amount, lease, currency="EUR"):
        runs.append((order_id, amount, currency, lease.name))
        return amount

    assert [pay(1, 10), pay(order_id=1, amount=99), pay(2, amount=20, currency="SEK")] == [10, 10, 20]
    assert runs == [(1, 10, "EUR", "once:order:1"), (2, 20, "SEK", "once:order:2")]
    with pytest.raises(ConfigError, match="not a parameter"):
        client.once_per("order:{id}")(lambda order_id: 1)


# ----------------------------------------------------------------------------- events


def test_once_emits_ran_and_replayed_events(counting_function):
    events = []
    with Client("memory://", on_event=events.append) as client:
        client.once("a", counting_function(1))
        client.once("a", counting_function(1))
    reported = [(event.kind, event.name) for event in events if event.kind in ("ran", "replayed")]
    assert reported == [("ran", "once:a"), ("replayed", "once:a")]


# ---------------------------------------------------------------------------- asyncio


def test_async_once_tasks_wait_for_the_runner():
    async def main():
        runs = []

        async def work(lease):
            runs.append(lease.token)
            await asyncio.sleep(0.02)  # pause: the work
            return [len(runs)]

        async with leasehold.AsyncClient("memory://") as client:
            assert await asyncio.gather(*(client.once("a", work) for _ in range(10))) == [[1]] * 10
            decorated = client.once_per("k:{n}")(lambda n: n + 1)
            assert [await decorated(1), await decorated(n=1), await decorated(2)] == [2, 2, 3]
            assert (await client.outcome("a")).state == "done"
        assert len(runs) == 1

    asyncio.run(main())


def test_async_once_cancelled_run_is_rerun(counting_function):
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
            assert (await client.outcome("a")).state == "expired"
            assert await client.once("a", counting_function("second")) == "second"

    asyncio.run(main())


def test_async_once_keeps_failure_of_run_that_awaited_a_cancelled_task():
    runs = []

    async def work():
        runs.append(1)
        other = asyncio.ensure_future(asyncio.Event().wait())
        other.cancel()
        await other

    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            with pytest.raises(asyncio.CancelledError):
                await client.once("a", work, on_failure="keep")
            with pytest.raises(RunFailed, match="CancelledError"):
                await client.once("a", work, on_failure="keep")

    asyncio.run(main())
    assert len(runs) == 1


def test_async_once_lost_lease_cancels_the_run(counting_function):
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
            assert await client.once("a", counting_function("second")) == "second"

    asyncio.run(main())
