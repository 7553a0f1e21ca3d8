"""What engines with fewer promises refuse, and calls that come at the worst moment."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from leasehold import Unavailable, Unsupported
from leasehold.book import every
from leasehold.engines.memory import TRAITS, Direct, MemoryEngine
from leasehold.errors import Reentered
from leasehold.model import Claim, Holder

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def lesser(bench, **traits):
    """A client of an engine that promises less than memory does."""

    class Lesser(MemoryEngine):
        pass

    Lesser.traits = replace(TRAITS, **traits)
    bench.open = lambda _config, runtime, book: Lesser(runtime, book, bench.link)
    return bench.client()


def test_what_an_engine_cannot_do_is_refused_when_the_lock_is_built(bench) -> None:
    with pytest.raises(Unsupported, match="read locks"):
        lesser(bench, shared=False).rwlock("a").read()
    with pytest.raises(Unsupported, match="more than 1 holder"):
        lesser(bench, max_limit=1).semaphore("a", 2)
    client = lesser(bench, outlives=False)
    for option in ({"min_hold": 1}, {"delay": 1}):
        with pytest.raises(Unsupported, match="die with their process"):
            client.lock("a", **option)
    assert not bench.link.calls


def test_what_the_servers_settings_decide_is_refused_before_any_grant(bench) -> None:
    client = bench.client()
    lock = client.lock("a", require={"fair"})
    client._desk._engine.traits = replace(TRAITS, fair=False)  # as found out by connecting
    with pytest.raises(Unsupported, match="does not promise fair"):
        lock.acquire()
    assert not bench.store.lines


def test_a_call_from_inside_the_engine_is_not_answered_but_owed(bench, wait_until) -> None:
    client = bench.client()
    lease, other = client.lock("a").acquire(), client.lock("b").acquire()
    with bench.store._guard:  # as a finaliser or signal handler finds it
        for ask in (client.inspect, client.lock("c").acquire, lambda: client.break_lock("b", token=other.token)):
            with pytest.raises(Reentered, match="finaliser or signal handler"):
                ask()
        assert not lease.release()
        assert not Direct(bench.store).post("release", (other._claim,))
        client._desk.forget(other._claim)
    wait_until(lambda: not bench.store.lines)


def test_close_from_inside_the_engine_ends(bench) -> None:
    client = bench.client(call_timeout=0.2)
    lease = client.lock("a").acquire()
    with bench.store._guard:
        client.close()
    assert lease.state == "RELEASED"


def test_a_torn_look_is_mended(bench, monkeypatch) -> None:
    from leasehold.core.admission import Line

    client = bench.client()
    lease = client.lock("a").acquire()
    look = Line.look
    torn: list[int] = []

    def interrupted(self, at):
        if not torn:
            torn.append(1)
            self.waiters.append((99, object()))  # half done
            raise KeyboardInterrupt
        return look(self, at)

    monkeypatch.setattr(Line, "look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.inspect()
    assert not bench.store.lines["", "a"].waiters
    lease.verify()


def test_a_condition_waits_and_is_notified(bench) -> None:
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


def test_a_teller_that_could_not_start_tries_again(bench, monkeypatch, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    told: list[object] = []
    lease.on_lost(told.append)
    teller = client._desk.teller
    aside = teller._runtime.aside

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    teller._runtime.aside = refuse
    teller.tell(told.append, "before")  # whoever tells has better things to do than to fail for that
    teller._runtime.aside = aside
    client.break_lock("a", token=lease.token)
    wait_until(lambda: told == ["before", lease])


def test_options_of_a_url_are_converted_and_refused() -> None:
    from leasehold import ConfigError
    from leasehold.config import EngineConfig

    config = EngineConfig.parse("x://h?replicas=2&sync=yes", 5.0)
    assert config.accept(replicas=int, sync=str, other=int) == {"replicas": 2, "sync": "yes"}
    with pytest.raises(ConfigError, match="the option replicas of this x:// URL"):
        EngineConfig.parse("x://h?replicas=two", 5.0).accept(replicas=int)


def test_a_silent_engine_answers_no_renewal_in_a_batch(bench) -> None:
    from leasehold.runtime.base import step

    client = bench.client()
    engine = client._desk._engine
    bench.link.silent = True
    claim = Claim("", "a", "s", "m", Holder("h"), 10.0)
    replies = step(engine.renew([claim, claim], 0.0))
    assert [type(reply) for reply in replies] == [Unavailable, Unavailable]


def test_what_others_change_meanwhile_is_read_whole() -> None:
    class Restless(dict[str, int]):
        tries = 0

        def items(self):  # type: ignore[no-untyped-def]
            Restless.tries += 1
            if Restless.tries < 3:
                raise RuntimeError("dictionary changed size during iteration")
            return super().items()

    assert every(Restless(a=1)) == [("a", 1)]
