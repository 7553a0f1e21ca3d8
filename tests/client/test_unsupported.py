"""Refused options of engines with fewer traits, and calls from finalisers, signal handlers and interrupts."""

from __future__ import annotations

import threading

import pytest

from leasehold import Unavailable, Unsupported
from leasehold.engines.memory import TRAITS, InProcessTransport, MemoryEngine
from leasehold.engines.registry import snapshot_items
from leasehold.errors import Reentered
from leasehold.model import Claim, Holder
from tests.support import probe, probe_memory

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def client_with_traits(bench, **traits):
    """A client of an engine with fewer traits than the memory engine."""

    class LimitedEngine(MemoryEngine):
        pass

    LimitedEngine.traits = TRAITS._replace(**traits)
    bench.open = lambda _config, runtime, registry: LimitedEngine(runtime, registry, bench.transport)
    return bench.client()


def test_unsupported_trait_is_refused_when_lock_is_built(bench) -> None:
    with pytest.raises(Unsupported, match="read locks"):
        client_with_traits(bench, shared=False).rwlock("a").read()
    with pytest.raises(Unsupported, match="more than 1 holder"):
        client_with_traits(bench, max_limit=1).semaphore("a", 2)
    client = client_with_traits(bench, outlives=False)
    for option in ({"min_hold": 1}, {"delay": 1}):
        with pytest.raises(Unsupported, match="die with their process"):
            client.lock("a", **option)
    assert not bench.transport.calls


def test_trait_lost_on_connect_is_refused_before_any_grant(bench) -> None:
    client = bench.client()
    lock = client.lock("a", require={"fair"})
    probe.engine(client).traits = TRAITS._replace(fair=False)  # as discovered on connect
    with pytest.raises(Unsupported, match="does not promise fair"):
        lock.acquire()
    assert not bench.server.lock_states


def test_trait_lost_during_the_attempt_is_refused_and_the_grant_released(bench) -> None:
    client, call = bench.client(), bench.transport.call

    def restart_with_other_settings(verb: str, args: tuple[object, ...], deadline: float) -> object:
        if verb == "attempt":
            probe.engine(client).traits = TRAITS._replace(fair=False)
        return call(verb, args, deadline)

    bench.transport.call = restart_with_other_settings
    with pytest.raises(Unsupported, match="does not promise fair"):
        client.lock("a", require={"fair"}).acquire()
    assert not bench.server.lock_states


def test_reentrant_engine_call_raises_and_release_becomes_pending(bench, wait_until) -> None:
    client = bench.client()
    lease, other = client.lock("a").acquire(), client.lock("b").acquire()
    with probe_memory.mutex(bench.server):  # as when a finaliser or signal handler runs meanwhile
        for call in (client.inspect, client.lock("c").acquire, lambda: client.break_lock("b", token=other.token)):
            with pytest.raises(Reentered, match="finaliser or signal handler"):
                call()
        assert not lease.release()
        assert not InProcessTransport(bench.server).post("release", (probe.claim(other),))
        probe.core(client).forget(probe.claim(other))
    wait_until(lambda: not bench.server.lock_states)


def test_close_while_engine_mutex_is_held_returns(bench) -> None:
    client = bench.client(call_timeout=0.2)
    lease = client.lock("a").acquire()
    with probe_memory.mutex(bench.server):
        client.close()
    assert lease.state == "RELEASED"


def test_interrupted_sweep_is_repaired(bench, monkeypatch) -> None:
    from leasehold.core.lock_state import LockState

    client = bench.client()
    lease = client.lock("a").acquire()
    sweep = LockState.sweep
    interruptions: list[int] = []

    def interrupted(self, context):
        if not interruptions:
            interruptions.append(1)
            self.waiters.append((99, object()))  # a sweep interrupted halfway
            raise KeyboardInterrupt
        return sweep(self, context)

    monkeypatch.setattr(LockState, "sweep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.inspect()
    assert not bench.server.lock_states["", "a"].waiters
    lease.verify()


def test_condition_on_threading_lock_waits_and_is_notified(bench) -> None:
    for options in ({}, {"reentrant": True}):
        lock = bench.client().lock("a", **options).as_threading()
        condition = threading.Condition(lock)
        ready: list[int] = []

        def notify(condition=condition, ready=ready) -> None:
            with condition:
                ready.append(1)
                condition.notify_all()

        with condition:
            if options:
                lock.acquire()
            threading.Thread(target=notify).start()
            assert condition.wait_for(lambda ready=ready: ready, timeout=20)
            if options:
                lock.release()
        assert not lock.locked()


def test_callback_thread_start_is_retried_after_failure(bench, monkeypatch, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    notified: list[object] = []
    lease.on_lost(notified.append)
    callbacks = probe.core(client).callbacks
    start_thread = probe.callback_runtime(client).start_thread

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    probe.callback_runtime(client).start_thread = refuse
    callbacks.submit(notified.append, "before")  # the caller must not fail
    probe.callback_runtime(client).start_thread = start_thread
    client.break_lock("a", token=lease.token)
    wait_until(lambda: notified == ["before", lease])


def test_url_options_are_converted_or_refused() -> None:
    from leasehold import ConfigError
    from leasehold.config import EngineConfig

    config = EngineConfig.parse("x://h?replicas=2&sync=yes", 5.0)
    assert config.accept(replicas=int, sync=str, other=int) == {"replicas": 2, "sync": "yes"}
    with pytest.raises(ConfigError, match="the option replicas of this x:// URL"):
        EngineConfig.parse("x://h?replicas=two", 5.0).accept(replicas=int)


def test_renew_of_unresponsive_engine_returns_unavailable_per_claim(bench) -> None:
    from leasehold.runtime.base import run_sync

    client = bench.client()
    engine = probe.engine(client)
    bench.transport.silent = True
    claim = Claim("", "a", "s", "m", Holder("h"), 10.0)
    replies = run_sync(engine.renew([claim, claim], 0.0))
    assert [type(reply) for reply in replies] == [Unavailable, Unavailable]


def test_snapshot_items_retries_when_dict_changes_size() -> None:
    class ChangingDict(dict[str, int]):
        tries = 0

        def items(self):  # type: ignore[no-untyped-def]
            ChangingDict.tries += 1
            if ChangingDict.tries < 3:
                raise RuntimeError("dictionary changed size during iteration")
            return super().items()

    assert snapshot_items(ChangingDict(a=1)) == [("a", 1)]
