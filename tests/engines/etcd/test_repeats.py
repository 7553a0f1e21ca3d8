"""What is carried out twice, or late."""

from __future__ import annotations

import pytest

from leasehold import Unavailable
from leasehold.engines.etcd import line, wire
from leasehold.engines.etcd.calls import Calls, LeaseGone
from leasehold.model import Alive, Grant
from leasehold.runtime.base import step


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("shape", [{}, {"mode": "shared"}, {"kind": "semaphore", "limit": 2}])
def test_an_attempt_carried_out_twice_is_one_grant(url, member, bare, monkeypatch, queue, shape, claims) -> None:
    """The answer of the first try is lost on the way, and it is repeated before anybody knows."""
    seat = bare(url)
    step(seat.engine.ping(seat.by()))
    true, lost = Calls._once, []

    async def once(self, method, body, deadline):
        answer = await true(self, method, body, deadline)
        if method is wire.TXN and not lost:
            lost.append(answer)
            return None, []
        return answer

    monkeypatch.setattr(Calls, "_once", once)
    claim = seat.claim(queue=queue, **shape)
    grant = seat.attempt(claim)
    assert isinstance(grant, Grant), "it stood in its own way"
    assert len(claims()) == 1
    assert seat.attempt(claim).token == grant.token
    assert seat.release(claim)
    assert claims() == {}


def test_an_attempt_that_lands_after_its_release_is_refused(url, member, bare, monkeypatch, claims) -> None:
    """A lease in the pool would carry it, and the next claim on that lease would keep it alive for ever."""
    seat = bare(url)
    seat.release(seat.takes(seat.claim()))
    true, late = Calls.ask, []

    async def ask(self, method, request, deadline, doubts=None):
        if method is wire.TXN and not late:
            late.append(request)
            raise Unavailable("silence")
        return await true(self, method, request, deadline, doubts)

    monkeypatch.setattr(Calls, "ask", ask)
    claim = seat.claim(queue=True)
    with pytest.raises(Unavailable):
        seat.attempt(claim)
    seat.release(claim)
    with pytest.raises(LeaseGone):
        step(seat.engine._calls.ask(wire.TXN, late[0], seat.by()))
    assert claims() == {}
    held = seat.takes(seat.claim())
    assert len(claims()) == 1
    seat.release(held)


def test_a_release_that_lands_late_hits_nobody(url, member, bare) -> None:
    """Chairs are used again: the key it names may be another claim's by then."""
    seat = bare(url)
    first = seat.claim()
    seat.takes(first)
    party = seat.engine._shared.parties[first.mark]
    late = line.leave(party.spot, party.created)
    seat.release(first)
    second = seat.takes(seat.claim())
    assert seat.engine._shared.parties[second.mark].spot.key == party.spot.key
    assert not step(seat.engine._calls.ask(wire.TXN, late, seat.by())).succeeded
    assert isinstance(seat.renew(second), Alive)


def test_a_lease_revoked_in_the_pool_harms_nobody(url, member, bare) -> None:
    """Somebody tidies up at etcd: leases that nothing hangs on are gone, and this client does not know."""
    seat, there = bare(url), member.leases()
    seat.release(seat.takes(seat.claim(ttl=60.0)))
    seat.release(seat.takes(seat.claim(ttl=10.0)))
    held = seat.takes(seat.claim(ttl=20.0))
    for lease in member.leases() - there:
        if lease != seat.engine._shared.parties[held.mark].lease.id:
            member.revoke(lease)
    longer = seat.renew(held._replace(ttl=60.0))
    assert isinstance(longer, Alive)
    assert longer.ttl > 55
    assert seat.release(held)
    seat.release(seat.takes(seat.claim(ttl=10.0, queue=True)))
    seat.release(seat.takes(seat.claim(ttl=10.0)))
