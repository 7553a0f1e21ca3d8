"""A request that waits gets the name when it is released, and leaves what its caller relies on: the position of an id
that the caller made, and nothing of an id made here."""

import pytest

from leasehold.core.timing import WAITER_TTL
from leasehold.errors import Unavailable
from leasehold.model import Busy, Grant
from tests.support import probe_server
from tests.support.bare_service import (
    CLIENT,
    acquire,
    attempt,
    claim_of,
    found,
    queued,
    release,
    serving,
    until,
    until_wakeup,
)
from tests.support.running_server import in_loop


@in_loop
async def test_long_poll_gets_the_name_when_it_is_released():
    async with serving() as service:
        await acquire(service, "holder")
        asked = acquire(service, "web", wait=60)
        await queued(service, "web")
        service.clock.ahead += 3
        await release(service, "holder")
        grant, waited = await asked
        assert isinstance(grant, Grant)
        assert 3 <= waited < 60


@in_loop
async def test_position_is_kept_for_a_callers_id_after_the_wait():
    async with serving() as service:
        await acquire(service, "holder")
        reply, _ = await acquire(service, "first", wait=0.01)
        assert reply.position == 0
        second = acquire(service, "second", wait=60)
        await queued(service, "first", "second")
        again = acquire(service, "first", wait=60)
        await until(lambda: claim_of("first").id_hash in service.polls)
        await release(service, "holder")
        assert isinstance((await again)[0], Grant)
        second.poll.end("test is over")
        await second


@in_loop
async def test_position_of_an_id_made_here_is_given_up_after_the_wait():
    async with serving() as service:
        await acquire(service, "holder")
        reply, _ = await acquire(service, "web", wait=0.01, caller_made_id=False)
        assert isinstance(reply, Busy)
        assert await found(service) == [("holder", "held")]


@in_loop
async def test_hang_up_gives_up_the_position_of_an_id_made_here():
    async with serving() as service:
        await acquire(service, "holder")
        asked = acquire(service, "web", wait=60, caller_made_id=False)
        await queued(service, "web")
        asked.poll.end("hung up")
        await asked
        assert await found(service) == [("holder", "held")]


@in_loop
async def test_hang_up_keeps_the_position_of_a_callers_id():
    async with serving() as service:
        await acquire(service, "holder")
        asked = acquire(service, "web", wait=60)
        await queued(service, "web")
        asked.poll.end("hung up")
        await asked
        await queued(service, "web")
        assert service.polls == {}


@in_loop
async def test_later_request_with_the_same_id_replaces_a_long_poll():
    async with serving() as service:
        await acquire(service, "holder")
        polls = [acquire(service, "web", wait=60)]
        await queued(service, "web")
        polls += [acquire(service, "web", wait=60) for _ in range(5)]
        for replaced in polls[:-1]:
            assert isinstance((await replaced)[0], Busy)
        await until(lambda: service.polls)
        await release(service, "holder")
        assert isinstance((await polls[-1])[0], Grant)


@in_loop
async def test_remote_attempt_with_the_same_id_replaces_a_long_poll():
    async with serving() as service:
        await acquire(service, "holder")
        asked = acquire(service, "web", wait=60)
        await queued(service, "web")
        stream = service.open_stream(CLIENT)
        assert isinstance(await attempt(service, "web"), Busy)
        assert isinstance((await asked)[0], Busy)
        await release(service, "holder")
        assert await until_wakeup(stream) == claim_of("web").id_hash


@in_loop
async def test_long_polls_stay_in_the_queue_by_heartbeats():
    async with serving() as service:
        await acquire(service, "holder")
        polls = [acquire(service, who, wait=600) for who in ("first", "second")]
        await queued(service, "first", "second")
        for _ in range(4):
            service.clock.ahead += WAITER_TTL * 0.7
            await probe_server.send_heartbeats(service)
        await queued(service, "first", "second")
        await release(service, "holder")
        assert isinstance((await polls[0])[0], Grant)
        polls[1].poll.end("test is over")
        await polls[1]


@in_loop
async def test_engine_that_fails_during_a_long_poll_leaves_no_id_made_here():
    async with serving() as service:
        await acquire(service, "holder")
        asked = acquire(service, "web", wait=60, caller_made_id=False)
        await queued(service, "web")
        real = service.engine.real.attempt

        async def silent(*args):
            raise Unavailable("no answer")

        service.engine.real.attempt = silent
        await release(service, "holder")
        with pytest.raises(Unavailable):
            await asked
        service.engine.real.attempt = real
        assert await found(service) == []
