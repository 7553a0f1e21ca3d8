"""The service over the memory engine: its three rules, long-polls and wake-ups, without HTTP."""

import asyncio
import contextlib

import pytest

from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.core.timing import RESERVATION_TTL, WAITER_TTL
from leasehold.engines.remote.wire import Hello, Lost, Moved, Wakeup
from leasehold.errors import ConfigError, NotSent, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import boot_clock
from leasehold.server.problems import Draining, Problem
from leasehold.server.routes import LongPoll
from leasehold.server.service import Service
from tests.support.running_server import in_loop
from tests.support.timing import check_seconds

CLIENT = ("anyone", "client-1")
OTHER = ("anyone", "client-2")


class GatedEngine:
    """The engine of a service. A verb in `gates` begins, and gets its answer when the test opens the gate."""

    def __init__(self, engine):
        self._engine, self.gates, self.calls, self.cancelled = engine, {}, [], []

    def __getattr__(self, name):
        verb = getattr(self._engine, name)
        if name not in ("attempt", "release", "renew", "decline", "ping"):
            return verb

        async def gated(*args):
            self.calls.append(name)
            try:
                answer = await verb(*args)
                if (gate := self.gates.get(name)) is not None:
                    await gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            if isinstance(answer, list | Grant | Busy | bool | type(None)):
                return answer
            raise answer

        return gated


class Clock:
    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return boot_clock() + self.ahead


@contextlib.asynccontextmanager
async def serving(call_timeout=60.0):
    clock = Clock()
    service = Service(EngineConfig.parse("memory://", call_timeout), Loop(clock))
    service.engine, service.clock = GatedEngine(service.engine), clock
    await service.start()
    service.engine.calls.clear()  # the ping of the start
    try:
        yield service
    finally:
        service.engine.gates.clear()
        await service.stop()


def claim_of(who, name="orders/42", **fields):
    claim_id = f"id-of-{who}".ljust(20, "-")
    return Claim("", name, claim_id, hash_id(claim_id), Holder(who), fields.pop("ttl", 600.0))._replace(**fields)


def acquire(service, who, wait=0.0, caller_made_id=True, poll=None):
    """A request of this caller, as a task."""
    poll = poll or LongPoll(claim_of(who), caller_made_id, lambda _first: contextlib.nullcontext())
    task = asyncio.ensure_future(service.acquire(poll, wait, float("inf")))
    task.poll = poll
    return task


def attempt(service, who, client=CLIENT, queue=True):
    return service.attempt(claim_of(who, queue=queue), client, deadline(service))


def release(service, who):
    return service.release(claim_of(who), deadline(service))


def deadline(service):
    return service.runtime.now() + 60


async def found(service, name="orders/42"):
    """Holder and state of every claim on the name, in order."""
    return [(h.holder.label, h.state) for h in await service.engine._engine.inspect("", name, True, deadline(service))]


async def until(condition):
    while not (value := await condition() if asyncio.iscoroutinefunction(condition) else condition()):
        await asyncio.sleep(0.002)
    return value


async def queued(service, *who):
    """Return when these wait in this order."""

    async def as_expected():
        return [label for label, state in await found(service) if state == "waiting"] == list(who)

    await until(as_expected)


# -- rule 1: the service never ends a grant by itself


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
        await until(lambda: not service._attempts)
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


# -- rule 2: a release waits for the attempts of the same claim


