"""The service never ends a grant by itself, and refuses claims without an id."""

import asyncio

import pytest

from leasehold.config import EngineConfig
from leasehold.core.timing import WAITER_TTL
from leasehold.errors import ConfigError
from leasehold.model import Gone, Grant
from leasehold.server.problems import Problem
from leasehold.server.service import Service
from tests.support import probe_server
from tests.support.bare_service import CLIENT, acquire, attempt, claim_of, deadline, found, release, serving, until
from tests.support.running_server import in_loop

# -- only a release or its caller's own id ends a grant


@in_loop
async def test_hang_up_during_an_attempt_leaves_its_grant():
    async with serving() as service:
        gate = service.engine.gates["attempt"] = asyncio.Event()
        asked = acquire(service, "web", wait=10)
        await until(lambda: service.engine.calls)
        asked.poll.end("hung up")
        gate.set()
        assert isinstance((await asked)[0], Grant)
        assert await found(service) == [("web", "held")]
        assert "release" not in service.engine.calls


@in_loop
async def test_cancelled_request_does_not_cancel_its_attempt():
    async with serving() as service:
        gate = service.engine.gates["attempt"] = asyncio.Event()
        asked = acquire(service, "web", wait=10)
        await until(lambda: service.engine.calls)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        gate.set()
        await until(lambda: not probe_server.attempts(service))
        assert service.engine.cancelled == []
        assert await found(service) == [("web", "held")]


@in_loop
async def test_hang_up_during_an_attempt_releases_an_id_made_here():
    async with serving() as service:
        gate = service.engine.gates["attempt"] = asyncio.Event()
        asked = acquire(service, "web", caller_made_id=False)
        await until(lambda: service.engine.calls)
        asked.poll.end("hung up")
        gate.set()
        await asked
        assert await found(service) == []


@in_loop
async def test_stream_that_ends_leaves_its_clients_grants():
    async with serving() as service:
        stream = service.open_stream(CLIENT)
        assert isinstance(await attempt(service, "web"), Grant)
        service.close_stream(CLIENT, stream)
        service.clock.ahead += 2 * WAITER_TTL
        await until(lambda: not service.routes)
        assert await found(service) == [("web", "held")]


@in_loop
async def test_release_without_an_id_leaves_a_grant():
    async with serving() as service:
        await acquire(service, "holder")
        assert await service.release(claim_of("holder", id=""), deadline(service)) is False
        assert await found(service) == [("holder", "held")]


# -- claims that are refused, or over


@in_loop
async def test_attempt_without_an_id_is_refused():
    async with serving() as service:
        with pytest.raises(Problem) as refused:
            await service.attempt(claim_of("web", id=""), CLIENT, deadline(service))
        assert refused.value.kind == "invalid"


@in_loop
async def test_renewal_of_a_claim_that_is_over_says_gone():
    async with serving() as service:
        grant, _ = await acquire(service, "holder")
        await release(service, "holder")
        replies = await service.renew([claim_of("holder", token=grant.token)], None, deadline(service))
        assert replies == [Gone("unknown")]


@pytest.mark.parametrize("url", ["zookeeper://127.0.0.1:1", "http://127.0.0.1:1"])
def test_engine_that_a_server_cannot_serve_is_refused(url):
    with pytest.raises(ConfigError, match="cannot serve"):
        Service(EngineConfig.parse(url, 5.0))
