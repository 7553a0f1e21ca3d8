"""Regressions: wrong lease states, what a client keeps for ever, and what a forked child inherits."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
import warnings
from functools import partial

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost
from tests.support import probe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def test_expired_lease_stays_lost_after_late_renewal_reply(bench) -> None:
    # `_on_renewal` checked whether the lease had ended, but not the time: a late Alive turned LOST into HELD. One
    # thread had stopped on LeaseLost, another continued, and on_lost was never called.
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.clock.at += 20
    asked_at, claim = bench.clock.at, probe.renewal_claim(lease)
    (reply,) = bench.server.renew([claim])
    bench.clock.at += 9.8
    with pytest.raises(LeaseLost):
        lease.check()
    probe.answer_renewal(lease, asked_at, claim, reply)
    with pytest.raises(LeaseLost):
        lease.check()


def test_garbage_collected_lease_is_not_held(bench, wait_until) -> None:
    # __del__ passed the claim on for release and left `_final_state` None. Code that could still reach the lease (a
    # recorded warning's `source`, another finaliser of the same cycle) saw HELD while another client held the name.
    client = bench.client()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        client.lock("a").acquire()
        gc.collect()
    wait_until(lambda: not bench.server.lock_states)
    assert not seen[0].source.held


def test_close_tolerates_pending_releases_confirmed_meanwhile(bench, run_clock) -> None:
    # close() iterated over `pending_releases` while the watchdog deleted from it: RuntimeError, engine never closed.
    client = bench.client(call_timeout=0.05)
    leases = [client.lock(f"n{number}").acquire() for number in range(3)]

    class ConfirmingHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "before close" in record.getMessage() and probe.pending_releases(client):
                probe.registry(client).pending_releases.popitem()  # as the watchdog does in its thread

    handler, log = ConfirmingHandler(), logging.getLogger("leasehold")
    log.addHandler(handler)
    bench.transport.silent = True
    run_clock(bench)
    try:
        client.close()
    finally:
        log.removeHandler(handler)
    assert not any(lease.held for lease in leases)


def test_distinct_purposes_leave_nothing_in_the_client(bench) -> None:
    # The client kept one Holder per (holder, purpose) for ever; a purpose is often unique, such as "order 4711".
    client = bench.client()
    for number in range(5000):
        with client.lock("a", purpose=f"job {number}"):
            pass
    parts = [
        *vars(probe.core(client)).values(),
        *vars(probe.registry(client)).values(),
        *vars(probe.watchdog(client)).values(),
    ]
    assert all(len(part) < 100 for part in parts if hasattr(part, "__len__"))


def test_interrupted_acquire_leaves_nothing_in_the_registry(bench, monkeypatch, wait_until) -> None:
    # `registry.held` was written before `watch`; the clean-up of acquire() released the claim but kept that entry.
    client = bench.client()
    client.lock("warm").acquire().release()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probe.watchdog(client), "watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.lock("a").acquire()
    gc.collect()
    probe.wake_watchdog(client)
    wait_until(lambda: not probe.registry(client).held)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_async_client_works_in_forked_child() -> None:
    # After a fork, Loop kept the parent's loop (never closed in the child) and its worker thread (absent in the child),
    # because after_fork did not reset the runtime. ConfigError here; with an engine that uses runtime.call, a hang.
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
        output = os.read(reader, 500)
        os.close(reader)
        os.close(writer)
        await client.close()
        return output

    assert asyncio.run(main()) == b"done"


def test_watchdog_of_collected_client_stops_after_last_release(wait_until) -> None:
    # `unwatch` did not wake the watchdog: thread, client core and engine lived until the next renewal, a third of the
    # ttl later.
    def count_watchdogs() -> int:
        return sum(thread.name == "leasehold-watchdog" for thread in threading.enumerate())

    before = count_watchdogs()
    client = Client("memory://")
    lease = client.lock("a", ttl=3000).acquire()
    wait_until(partial(probe.watchdog_sleeps, client))
    del client
    gc.collect()
    lease.release()
    del lease
    gc.collect()
    end = time.monotonic() + 10
    while count_watchdogs() > before and time.monotonic() < end:
        time.sleep(0.02)
    assert count_watchdogs() <= before


def test_condition_accepts_reentrant_threading_lock(bench) -> None:
    # Condition probes a lock without _is_owned by acquire(False), which a reentrant lock grants: "un-acquired lock".
    condition = threading.Condition(bench.client().lock("a", reentrant=True).as_threading())
    with condition:
        condition.notify()


def test_ttl_too_large_for_a_float_raises_config_error(bench) -> None:
    # isfinite(10**400) raises OverflowError, which reached the caller.
    with pytest.raises(ConfigError):
        bench.client().lock("a", ttl=10**400)
