"""Regressions: a grant renewed for ever, a held-lock entry or permit left behind, a client closed halfway."""

from __future__ import annotations

import asyncio
import gc

import pytest

from leasehold import AsyncClient
from leasehold.client.held_locks import HeldLocks
from tests.support import probe
from tests.support.client_fixtures import InterruptedSet

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def test_async_generator_left_by_break_releases_its_permit() -> None:
    # asyncio closes the generator in another task. `HeldLocks.pop` found the lock entered in several tasks and raised;
    # its entry kept a strong reference to the lease, which was renewed for ever. The same happened to a generator that
    # was collected in another thread.
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            permits = client.semaphore("s", 5)
            finish = asyncio.Event()

            async def items():
                async with permits as lease:
                    yield lease

            async def other() -> None:
                async with permits:
                    await finish.wait()

            async def take_one() -> None:
                async for _ in items():
                    break

            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            others = [asyncio.create_task(other()) for _ in range(2)]
            await asyncio.create_task(take_one())
            gc.collect()

            async def wait_until_two_are_left() -> None:
                while len(await client.inspect("s")) != 2:
                    await asyncio.sleep(0.002)

            await asyncio.wait_for(wait_until_two_are_left(), 30)
            finish.set()
            await asyncio.gather(*others, return_exceptions=True)
            assert await client.inspect("s") == []

    asyncio.run(main())


@pytest.mark.parametrize("where", ["interrupt", "run_sync"])
def test_ctrl_c_in_enter_leaves_no_held_lock(bench, monkeypatch, wait_until, where) -> None:
    # After `HeldLocks.push` only __exit__ removed the entry, but __exit__ does not run if __enter__ is interrupted
    # before it returns. The entry kept the lease alive: renewed for ever, and SelfDeadlock in this thread.
    client = bench.client()
    lock = client.lock("a")
    push = HeldLocks.push

    def interrupted(self, *args):
        push(self, *args)
        raise KeyboardInterrupt  # as if right after the push

    with monkeypatch.context() as patch:
        if where == "interrupt":
            patch.setattr(HeldLocks, "push", interrupted)
        else:
            import leasehold.blocking.locks as face

            run_sync = face.run_sync

            def then_interrupted(coro):
                run_sync(coro)
                raise KeyboardInterrupt  # as if inside `finally: coro.close()` of run_sync

            patch.setattr(face, "run_sync", then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
    gc.collect()
    probe.wake_watchdog(client)
    wait_until(lambda: not bench.server.lock_states, 30)


def test_ctrl_c_in_release_still_sends_the_release(bench, monkeypatch, wait_until) -> None:
    # The lease became RELEASED long before the release was sent. After an interrupt between the two (in
    # `watchdog.unwatch` or `send_release`) the release was neither sent nor pending: the name stayed held for a whole
    # ttl, and __del__ did not warn.
    client = bench.client()
    lease = client.lock("a", ttl=600).acquire()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probe.watchdog(client), "unwatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lease.release()
    probe.wake_watchdog(client)
    wait_until(lambda: not bench.server.lock_states, 30)


def test_close_waits_for_an_interrupted_release_until_it_is_sent_again(bench, monkeypatch) -> None:
    core = probe.core(client := bench.client())
    lease, known, forget = client.lock("a").acquire(), [], core.forget

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(probe.watchdog(client), "unwatch", interrupted)
    monkeypatch.setattr(core, "forget", lambda claim: known.append(claim.id_hash in core.in_flight) or forget(claim))
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    assert known == [True]
    assert not core.in_flight
    assert not bench.server.lock_states


def test_ctrl_c_before_a_release_has_begun_leaves_the_lease_held(bench) -> None:
    class InterruptedMutex:
        def __enter__(self) -> None:
            core.mutex = mutex
            raise KeyboardInterrupt

        def __exit__(self, *error: object) -> None:
            pass

    core = probe.core(client := bench.client())
    lease, mutex = client.lock("a").acquire(), core.mutex
    core.mutex = InterruptedMutex()
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    assert lease.held
    assert bench.held_names() == ["a"]
    assert lease.release()


@pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_every_point_of_with_releases_a_kept_lease(bench, wait_until, ctrl_c) -> None:
    # Between the removal of the entry and the first step of the release, neither side released the lease. As long as a
    # variable kept it, as in a notebook, the watchdog renewed it for ever.
    client, kept = bench.client(ttl=600), []
    lock = client.lock("a")
    with lock:  # imports every module and starts every thread
        pass

    def work() -> None:
        with lock as lease:
            kept.append(lease)

    number = 0
    while ctrl_c(number := number + 1, work, "client/lock.py"):
        if bench.server.lock_states:  # the watchdog, or the garbage collector during acquire, has yet to release
            gc.collect()
            probe.wake_watchdog(client)
        wait_until(lambda: not bench.server.lock_states, 30)
    assert number > 60
    assert not probe.held_lock_entries(client)


@pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["with", "acquire", "call", "multilock"])
def test_ctrl_c_while_reentering_leaves_the_outer_hold_alone(bench, ctrl_c, how) -> None:
    client = bench.client(ttl=600)
    lock = client.lock("job", reentrant=True)
    multilock = client.multilock(["job"], reentrant=True)

    def work() -> None:
        if how == "with":
            with lock:
                pass
        elif how == "acquire":
            lock.acquire()
        elif how == "call":
            lock.call(lambda: None)
        else:
            with multilock:
                pass

    # Not at each line of call(): no handler covers the line that begins a `try`, and no signal arrives there.
    files = ("blocking/locks.py",) if how == "call" else ("client/lock.py", "multilock.py")
    with lock as lease:
        number, uninterrupted, held_locks = 0, 0, probe.held_lock_entries(client)
        while uninterrupted < 3:  # the interpreter swallows an exception where a generator is closed
            interrupted = ctrl_c(number := number + 1, work, *files)
            uninterrupted = 0 if interrupted else uninterrupted + 1
            if how == "acquire" and probe.depth(lease) == 2 and len(next(iter(held_locks.values()))) == 2:
                lease.release()  # acquired, even if Ctrl-C came while acquire() returned
            assert probe.depth(lease) == 1, f"Ctrl-C at place {number} left a hold"
            assert [len(entries) for entries in held_locks.values()] == [1], f"Ctrl-C at place {number} left an entry"
        assert number > 40
        assert lease.held
    assert not lease.held
    assert not held_locks


def test_ctrl_c_before_an_attempt_leaves_nothing_for_close_to_wait_for(bench) -> None:
    core = probe.core(client := bench.client())
    core.in_flight = InterruptedSet()
    with pytest.raises(KeyboardInterrupt):
        client.lock("a").acquire()
    assert not core.in_flight


def test_interrupted_close_can_be_repeated(bench, wait_until) -> None:
    # `closed` was set first, so the second close() returned at once and the watchdog renewed the other leases for ever.
    client = bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(3)]
    call, releases = bench.transport.call, []

    def ctrl_c(verb, args, deadline):
        if verb == "release":
            releases.append(verb)
            if len(releases) == 2:
                raise KeyboardInterrupt
        return call(verb, args, deadline)

    bench.transport.call = ctrl_c
    with pytest.raises(KeyboardInterrupt):
        client.close()
    client.close()
    assert not [lease for lease in leases if lease.held]
    bench.clock.advance(80)
    wait_until(lambda: not bench.server.lock_states)
