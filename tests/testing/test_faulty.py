"""The fault-injecting wrapper does to calls what it says, in every runtime, and nothing else."""

import asyncio

import pytest

import leasehold
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import mark
from leasehold.engines import memory
from leasehold.errors import Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.runtime.base import step
from leasehold.runtime.loop import Loop
from leasehold.runtime.simulated import Process, World
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


class Bench:
    """A faulty engine, the true one behind it, and claims to make."""

    def __init__(self, runtime):
        self.runtime, self.faults = runtime, Faults()
        self.book = Book(runtime, "client")
        config = EngineConfig.parse("memory://", CALL_TIMEOUT)
        self.true = memory.open(config, runtime, self.book)
        self.sent = []
        self.engine = faulty(lambda *_: self, self.faults)(config, runtime, self.book)
        self.numbers = iter(range(100))

    def __getattr__(self, verb):
        """Between the two, to see what reaches the true engine."""
        if verb in ("attempt", "renew", "release", "break_", "inspect", "ping", "forget", "wait"):
            self.sent.append(verb)
        return getattr(self.true, verb)

    def claim(self, **fields):
        secret = f"secret-{next(self.numbers)}"
        return Claim("", "job", secret, mark(secret), Holder("me"), 30.0)._replace(**fields)

    def by(self):
        return self.runtime.now() + CALL_TIMEOUT

    async def attempt_it(self, claim):
        return await self.engine.attempt(claim, self.by())


def in_threads(test):
    step(test(Bench(Threads())))


def in_a_loop(test):
    async def run():
        await test(Bench(Loop()))

    asyncio.run(run())


def simulated(test):
    world = World(1)
    process = Process(world, "p")
    world.finish(process.spawn(test(Bench(process)), "test"), 60)


@pytest.fixture(params=[in_threads, in_a_loop, simulated])
def run(request):
    return request.param


def test_without_faults_it_is_the_engine_itself(run):
    async def test(bench):
        claim = bench.claim()
        grant = await bench.attempt_it(claim)
        (alive,) = await bench.engine.renew([claim._replace(token=grant.token)], bench.by())
        assert isinstance(alive, Alive)
        assert await bench.engine.break_("", "job", grant.token, bench.by())
        assert not await bench.engine.release(claim, bench.by())
        assert await bench.engine.inspect("", "", False, bench.by()) == []
        await bench.engine.ping(bench.by())
        assert bench.engine.traits is bench.true.traits
        assert bench.engine.listening == bench.true.listening
        bench.engine.after_fork()
        await bench.engine.close()
        assert bench.faults.calls == ["attempt", "renew", "break_", "release", "inspect", "ping"]
        assert bench.faults.struck == []

    run(test)


def test_a_dropped_request_does_not_happen(run):
    async def test(bench):
        bench.faults.next("attempt", drop_request)
        with pytest.raises(Unavailable, match="drop_request"):
            await bench.attempt_it(bench.claim())
        assert bench.sent == []
        assert isinstance(await bench.attempt_it(bench.claim()), Grant)

    run(test)


def test_a_dropped_answer_does_happen(run):
    async def test(bench):
        claim = bench.claim()
        bench.faults.next("attempt", drop_answer)
        with pytest.raises(Unavailable, match="drop_answer"):
            await bench.attempt_it(claim)
        assert isinstance(await bench.attempt_it(bench.claim()), Busy)
        assert isinstance(await bench.attempt_it(claim), Grant)

    run(test)


def test_silence_lasts_to_the_deadline(run):
    async def test(bench):
        for fault in (drop_request, drop_answer):
            bench.faults.next("release", silently(fault))
            deadline = bench.by()
            with pytest.raises(Unavailable):
                await bench.engine.release(bench.claim(), deadline)
            assert bench.runtime.now() >= deadline - 0.001

    run(test)


def test_a_late_answer_is_an_answer_until_the_deadline(run):
    async def test(bench):
        began = bench.runtime.now()
        bench.faults.next("attempt", delay(answer=0.05), delay(request=0.05))
        assert isinstance(await bench.attempt_it(bench.claim()), Grant)
        assert bench.runtime.now() - began >= 0.049
        assert isinstance(await bench.attempt_it(bench.claim()), Busy)
        assert bench.runtime.now() - began >= 0.098
        bench.faults.next("inspect", delay(answer=9), delay(request=9))
        for _ in range(2):
            with pytest.raises(Unavailable):
                await bench.engine.inspect("", "", False, bench.by())
        assert bench.sent.count("inspect") == 2, "late, they arrive all the same"

    run(test)


def test_a_duplicate_arrives_twice_and_is_answered_once(run):
    async def test(bench):
        bench.faults.next("attempt", duplicate)
        grant = await bench.attempt_it(bench.claim())
        assert bench.sent == ["attempt", "attempt"]
        assert [holding.token for holding in await bench.engine.inspect("", "", False, bench.by())] == [grant.token]

    run(test)


