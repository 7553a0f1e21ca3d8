"""A hook that fails, is slow or hangs: the locks do not notice."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import pytest

from leasehold import Client, ConfigError, Event, events
from leasehold.telemetry import Metrics, background
from tests.support import probe, probe_logs


@pytest.fixture(autouse=True)
def no_slow_calls(monkeypatch):
    monkeypatch.setattr(*probe_logs.SLOW_CALLS, {})
    monkeypatch.setattr(*probe_logs.SLOW_HOOKS, set())


def dropped(metrics: Metrics) -> float:
    return next(f.samples[0].value for f in metrics.families() if f.name == "leasehold_events_dropped")


def event(name: str = "a") -> Event:
    return Event("replayed", "memory", "", name, 1.0)


def test_slow_hook_is_reported_once_with_advice(monkeypatch, caplog):
    def slow_hook(_event: Event) -> None:
        clock[0] += 0.06

    clock = [0.0]
    monkeypatch.setattr(events, "perf_counter", lambda: clock[0])
    for number in range(10):
        events.call_hook(slow_hook, event())
        assert ("slow_hook is slow" in caplog.text) == (number >= 2)  # once may be the machine's fault
    assert not getattr(*probe_logs.SLOW_CALLS)
    (record,) = [record for record in caplog.records if "slow_hook" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "slow_hook is slow (0.060 s" in record.getMessage()
    assert "leasehold.telemetry.background(hook)" in record.getMessage()


def test_hook_that_is_slow_now_and_then_is_not_reported(monkeypatch, caplog):
    """On a machine that is busy with other things, any call may take long."""
    clock, calls = [0.0], [0]

    def hook(_event: Event) -> None:
        calls[0] += 1
        clock[0] += 0.0 if calls[0] % 3 == 0 else 0.06

    monkeypatch.setattr(events, "perf_counter", lambda: clock[0])
    for _ in range(30):
        events.call_hook(hook, event())
    assert "is slow" not in caplog.text


def test_hook_in_the_background_is_called_in_order_on_one_other_thread(wait_until):
    seen: list[tuple[str, int]] = []
    hook = background(lambda event: seen.append((event.name, threading.get_ident())))
    for number in range(100):
        hook(event(str(number)))
    assert hook.flush(20)
    assert [name for name, _ in seen] == [str(number) for number in range(100)]
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


def test_hook_that_hangs_in_the_background_delays_no_lock_and_is_bounded(caplog):
    metrics, release, seen = Metrics(), threading.Event(), []

    def hangs(event: Event) -> None:
        release.wait(60)
        seen.append(event)

    hook = background(hangs, max_events=10)
    with Client("memory://", on_event=hook) as client:
        for _ in range(10):  # 30 events
            client.lock("a").acquire().release()
    assert not seen
    assert dropped(metrics) in (19, 20)  # 10 wait, and the thread may have taken one
    assert not hook.flush(0)
    release.set()
    assert hook.flush(20)
    assert len(seen) == 30 - dropped(metrics)
    assert "slow" not in caplog.text  # it may be: that is what the thread is for


def test_hook_that_fails_in_the_background_gets_the_next_event(caplog):
    seen: list[str] = []

    def fails(event: Event) -> None:
        seen.append(event.name)
        raise RuntimeError("hook")

    hook = background(fails)
    hook(event("a"))
    hook(event("b"))
    assert hook.flush(20)
    assert seen == ["a", "b"]
    assert caplog.text.count("the on_event hook failed") == 2


def test_hook_that_exits_in_the_background_gets_the_next_event(caplog):
    seen: list[str] = []

    def exits(event: Event) -> None:
        seen.append(event.name)
        sys.exit("hook")

    hook = background(exits)
    hook(event("a"))
    hook(event("b"))
    assert hook.flush(20)
    assert seen == ["a", "b"]
    assert caplog.text.count("unexpected error in the thread of a background hook") == 2


def test_hook_in_the_background_works_in_a_forked_child():
    hook = background(lambda _event: None)
    hook(event())
    assert hook.flush(20)
    child = os.fork()
    if child == 0:
        hook(event())
        os._exit(0 if hook.flush(20) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_events_still_queued_at_exit_are_passed_on(run_script):
    script = """
import time, leasehold
def slow(event):
    time.sleep(0.01)
    print(event.kind, flush=True)
with leasehold.Client("memory://", on_event=leasehold.telemetry.background(slow)) as client:
    client.lock("a").acquire().release()
"""
    assert run_script(script).split() == ["attempted", "granted", "released"]


@pytest.mark.parametrize(("hook", "max_events"), [(3, 10), (print, 0), (print, "many")])
def test_background_refuses_what_is_not_a_hook_or_number(hook, max_events):
    with pytest.raises(ConfigError, match="background takes a hook"):
        background(hook, max_events=max_events)


def test_events_of_the_watchdog_are_dropped_if_its_hook_hangs(bench, monkeypatch, wait_until):
    """The callback thread also runs on_lost callbacks: those are never dropped."""
    monkeypatch.setattr(*probe.MAX_EVENTS, 3)
    metrics, release, lost = Metrics(), threading.Event(), []

    def hangs(event: Event) -> None:
        if event.kind == "lost":
            release.wait(60)

    client = bench.client(on_event=hangs)
    leases = [client.lock(f"a{number}", max_hold=5).acquire() for number in range(10)]
    for lease in leases:
        lease.on_lost(lambda lease: lost.append(lease.name))
    bench.clock.advance(6)
    wait_until(lambda: dropped(metrics) > 0)
    assert not [lease for lease in leases if lease.held]
    release.set()
    wait_until(lambda: len(lost) == 10)


def test_slow_hook_delays_no_renewal(bench, wait_until):
    release = threading.Event()
    client = bench.client(on_event=lambda event: event.kind != "renewed" or release.wait(60))
    lease = client.lock("a", ttl=30).acquire()
    for _ in range(5):
        before = bench.transport.calls
        bench.clock.advance(10)
        wait_until(lambda before=before: bench.transport.calls > before)
    end = time.monotonic() + 20
    while lease.remaining < 20 and time.monotonic() < end:
        time.sleep(0.01)
    assert lease.remaining >= 20
    release.set()
    lease.release()
