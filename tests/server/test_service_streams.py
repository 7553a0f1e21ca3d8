"""A client's stream brings its wake-ups and losses, to this client alone. Routes live for 15 s after the last
call of their client."""

from leasehold.core.timing import WAITER_TTL
from leasehold.engines.remote.wire import Hello, Lost, Moved
from leasehold.model import Alive, Busy
from tests.support import probe_server
from tests.support.bare_service import (
    CLIENT,
    acquire,
    attempt,
    claim_of,
    deadline,
    release,
    serving,
    until,
    until_wakeup,
)
from tests.support.running_server import in_loop

# -- streams


@in_loop
async def test_stream_gets_hello_wakeup_and_break():
    async with serving() as service:
        await acquire(service, "holder")
        stream = service.open_stream(CLIENT)
        (hello,) = await stream.take(60)
        assert hello == Hello(service.engine.traits)
        assert isinstance(await attempt(service, "web"), Busy)
        await release(service, "holder")
        assert await until_wakeup(stream) == claim_of("web").id_hash
        grant = await attempt(service, "web")
        assert await service.break_("", "orders/42", grant.token, deadline(service))
        assert await stream.take(60) == [Lost(claim_of("web").id_hash)]


@in_loop
async def test_stream_of_another_caller_with_the_same_client_id_gets_nothing():
    async with serving() as service:
        await acquire(service, "holder")
        stream, foreign = service.open_stream(CLIENT), service.open_stream(("mallory", CLIENT[1]))
        await attempt(service, "web")
        await release(service, "holder")
        await until_wakeup(stream)
        assert [type(each) for each in await foreign.take(0.01)] == [Hello]


@in_loop
async def test_second_stream_of_a_client_ends_the_first():
    async with serving() as service:
        first = service.open_stream(CLIENT)
        second = service.open_stream(CLIENT)
        service.close_stream(CLIENT, first)
        assert first.closed
        assert service.streams == {CLIENT: second}


@in_loop
async def test_reader_that_is_too_slow_loses_its_stream():
    async with serving() as service:
        stream = service.open_stream(CLIENT)
        for _ in range(20_000):
            stream.push(Moved())
        assert stream.closed
        assert len(await stream.take(1)) < 20_000


# -- routes


@in_loop
async def test_route_of_a_silent_client_is_dropped_after_15_s():
    async with serving() as service:
        await acquire(service, "holder")
        service.open_stream(CLIENT)
        await attempt(service, "web")
        service.clock.ahead += WAITER_TTL + 1
        await until(lambda: not service.routes)
        assert service.registry.waiting == {}
        assert probe_server.routes_by_client(service) == {}


@in_loop
async def test_route_is_kept_by_the_clients_heartbeats():
    async with serving() as service:
        await acquire(service, "holder")
        service.open_stream(CLIENT)
        await attempt(service, "web")
        for _ in range(4):
            service.clock.ahead += WAITER_TTL / 2
            (reply,) = await service.renew([claim_of("web")], CLIENT, deadline(service))
            assert isinstance(reply, Alive)
            probe_server.disown_expired(service)
        assert list(service.routes) == [claim_of("web").id_hash]


@in_loop
async def test_grant_that_is_not_renewed_here_is_forgotten_after_its_ttl():
    async with serving() as service:
        await acquire(service, "holder")
        assert len(service.grants.held) == 1
        service.clock.ahead += 601
        await until(lambda: not service.grants.held)
        assert service.registry.held == {}
