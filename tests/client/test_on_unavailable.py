"""What `on_unavailable` of a lock does while the engine does not answer."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from leasehold import AsyncClient, Client, ConfigError, Event, LeaseState, NotAcquired, Unavailable
from leasehold.client.acquire import AcquireRequest
from leasehold.core import timing
from leasehold.engines import memory
from leasehold.engines.memory import MemoryEngine
from leasehold.errors import NotSent, Overloaded, Reentered
from leasehold.model import Busy
from leasehold.runtime.base import run_sync
from leasehold.testing import Clock, Faults, drop_answer, drop_request, faulty, silently
from leasehold.testing.clock import ClockThreads
from tests.support import probe

MakeClient = Callable[..., Client]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def make_client(clock: Clock, faults: Faults, events: list[Event]) -> Iterator[MakeClient]:
    """Clients of one memory engine on the simulated clock. Their calls meet `faults`."""
    server = memory.MemoryServer(ClockThreads(clock))
    clients = []

    def open_(_config: Any, runtime: Any, registry: Any) -> Any:
        return memory.MemoryEngine(runtime, registry, memory.InProcessTransport(server))

    def make(**options: Any) -> Client:
        client = Client(engine=faulty(open_, faults), runtime=ClockThreads(clock), on_event=events.append, **options)
        clients.append(client)
        return client

    yield make
    faults.clear()
    for client in clients:
        client.close()


def cut_off(faults: Faults) -> None:
    for verb in ("attempt", "renew", "release", "ping", "forget"):
        faults.always(verb, drop_request)


@pytest.mark.parametrize("value", ["ignore", "", None, True])
def test_unknown_on_unavailable_is_refused(value) -> None:
    with Client("memory://") as client, pytest.raises(ConfigError, match="on_unavailable must be one of raise, wait"):
        client.lock("a", on_unavailable=value)


def test_run_is_refused_where_fencing_is_required() -> None:
    with Client("memory://") as client:
        for build in (lambda **options: client.lock("a", **options), client.rwlock("a").write):
            with pytest.raises(ConfigError, match="has no token"):
                build(on_unavailable="run", require={"fencing"})
        with pytest.raises(ConfigError, match="has no token"):
            client.election("a", on_unavailable="run")


def test_lease_that_engine_granted_is_guaranteed(make_client) -> None:
    for value in ("raise", "wait", "run"):
        with make_client().lock(value, on_unavailable=value) as lease:
            assert lease.guaranteed
            assert lease.token > 0


# ----------------------------------------------------------------------------- wait


@pytest.mark.parametrize("require", [(), {"fair"}])
def test_wait_outlasts_outage_at_first_contact(make_client, clock, faults, require) -> None:
    client = make_client()
    for verb in ("attempt", "ping"):
        faults.next(verb, *[drop_request] * 6)
    with clock.skipping(), client.lock("a", wait=60, require=require, on_unavailable="wait") as lease:
        assert lease.guaranteed
    assert not probe.waiters(client)


def test_wait_gets_grant_whose_answer_was_lost(make_client, clock, faults) -> None:
    client = make_client()
    faults.next("attempt", drop_answer, drop_request, drop_request)
    with clock.skipping(), client.lock("a", wait=60, on_unavailable="wait"):
        assert [holding.state for holding in client.inspect("a")] == ["held"]


@pytest.mark.parametrize("fault", [drop_request, silently(drop_request)], ids=lambda fault: fault.label)
@pytest.mark.parametrize("require", [(), {"fair"}])
def test_wait_raises_unavailable_when_wait_is_over(make_client, clock, faults, fault, require) -> None:
    client = make_client()
    faults.always("attempt", fault)
    faults.always("ping", fault)
    began = clock.now()
    with clock.skipping(), pytest.raises(Unavailable):
        client.lock("a", wait=12, require=require, on_unavailable="wait").acquire()
    assert 12 <= clock.now() - began <= 12.5
    assert 3 <= faults.calls.count("ping" if require else "attempt") <= 20  # with growing pauses
    assert not probe.waiters(client)


def test_wait_of_0_tries_once(make_client, faults) -> None:
    faults.always("attempt", drop_request)
    with pytest.raises(Unavailable):
        make_client().lock("a", wait=0, on_unavailable="wait").acquire()
    assert faults.calls.count("attempt") == 1


def test_second_read_lock_of_a_thread_is_not_repeated(make_client, clock, faults) -> None:
    # It would join the queue, and a writer that is queued there may wait for the first one.
    lock = make_client().rwlock("a").read(on_unavailable="wait")
    with lock:
        faults.next("attempt", drop_request)
        with clock.skipping(), pytest.raises(Unavailable):
            lock.acquire()


def test_close_ends_wait_for_engine(make_client, faults, wait_until) -> None:
    client, errors = make_client(), []
    faults.always("attempt", drop_request)

    def acquire() -> None:
        try:
            client.lock("a", on_unavailable="wait").acquire()
        except ConfigError as closed:
            errors.append(closed)

    thread = threading.Thread(target=acquire, daemon=True)
    thread.start()
    wait_until(lambda: faults.calls.count("attempt") >= 2)
    client.close()
    thread.join(30)
    assert errors
    assert not probe.waiters(client)


def test_wait_ends_with_not_acquired_for_busy_lock(make_client, clock, faults) -> None:
    holder, client = make_client(), make_client()
    with holder.lock("a"):
        faults.next("attempt", drop_request)
        with clock.skipping(), pytest.raises(NotAcquired):
            client.lock("a", wait=5, on_unavailable="wait").acquire()


# ------------------------------------------------------------------------------ run


def test_run_returns_lease_that_is_not_guaranteed(make_client, clock, faults, events, caplog) -> None:
    client = make_client()
    cut_off(faults)
    with caplog.at_level(logging.WARNING), client.lock("a", on_unavailable="run") as lease:
        assert not lease.guaranteed
        assert (lease.state, lease.held, lease.remaining) == (LeaseState.AT_RISK, True, 0.0)
        lease.check()
        assert "not guaranteed" in repr(lease)
        clock.advance(600)
        assert lease.held
    assert lease.state is LeaseState.RELEASED
    assert [event.kind for event in events] == ["attempted", "unguaranteed"]
    assert "WITHOUT its lock" in caplog.text
    assert "renew" not in faults.calls


def test_unguaranteed_lease_has_no_token_for_a_fence(make_client, faults) -> None:
    cut_off(faults)
    with make_client().lock("a", on_unavailable="run") as lease:
        for use in (lambda: lease.token, lease.verify, lease.renew):
            with pytest.raises(Unavailable, match="not guaranteed"):
                use()


def test_run_releases_only_claim_without_an_answer(make_client, clock, faults) -> None:
    client, other = make_client(), make_client()
    faults.next("attempt", drop_answer)  # granted, and the client does not know it
    faults.next("forget", drop_request)
    with client.lock("a", on_unavailable="run") as lease:
        assert not lease.guaranteed
        clock.advance(5)
        assert faults.calls.count("release") == 1  # the watchdog released the claim that was granted
        other.lock("a", wait=0).acquire().release()
    assert faults.calls.count("release") == 2  # that of the other client


def test_run_never_runs_under_busy_lock(make_client, clock, faults) -> None:
    holder, client = make_client(), make_client()
    with holder.lock("a"):
        with pytest.raises(NotAcquired):
            client.lock("a", wait=0, on_unavailable="run").acquire()
        faults.at(1, drop_request, {"attempt"})  # the engine says busy, and then nothing any more
        with clock.skipping(), pytest.raises(Unavailable):
            client.lock("a", wait=5, on_unavailable="run").acquire()


def test_unguaranteed_lease_ends_at_max_hold(make_client, clock, faults) -> None:
    client, lost = make_client(), []
    cut_off(faults)
    lease = client.lock("a", max_hold=3, on_unavailable="run").acquire()
    lease.on_lost(lost.append)
    clock.advance(4)
    assert (lease.lost_reason, lost) == ("max_hold", [lease])
    assert not lease.release()


def test_unguaranteed_lease_is_reentered_and_ended_once(make_client, faults) -> None:
    client = make_client()
    cut_off(faults)
    lock = client.lock("a", reentrant=True, on_unavailable="run")
    with lock as outer:
        with lock as inner:
            assert inner is outer
        assert outer.held
    assert outer.state is LeaseState.RELEASED
    assert not probe.registry(client).held


def test_unguaranteed_lease_ends_with_its_client_or_reference(make_client, faults) -> None:
    client = make_client()
    cut_off(faults)
    kept = client.lock("a", on_unavailable="run").acquire()
    client.lock("b", on_unavailable="run").acquire()  # dropped: without a warning, because it protects nothing
    assert len(probe.registry(client).held) == 1
    faults.clear()
    client.close()
    assert not kept.held


def test_run_covers_every_member_of_multilock(make_client, faults) -> None:
    client = make_client()
    cut_off(faults)
    with client.multilock(["a", "b"], on_unavailable="run") as leases:
        assert (leases.guaranteed, leases.held) == (False, True)
    faults.clear()
    with client.multilock(["a", "b"], on_unavailable="run") as leases:
        assert leases.guaranteed


def test_decorated_function_runs_without_engine(make_client, faults) -> None:
    client = make_client()
    cut_off(faults)

    @client.locked("job:{item}", on_unavailable="run")
    def work(lease: Any, item: str) -> tuple[str, bool]:
        return item, lease.guaranteed

    assert work("a") == ("a", False)


def test_asyncio_runs_and_waits_without_engine(faults) -> None:
    async def main() -> None:
        async with AsyncClient("memory://", engine=faulty(memory.open, faults)) as client:
            faults.next("attempt", drop_request)
            async with client.lock("a", on_unavailable="run") as lease:
                assert not lease.guaranteed
            faults.next("attempt", drop_request, drop_request)
            async with client.lock("a", wait=60, on_unavailable="wait") as lease:
                assert lease.guaranteed

    asyncio.run(main())


def overloaded_request(bench, **options: object) -> AcquireRequest:
    return probe.acquire_request(bench.client(call_timeout=5).lock("a", **options))


def test_caller_that_may_run_retries_after_overload_for_call_timeout(bench) -> None:
    request = overloaded_request(bench, on_unavailable="run")
    error, now = Overloaded("busy", engine="memory"), bench.clock.at
    assert request.may_retry(error, now + 4.9)
    assert not request.may_retry(error, now + 5.0)
    request.answered = True  # the engine works: the caller must not run without a grant
    assert request.may_retry(error, now + 5.0)


@pytest.mark.parametrize(("is_queued", "tries"), [(True, 1), (False, 7)])
def test_pauses_after_overload_do_not_grow_for_a_queued_claim(bench, monkeypatch, is_queued, tries) -> None:
    """It may get its reservation soon."""
    asked = []
    monkeypatch.setattr(timing, "overload_pause", lambda *args: asked.append(args[0]) or 0.0)
    request = overloaded_request(bench)
    request.queued, request.failures = is_queued, 7
    run_sync(request.pause_before_retry(Overloaded("busy", engine="memory", retry_in=1.0)))
    assert asked == [tries]
    # Heartbeats keep its place, and are sent only for a claim that has one.
    assert [waiter.refused for waiter in probe.waiters(bench.clients[0])] == [not is_queued]


def test_pause_lasts_until_the_circuit_breaker_lets_calls_through(bench, monkeypatch) -> None:
    async def record(_request: object, seconds: float) -> None:
        pauses.append(seconds)

    request, pauses = overloaded_request(bench), []
    monkeypatch.setattr(AcquireRequest, "pause", record)
    run_sync(request.pause_before_retry(NotSent("the circuit breaker is open", retry_in=30.0)))
    assert pauses == [30.0]


def test_call_from_inside_the_engine_is_never_repeated(bench) -> None:
    # The engine cannot answer before the call that a signal handler interrupted has returned.
    request = overloaded_request(bench, on_unavailable="wait")
    assert request.may_retry(Unavailable("silence"), bench.clock.at)
    assert not request.may_retry(Reentered(), bench.clock.at)


@pytest.mark.parametrize("on_unavailable", ["wait", "raise"])
def test_engine_that_fails_during_a_wait_ends_it_unless_it_is_outlasted(bench, monkeypatch, on_unavailable) -> None:
    async def fail(*_args: object) -> None:
        raise Unavailable("silence")

    request = overloaded_request(bench, on_unavailable=on_unavailable)
    request.join_queue()
    monkeypatch.setattr(MemoryEngine, "wait", fail)
    with nullcontext() if on_unavailable == "wait" else pytest.raises(Unavailable, match="silence"):
        run_sync(request.after_busy(Busy(position=0)))


@pytest.mark.parametrize("sent", [True, False], ids=["in the attempt", "before the attempt"])
def test_queued_claim_without_an_answer_is_released_and_gets_a_new_id(bench, sent) -> None:
    request = overloaded_request(bench, on_unavailable="wait")
    request.sent, request.queued = sent, True
    released, old = [], request.claim
    bench.transport.post = lambda _verb, args: released.append(args[0].id) or True
    assert request.after_failure(Unavailable("silence"))
    assert released == [old.id]
    assert request.claim.id != old.id
    assert not request.sent
    assert not request.queued


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize(("error", "keeps_id"), [(NotSent("refused"), True), (Unavailable("silence"), False)])
def test_only_a_claim_that_was_not_sent_keeps_its_id_for_the_retry(bench, error, keeps_id, queued) -> None:
    request = overloaded_request(bench, on_unavailable="wait")
    request.sent, request.queued = True, queued
    claim_id = request.claim.id
    assert request.after_failure(error)
    assert (request.claim.id == claim_id) is keeps_id
    assert (request.sent, request.queued) == (False, queued and keeps_id)
    assert request.claim.queue


def test_answer_makes_the_pauses_short_again(bench) -> None:
    request = overloaded_request(bench, on_unavailable="wait")
    request.failures = 7
    run_sync(request.after_busy(Busy()))
    assert request.failures == 0
    assert request.claim.queue
