"""The first calls of a new client may be concurrent: its store connects and creates its table only once they come."""

import asyncio
from contextlib import closing
from functools import partial

import pytest

from leasehold import AsyncClient, Client
from leasehold.records.stores.sql import TABLE, SqlStore
from tests.support.bursts import failures, in_tasks, in_threads

MOVES = {"new": {"paid"}}

# Each call, and whether its result is right.
CALLS = {
    "once": (lambda client, name, store: client.once(name, lambda: True, store=store), True.__eq__),
    "outcome": (lambda client, name, store: client.outcome(name, store=store), lambda outcome: outcome is None),
    "status": (lambda client, name, store: client.status(name, MOVES, "new", store=store).get(), "new".__eq__),
    "move": (lambda client, name, store: client.status(name, MOVES, "new", store=store).move("paid"), "new".__eq__),
    "schedule": (
        lambda client, name, store: client.schedule(name, 3600, store=store).run_due(lambda: None),
        lambda ticks: len(ticks) <= 1,
    ),
}
# The twenty callers take turns. In the first tier `once` is one of the calls that come together.
BURSTS = [pytest.param(["once"], id="once", marks=pytest.mark.extended), pytest.param(list(CALLS), id="mixed")]


@pytest.fixture
def url(kind, url_of, open_runner):
    """Of a store without a table."""
    found = url_of(kind)
    store = open_runner(found).store
    if isinstance(store, SqlStore):
        with closing(store.connect(5.0)) as connection:
            connection.cursor().execute(f"drop table if exists {TABLE}")
    return found


@pytest.mark.parametrize("burst", BURSTS)
def test_first_calls_of_twenty_threads_succeed(url, key, burst):
    with Client("memory://", call_timeout=30) as client:

        def work(number):
            call, is_right = CALLS[burst[number % len(burst)]]
            result = call(client, f"{key}-{number}", url)
            return is_right(result) or (number, result)

        assert failures(in_threads(work)) == {}


@pytest.mark.parametrize("burst", BURSTS)
def test_first_calls_of_twenty_tasks_succeed_in_each_loop(url, key, burst):
    client = AsyncClient("memory://", call_timeout=30)

    async def work(loop, number):
        call, is_right = CALLS[burst[number % len(burst)]]
        result = await call(client, f"{key}-{loop}-{number}", url)
        return is_right(result) or (number, result)

    async def main(loop):
        found = failures(await in_tasks(partial(work, loop)))
        if loop == 2:
            await client.close()
        return found

    assert [asyncio.run(main(loop)) for loop in (1, 2)] == [{}, {}]
