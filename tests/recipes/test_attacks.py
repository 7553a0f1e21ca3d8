"""Attacks that broke something when they were written. Each comment names the mechanism, worst first."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, NotAcquired, SelfDeadlock, Unavailable
from leasehold.core.party import Counter
from leasehold.engines.memory import Direct
from leasehold.recipes.entries import Entries, Entry
from leasehold.runtime.threads import Threads, boot_clock

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def child(script: str, seconds: float = 60.0) -> str:
    """Run a script that may hang, and give the end of what it said."""
    bounded = f"import faulthandler; faulthandler.dump_traceback_later({seconds - 5}, exit=True)\n{script}"
    done = subprocess.run([sys.executable, "-c", bounded], capture_output=True, text=True, timeout=seconds)
    return done.stdout.strip() or done.stderr[-1500:]


def aside(fn):
    """What `fn` gave or raised on a new thread, which has ended by now."""
    out: list[object] = []

    def run() -> None:
        try:
            out.append(fn())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(15)
    assert out, "it hangs"
    return out[0]


def run_clock(bench, seconds: float):
    """Let the hand-turned clock follow the real one for a while."""

    def run() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.02)
            bench.clock.at += 0.02

    threading.Thread(target=run, daemon=True).start()


# ------------------------------------------------------------------ two holders


def test_a_new_thread_does_not_inherit_a_reentrant_lease_by_its_ident(bench) -> None:
    # Entries are keyed by get_ident(), which the system gives to the next thread once the first has ended. The lease
    # itself may have been handed on. TWO HOLDERS of one lease, by plain use.
    lock = bench.client().lock("a", reentrant=True)
    handed = aside(lock.acquire)
    for _ in range(10):
        assert aside(lock.try_acquire) is None
    assert handed.held


def test_a_new_thread_is_not_told_of_a_self_deadlock_that_is_not_its_own(bench) -> None:
    # The same reuse of idents: a generator left suspended inside a `with` by a thread that ended.
    lock = bench.client().lock("a")
    kept = []

    def body():
        with lock:
            yield

    def enter() -> None:
        kept.append(body())
        next(kept[0])

    aside(enter)
    for _ in range(10):
        refused = aside(lambda: lock.acquire(wait=0))
        assert isinstance(refused, NotAcquired), refused
    assert not any(aside(lambda: lock._desk.entries.find("a")) for _ in range(10))


def test_interleaved_bodies_in_one_thread_release_their_own_permits(bench) -> None:
    # Entries.pop takes the *newest* entry of the lock: two generators (or ExitStacks) not left in reverse order
    # release each other's lease. The second body goes on with a released permit, whose slot goes to somebody else.
    permits = bench.client().semaphore("s", 2)

    def body():
        with permits as lease:
            yield lease

    first, second = body(), body()
    one, two = next(first), next(second)
    first.close()
    assert (one.held, two.held) == (False, True)


def test_an_inner_with_that_fails_leaves_the_outer_one_alone(bench) -> None:
    # What a failed `with` gave up was found by lock and frame: that of the `with` around it in the same function. The
    # outer body went on unlocked, and its end raised RuntimeError. TWO HOLDERS by plain use.
    lock, permits = bench.client().lock("a"), bench.client().semaphore("s", 2, wait=0)
    with lock as lease:
        with pytest.raises(SelfDeadlock), lock:
            pass
        assert lease.held
    other = bench.client().semaphore("s", 2).acquire()
    with permits as permit:
        with pytest.raises(NotAcquired), permits:
            pass
        with pytest.raises(NotAcquired):
            permits.call(print)
        assert permit.held
        other.release()
        with pytest.raises(LeaseLost), permits as inner:
            inner._lose("broken")
        assert permit.held
    assert not permit.held


def test_an_inner_with_that_is_cancelled_leaves_the_cancellation_as_it_is() -> None:
    # The same: leaving the outer `with` raised RuntimeError in place of the cancellation.
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            permits = client.semaphore("s", 2)
            other = await permits.acquire()

            async def twice() -> None:
                async with permits, permits:
                    pass

            task = asyncio.create_task(twice())
            while not any(one.state == "waiting" for one in await client.inspect()):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await other.release()
            assert await client.inspect() == []

    asyncio.run(main())


def test_the_threading_shape_never_releases_the_lease_of_another_thread(bench) -> None:
    # It popped the newest lease, whoever called: after a loss the first thread's release() freed the second's.
    lock = bench.client().lock("a", ttl=10).as_threading()
    assert lock.acquire()
    bench.clock.turn(11)
    assert aside(lock.acquire) is True
    second = lock.lease
    lock.release()
    assert second.held


def test_a_lease_ended_between_finding_it_and_entering_it_again_is_not_entered(bench, monkeypatch) -> None:
    # `find` says held, another thread releases, `_depth += 1` follows: the body of a `with` runs unlocked.
    lock = bench.client().lock("a", reentrant=True)
    lease = lock.acquire()
    find = Entries.find

    def found_then_released(self, name):
        found = find(self, name)
        if found is not None and lease.held:
            aside(lease.release)
        return found

    monkeypatch.setattr(Entries, "find", found_then_released)
    with lock as entered:
        assert entered.held


def test_releasing_an_inner_hold_by_hand_does_not_open_the_outer_body(bench) -> None:
    # release() and the inner exit both count down: two exits for one entry, the outer body runs unlocked.
    lock = bench.client().lock("a", reentrant=True)
    with lock as outer:
        with lock as inner:
            inner.release()
        assert outer.held


# --------------------------------------------------------------- hangs, deadlocks


def test_a_body_closed_by_the_garbage_collector_inside_a_guard_does_not_deadlock() -> None:
    # A generator in a cycle, suspended in a `with`, is closed by gc wherever an allocation happens: also under
    # Store._guard (or desk.guard, dog._guard, the teller's), which its __exit__ then wants. Not reentrant: hang.
    out = child("""
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
def test_a_signal_handler_that_gives_up_what_is_held_does_not_deadlock(what) -> None:
    # The usual SIGTERM handler. It runs between two bytecodes of the main thread, also of one that holds a guard.
    out = child(f"""
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


def test_ctrl_c_inside_the_store_harms_no_other_waiter(bench, wait_until, monkeypatch) -> None:
    # The verbs of Line are not all-or-nothing. An interrupt (or RecursionError, MemoryError) in `_occupy`, when
    # the head has left `waiters` and is no occupier yet, leaves a party that says WAITING and stands nowhere: it is
    # never served again, though the name is free. At its end `_remove` deletes by place: an IndexError in the caller's
    # face, or *somebody else* out of the line.
    held = bench.client().lock("a").acquire()
    other = bench.client()
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(other.lock("a").acquire(wait=60)), daemon=True)
    thread.start()
    wait_until(lambda: other._desk.book.waiting)
    wait_until(lambda: bench.store.lines["", "a"].waiters)
    once = iter([KeyboardInterrupt])
    issue = Counter.next

    def interrupted(self, floor):
        for error in once:
            raise error
        return issue(self, floor)

    monkeypatch.setattr(Counter, "next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        held.release()
    for _ in range(6):
        bench.clock.turn(5)
        for waiter in list(other._desk.book.waiting.values()):
            waiter.signal.set()  # it sleeps by the real clock
        time.sleep(0.05)
    try:
        wait_until(lambda: got, 2)
    finally:
        other.close()
    assert got[0].token > held.token


def test_ctrl_c_inside_the_store_is_told_as_ctrl_c(bench, monkeypatch) -> None:
    # The same half-done verb, met by the claim's own clean-up: `forget` raises IndexError instead of the interrupt.
    def interrupted(_self, _floor):
        raise KeyboardInterrupt

    client = bench.client()
    with monkeypatch.context() as patch:
        patch.setattr(Counter, "next", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.lock("a").acquire()
    assert not bench.store.lines


def test_entries_survive_a_release_in_another_thread(bench, monkeypatch, wait_until) -> None:
    # `discard` (and `pop` elsewhere) reads another owner's chain and writes it back; what the owner enters meanwhile
    # is lost. Leaving it raises RuntimeError, the lease stays, and the next `with` waits for its own thread for ever.
    lock = bench.client().lock("a", reentrant=True)
    chain, paused, go_on = getattr(Entry, "chain", None), threading.Event(), threading.Event()
    helper: list[threading.Thread] = []
    calls: list[int] = []

    def slow(self):
        found = list(chain(self))
        if helper and threading.current_thread() is helper[0]:
            calls.append(1)
            if len(calls) == 2:
                paused.set()
                go_on.wait(2)
        return iter(found)

    monkeypatch.setattr(Entry, "chain", slow, raising=False)
    with lock as outer:
        handed = lock.acquire()
        helper.append(threading.Thread(target=handed.release))
        helper[0].start()
        paused.wait(1)
        with lock:
            go_on.set()
            helper[0].join(5)
    assert not outer.held
    assert not bench.store.lines


# ------------------------------------------------------- renewed for ever, ghosts


def test_an_async_generator_left_by_break_gives_back_its_permit() -> None:
    # asyncio closes it in a task of its own. `Entries.pop` finds the lock entered in several tasks and raises; the
    # entry keeps the lease strongly, so it is renewed for ever. Same for a generator collected on another thread.
    async def main() -> tuple[int, int]:
        async with AsyncClient("memory://") as client:
            permits = client.semaphore("s", 5)
            enough = asyncio.Event()

            async def items():
                async with permits as lease:
                    yield lease

            async def other() -> None:
                async with permits:
                    await enough.wait()

            async def take_one() -> None:
                async for _ in items():
                    break

            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            others = [asyncio.create_task(other()) for _ in range(2)]
            await asyncio.create_task(take_one())
            gc.collect()
            await asyncio.sleep(0.3)
            held = len(await client.inspect("s"))
            enough.set()
            await asyncio.gather(*others, return_exceptions=True)
            return held, len(await client.inspect("s"))

    assert asyncio.run(main()) == (2, 0)


@pytest.mark.parametrize("where", ["interrupt", "step"])
def test_ctrl_c_while_entering_leaves_no_entry(bench, monkeypatch, wait_until, where) -> None:
    # Once `entries.push` ran, nothing but __exit__ takes the lease out again; an interrupt before __enter__ returned
    # means there is no __exit__. The entry holds the lease strongly: renewed for ever, SelfDeadlock in this thread.
    client = bench.client()
    lock = client.lock("a")
    push = Entries.push

    def interrupted(self, *args):
        push(self, *args)
        raise KeyboardInterrupt  # as after the call that pushes

    with monkeypatch.context() as patch:
        if where == "interrupt":
            patch.setattr(Entries, "push", interrupted)
        else:
            import leasehold.locks_blocking as face

            step = face.step

            def then_interrupted(coro):
                step(coro)
                raise KeyboardInterrupt  # as inside step's `finally: coro.close()`

            patch.setattr(face, "step", then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
    gc.collect()
    client._desk.dog.stir(-1.0)
    wait_until(lambda: not bench.store.lines, 2)


def test_ctrl_c_while_leaving_still_gives_back(bench, monkeypatch, wait_until) -> None:
    # `_ended = RELEASED` is set long before the release is sent: an interrupt between (`dog.drop`, `give_back`) and
    # nobody sends or owes it. The name stays taken for a whole ttl, and __del__ is silent (DESIGN 3.2: forgotten).
    client = bench.client()
    lease = client.lock("a", ttl=600).acquire()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client._desk.dog, "drop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lease.release()
    client._desk.dog.stir(-1.0)
    wait_until(lambda: not bench.store.lines, 2)


def test_close_interrupted_half_way_can_be_repeated(bench) -> None:
    # `closed` is set first, so the second close() returns at once: the watchdog renews what is left for ever.
    client = bench.client()
    leases = [client.lock(f"n{number}", ttl=30).acquire() for number in range(3)]
    call, releases = bench.link.call, []

    def ctrl_c(verb, args, deadline):
        if verb == "release":
            releases.append(verb)
            if len(releases) == 2:
                raise KeyboardInterrupt
        return call(verb, args, deadline)

    bench.link.call = ctrl_c
    with pytest.raises(KeyboardInterrupt):
        client.close()
    client.close()
    for _ in range(8):
        bench.clock.turn(10)
        time.sleep(0.03)
    assert not bench.store.lines, [lease.state for lease in leases]


# ------------------------------------------------------- a watchdog or teller that is gone


def test_a_watchdog_that_could_not_start_is_started_by_the_next_lease(bench, monkeypatch, wait_until) -> None:
    # `_running = True` before `aside`: when the thread cannot start (limit of processes, Ctrl-C just there) no lease of
    # this client is ever renewed or told lost again, and close() waits `call_timeout` for nobody. The teller likewise.
    client = bench.client()

    def refuse(_self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            client.lock("a").acquire()
    lease = client.lock("b", ttl=30).acquire()
    bench.clock.turn(10.1)
    wait_until(lambda: lease._asked > 1000, 2)


def test_a_callback_that_exits_silences_no_other(bench, wait_until) -> None:
    # The teller catches Exception: sys.exit() in a callback (or CancelledError) ends its thread, `_running` stays.
    client = bench.client()
    told: list[str] = []
    one, two = client.lock("a").acquire(), client.lock("b").acquire()
    one.on_lost(lambda _: sys.exit(3))
    two.on_lost(lambda lease: told.append(lease.name))
    client.break_lock("a", token=one.token)
    time.sleep(0.1)
    client.break_lock("b", token=two.token)
    wait_until(lambda: told, 2)


def test_a_log_handler_that_raises_costs_no_renewal(bench, wait_until) -> None:
    # Due leases are off the heap while they are renewed. Anything raised in `answered` (a log handler or filter, the
    # teller's thread that cannot start) ends the turn: the whole batch is never planned, so never renewed, again.
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "at risk" in record.getMessage():
                raise OSError("disk full")

    handler, log = Raising(), logging.getLogger("leasehold")
    log.addHandler(handler)
    try:
        client = bench.client()
        lease = client.lock("a", ttl=30).acquire()
        wait_until(lambda: client._desk.dog._ends)
        bench.link.silent = True
        bench.clock.turn(10)
        wait_until(lambda: lease._missed)
        bench.link.silent = False
        for _ in range(30):
            bench.clock.turn(0.5)
            time.sleep(0.01)
        assert lease._asked > 1000, lease.lost_reason
    finally:
        log.removeHandler(handler)


def test_a_log_handler_that_blocks_costs_no_renewal(bench, wait_until) -> None:
    # `at_risk`, `lost` and `owed` are logged on the watchdog's own thread: the one kind of user code it still runs.
    free = threading.Event()

    class Blocking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "at risk" in record.getMessage():
                free.wait(5)

    handler, log = Blocking(), logging.getLogger("leasehold")
    log.addHandler(handler)
    try:
        client = bench.client()
        lease = client.lock("a", ttl=30).acquire()
        wait_until(lambda: client._desk.dog._ends)
        bench.link.silent = True
        bench.clock.turn(10)
        wait_until(lambda: lease._missed)
        bench.link.silent = False
        for _ in range(10):
            bench.clock.turn(1)
            time.sleep(0.03)
        assert lease._asked > 1000
    finally:
        free.set()
        log.removeHandler(handler)


def test_after_a_suspend_the_loss_is_told_soon() -> None:
    # The clock counts suspend, the watchdog's sleep (a lock's timeout, CLOCK_MONOTONIC) does not: it sleeps on for
    # up to a third of the ttl after the machine woke. state and check() know at once; callbacks, events, tasks do not.
    slept = [0.0]
    client = Client("memory://", runtime=Threads(lambda: boot_clock() + slept[0]))
    lease, told = client.lock("a", ttl=60).acquire(), []
    lease.on_lost(told.append)
    time.sleep(0.1)
    slept[0] = 3600.0
    assert lease.state == "LOST"
    end = time.monotonic() + 6
    while not told and time.monotonic() < end:
        time.sleep(0.05)
    try:
        assert told
    finally:
        client.close()


# --------------------------------------------------------------------- deadlines


def test_close_takes_no_longer_for_more_leases(bench) -> None:
    # Each lease of a silent engine gets a `call_timeout` of its own: 100 leases, 500 s.
    client = bench.client(call_timeout=0.2)
    leases = [client.lock(f"n{number}").acquire() for number in range(20)]

    def silent(_verb, _args, _deadline):
        time.sleep(0.2)
        raise Unavailable("silence")

    bench.link.call, bench.link.post = silent, lambda *_: False
    run_clock(bench, 10)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 1.5
    assert not any(lease.held for lease in leases)


def test_a_wake_up_is_not_lost_by_an_interrupted_first_attempt(monkeypatch) -> None:
    # shelf["mailbox"] is set before `listen`: interrupted between (or overtaken by another thread's queued attempt)
    # the client is deaf for ever, always passed over, and finds out by its own 5 s look.
    name = f"memory://deaf-{os.getpid()}-{time.monotonic_ns()}"
    listen = Direct.listen
    once = iter([KeyboardInterrupt])

    def interrupted(self, *args):
        for error in once:
            raise error
        listen(self, *args)

    monkeypatch.setattr(Direct, "listen", interrupted)
    with Client(name) as client, Client(name) as other:
        with pytest.raises(KeyboardInterrupt):
            client.lock("x").acquire()
        held = other.lock("a").acquire()
        at: list[float] = []

        def wait() -> None:
            with client.lock("a"):
                at.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        began = time.monotonic()
        held.release()
        thread.join(20)
        assert at[0] - began < 1


# ------------------------------------------------------- states, reasons, leaks, forks


def test_a_lease_that_was_lost_by_the_clock_never_comes_back(bench) -> None:
    # `answered` asks whether the lease has ended, not what time it is: a late Alive turns LOST into HELD. One thread
    # has stopped on LeaseLost, another goes on, and on_lost is never called.
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.clock.at += 20
    asked, claim = bench.clock.at, lease._renewal()
    (reply,) = bench.store.renew([claim])
    bench.clock.at += 9.8
    with pytest.raises(LeaseLost):
        lease.check()
    lease._answered(asked, claim, reply)
    with pytest.raises(LeaseLost):
        lease.check()


def test_a_dropped_lease_does_not_say_held(bench, wait_until) -> None:
    # __del__ hands the claim over for release and leaves `_ended` None. Whoever still reaches the lease (a recorded
    # warning's `source`, another finaliser of the same cycle) sees HELD while the name is somebody else's.
    client = bench.client()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        client.lock("a").acquire()
        gc.collect()
    wait_until(lambda: not bench.store.lines)
    assert not seen[0].source.held


def test_owed_releases_settled_during_close_do_not_break_it(bench) -> None:
    # close() walks over book.owed itself, while the watchdog may delete from it: RuntimeError, engine never closed.
    client = bench.client(call_timeout=0.05)
    leases = [client.lock(f"n{number}").acquire() for number in range(3)]

    class Settling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "before close" in record.getMessage() and client._desk.book.owed:
                client._desk.book.owed.popitem()  # as the watchdog does on its thread

    handler, log = Settling(), logging.getLogger("leasehold")
    log.addHandler(handler)
    bench.link.silent = True
    run_clock(bench, 3)
    try:
        client.close()
    finally:
        log.removeHandler(handler)
    assert not any(lease.held for lease in leases)


def test_a_purpose_for_every_call_leaves_nothing_behind(bench) -> None:
    # The desk kept one Holder per (holder, purpose) for ever; a purpose is often "order 4711".
    client = bench.client()
    for number in range(5000):
        with client.lock("a", purpose=f"job {number}"):
            pass
    parts = [*vars(client._desk).values(), *vars(client._desk.book).values(), *vars(client._desk.dog).values()]
    assert all(len(part) < 100 for part in parts if hasattr(part, "__len__"))


def test_an_interrupted_admission_leaves_nothing_in_the_book(bench, monkeypatch) -> None:
    # book.held[mark] is written before `watch`; the clean-up of acquire() forgets the claim but not that line.
    client = bench.client()
    client.lock("warm").acquire().release()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client._desk.dog, "watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.lock("a").acquire()
    gc.collect()
    client._desk.dog.stir(-1.0)
    time.sleep(0.1)
    assert not client._desk.book.held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_an_asyncio_client_can_be_used_in_a_forked_child() -> None:
    # Loop keeps the parent's loop (never closed in the child) and its worker thread (not there): after_fork has no
    # part for the runtime. ConfigError here; with an engine that uses runtime.call, a hang.
    async def use(client: AsyncClient) -> None:
        async with client.lock("a"):
            pass

    async def main() -> bytes:
        client = AsyncClient("memory://")
        await use(client)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.events._set_running_loop(None)
                asyncio.new_event_loop().run_until_complete(use(client))
                os.write(writer, b"done")
            except BaseException as error:
                os.write(writer, repr(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)  # noqa: ASYNC222
        said = os.read(reader, 500)
        os.close(reader)
        os.close(writer)
        await client.close()
        return said

    assert asyncio.run(main()) == b"done"


def test_the_watchdog_of_a_collected_client_ends_with_its_last_lease() -> None:
    # `drop` wakes nobody: thread, desk and engine live on until the next appointment, a third of the ttl away.
    def dogs() -> int:
        return sum(thread.name == "leasehold-watchdog" for thread in threading.enumerate())

    before = dogs()
    client = Client("memory://")
    lease = client.lock("a", ttl=3000).acquire()
    time.sleep(0.1)  # it has an appointment now
    del client
    gc.collect()
    lease.release()
    del lease
    gc.collect()
    end = time.monotonic() + 2
    while dogs() > before and time.monotonic() < end:
        time.sleep(0.02)
    assert dogs() <= before


def test_the_shape_of_rlock_carries_a_condition(bench) -> None:
    # Condition asks a lock without _is_owned by acquire(False), which a reentrant one grants: "un-acquired lock".
    condition = threading.Condition(bench.client().lock("a", reentrant=True).as_threading())
    with condition:
        condition.notify()


def test_a_number_too_large_for_a_float_is_a_config_error(bench) -> None:
    # isfinite(10**400) raises OverflowError.
    with pytest.raises(ConfigError):
        bench.client().lock("a", ttl=10**400)