@in_loop
async def test_release_waits_for_an_attempt_under_way():
    async with serving() as service:
        gate = service.engine.gates["attempt"] = asyncio.Event()
        asked = acquire(service, "web")
        await until(lambda: service.engine.calls)
        releasing = asyncio.ensure_future(release(service, "web"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert "release" not in service.engine.calls
        gate.set()
        assert await releasing is True
        await asked
        assert await found(service) == []


@in_loop
async def test_release_waits_for_every_attempt_under_way():
    async with serving() as service:
        first = service.engine.gates["attempt"] = asyncio.Event()
        asked = [asyncio.ensure_future(attempt(service, "web"))]
        await until(lambda: len(service.engine.calls) == 1)
        second = service.engine.gates["attempt"] = asyncio.Event()
        asked.append(asyncio.ensure_future(attempt(service, "web")))
        await until(lambda: len(service.engine.calls) == 2)
        releasing = asyncio.ensure_future(release(service, "web"))
        first.set()
        await asked[0]
        for _ in range(20):
            await asyncio.sleep(0)
        assert "release" not in service.engine.calls
        second.set()
        assert await releasing is True


@in_loop
async def test_release_gives_up_at_its_deadline_if_an_attempt_lasts():
    async with serving() as service:
        gate = service.engine.gates["attempt"] = asyncio.Event()
        asked = acquire(service, "web")
        await until(lambda: service.engine.calls)
        with pytest.raises(Unavailable, match="still under way"):
            await service.release(claim_of("web"), service.runtime.now())
        gate.set()
        await asked


@in_loop
async def test_id_of_an_attempt_under_way_is_refused_for_another_name():
    """An engine knows its waiters by their ids: two names would share one waiter, and one would not be woken."""
    async with serving() as service:
        await acquire(service, "holder")
        gate = service.engine.gates["attempt"] = asyncio.Event()
        first = asyncio.ensure_future(attempt(service, "waiter"))
        await until(lambda: len(service.engine.calls) == 2)
        other = claim_of("waiter", "invoices/7", queue=True)
        with pytest.raises(Problem, match="waits for another name"):
            await service.attempt(other, CLIENT, deadline(service))
        assert await service.release(other, deadline(service)) is False
        gate.set()
        assert isinstance(await first, Busy)
        await queued(service, "waiter")


@in_loop
async def test_release_ends_a_long_poll_which_attempts_no_more():
    async with serving() as service:
        await acquire(service, "holder")
        asked = acquire(service, "web", wait=60)
        await queued(service, "web")
        assert await release(service, "web") is False
        assert isinstance((await asked)[0], Busy)
        assert await release(service, "holder") is True
        assert await found(service) == []


# -- rule 3: routes live for 15 s


@in_loop
async def test_route_of_a_silent_client_is_dropped_after_15_s():
    async with serving() as service:
        await acquire(service, "holder")
        service.open_stream(CLIENT)
        await attempt(service, "web")
        service.clock.ahead += WAITER_TTL + 1
        await until(lambda: not service.routes)
        assert service.registry.waiting == {}
        assert service._routes_of == {}


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
            service._disown_expired()
        assert list(service.routes) == [claim_of("web").id_hash]


@in_loop
async def test_grant_that_is_not_renewed_here_is_forgotten_after_its_ttl():
    async with serving() as service:
        await acquire(service, "holder")
        assert len(service.held) == 1
        service.clock.ahead += 601
        await until(lambda: not service.held)
        assert service.registry.held == {}


# -- long-polls


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
            await service._send_heartbeats()
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
        real = service.engine._engine.attempt

        async def silent(*args):
            raise Unavailable("no answer")

        service.engine._engine.attempt = silent
        await release(service, "holder")
        with pytest.raises(Unavailable):
            await asked
        service.engine._engine.attempt = real
        assert await found(service) == []


# -- streams


async def until_wakeup(stream):
    while True:
        for notification in await stream.take(60):
            if isinstance(notification, Wakeup):
                return notification.id_hash


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
        dead, wait, due, waits = claim_of("dead").id_hash, service.engine._engine.wait, asyncio.Event(), []

        async def wait_until_due(claim, busy, seconds):
            waits.append(claim.id_hash)
            if waits.count(dead) == 1:
                service.registry.waiting[dead].recheck_by = service.runtime.now()
                await due.wait()
            else:
                await wait(claim, busy, seconds)

        service.engine._engine.wait = wait_until_due
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
        began = asyncio.get_running_loop().time()
        service.close_stream(CLIENT, stream)
        assert await until_wakeup(other) == claim_of("next").id_hash
        check_seconds(asyncio.get_running_loop().time() - began, RESERVATION_TTL)


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
        service._disown(claim_of("elsewhere"))
        await release(service, "holder")
        assert await until_wakeup(other) == claim_of("next").id_hash
        assert ("elsewhere", "passed over") in await found(service)


@in_loop
async def test_reader_that_is_too_slow_loses_its_stream():
    async with serving() as service:
        stream = service.open_stream(CLIENT)
        for _ in range(20_000):
            stream.push(Moved())
        assert stream.closed
        assert len(await stream.take(1)) < 20_000


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


# -- the breaker


async def silent(*_args):
    raise Unavailable("no answer")


@in_loop
async def test_open_breaker_refuses_attempts_and_passes_renewals_and_releases():
    async with serving() as service:
        grant, _ = await acquire(service, "holder")
        working = service.engine._engine
        service.engine._engine = type("Silent", (), {"attempt": silent, "traits": working.traits})()
        service.engine._engine.attempt = silent
        for _ in range(5):
            with pytest.raises(Unavailable):
                await attempt(service, "web")
        service.engine._engine = working
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

        service.engine._engine.attempt = until_deadline
        for _ in range(20):
            with pytest.raises(Unavailable):
                await service.attempt(claim_of("hasty"), CLIENT, service.runtime.now() + 0.0001)
        assert not service.breaker.open


@in_loop
async def test_ready_is_one_ping_for_many_callers():
    async with serving() as service:
        service.clock.ahead += 60
        before = service.engine.calls.count("ping")
        await asyncio.gather(*[service.check_ready() for _ in range(50)])
        assert service.engine.calls.count("ping") == before + 1


# -- what is refused


@in_loop
async def test_attempt_without_an_id_is_refused():
    async with serving() as service:
        with pytest.raises(Problem) as refused:
            await service.attempt(claim_of("web", id=""), CLIENT, deadline(service))
        assert refused.value.kind == "invalid"


@in_loop
async def test_release_without_an_id_leaves_a_grant():
    async with serving() as service:
        await acquire(service, "holder")
        assert await service.release(claim_of("holder", id=""), deadline(service)) is False
        assert await found(service) == [("holder", "held")]


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
