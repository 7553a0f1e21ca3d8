"""A draining server refuses what is new and keeps what is held; a breaker spares an engine that does not answer."""

import asyncio

import pytest

from leasehold.engines.remote.wire import Moved
from leasehold.errors import NotSent, Unavailable
from leasehold.model import Alive, Busy
from leasehold.server.problems import Draining
from tests.support.bare_service import (
    CLIENT,
    OTHER,
    acquire,
    attempt,
    claim_of,
    deadline,
    queued,
    release,
    serving,
    until,
)
from tests.support.running_server import in_loop

# -- drain


@in_loop
async def test_drain_ends_streams_and_polls_and_keeps_positions():
    async with serving() as service:
        grant, _ = await acquire(service, "holder")
        stream = service.open_stream(CLIENT)
        await stream.take(1)
        await attempt(service, "streamed")
        asked = acquire(service, "polled", wait=60)
        await queued(service, "streamed", "polled")
        service.drain()
        assert isinstance((await asked)[0], Busy)
        assert asked.poll.ended == "draining"
        assert await stream.take(1) == [Moved()]
        assert stream.closed
        await queued(service, "streamed", "polled")
        with pytest.raises(Draining) as refused:
            await attempt(service, "late")
        assert refused.value.fields == {"done": False}
        with pytest.raises(Draining):
            service.open_stream(OTHER)
        (renewed,) = await service.renew([claim_of("holder", token=grant.token)], None, deadline(service))
        assert isinstance(renewed, Alive)
        assert await release(service, "holder") is True


@in_loop
async def test_hang_up_during_a_drain_gives_up_no_position():
    async with serving() as service:
        await acquire(service, "holder")
        asked = acquire(service, "web", wait=60, caller_made_id=False)
        await queued(service, "web")
        service.drain()
        asked.poll.end("hung up")
        await asked
        await queued(service, "web")


# -- the breaker, and readiness


async def silent(*_args):
    raise Unavailable("no answer")


@in_loop
async def test_open_breaker_refuses_attempts_and_passes_renewals_and_releases():
    async with serving() as service:
        grant, _ = await acquire(service, "holder")
        working = service.engine.real
        service.engine.real = type("Silent", (), {"attempt": silent, "traits": working.traits})()
        service.engine.real.attempt = silent
        for _ in range(5):
            with pytest.raises(Unavailable):
                await attempt(service, "web")
        service.engine.real = working
        with pytest.raises(NotSent) as refused:
            await attempt(service, "web")
        assert 0 < refused.value.retry_in <= 1
        (renewed,) = await service.renew([claim_of("holder", token=grant.token)], None, deadline(service))
        assert isinstance(renewed, Alive)
        assert isinstance(await attempt(service, "web"), Busy)  # the renewal's answer closed it
        assert await release(service, "holder") is True


@in_loop
async def test_callers_with_short_deadlines_do_not_open_the_breaker():
    async with serving() as service:
        service.engine.gates["attempt"] = asyncio.Event()

        async def until_deadline(_claim, latest):
            assert latest - service.runtime.now() > 0.2, "the engine gets some time, whatever the caller wants"
            service.clock.ahead += 1
            raise Unavailable("no answer by the deadline")

        service.engine.real.attempt = until_deadline
        for _ in range(20):
            with pytest.raises(Unavailable):
                await service.attempt(claim_of("hasty"), CLIENT, service.runtime.now() + 0.0001)
        assert not service.breaker.open


@in_loop
async def test_calls_that_waited_for_one_another_do_not_open_the_breaker():
    """One caller sent more calls than an engine with one connection could make in time, and no other caller got a new
    lock for a second."""
    async with serving() as service:
        grant, _ = await acquire(service, "holder")
        end = service.engine.gates["attempt"] = asyncio.Event()

        async def crowded(_claim, _latest):
            await end.wait()
            raise Unavailable("other calls kept the connection busy until the deadline")

        service.engine.real.attempt = crowded
        waiting = [asyncio.ensure_future(attempt(service, f"web-{number}")) for number in range(20)]
        await until(lambda: service.engine.calls.count("attempt") == 21)
        (renewed,) = await service.renew([claim_of("holder", token=grant.token)], None, deadline(service))
        assert isinstance(renewed, Alive)
        end.set()
        assert all(isinstance(each, Unavailable) for each in await asyncio.gather(*waiting, return_exceptions=True))
        assert not service.breaker.open


@in_loop
async def test_ready_is_one_ping_for_many_callers():
    async with serving() as service:
        service.clock.ahead += 60
        before = service.engine.calls.count("ping")
        await asyncio.gather(*[service.check_ready() for _ in range(50)])
        assert service.engine.calls.count("ping") == before + 1
