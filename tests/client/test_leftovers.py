"""Attacks that once left something behind: a grant renewed for ever, an entry, a permit, a client half closed."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from leasehold import AsyncClient
from leasehold.client.held_locks import HeldLocks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def test_async_generator_left_by_break_releases_its_permit() -> None:
    # asyncio closes it in a task of its own. `HeldLocks.pop` finds the lock entered in several tasks and raises; the
    # entry keeps the lease strongly, so it is renewed for ever. Same for a generator collected on another thread.
    async def main() -> tuple[int, int]:
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
            await asyncio.sleep(0.3)
            held = len(await client.inspect("s"))
            finish.set()
            await asyncio.gather(*others, return_exceptions=True)
            return held, len(await client.inspect("s"))

    assert asyncio.run(main()) == (2, 0)


@pytest.mark.parametrize("where", ["interrupt", "run_sync"])
def test_ctrl_c_in_enter_leaves_no_held_lock(bench, monkeypatch, wait_until, where) -> None:
    # Once `entries.push` ran, nothing but __exit__ takes the lease out again; an interrupt before __enter__ returned
    # means there is no __exit__. The entry holds the lease strongly: renewed for ever, SelfDeadlock in this thread.
    client = bench.client()
    lock = client.lock("a")
    push = HeldLocks.push

    def interrupted(self, *args):
        push(self, *args)
        raise KeyboardInterrupt  # as after the call that pushes

    with monkeypatch.context() as patch:
        if where == "interrupt":
            patch.setattr(HeldLocks, "push", interrupted)
        else:
            import leasehold.blocking.locks as face

            run_sync = face.run_sync

            def then_interrupted(coro):
                run_sync(coro)
                raise KeyboardInterrupt  # as inside step's `finally: coro.close()`

            patch.setattr(face, "run_sync", then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
    gc.collect()
    client._core.watchdog.wake_by(-1.0)
    wait_until(lambda: not bench.server.lock_states, 2)


def test_ctrl_c_in_release_still_sends_the_release(bench, monkeypatch, wait_until) -> None:
    # `_ended = RELEASED` is set long before the release is sent: an interrupt between (`watchdog.unwatch`, `give_back`)
    # and nobody sends or owes it. The name stays taken for a whole ttl, and __del__ is silent (DESIGN 3.2: forgotten).
    client = bench.client()
    lease = client.lock("a", ttl=600).acquire()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client._core.watchdog, "unwatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lease.release()
    client._core.watchdog.wake_by(-1.0)
    wait_until(lambda: not bench.server.lock_states, 2)


def test_interrupted_close_can_be_repeated(bench) -> None:
    # `closed` is set first, so the second close() returns at once: the watchdog renews what is left for ever.
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
    for _ in range(8):
        bench.clock.advance(10)
        time.sleep(0.03)
    assert not bench.server.lock_states, [lease.state for lease in leases]
