"""What the engine's answer to a release says about the lease: that it was lost before, or nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from leasehold import AsyncClient, LeaseLost, Unavailable
from leasehold.client.lease import LeaseState
from leasehold.engines.memory import MemoryEngine
from leasehold.runtime.loop import Loop
from tests.support import probe


def _break(bench, lease) -> None:
    """End the grant without a notification to its holder."""
    bench.server.notify_callbacks.clear()
    assert bench.server.break_("", lease.name, lease.token)


def _answer_releases(monkeypatch, answer: Callable[[], bool | None]) -> None:
    """Let the engine carry releases out, and answer this."""
    release = MemoryEngine.release

    async def release_and_answer(engine, claim, deadline) -> bool | None:
        await release(engine, claim, deadline)
        return answer()

    monkeypatch.setattr(MemoryEngine, "release", release_and_answer)


class MutexTakenByOthersFirst:
    """Lets another thread's step come before the first `with` of it."""

    def __init__(self, mutex, step: Callable[[], object]) -> None:
        self._mutex, self._steps = mutex, [step]

    def __enter__(self) -> None:
        if self._steps:
            self._steps.pop()()
        self._mutex.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mutex.__exit__(*error)


def test_leaving_block_of_broken_lease_raises_lost(bench, wait_until) -> None:
    events, lost = [], []
    client = bench.client(on_event=events.append)
    with pytest.raises(LeaseLost) as caught, client.lock("a") as lease:
        lease.on_lost(lost.append)
        _break(bench, lease)
    assert caught.value.reason == lease.lost_reason == "unknown"
    assert lease.state is LeaseState.LOST
    wait_until(lambda: lost == [lease] and "lost" in [event.kind for event in events])
    assert "released" not in [event.kind for event in events]


def test_leaving_async_block_of_broken_lease_raises_lost(bench) -> None:
    async def work() -> None:
        async with AsyncClient(engine=bench.open, runtime=Loop(bench.clock)) as client:
            with pytest.raises(LeaseLost):
                async with client.lock("a") as lease:
                    _break(bench, lease)

    asyncio.run(work())


def test_leaving_block_with_error_notes_the_loss(bench) -> None:
    with pytest.raises(KeyError) as caught, bench.client().lock("a") as lease:
        _break(bench, lease)
        raise KeyError("body")
    assert "is lost" in caught.value.__notes__[0]


def test_leaving_multilock_block_names_the_broken_lease(bench) -> None:
    with pytest.raises(LeaseLost) as caught, bench.client().multilock(["a", "b", "c"]) as leases:
        _break(bench, leases["b"])
    assert caught.value.name == "b"
    assert not bench.held_names()


def test_call_and_decorator_raise_when_lease_was_broken(bench) -> None:
    client = bench.client()
    with pytest.raises(LeaseLost):
        client.lock("a").call(lambda lease: _break(bench, lease))
    with pytest.raises(LeaseLost):
        client.locked("a")(lambda lease: _break(bench, lease))()


def test_release_of_broken_lease_returns_false_and_is_lost(bench) -> None:
    lease = bench.client().lock("a").acquire()
    _break(bench, lease)
    assert lease.release() is False
    assert (lease.state, lease.lost_reason) == (LeaseState.LOST, "unknown")
    assert lease.release() is False


def test_release_of_lease_that_was_notified_of_its_break_sends_nothing(bench) -> None:
    lease = bench.client().lock("a").acquire()
    assert bench.server.break_("", lease.name, lease.token)
    assert lease.lost_reason == "broken"
    calls = bench.transport.calls
    assert lease.release() is False
    assert bench.transport.calls == calls


def test_block_that_released_a_broken_lease_itself_raises_lost(bench) -> None:
    with pytest.raises(LeaseLost), bench.client().lock("a") as lease:
        _break(bench, lease)
        assert lease.release() is False


def test_release_of_lease_lost_as_it_begins_returns_false(bench, wait_until) -> None:
    # The release had read the state before; it answered True, and could report a second loss.
    lost = []
    client = bench.client()
    lease = client.lock("a", ttl=30, strict=True).acquire()
    lease.on_lost(lost.append)
    core, no_answer = probe.core(client), Unavailable("silence")
    core.mutex = MutexTakenByOthersFirst(
        core.mutex, lambda: probe.answer_renewal(lease, bench.clock.at, probe.renewal_claim(lease), no_answer)
    )
    assert lease.release() is False
    assert lease.lost_reason == "unreachable"
    assert not bench.held_names()
    wait_until(lambda: lost == [lease])


def test_release_of_expired_lease_with_live_grant_returns_false(bench) -> None:
    lease = bench.client(on_event=lambda _event: None).lock("a", ttl=30).acquire()
    bench.clock.at += 29.9  # by the local clock it is over, less the drift; the engine still has it
    assert lease.release() is False
    assert not bench.held_names()


def test_repeated_release_that_finds_no_grant_is_only_logged(bench, monkeypatch, caplog, wait_until) -> None:
    # The request sent first may have ended the grant, so the answer to the second one proves nothing.
    _answer_releases(monkeypatch, lambda: None)
    with caplog.at_level(logging.WARNING, "leasehold"), bench.client().lock("a") as lease:
        pass
    assert lease.state is LeaseState.RELEASED
    wait_until(lambda: "was over when its release arrived" in caplog.text)


def test_release_answered_after_local_deadline_is_no_loss(bench, monkeypatch, caplog, wait_until) -> None:
    # The body ended in time; the grant may have expired while the release was under way.
    def answer_late() -> bool:
        bench.clock.at += 40
        return False

    _answer_releases(monkeypatch, answer_late)
    with caplog.at_level(logging.WARNING, "leasehold"), bench.client().lock("a", ttl=30) as lease:
        pass
    assert lease.state is LeaseState.RELEASED
    wait_until(lambda: "was over when its release arrived" in caplog.text)


def test_multilock_lease_that_ends_during_the_exit_is_no_loss(bench, monkeypatch) -> None:
    # The locks are released one after the other. The body ended before any of them.
    def answer_late() -> bool:
        bench.clock.at += 40
        return True

    _answer_releases(monkeypatch, answer_late)
    with bench.client().multilock(["a", "b"], ttl=30) as leases:
        pass
    assert leases["a"].lost_reason in ("stalled", "unreachable")
