"""The fault-injecting wrapper changes calls as documented, in every runtime, and nothing else."""

import asyncio

import pytest

import leasehold
from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.engines import memory
from leasehold.engines.registry import ClaimRegistry
from leasehold.errors import Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.loop import Loop
from leasehold.runtime.simulated import Process, Simulator
from leasehold.runtime.threads import Threads
from leasehold.testing import (
    Fault,
    Faults,
    cannot_tell,
    delay,
    drop_answer,
    drop_request,
    duplicate,
    each_call,
    faulty,
    repeat_answer,
    repeat_later,
    silently,
)

CALL_TIMEOUT = 0.2


class FaultyEngineSetup:
    """A faulty engine, the real engine behind it, and claims for both."""

    def __init__(self, runtime):
        self.runtime, self.faults = runtime, Faults()
        self.registry = ClaimRegistry(runtime, "client")
        config = EngineConfig.parse("memory://", CALL_TIMEOUT)
        self.real_engine = memory.open(config, runtime, self.registry)
        self.sent = []
        self.engine = faulty(lambda *_: self, self.faults)(config, runtime, self.registry)
        self.numbers = iter(range(100))

    def __getattr__(self, verb):
        """Sits between the two and records the calls that reach the real engine."""
        if verb in ("attempt", "renew", "release", "break_", "inspect", "ping", "forget", "wait"):
            self.sent.append(verb)
        return getattr(self.real_engine, verb)

    def claim(self, **fields):
        claim_id = f"secret-{next(self.numbers)}"
        return Claim("", "job", claim_id, hash_id(claim_id), Holder("me"), 30.0)._replace(**fields)

    def by(self):
        return self.runtime.now() + CALL_TIMEOUT

    async def attempt_with_faults(self, claim):
        return await self.engine.attempt(claim, self.by())


def in_threads(test):
    run_sync(test(FaultyEngineSetup(Threads())))


def in_a_loop(test):
    async def run():
        await test(FaultyEngineSetup(Loop()))

    asyncio.run(run())


def simulated(test):
    simulator = Simulator(1)
    process = Process(simulator, "p")
    simulator.run_until_complete(process.spawn(test(FaultyEngineSetup(process)), "test"), 60)


@pytest.fixture(params=[in_threads, in_a_loop, simulated])
def run(request):
    return request.param


def test_faulty_engine_without_faults_passes_calls_through(run):
    async def test(setup):
        claim = setup.claim()
        grant = await setup.attempt_with_faults(claim)
        (alive,) = await setup.engine.renew([claim._replace(token=grant.token)], setup.by())
        assert isinstance(alive, Alive)
        assert await setup.engine.break_("", "job", grant.token, setup.by())
        assert not await setup.engine.release(claim, setup.by())
        assert await setup.engine.inspect("", "", False, setup.by()) == []
        await setup.engine.ping(setup.by())
        assert setup.engine.traits is setup.real_engine.traits
        assert setup.engine.queues_at_once == setup.real_engine.queues_at_once
        setup.engine.after_fork()
        await setup.engine.close()
        assert setup.faults.calls == ["attempt", "renew", "break_", "release", "inspect", "ping"]
        assert setup.faults.struck == []

    run(test)


def test_dropped_request_is_not_executed(run):
    async def test(setup):
        setup.faults.next("attempt", drop_request)
        with pytest.raises(Unavailable, match="drop_request"):
            await setup.attempt_with_faults(setup.claim())
        assert setup.sent == []
        assert isinstance(await setup.attempt_with_faults(setup.claim()), Grant)

    run(test)


def test_call_with_dropped_answer_is_executed(run):
    async def test(setup):
        claim = setup.claim()
        setup.faults.next("attempt", drop_answer)
        with pytest.raises(Unavailable, match="drop_answer"):
            await setup.attempt_with_faults(claim)
        assert isinstance(await setup.attempt_with_faults(setup.claim()), Busy)
        assert isinstance(await setup.attempt_with_faults(claim), Grant)

    run(test)


def test_silent_fault_blocks_until_the_deadline(run):
    async def test(setup):
        for fault in (drop_request, drop_answer):
            setup.faults.next("release", silently(fault))
            deadline = setup.by()
            with pytest.raises(Unavailable):
                await setup.engine.release(setup.claim(), deadline)
            assert setup.runtime.now() >= deadline - 0.001

    run(test)


def test_delayed_answer_counts_only_before_the_deadline(run):
    async def test(setup):
        began = setup.runtime.now()
        setup.faults.next("attempt", delay(answer=0.05), delay(request=0.05))
        assert isinstance(await setup.attempt_with_faults(setup.claim()), Grant)
        assert setup.runtime.now() - began >= 0.049
        assert isinstance(await setup.attempt_with_faults(setup.claim()), Busy)
        assert setup.runtime.now() - began >= 0.098
        setup.faults.next("inspect", delay(answer=9), delay(request=9))
        for _ in range(2):
            with pytest.raises(Unavailable):
                await setup.engine.inspect("", "", False, setup.by())
        assert setup.sent.count("inspect") == 2, "delayed requests must still arrive"

    run(test)


def test_duplicated_request_arrives_twice_and_is_answered_once(run):
    async def test(setup):
        setup.faults.next("attempt", duplicate)
        grant = await setup.attempt_with_faults(setup.claim())
        assert setup.sent == ["attempt", "attempt"]
        assert [holding.token for holding in await setup.engine.inspect("", "", False, setup.by())] == [grant.token]

    run(test)


