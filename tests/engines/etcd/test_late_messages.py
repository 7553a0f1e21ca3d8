"""Requests that etcd executes twice or late."""

from __future__ import annotations

import pytest

from leasehold import Unavailable
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.release import EtcdRelease
from leasehold.engines.etcd.rpc import LeaseNotFound, RpcClient
from leasehold.model import Alive, Grant
from leasehold.runtime.base import run_sync


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("shape", [{}, {"mode": "shared"}, {"kind": "semaphore", "limit": 2}])
def test_attempt_executed_twice_is_one_grant(url, member, make_driver, monkeypatch, queue, shape, claims) -> None:
    """The first answer is lost, so the client repeats an attempt that etcd has already executed."""
    driver = make_driver(url)
    run_sync(driver.engine.ping(driver.deadline()))
    original, lost = RpcClient._try_once, []

    async def try_once(self, method, body, deadline):
        answer = await original(self, method, body, deadline)
        if method is messages.TXN and not lost:
            lost.append(answer)
            return None, []
        return answer

    monkeypatch.setattr(RpcClient, "_try_once", try_once)
    claim = driver.claim(queue=queue, **shape)
    grant = driver.attempt(claim)
    assert isinstance(grant, Grant), "the claim was queued behind itself"
    assert len(claims()) == 1
    assert driver.attempt(claim).token == grant.token
    assert driver.release(claim)
    assert claims() == {}


def test_attempt_that_arrives_after_its_release_is_refused(url, member, make_driver, monkeypatch, claims) -> None:
    """If the late key were attached to a pooled lease, the next claim on that lease would keep it alive for ever."""
    driver = make_driver(url)
    driver.release(driver.acquire(driver.claim()))
    original, late = RpcClient.call, []

    async def call(self, method, request, deadline, unconfirmed=None):
        if method is messages.TXN and not late:
            late.append(request)
            raise Unavailable("silence")
        return await original(self, method, request, deadline, unconfirmed)

    monkeypatch.setattr(RpcClient, "call", call)
    claim = driver.claim(queue=True)
    with pytest.raises(Unavailable):
        driver.attempt(claim)
    driver.release(claim)
    with pytest.raises(LeaseNotFound):
        run_sync(driver.engine.rpc.call(messages.TXN, late[0], driver.deadline()))
    assert claims() == {}
    held = driver.acquire(driver.claim())
    assert len(claims()) == 1
    driver.release(held)


def test_late_release_does_not_end_another_claim(url, member, make_driver) -> None:
    """Keys are reused: when the release arrives, its key may belong to another claim."""
    driver = make_driver(url)
    first = driver.claim()
    driver.acquire(first)
    claim_state = driver.engine._client_state.claim_states[first.id_hash]
    late = queue.dequeue_txn(claim_state.queue_key, claim_state.create_revision)
    driver.release(first)
    second = driver.acquire(driver.claim())
    assert driver.engine._client_state.claim_states[second.id_hash].queue_key.key == claim_state.queue_key.key
    assert not run_sync(driver.engine.rpc.call(messages.TXN, late, driver.deadline())).succeeded
    assert isinstance(driver.renew(second), Alive)


def test_revoked_lease_in_the_pool_is_replaced(url, member, make_driver) -> None:
    """An operator revokes leases without keys, and this client does not know."""
    driver, leases_before = make_driver(url), member.leases()
    driver.release(driver.acquire(driver.claim(ttl=60.0)))
    driver.release(driver.acquire(driver.claim(ttl=10.0)))
    held = driver.acquire(driver.claim(ttl=20.0))
    for lease in member.leases() - leases_before:
        if lease != driver.engine._client_state.claim_states[held.id_hash].key_lease.id:
            member.revoke(lease)
    longer = driver.renew(held._replace(ttl=60.0))
    assert isinstance(longer, Alive)
    assert longer.ttl > 55
    assert driver.release(held)
    driver.release(driver.acquire(driver.claim(ttl=10.0, queue=True)))
    driver.release(driver.acquire(driver.claim(ttl=10.0)))


@pytest.mark.parametrize("how", ["break", "release"])
def test_cooling_key_stays_when_the_answer_to_its_write_is_lost(url, make_driver, monkeypatch, how) -> None:
    """The repeated write finds that the key has changed: by the first try. It must not undo that."""
    driver = make_driver(url)
    held = driver.acquire(driver.claim(delay=20.0) if how == "break" else driver.claim(min_hold=20.0))
    original, lost = RpcClient._try_once, []

    async def try_once(self, method, body, deadline):
        answer = await original(self, method, body, deadline)
        if method is messages.TXN and not lost:
            lost.append(answer)
            return None, []
        return answer

    monkeypatch.setattr(RpcClient, "_try_once", try_once)
    if how == "break":
        assert run_sync(driver.engine.break_("", "job", held.token, driver.deadline()))
    else:
        assert driver.release(held) is None
    run_sync(driver.engine.ping(driver.deadline()))  # requests without an answer, such as revokes, were sent before
    assert [holding.state for holding in run_sync(driver.engine.inspect("", "", False, driver.deadline()))] == [
        "cooling"
    ]


def test_lease_released_twice_at_once_is_pooled_once(url, make_driver) -> None:
    """The client's close() and its watchdog may both send a pending release. A lease carries one claim at a time."""
    driver = make_driver(url)
    held = driver.acquire(driver.claim())
    state = driver.engine._client_state
    releases = [EtcdRelease(state, driver.engine.rpc, driver.runtime, held, driver.deadline()) for _ in range(2)]
    claim_state = state.claim_states[held.id_hash]
    for release in releases:
        run_sync(release._release_leases(claim_state))
    first, second = (run_sync(state.leases.get(driver.engine.rpc, 30, driver.deadline())) for _ in range(2))
    assert first.id != second.id
