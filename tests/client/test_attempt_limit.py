"""How many attempts of a client are under way at a time: what forks, loops that end, and two threads leave behind."""

from __future__ import annotations

import asyncio
import os
import threading
import types
from contextlib import suppress

import pytest

from leasehold import AsyncClient, Client, ConfigError, Mismatch, Unavailable
from leasehold.client.attempt_limit import MAX_ATTEMPTS, AttemptLimit
from leasehold.errors import Overloaded
from tests.support import probe, probe_acquire


def fill(limit: AttemptLimit) -> None:
    for number in range(MAX_ATTEMPTS):
        assert limit.try_enter(f"sent {number}")


class SuspendingRuntime:
    """Suspends a caller that waits, so that a test decides when it goes on."""

    def now(self) -> float:
        return 100.0

    def signal(self) -> SuspendingRuntime:
        return self

    def set(self) -> None:
        pass

    @types.coroutine
    def wait(self, _seconds: float):
        yield


class InterruptedSet(set):
    """Lets another thread run before an id hash is added."""

    def __init__(self, id_hashes, interrupt) -> None:
        super().__init__(id_hashes)
        self._interrupt = interrupt

    def add(self, id_hash: str) -> None:
        self._interrupt(id_hash)
        super().add(id_hash)


def test_caller_that_gives_up_while_it_is_admitted_leaves_room_for_others() -> None:
    limit = AttemptLimit(SuspendingRuntime(), 5.0, "engine")
    fill(limit)
    callers = {id_hash: limit.enter(id_hash, 200.0) for id_hash in ("first", "second")}
    for caller in callers.values():
        caller.send(None)

    def give_up(id_hash: str) -> None:
        if id_hash == "first":
            callers["first"].close()
            limit.leave("first", answered=False)

    probe_acquire.replace_attempts_under_way(limit, InterruptedSet(probe_acquire.attempts_under_way(limit), give_up))
    limit.leave("sent 0", answered=True)
    assert "first" not in probe_acquire.attempts_under_way(limit)
    assert "second" in probe_acquire.attempts_under_way(limit)
    callers["second"].close()


def test_new_caller_does_not_overtake_one_that_waits_to_be_sent() -> None:
    limit = AttemptLimit(SuspendingRuntime(), 5.0, "engine")
    fill(limit)
    caller = limit.enter("first", 200.0)
    caller.send(None)
    # another thread gives its place back, and has yet to admit the next
    probe_acquire.attempts_under_way(limit).discard("sent 0")
    assert not limit.try_enter("late")
    limit.leave("sent 0", answered=True)
    with pytest.raises(StopIteration):
        caller.send(None)


def test_thread_admitted_while_the_interpreter_exits_sends_nothing(bench, in_new_thread, wait_until) -> None:
    core = probe.core(client := bench.client())
    fill(core.attempts)

    def exit_soon() -> None:
        wait_until(lambda: probe_acquire.callers_waiting(core.attempts))
        core.exiting = True
        core.attempts.leave("sent 0", answered=True)

    helper = threading.Thread(target=exit_soon)
    helper.start()
    assert isinstance(in_new_thread(client.lock("a").acquire), SystemExit)
    helper.join(60)
    assert not bench.transport.calls
    core.exiting = False


def test_claim_that_is_next_is_not_held_up_by_other_attempts(bench, wait_until) -> None:
    held, client = bench.client().lock("a").acquire(), bench.client()
    limit, leases = probe.core(client).attempts, []
    waiting = threading.Thread(target=lambda: leases.append(client.lock("a").acquire()), daemon=True)
    waiting.start()
    wait_until(lambda: any(waiter.answered for waiter in probe.waiters(client)))
    fill(limit)
    held.release()
    waiting.join(60)
    assert leases
    leases[0].release()


@pytest.mark.parametrize(
    ("error", "answered"),
    [
        (None, True),
        (Mismatch("a", wanted="lock", found="semaphore"), True),
        (Overloaded("busy", engine="memory"), True),
        (Unavailable("silence"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=["grant", "refusal", "overload", "silence", "Ctrl-C"],
)
def test_attempt_limit_learns_whether_the_engine_answered(bench, error, answered) -> None:
    # Callers that wait to be sent give up once the engine has answered none of this client for `call_timeout`.
    limit, answers = probe.core(client := bench.client()).attempts, []
    leave, call = limit.leave, bench.transport.call

    def record_leave(id_hash: str, *, answered: bool) -> None:
        answers.append(answered)
        leave(id_hash, answered=answered)

    def call_with_error(verb: str, *args: object) -> object:
        if verb == "attempt" and error is not None:
            raise error
        return call(verb, *args)

    limit.leave, bench.transport.call = record_leave, call_with_error
    with suppress(Mismatch, Unavailable, KeyboardInterrupt):
        client.lock("a", wait=0).acquire().release()
    assert answers[0] is answered
    assert True not in answers[1:]


def test_ctrl_c_while_a_caller_is_admitted_leaves_it_to_the_next(ctrl_c) -> None:
    number, interrupted = 0, True
    while interrupted:
        limit = AttemptLimit(SuspendingRuntime(), 5.0, "engine")
        fill(limit)
        caller = limit.enter("late", 200.0)
        caller.send(None)
        number += 1
        interrupted = ctrl_c(number, lambda: limit.leave("sent 0", answered=True), "attempt_limit.py")  # noqa: B023
        limit.leave("sent 0", answered=False)  # as `acquire` does when it was interrupted
        limit.leave("sent 1", answered=True)
        assert probe_acquire.attempts_under_way(limit) == {
            "late",
            *(f"sent {number}" for number in range(2, MAX_ATTEMPTS)),
        }
        with pytest.raises(StopIteration):  # no longer suspended
            caller.send(None)
        assert not probe_acquire.callers_waiting(limit)
    assert number > 10


@pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_every_point_of_acquire_gives_its_place_back(bench, ctrl_c) -> None:
    client = bench.client(ttl=600)
    lock, limit, number = client.lock("a"), probe.core(client).attempts, 0

    def work() -> None:
        with lock:
            pass

    while ctrl_c(number := number + 1, work, "client/acquire.py", "client/attempt_limit.py"):
        assert not probe_acquire.attempts_under_way(limit), f"Ctrl-C at place {number}"
    assert number > 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_sends_attempts_while_its_parents_threads_wait() -> None:
    client = Client("memory://")
    fill(probe.core(client).attempts)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if client.lock("a", wait=0).acquire().held else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    probe.core(client).attempts.reset()
    client.close()


def test_client_in_next_loop_sends_attempts_though_earlier_never_ended() -> None:
    client = AsyncClient("memory://")
    asyncio.run(client.ping())
    fill(probe.core(client).attempts)

    async def use() -> None:
        async with client.lock("a", wait=0):
            pass
        await client.close()

    asyncio.run(use())


def test_caller_that_waits_to_be_sent_sends_nothing_after_close(monkeypatch) -> None:
    async def use() -> None:
        client = AsyncClient("memory://")
        attempts, sent = probe.core(client).attempts, []
        monkeypatch.setattr(probe.engine(client), "attempt", lambda claim, _deadline: sent.append(claim))
        fill(attempts)
        waiting = asyncio.create_task(client.lock("a", wait=30).acquire())
        while not probe_acquire.callers_waiting(attempts):
            await asyncio.sleep(0)
        closing = asyncio.create_task(client.close())
        while not probe.is_closed(client):
            await asyncio.sleep(0)
        attempts.leave("sent 0", answered=True)
        with pytest.raises(ConfigError, match="closed"):
            await waiting
        await closing
        assert not sent

    asyncio.run(use())