def test_an_answer_may_be_repeated(run):
    async def test(bench):
        claim = bench.claim()
        grant = await bench.attempt_it(claim)
        held = claim._replace(token=grant.token)
        (alive,) = await bench.engine.renew([held], bench.by())
        await bench.engine.break_("", "job", grant.token, bench.by())
        bench.faults.next("renew", repeat_answer, repeat_answer)
        assert await bench.engine.renew([held], bench.by()) == [alive], "out of date by now"
        (gone,) = await bench.engine.renew([bench.claim()], bench.by())
        assert isinstance(gone, Gone), "never one about another claim"

    run(test)


def test_a_request_may_arrive_once_more_much_later(run):
    async def test(bench):
        claim = bench.claim(queue=True)
        bench.faults.next("attempt", repeat_later(2))
        await bench.attempt_it(claim)
        await bench.engine.release(claim, bench.by())
        assert await bench.engine.inspect("", "", False, bench.by()) != [], "the ghost is there"
        assert bench.book.waiting == {}, "and nobody keeps its place in line"
        assert bench.sent == ["attempt", "release", "attempt", "inspect"]

    run(test)


def test_a_ghost_that_is_refused_tells_nobody(run):
    async def test(bench):
        claim = bench.claim()
        bench.faults.next("attempt", repeat_later(2))
        await bench.attempt_it(claim)
        await bench.engine.release(claim, bench.by())
        other = bench.claim(kind="semaphore", limit=2)
        await bench.true.attempt(other, bench.by())
        await bench.engine.ping(bench.by())

    run(test)


def test_a_renewal_raises_nothing(run):
    async def test(bench):
        claims = [bench.claim(token=1), bench.claim(token=2)]
        for fault in (cannot_tell, drop_answer, drop_request, delay(answer=9)):
            bench.faults.next("renew", fault)
            replies = await bench.engine.renew(claims, bench.by())
            assert [type(reply) for reply in replies] == [Unavailable, Unavailable]

    run(test)


def test_a_wait_may_be_for_nothing_or_miss_its_wake_up(run):
    async def test(bench):
        claim = bench.claim(queue=True)
        await bench.attempt_it(bench.claim())
        busy = await bench.attempt_it(claim)
        began = bench.runtime.now()
        bench.faults.next("wait", drop_answer, drop_request)
        await bench.engine.wait(claim, busy, 30.0)
        assert bench.runtime.now() - began < 10
        bench.book.waiting[claim.mark].go = True
        await bench.engine.wait(claim, busy, 0.1)
        assert bench.runtime.now() - began >= 0.099
        await bench.engine.wait(claim, busy, 30.0)
        assert bench.sent.count("wait") == 1
        assert bench.runtime.now() - began < 10

    run(test)


def test_what_is_forgotten_may_be_owed(run):
    async def test(bench):
        claims = [bench.claim(queue=True), bench.claim(queue=True)]
        for claim in claims:
            await bench.attempt_it(claim)
        bench.faults.next("forget", drop_request)
        for claim in claims:
            bench.engine.forget(claim)
        assert list(bench.book.owed) == [claims[0].mark]
        assert bench.book.waiting == {}

    run(test)


# -------------------------------------------------------------------- scripts


def test_faults_come_in_the_order_they_were_asked_for():
    faults = Faults()
    faults.next("attempt", drop_request, drop_answer)
    faults.next("release", duplicate)
    met = [faults.meet(verb) for verb in ("attempt", "release", "release", "attempt", "attempt")]
    assert met == [drop_request, duplicate, None, drop_answer, None]
    assert faults.struck == [("attempt", drop_request), ("release", duplicate), ("attempt", drop_answer)]


def test_always_is_until_clear():
    faults = Faults()
    faults.always("renew", cannot_tell)
    faults.next("renew", drop_answer)
    assert [faults.meet("renew") for _ in range(3)] == [drop_answer, cannot_tell, cannot_tell]
    faults.next("renew", drop_answer)
    faults.at(0, drop_answer)
    faults.clear()
    assert faults.meet("renew") is None


def test_calls_are_counted_among_the_verbs_asked_for():
    faults = Faults()
    faults.at(1, drop_answer, {"attempt"})
    faults.at(2, drop_request)
    met = [faults.meet(verb) for verb in ("attempt", "wait", "renew", "attempt", "attempt")]
    assert met == [None, None, None, drop_request, None], "the later rule wins where both strike"


def test_each_call_of_a_scenario_is_struck_once():
    struck = []
    for faults in each_call(drop_answer):
        for verb in ("attempt", "wait", "renew", "release"):
            faults.meet(verb)
        struck.append([verb for verb, _ in faults.struck])
    assert struck == [["attempt"], ["renew"], ["release"], []]


def test_both_twins_of_a_client_pass_through():
    faults = Faults()
    with leasehold.Client("memory://", engine=faulty(memory.open, faults)) as client:
        faults.next("release", *[drop_request] * 4)
        assert client.lock("job").acquire().release() is False
        with client.lock("job", wait=10):  # once the watchdog's repeats got through
            assert len(faults.struck) == 4


def test_a_fault_is_a_value():
    assert silently(drop_answer) == Fault("silently drop_answer", answered=False, silent=True)
    assert delay(request=1, answer=2) == Fault("delay 1+2", before=1, after=2)
