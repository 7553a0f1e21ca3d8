"""How many leases of a caller a service counts: those that keep a name occupied at the engine."""

import contextlib

import pytest

from leasehold.model import NO_MIN_HOLD, Busy, Grant
from leasehold.server.routes import LongPoll
from tests.support import probe_server
from tests.support.bare_service import CLIENT, OTHER, acquire, claim_of, deadline, serving
from tests.support.running_server import in_loop


async def granted(service, who="web", name="orders/42", **fields):
    claim = claim_of(who, name, **fields)
    poll = LongPoll(claim, True, lambda _first: contextlib.nullcontext(), "web")
    reply, _ = await acquire(service, who, poll=poll)
    assert isinstance(reply, Grant)
    return claim._replace(token=reply.token)


@in_loop
async def test_released_lease_counts_while_min_hold_keeps_its_name():
    """A caller could fill the engine with names that stay occupied for a day."""
    async with serving() as service:
        claim = await granted(service, min_hold=60.0)
        assert await service.release(claim, deadline(service)) is True
        assert service.grants.leases == {"web": 1}
        service.clock.ahead += 59
        probe_server.disown_expired(service)
        assert service.grants.leases == {"web": 1}
        service.clock.ahead += 2
        probe_server.disown_expired(service)
        assert service.grants.leases == {}


@in_loop
async def test_min_hold_counts_from_the_grant_and_not_from_its_repetition():
    async with serving() as service:
        claim = await granted(service, min_hold=60.0)
        service.clock.ahead += 40
        again = await service.attempt(claim, CLIENT, deadline(service))
        assert isinstance(again, Grant)
        assert again.token == claim.token
        await service.release(claim, deadline(service))
        service.clock.ahead += 21
        probe_server.disown_expired(service)
        assert service.grants.leases == {}


@in_loop
async def test_lease_that_another_client_renews_counts_for_its_caller():
    """Else a key could have any number of leases, by renewing each as another client."""
    async with serving() as service:
        claim = await granted(service)
        await service.renew([claim], CLIENT, deadline(service))
        await service.renew([claim], OTHER, deadline(service))
        assert service.grants.leases == {"web": 1}


@in_loop
async def test_all_names_that_are_free_by_now_count_no_longer():
    async with serving() as service:
        for number in range(3):
            await service.release(await granted(service, name=f"orders/{number}", min_hold=60.0), deadline(service))
        assert service.grants.leases == {"web": 3}
        service.clock.ahead += 61
        probe_server.disown_expired(service)
        assert service.grants.leases == {}


@in_loop
async def test_lease_that_is_given_up_counts_no_longer():
    async with serving() as service:
        claim = await granted(service, min_hold=60.0)
        assert await service.release(claim._replace(min_hold=NO_MIN_HOLD), deadline(service)) is True
        assert service.grants.leases == {}


@pytest.mark.parametrize("end", ["expired", "renewed too late", "broken"])
@in_loop
async def test_ended_lease_counts_while_its_delay_keeps_the_name(end):
    async with serving() as service:
        claim = await granted(service, ttl=30.0)
        assert (await granted(service, ttl=30.0, delay=60.0)).token == claim.token, "the same lease, now with a delay"
        if end == "broken":
            assert await service.break_("", claim.name, claim.token, deadline(service))
        else:
            service.clock.ahead += 31
        if end == "expired":
            probe_server.disown_expired(service)
        else:
            await service.renew([claim], CLIENT, deadline(service))
        assert service.grants.leases == {"web": 1}
        assert isinstance((await acquire(service, "other"))[0], Busy)
        service.clock.ahead += 91
        probe_server.disown_expired(service)
        assert service.grants.leases == {}
        assert isinstance((await acquire(service, "other"))[0], Grant)


@in_loop
async def test_leases_with_the_same_id_count_one_by_one():
    """One id for very many names must not count as one lease."""
    async with serving() as service:
        claims = [await granted(service, name=f"orders/{number}") for number in range(3)]
        assert await granted(service, name="orders/0") == claims[0], "the same lease again"
        assert service.grants.leases == {"web": 3}
        for left, claim in zip((2, 1, 0), claims, strict=True):
            assert await service.release(claim, deadline(service)) is True
            assert service.grants.leases.get("web", 0) == left
        assert (service.grants.held, service.registry.held) == ({}, {})
