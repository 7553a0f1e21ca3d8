"""A grant whose answer was lost: what the next attempt may write, if the key has changed meanwhile."""

from __future__ import annotations

import time

import pytest

from leasehold import Unavailable
from leasehold.engines.etcd import queue
from leasehold.engines.etcd.client_state import claim_key
from leasehold.model import Alive, Busy, Grant
from tests.support import probe_etcd

DELAY = 3.0


@pytest.fixture
def after_grant(monkeypatch):
    """Call a function when etcd has carried out the engine's next transaction that writes this claim as held; with
    `repeat`, send the transaction a second time, as after a broken connection."""

    def intercept(driver, claim, action=lambda: None, repeat=False) -> None:
        rpc, original = driver.engine.rpc, driver.engine.rpc.call

        async def call(method, request, deadline, *more):
            answer = await original(method, request, deadline, *more)
            puts = [op.put for op in getattr(request, "success", ()) if op.put is not None]
            if any(queue.parse_value(put.value)[:2] == (claim.id_hash, "held") for put in puts):
                monkeypatch.setattr(rpc, "call", original)
                action()
                return await original(method, request, deadline, *more) if repeat else answer
            return answer

        monkeypatch.setattr(rpc, "call", call)

    return intercept


def lose_answer() -> None:
    raise Unavailable("the answer was lost", engine="etcd")


def make_first(holder, other, waiter, held) -> None:
    """Queue the waiter behind the holder, and release the holder."""
    assert isinstance(other.attempt(waiter), Busy)
    holder.release(held)


def test_broken_grant_does_not_return_when_its_answer_was_lost(url, make_driver, after_grant) -> None:
    holder, other, operator = (make_driver(url) for _ in range(3))
    held, waiter = holder.acquire(holder.claim()), other.claim(queue=True, delay=DELAY)
    make_first(holder, other, waiter, held)
    after_grant(other, waiter, lose_answer)
    with pytest.raises(Unavailable):
        other.attempt(waiter)
    (holding,) = operator.inspect()
    assert holding.state == "held", "granted, but its client does not know"
    broken_at = time.monotonic()
    assert operator.break_(waiter._replace(token=holding.token))
    other.registry.on_notification("reserved", waiter.id_hash, 0.0, None)  # that of the holder's release comes late
    reply = other.attempt(waiter)
    assert isinstance(reply, Busy) or time.monotonic() > broken_at + DELAY, f"the broken grant is back: {reply}"
    end = time.monotonic() + DELAY + 30
    while not isinstance(reply := other.attempt(waiter), Grant):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert time.monotonic() >= broken_at + DELAY
    assert reply.token > holding.token, "a new grant, not the broken one"


def test_broken_grant_does_not_return_as_a_waiter(url, make_driver, after_grant) -> None:
    """A claim first writes its key as that of a holder, and if it has to wait, as that of a waiter. If the holder ahead
    leaves in between, the claim counts as granted, and an operator may break it."""
    holder, other, operator = (make_driver(url) for _ in range(3))
    held, waiter = holder.acquire(holder.claim()), other.claim(queue=True, delay=DELAY)
    broken: list[float] = []

    def release_and_break() -> None:
        holder.release(held)
        (holding,) = operator.inspect()
        broken.append(time.monotonic())
        assert operator.break_(waiter._replace(token=holding.token))

    after_grant(other, waiter, release_and_break)
    reply = other.attempt(waiter)
    assert isinstance(reply, Busy) or time.monotonic() > broken[0] + DELAY, f"the broken grant is back: {reply}"


def test_repeated_attempt_gets_the_grant_whose_answer_was_lost(url, make_driver, after_grant) -> None:
    holder, other = make_driver(url), make_driver(url)
    held, waiter = holder.acquire(holder.claim()), other.claim(queue=True)
    make_first(holder, other, waiter, held)
    after_grant(other, waiter, lose_answer)
    with pytest.raises(Unavailable):
        other.attempt(waiter)
    (holding,) = other.inspect()
    reply = other.attempt(waiter)
    assert isinstance(reply, Grant)
    assert reply.token == holding.token
    assert other.release(waiter._replace(token=reply.token))
    assert not other.inspect()


@pytest.mark.parametrize("contended", [False, True])
def test_repeated_grant_transaction_is_one_grant(url, make_driver, after_grant, contended: bool) -> None:
    holder, other = make_driver(url), make_driver(url)
    waiter = other.claim(queue=True)
    if contended:
        make_first(holder, other, waiter, holder.acquire(holder.claim()))
    after_grant(other, waiter, repeat=True)
    reply = other.attempt(waiter)
    assert isinstance(reply, Grant)
    assert [holding.token for holding in other.inspect()] == [reply.token]
    assert isinstance(other.renew(waiter._replace(token=reply.token)), Alive)
    assert other.release(waiter._replace(token=reply.token))


def test_waiter_is_renewed_when_the_answer_to_its_requeue_was_lost(url, member, claims, make_driver) -> None:
    """The key is on the new etcd lease, not on the one that the client knows of."""
    holder, other = make_driver(url), make_driver(url)
    holder.acquire(holder.claim())
    (held_key,) = claims()
    waiter = other.claim(queue=True)
    original = other.engine.rpc.call

    async def call(method, request, deadline, *more):
        answer = await original(method, request, deadline, *more)
        puts = [op.put for op in getattr(request, "success", ()) if op.put is not None]
        if any(queue.parse_value(put.value)[:2] == (waiter.id_hash, "waiting") for put in puts):
            other.engine.rpc.call = original
            lose_answer()
        return answer

    other.engine.rpc.call = call
    with pytest.raises(Unavailable):
        other.attempt(waiter)
    assert isinstance(other.attempt(waiter), Busy)
    ((_, lease_id),) = [(key, lease) for key, lease in claims().items() if key != held_key]
    assert probe_etcd.state(other.engine).claim_states[claim_key(waiter)].key_lease.id == lease_id
