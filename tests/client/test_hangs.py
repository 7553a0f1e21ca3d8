"""Regressions: hangs by finalisers, signals and threads while a mutex is held, and calls past their deadline."""

from __future__ import annotations

import os
import threading
import time

import pytest

from leasehold import Client, Unavailable
from leasehold.core.queue_entry import TokenCounter
from leasehold.core.timing import HEARTBEAT_INTERVAL
from leasehold.engines.memory import InProcessTransport
from tests.support import probe
from tests.support.timing import check_elapsed, check_seconds

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def test_generator_closed_by_gc_while_mutex_is_held_does_not_deadlock(run_script) -> None:
    # gc may close a generator in a cycle, suspended in a `with`, at any allocation: even while this thread holds the
    # mutex of MemoryServer, ClientCore, Watchdog or CallbackThread. __exit__ then takes the same mutex, and hung
    # because it was not reentrant.
    out = run_script("""
import gc, warnings
warnings.simplefilter("ignore")
from leasehold import Client
client = Client("memory://")
def body(n, box):
    with client.lock(f"g{n}") as lease:
        box.append(lease)
        yield lease
def leave_in_a_cycle(n):
    box = []
    suspended = body(n, box)
    next(suspended)
    box.append(suspended)
for n in range(5000):
    gc.set_threshold(5 + n % 11, 2, 2)
    leave_in_a_cycle(n)
    with client.lock("x"):
        pass
print("done")
""")
    assert out == "done"


@pytest.mark.parametrize("what", ["keep.release()", "client.close()"])
def test_signal_handler_that_releases_does_not_deadlock(what, run_script) -> None:
    # The usual SIGTERM handler. It runs between two bytecodes of the main thread, even while that holds a mutex.
    out = run_script(f"""
import random, signal, time
from leasehold import Client, ConfigError
end = time.monotonic() + 3
while time.monotonic() < end:
    client = Client("memory://")
    keep = client.lock("keep").acquire()
    signal.signal(signal.SIGALRM, lambda *_: {what})
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.002))
    until = time.monotonic() + 0.003
    try:
        while time.monotonic() < until:
            with client.lock("a"):
                pass
    except ConfigError:
        pass
    client.close()
print("done")
""")
    assert out == "done"


def test_ctrl_c_inside_memory_server_does_not_block_other_waiters(bench, wait_until, monkeypatch) -> None:
    # The verbs of LockState are not atomic. An interrupt (or RecursionError, MemoryError) in `_make_holder`, when the
    # head has left `waiters` and is no holder yet, left an entry in state WAITING that was not queued: it was never
    # served, though the name was free. When the entry ended, `_remove` deleted by index: the caller got an IndexError,
    # or *another* waiter was removed from the queue.
    held = bench.client().lock("a").acquire()
    other = bench.client()
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(other.lock("a").acquire(wait=60)), daemon=True)
    thread.start()
    wait_until(lambda: probe.waiters(other))
    wait_until(lambda: bench.server.lock_states["", "a"].waiters)
    once = iter([KeyboardInterrupt])
    next_token = TokenCounter.next

    def interrupted(self, floor):
        for error in once:
            raise error
        return next_token(self, floor)

    monkeypatch.setattr(TokenCounter, "next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        held.release()

    def granted() -> bool:
        bench.clock.advance(0.1)
        probe.wake_waiters(other)  # the waiter sleeps by the real clock
        return bool(got)

    try:
        wait_until(granted)
    finally:
        other.close()
    assert got[0].token > held.token


def test_ctrl_c_inside_memory_server_raises_keyboard_interrupt(bench, monkeypatch) -> None:
    # The same half-done verb, found by the claim's own clean-up: `forget` raised IndexError instead of the interrupt.
    def interrupted(_self, _floor):
        raise KeyboardInterrupt

    client = bench.client()
    with monkeypatch.context() as patch:
        patch.setattr(TokenCounter, "next", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.lock("a").acquire()
    assert not bench.server.lock_states


def test_held_locks_survive_release_in_another_thread(bench) -> None:
    # A release in another thread removes the owner's last entry in two steps: out of the list, then the empty list. An
    # entry that the owner added in between was lost: its exit raised RuntimeError, and the lease stayed.
    client = bench.client()
    semaphore = client.semaphore("a", 2, reentrant=True)
    paused, go_on = threading.Event(), threading.Event()

    class PausingDict(dict):
        def __delitem__(self, key) -> None:
            if threading.current_thread() is helper:
                paused.set()
                go_on.wait(0.3)  # with the mutex, the owner waits for this; without it, it adds its entry meanwhile
            super().__delitem__(key)

    probe.replace_held_lock_entries(client, PausingDict())
    helper = threading.Thread(target=semaphore.acquire().release)
    helper.start()
    assert paused.wait(60)
    with semaphore:
        go_on.set()
        helper.join(60)
    assert not bench.server.lock_states


def test_close_duration_does_not_grow_with_number_of_leases(bench, run_clock) -> None:
    # If the engine did not answer, each lease got its own `call_timeout`: 100 leases took 500 s.
    client = bench.client(call_timeout=0.2)
    leases = [client.lock(f"n{number}").acquire() for number in range(20)]

    def silent(_verb, _args, _deadline):
        time.sleep(0.2)  # pause: an engine that does not answer takes the whole timeout
        raise Unavailable("silence")

    bench.transport.call, bench.transport.post = silent, lambda *_: False
    run_clock(bench)
    began = time.monotonic()
    client.close()
    check_elapsed(began, 1.5)
    assert not any(lease.held for lease in leases)


def test_wakeup_arrives_after_interrupted_first_attempt(monkeypatch, wait_until) -> None:
    # The registry noted "listening" before `listen` was called. If interrupted between the two (or overtaken by another
    # thread's queued attempt), the client never got a wake-up, was always passed over, and relied on its 5 s re-check.
    name = f"memory://deaf-{os.getpid()}-{time.monotonic_ns()}"
    listen = InProcessTransport.listen
    once = iter([KeyboardInterrupt])

    def interrupted(self, *args):
        for error in once:
            raise error
        listen(self, *args)

    monkeypatch.setattr(InProcessTransport, "listen", interrupted)
    with Client(name) as client, Client(name) as other:
        with pytest.raises(KeyboardInterrupt):
            client.lock("x").acquire()
        held = other.lock("a").acquire()
        acquired_at: list[float] = []

        def wait() -> None:
            with client.lock("a"):
                acquired_at.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: [holding.state for holding in other.inspect()] == ["held", "waiting"])
        began = time.monotonic()
        held.release()
        thread.join(60)
        check_seconds(acquired_at[0] - began, HEARTBEAT_INTERVAL - 1)
