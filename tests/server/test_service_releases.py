"""A release waits for the attempts of the same claim, or gives up at its deadline."""

import asyncio

import pytest

from leasehold.errors import Unavailable
from leasehold.model import Busy
from leasehold.server.problems import Problem
from tests.support.bare_service import (
    CLIENT,
    acquire,
    attempt,
    claim_of,
    deadline,
    found,
    queued,
    release,
    serving,
    until,
)
from tests.support.running_server import in_loop


@in_loop
async def test_release_waits_for_an_attempt_under_way():
    async with serving() as service:
        gate = service.engine.gates["attempt"] = asyncio.Event()
        asked = acquire(service, "web")
        await until(lambda: service.engine.calls)
        releasing = asyncio.ensure_future(release(service, "web"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert "release" not in service.engine.calls
        gate.set()
        assert await releasing is True
        await asked
        assert await found(service) == []


@in_loop
async def test_release_waits_for_every_attempt_under_way():
    async with serving() as service:
        first = service.engine.gates["attempt"] = asyncio.Event()
        asked = [asyncio.ensure_future(attempt(service, "web"))]
        await until(lambda: len(service.engine.calls) == 1)
        second = service.engine.gates["attempt"] = asyncio.Event()
        asked.append(asyncio.ensure_future(attempt(service, "web")))
        await until(lambda: len(service.engine.calls) == 2)
        releasing = asyncio.ensure_future(release(service, "web"))
        first.set()
        await asked[0]
        for _ in range(20):
            await asyncio.sleep(0)
        assert "release" not in service.engine.calls
        second.set()
        assert await releasing is True


@in_loop
async def test_release_gives_up_at_its_deadline_if_an_attempt_lasts():
    async with serving() as service:
        gate = service.engine.gates["attempt"] = asyncio.Event()
        asked = acquire(service, "web")
        await until(lambda: service.engine.calls)
        with pytest.raises(Unavailable, match="still under way"):
            await service.release(claim_of("web"), service.runtime.now())
        gate.set()
        await asked


@in_loop
async def test_id_of_an_attempt_under_way_is_refused_for_another_name():
    """An engine knows its waiters by their ids: two names would share one waiter, and one would not be woken."""
    async with serving() as service:
        await acquire(service, "holder")
        gate = service.engine.gates["attempt"] = asyncio.Event()
        first = asyncio.ensure_future(attempt(service, "waiter"))
        await until(lambda: len(service.engine.calls) == 2)
        other = claim_of("waiter", "invoices/7", queue=True)
        with pytest.raises(Problem, match="waits for another name"):
            await service.attempt(other, CLIENT, deadline(service))
        assert await service.release(other, deadline(service)) is False
        gate.set()
        assert isinstance(await first, Busy)
        await queued(service, "waiter")


@in_loop
async def test_release_ends_a_long_poll_which_attempts_no_more():
    async with serving() as service:
        await acquire(service, "holder")
        asked = acquire(service, "web", wait=60)
        await queued(service, "web")
        assert await release(service, "web") is False
        assert isinstance((await asked)[0], Busy)
        assert await release(service, "holder") is True
        assert await found(service) == []
