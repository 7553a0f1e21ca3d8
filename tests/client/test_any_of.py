"""`any_of`: one of several names, in all their queues at once, and no claim left in any of them."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from contextlib import ExitStack

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, MultiLock, NotAcquired, SelfDeadlock, Unavailable
from tests.support import probe, probe_acquire

NAMES = ["gpu0", "gpu1", "gpu2"]


def waiters_of(server) -> list[str]:
    return sorted(name for (_, name), state in list(server.lock_states.items()) for _ in state.waiters)


@pytest.mark.parametrize(
    ("names", "options", "text"),
    [
        ("gpu0", {}, "takes a list of names"),
        ([], {}, "at least one name"),
        (NAMES, {"reentrant": True}, "cannot be reentrant"),
        (NAMES, {"on_unavailable": "run"}, "cannot run without a grant"),
        ([""], {}, "name"),
    ],
)
def test_any_of_refuses_what_it_cannot_do_when_built(bench, names, options, text) -> None:
    with pytest.raises(ConfigError, match=text):
        bench.client().any_of(names, **options)


def test_multilock_refuses_a_pool(bench) -> None:
    client = bench.client()
    with pytest.raises(ConfigError, match="acquire the pool first"):
        MultiLock([client.any_of(NAMES), client.lock("a")])


def test_first_name_attempted_is_a_random_one(bench) -> None:
    client = bench.client()
    pool = client.any_of(NAMES)
    chosen = set()
    for _ in range(200):
        with pool as lease:
            chosen.add(lease.name)
    assert chosen == set(NAMES)


def test_free_name_costs_one_attempt_and_one_release(bench) -> None:
    client = bench.client()
    pool = client.any_of(NAMES)
    bench.transport.calls = 0
    with pool:
        pass
    assert bench.transport.calls == 2


def test_error_names_the_holder_of_each_name_and_survives_pickling(bench) -> None:
    holder, client = bench.client(holder="trainer"), bench.client()
    leases = [holder.lock(name).acquire() for name in NAMES]
    with pytest.raises(NotAcquired) as caught:
        client.any_of(NAMES, wait=0).acquire()
    error = pickle.loads(pickle.dumps(caught.value))
    assert {refusal.name for refusal in error.refusals} == set(NAMES)
    assert all(f"{name} is held by trainer" in str(error) for name in NAMES)
    assert "pass wait=SECONDS to queue for them" in str(error)
    assert client.any_of(NAMES).try_acquire() is None
    assert client.any_of(NAMES).locked()
    leases[1].release()
    assert not client.any_of(NAMES).locked()
    for lease in leases:
        lease.release()


def test_names_held_by_this_thread_are_left_out(bench) -> None:
    client = bench.client()
    pool = client.any_of(["gpu0", "gpu1"], wait=5)
    with pool as first:
        with pool as second:
            assert {first.name, second.name} == {"gpu0", "gpu1"}
            with pytest.raises(SelfDeadlock, match="any of gpu0, gpu1 is already held"), pool:
                pass
            assert pool.try_acquire() is None
        assert not second.held
        assert first.held
    assert bench.held_names() == []


def test_lost_lease_is_reported_with_the_name_that_was_chosen(bench) -> None:
    client, operator = bench.client(), bench.client()
    with pytest.raises(LeaseLost, match="the lease of gpu0"), client.any_of(["gpu0"]) as lease:
        operator.break_lock(lease.name, token=lease.token)
        lease.release()


def test_exit_stack_and_call_and_threading_shape_release_the_chosen_name(bench) -> None:
    client = bench.client()
    pool = client.any_of(NAMES)
    with ExitStack() as stack:
        for _ in NAMES:
            stack.enter_context(pool)
        assert bench.held_names() == NAMES
    assert bench.held_names() == []
    assert pool.call(lambda lease: lease.name) in NAMES
    with pool.as_threading():
        assert len(bench.held_names()) == 1
    assert bench.held_names() == []
    assert pickle.loads(pickle.dumps(Client("memory://p").any_of(NAMES))).name == "any of gpu0, gpu1, gpu2"


def test_events_are_those_of_the_chosen_name_or_of_all(bench) -> None:
    events = []
    holder, client = bench.client(), bench.client(on_event=events.append)
    leases = {name: holder.lock(name).acquire() for name in NAMES}
    with pytest.raises(NotAcquired):
        client.any_of(NAMES, wait=0).acquire()
    assert {event.name for event in events} == set(NAMES)
    assert sorted(event.kind for event in events) == ["attempted"] * 3 + ["busy"] * 3
    events.clear()
    leases["gpu2"].release()
    client.any_of(NAMES).acquire().release()
    assert [(event.kind, event.name) for event in events] == [
        (kind, "gpu2") for kind in ("attempted", "granted", "released")
    ]
    assert len({event.fingerprint for event in events}) == 1
    for lease in leases.values():
        lease.release()


def test_second_grant_that_arrives_meanwhile_is_released(bench, wait_until) -> None:
    # Both names become free before the waiter runs: it is the head of both queues, and both are reserved for it.
    holder, client = bench.client(), bench.client()
    leases = [holder.lock(name).acquire() for name in ("gpu0", "gpu1")]
    got = []
    thread = threading.Thread(target=lambda: got.append(client.any_of(["gpu0", "gpu1"]).acquire()))
    thread.start()
    wait_until(lambda: waiters_of(bench.server) == ["gpu0", "gpu1"])
    for lease in leases:
        lease.release()
    thread.join(30)
    assert bench.held_names() == [got[0].name]
    assert not probe.registry(client).waiting
    assert not probe.registry(client).pending_releases
    other = ({"gpu0", "gpu1"} - {got[0].name}).pop()
    assert holder.lock(other).try_acquire().release()
    got[0].release()


def test_close_ends_the_wait_and_leaves_all_queues(bench, wait_until) -> None:
    holder, client = bench.client(), bench.client()
    leases = [holder.lock(name).acquire() for name in NAMES]
    errors = []

    def wait() -> None:
        try:
            client.any_of(NAMES).acquire()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: waiters_of(bench.server) == NAMES)
    client.close()
    thread.join(30)
    assert "this client is closed" in str(errors[0])
    assert waiters_of(bench.server) == []
    for lease in leases:
        lease.release()


def test_outage_raises_unless_the_pool_waits_for_the_engine(bench, run_clock, wait_until) -> None:
    client = bench.client(call_timeout=0.5)
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        client.any_of(NAMES, wait=1).acquire()
    with pytest.raises(Unavailable):  # not NotAcquired: no name is known to be busy
        client.any_of(NAMES, wait=0, on_unavailable="wait").acquire()
    got = []
    pool = client.any_of(NAMES, wait=600, on_unavailable="wait")
    thread = threading.Thread(target=lambda: got.append(pool.acquire()))
    thread.start()
    run_clock(bench)
    wait_until(lambda: len(probe.waiters(client)) == 3)
    bench.transport.silent = False
    thread.join(30)
    assert bench.held_names() == [got[0].name]
    wait_until(lambda: waiters_of(bench.server) == [])
    got[0].release()


def test_silent_engine_does_not_keep_a_pool_beyond_its_wait(bench) -> None:
    client, began = bench.client(call_timeout=5), bench.clock()

    def stay_silent(verb, args, deadline):
        if verb == "attempt":
            bench.clock.at = deadline
        raise Unavailable("silence")

    bench.transport.call = stay_silent
    with pytest.raises(Unavailable):
        client.any_of(NAMES, wait=1, on_unavailable="wait").acquire()
    assert bench.clock() <= began + 1.5


@pytest.mark.parametrize("seconds", [0.2, 0.4])
def test_slow_engine_does_not_keep_a_pool_beyond_its_wait(bench, seconds) -> None:
    client, names = bench.client(), [f"gpu{number}" for number in range(8)]
    leases = [client.lock(name).acquire() for name in names]
    began, answer = bench.clock(), bench.transport.call

    def answer_slowly(verb, args, deadline):
        if verb == "attempt":
            bench.clock.at += seconds
        return answer(verb, args, deadline)

    bench.transport.call = answer_slowly
    with pytest.raises(NotAcquired) as caught:
        client.any_of(names, wait=2).acquire()
    assert bench.clock() <= began + 2.25 + seconds
    asked = {refusal.name for refusal in caught.value.refusals}
    assert asked == set(names) if seconds == 0.2 else len(asked) >= 5
    bench.transport.call = answer
    assert waiters_of(bench.server) == []
    for lease in leases:
        lease.release()


def test_many_threads_never_share_a_name(url) -> None:
    inside: dict[str, int] = {}
    done = []
    with Client(url) as client, Client(url) as other:

        def work(number: int) -> None:
            pool = (client, other)[number % 2].any_of(NAMES, wait=120)
            for _ in range(10):
                with pool as lease:
                    assert inside.setdefault(lease.name, number) == number, f"{lease.name} has two holders"
                    del inside[lease.name]
            done.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(done) == 50
        assert client.inspect() == []
        assert not probe.registry(client).waiting


def test_async_pool_is_cancelled_cleanly_and_names_its_lease(url) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client, AsyncClient(url) as holder:
            leases = [await holder.lock(name).acquire() for name in NAMES]
            waiting = asyncio.create_task(client.any_of(NAMES).acquire())
            while len(await holder.inspect()) < 6:
                await asyncio.sleep(0.001)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            while len(await holder.inspect()) > 3:
                await asyncio.sleep(0.001)
            await leases[1].release()
            async with client.any_of(NAMES) as lease:
                assert lease.name == "gpu1"

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["busy", *(pytest.param(how, marks=pytest.mark.extended) for how in ("free", "waits"))])
def test_ctrl_c_at_every_point_of_any_of_leaves_nothing(bench, wait_until, ctrl_c, how) -> None:
    client, holder = bench.client(ttl=600), bench.client(ttl=600)
    names = ["gpu0", "gpu1"]
    pool = client.any_of(names, wait=0 if how == "busy" else 60)
    with pool:  # imports every module and starts every thread
        pass
    leases = {name: holder.lock(name).acquire() for name in names} if how != "free" else {}

    def work() -> None:
        try:
            with pool:
                pass
        except NotAcquired:
            pass

    def let_go_when_it_waits() -> None:
        wait_until(lambda: stopped.is_set() or len(waiters_of(bench.server)) == 2, 30)
        leases.pop("gpu1").release()

    number, uninterrupted = 0, 0
    while uninterrupted < 3:
        stopped = threading.Event()
        if how == "waits":
            helper = threading.Thread(target=let_go_when_it_waits)
            helper.start()
        interrupted = ctrl_c(number := number + 1, work, "client/any_of.py")
        stopped.set()
        uninterrupted = 0 if interrupted else uninterrupted + 1
        if how == "waits":
            helper.join(30)
        gc.collect()
        probe.wake_watchdog(client)
        wait_until(lambda: bench.held_names() == sorted(leases) and not waiters_of(bench.server), 30)
        if how == "waits":
            leases["gpu1"] = holder.lock("gpu1").acquire(wait=0)
    assert number > 40
    for lease in leases.values():
        lease.release()
    assert not probe.held_lock_entries(client)
    assert not probe.registry(client).waiting


def test_ctrl_c_after_the_grant_of_a_pool_releases_it_at_once(bench, monkeypatch, wait_until) -> None:
    """The traceback keeps the lease as long as the error is kept, as in a notebook."""

    async def attempt_none(_) -> None:
        return None

    leave_all = getattr(*probe_acquire.LEAVE_ALL)

    def interrupted(members) -> None:
        leave_all(members)
        raise KeyboardInterrupt

    monkeypatch.setattr(*probe_acquire.ATTEMPT_EACH, attempt_none)
    monkeypatch.setattr(*probe_acquire.LEAVE_ALL, interrupted)
    client = bench.client(ttl=600)
    with pytest.raises(KeyboardInterrupt) as caught:
        client.any_of(["a", "b"]).acquire()
    wait_until(lambda: bench.held_names() == [])
    assert caught.value.__traceback__ is not None


def test_waiting_pool_asks_a_silent_engine_once_before_it_queues(bench, monkeypatch) -> None:
    """Its later attempts are repeated until the engine answers. Then its error is that of the engine."""

    async def give_up(*_: object) -> None:
        return None

    monkeypatch.setattr(*probe_acquire.FIRST_GRANT, give_up)
    asked, call = [], bench.transport.call
    monkeypatch.setattr(bench.transport, "call", lambda verb, *args: asked.append(verb) or call(verb, *args))
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        bench.client().any_of(["a", "b", "c"], wait=5, on_unavailable="wait").acquire()
    assert asked.count("attempt") == 1


def test_interrupt_while_leaving_one_queue_leaves_the_others_too(bench, monkeypatch, wait_until) -> None:
    client, holder = bench.client(), bench.client()
    leases = [holder.lock(name).acquire() for name in NAMES]
    leave, calls = probe_acquire.PoolMember.leave, []

    def interrupted(member) -> None:
        calls.append(member)
        if len(calls) == 1:
            raise KeyboardInterrupt
        leave(member)

    monkeypatch.setattr(probe_acquire.PoolMember, "leave", interrupted)
    monkeypatch.setattr(*probe_acquire.FIRST_GRANT, _interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        client.any_of(NAMES).acquire()
    assert waiters_of(bench.server) == []
    assert not probe.registry(client).waiting
    for lease in leases:
        lease.release()


async def _interrupted_wait(members, caller, runtime):
    for member in members:
        await member.resume()
    raise KeyboardInterrupt