def test_repeat_answer_returns_earlier_answer_about_same_claim(run):
    async def test(setup):
        claim = setup.claim()
        grant = await setup.attempt_with_faults(claim)
        held = claim._replace(token=grant.token)
        (alive,) = await setup.engine.renew([held], setup.by())
        await setup.engine.break_("", "job", grant.token, setup.by())
        setup.faults.next("renew", repeat_answer, repeat_answer)
        assert await setup.engine.renew([held], setup.by()) == [alive], "the repeated answer is out of date"
        (gone,) = await setup.engine.renew([setup.claim()], setup.by())
        assert isinstance(gone, Gone), "an answer must never be repeated for another claim"

    run(test)


def test_repeat_later_delivers_request_again_after_release(run):
    async def test(setup):
        claim = setup.claim(queue=True)
        setup.faults.next("attempt", repeat_later(2))
        await setup.attempt_with_faults(claim)
        await setup.engine.release(claim, setup.by())
        assert await setup.engine.inspect("", "", False, setup.by()) != [], "the late attempt acquired again"
        assert setup.registry.waiting == {}, "no heartbeat may keep it in the queue"
        assert setup.sent == ["attempt", "release", "attempt", "inspect"]

    run(test)


def test_refused_repeat_raises_nothing_to_the_caller(run):
    async def test(setup):
        claim = setup.claim()
        setup.faults.next("attempt", repeat_later(2))
        await setup.attempt_with_faults(claim)
        await setup.engine.release(claim, setup.by())
        other = setup.claim(kind="semaphore", limit=2)
        await setup.real_engine.attempt(other, setup.by())
        await setup.engine.ping(setup.by())

    run(test)


def test_faulty_renewal_answers_unavailable_without_raising(run):
    async def test(setup):
        claims = [setup.claim(token=1), setup.claim(token=2)]
        for fault in (cannot_tell, drop_answer, drop_request, delay(answer=9)):
            setup.faults.next("renew", fault)
            replies = await setup.engine.renew(claims, setup.by())
            assert [type(reply) for reply in replies] == [Unavailable, Unavailable]

    run(test)


def test_faulty_wait_returns_early_or_misses_its_wakeup(run):
    async def test(setup):
        claim = setup.claim(queue=True)
        await setup.attempt_with_faults(setup.claim())
        busy = await setup.attempt_with_faults(claim)
        began = setup.runtime.now()
        setup.faults.next("wait", drop_answer, drop_request)
        await setup.engine.wait(claim, busy, 30.0)
        assert setup.runtime.now() - began < 10
        setup.registry.waiting[claim.id_hash].woken = True
        await setup.engine.wait(claim, busy, 0.1)
        assert setup.runtime.now() - began >= 0.099
        await setup.engine.wait(claim, busy, 30.0)
        assert setup.sent.count("wait") == 1
        assert setup.runtime.now() - began < 10

    run(test)


def test_forget_with_dropped_request_is_a_pending_release(run):
    async def test(setup):
        claims = [setup.claim(queue=True), setup.claim(queue=True)]
        for claim in claims:
            await setup.attempt_with_faults(claim)
        setup.faults.next("forget", drop_request)
        for claim in claims:
            setup.engine.forget(claim)
        assert list(setup.registry.pending_releases) == [claims[0].id_hash]
        assert setup.registry.waiting == {}

    run(test)


# -------------------------------------------------------------------- scripts


def test_faults_strike_in_the_order_they_were_scheduled():
    faults = Faults()
    faults.next("attempt", drop_request, drop_answer)
    faults.next("release", duplicate)
    returned_faults = [faults.next_fault(verb) for verb in ("attempt", "release", "release", "attempt", "attempt")]
    assert returned_faults == [drop_request, duplicate, None, drop_answer, None]
    assert faults.struck == [("attempt", drop_request), ("release", duplicate), ("attempt", drop_answer)]


def test_always_fault_repeats_until_clear():
    faults = Faults()
    faults.always("renew", cannot_tell)
    faults.next("renew", drop_answer)
    assert [faults.next_fault("renew") for _ in range(3)] == [drop_answer, cannot_tell, cannot_tell]
    faults.next("renew", drop_answer)
    faults.at(0, drop_answer)
    faults.clear()
    assert faults.next_fault("renew") is None


def test_fault_at_call_number_counts_only_the_given_verbs():
    faults = Faults()
    faults.at(1, drop_answer, {"attempt"})
    faults.at(2, drop_request)
    returned_faults = [faults.next_fault(verb) for verb in ("attempt", "wait", "renew", "attempt", "attempt")]
    assert returned_faults == [None, None, None, drop_request, None], "if two rules apply, the later one wins"


def test_each_call_strikes_every_call_of_a_scenario_once():
    struck = []
    for faults in each_call(drop_answer):
        for verb in ("attempt", "wait", "renew", "release"):
            faults.next_fault(verb)
        struck.append([verb for verb, _ in faults.struck])
    assert struck == [["attempt"], ["renew"], ["release"], []]


def test_faults_apply_to_client_and_watchdog_engines():
    faults = Faults()
    with leasehold.Client("memory://", engine=faulty(memory.open, faults)) as client:
        faults.next("release", *[drop_request] * 4)
        assert client.lock("job").acquire().release() is False
        with client.lock("job", wait=10):  # acquired once the watchdog's retries succeed
            assert len(faults.struck) == 4


def test_equal_faults_compare_equal():
    assert silently(drop_answer) == Fault("silently drop_answer", answered=False, silent=True)
    assert delay(request=1, answer=2) == Fault("delay 1+2", before=1, after=2)
