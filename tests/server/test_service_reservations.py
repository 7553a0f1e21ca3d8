"""The reservation of a client that is gone goes to the next waiter at once; the client keeps its position."""

import asyncio

import pytest

from leasehold.core.timing import RESERVATION_TTL
from leasehold.model import Grant
from tests.support import probe_server
from tests.support.bare_service import (
    CLIENT,
    OTHER,
    acquire,
    attempt,
    claim_of,
    deadline,
    found,
    queued,
    release,
    serving,
    until,
    until_wakeup,
)
from tests.support.running_server import in_loop
from tests.support.timing import check_seconds


@pytest.mark.parametrize("hang_up", [False, True])
@in_loop
async def test_reservation_of_a_poll_that_ended_goes_to_the_next_at_once(hang_up):
    async with serving() as service:
        await acquire(service, "holder")
        first = acquire(service, "first", wait=60 if hang_up else 0.01)
        if hang_up:
            await queued(service, "first")
            first.poll.end("hung up")
        await first
        second = acquire(service, "second", wait=60)
        await queued(service, "first", "second")
        began = asyncio.get_running_loop().time()
        await release(service, "holder")
        assert isinstance((await second)[0], Grant)
        check_seconds(asyncio.get_running_loop().time() - began, RESERVATION_TTL)
        assert ("first", "passed over") in await found(service)


@in_loop
async def test_reservation_of_a_dead_client_goes_to_the_next_at_once():
    async with serving() as service:
        await acquire(service, "holder")
        stream, other = service.open_stream(CLIENT), service.open_stream(OTHER)
        await attempt(service, "dead")
        await attempt(service, "next", OTHER)
        service.close_stream(CLIENT, stream)
        began = asyncio.get_running_loop().time()
        await release(service, "holder")
        assert await until_wakeup(other) == claim_of("next").id_hash
        check_seconds(asyncio.get_running_loop().time() - began, RESERVATION_TTL)


@in_loop
async def test_dead_client_does_not_keep_a_reservation_it_gets_after_a_recheck():
    """An engine's `wait` ends early for a claim that is to attempt again without a notification."""
    async with serving() as service:
        await acquire(service, "holder")
        stream, other = service.open_stream(CLIENT), service.open_stream(OTHER)
        dead, wait, due, waits = claim_of("dead").id_hash, service.engine.real.wait, asyncio.Event(), []

        async def wait_until_due(claim, busy, seconds):
            waits.append(claim.id_hash)
            if waits.count(dead) == 1:
                service.registry.waiting[dead].recheck_by = service.runtime.now()
                await due.wait()
            else:
                await wait(claim, busy, seconds)

        service.engine.real.wait = wait_until_due
        await attempt(service, "dead")
        await until(lambda: dead in waits)
        await attempt(service, "next", OTHER)
        service.close_stream(CLIENT, stream)
        due.set()
        await until(lambda: service.routes[dead].task.done() or waits.count(dead) == 2)
        service.engine.calls.clear()
        await release(service, "holder")
        await until(lambda: "decline" in service.engine.calls)
        assert await until_wakeup(other) == claim_of("next").id_hash


@in_loop
async def test_reservation_is_declined_for_its_own_client_only():
    """Others see most digits of a claim's hash, and may not let a waiter lose its turn."""
    async with serving() as service:
        await acquire(service, "holder")
        service.open_stream(CLIENT)
        await attempt(service, "first")
        await attempt(service, "second", OTHER)
        await release(service, "holder")
        claim = claim_of("first")._replace(id="")
        for client in (OTHER, ("other", CLIENT[1]), ("", "")):
            assert not await service.decline(claim, client, deadline(service))
        assert ("first", "reserved") in await found(service)
        assert await service.decline(claim, CLIENT, deadline(service))
        assert ("second", "reserved") in await found(service)


@in_loop
async def test_client_that_dies_after_its_wakeup_does_not_hold_up_the_queue():
    async with serving() as service:
        await acquire(service, "holder")
        stream, other = service.open_stream(CLIENT), service.open_stream(OTHER)
        await attempt(service, "dead")
        await attempt(service, "next", OTHER)
        await release(service, "holder")
        await until_wakeup(stream)
        service.engine.calls.clear()
        service.close_stream(CLIENT, stream)
        assert await until_wakeup(other) == claim_of("next").id_hash
        assert "decline" in service.engine.calls, "else the reservation has expired"


@in_loop
async def test_client_without_a_stream_has_time_to_poll_its_reservation():
    async with serving() as service:
        await acquire(service, "holder")
        await attempt(service, "polls")
        await attempt(service, "next")
        await release(service, "holder")
        await asyncio.sleep(0.3)  # pause: such a client polls about every 0.2 s
        assert isinstance(await attempt(service, "polls"), Grant)


@in_loop
async def test_reservation_of_an_unknown_claim_keeps_its_position():
    async with serving() as service:
        await acquire(service, "holder")
        service.open_stream(CLIENT)
        other = service.open_stream(OTHER)
        await attempt(service, "elsewhere")
        await attempt(service, "next", OTHER)
        probe_server.disown(service, claim_of("elsewhere"))
        await release(service, "holder")
        assert await until_wakeup(other) == claim_of("next").id_hash
        assert ("elsewhere", "passed over") in await found(service)
