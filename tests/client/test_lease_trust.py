"""How long a holder trusts its lease: `ensure`, `on_at_risk`, `strict` and the drift of the client."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, LeaseState, Unavailable, advise_ttl
from leasehold.core import timing
from tests.support import probe

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")
CALL = 5.0  # seconds: the default call_timeout


# ------------------------------------------------------------------------ ensure


def test_ensure_asks_nothing_while_enough_time_is_left(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    calls = bench.transport.calls
    lease.ensure(29)
    assert bench.transport.calls == calls


def test_ensure_renews_when_too_little_time_is_left(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.clock.at += 9
    lease.ensure(25)
    assert lease.remaining >= 25
    bench.transport.silent = True
    bench.clock.at += lease.remaining - 0.01
    assert lease.held


def test_ensure_raises_the_ttl_for_as_long_as_asked_plus_one_call(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    lease.ensure("60s")
    assert 60 + CALL <= lease.remaining < 60 + CALL + 0.1
    assert lease.ttl == pytest.approx((60 + CALL) / 0.99)
    lease.renew(30)
    assert lease.ttl == 30


def test_watchdog_keeps_what_ensure_has_promised(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    lease.ensure(60)
    bench.clock.advance(30)  # the watchdog renews with the raised ttl
    wait_until(lambda: probe.renewed_at(lease) == bench.clock.at)
    assert lease.remaining >= 60


def test_ensure_answered_late_does_not_shorten_a_longer_one(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    original, nested = bench.transport.call, []

    def call(verb, args, deadline):
        answer = original(verb, args, deadline)
        if verb == "renew" and not nested:
            nested.append(True)
            lease.ensure(100)  # by another thread, and answered first
        return answer

    bench.transport.call = call
    lease.ensure(60)
    assert nested
    assert lease.remaining >= 100


def test_ensure_of_a_lost_lease_raises(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.client().break_lock("a", token=lease.token)
    with pytest.raises(LeaseLost):
        lease.ensure(1)


def test_ensure_raises_unavailable_and_keeps_the_lease(bench) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        lease.ensure(60)
    assert lease.state is LeaseState.AT_RISK
    assert lease.ttl == 30


@pytest.mark.parametrize(
    ("client_options", "lock_options", "seconds", "words"),
    [
        ({"max_ttl": 60}, {}, 58, "max_ttl"),
        ({}, {"max_hold": 40}, 41, "max_hold"),
        ({}, {}, -1, "0 or more"),
        ({}, {}, "soon", "such as '30s'"),
    ],
)
def test_ensure_refuses_what_no_lease_can_last(bench, client_options, lock_options, seconds, words) -> None:
    lease = bench.client(**client_options).lock("a", ttl=30, **lock_options).acquire()
    calls = bench.transport.calls
    with pytest.raises(ConfigError, match=words):
        lease.ensure(seconds)
    assert bench.transport.calls == calls
    assert lease.state is LeaseState.HELD


def test_ensure_refuses_more_than_the_engine_grants(bench, monkeypatch) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    renew = bench.server.renew

    def short_session(claims):
        return [reply._replace(ttl=min(reply.ttl, 30.0)) for reply in renew(claims)]

    monkeypatch.setattr(bench.server, "renew", short_session)
    with pytest.raises(ConfigError, match="grants it for at most 30 s at a time"):
        lease.ensure(60)
    assert lease.held


def test_ensure_cancelled_at_every_await_leaves_a_lease_that_is_held() -> None:
    async def run(steps: int) -> bool:
        async with AsyncClient("memory://", drift=0.02) as client:
            lease = await client.lock("a", ttl=5).acquire()
            task = asyncio.ensure_future(lease.ensure(60))
            for _ in range(steps):
                await asyncio.sleep(0)
            finished = not task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert lease.held
            await lease.ensure(60)
            assert lease.remaining >= 60
            return finished

    finished = [asyncio.run(run(steps)) for steps in range(8)]
    assert any(finished)


# -------------------------------------------------------------------- on_at_risk


def test_on_at_risk_is_called_once_until_a_renewal_succeeds(bench, wait_until) -> None:
    client = bench.client()
    lease, seen = client.lock("a", ttl=30).acquire(), []
    lease.on_at_risk(lambda lease: seen.append((lease, lease.state)))
    for episode in (1, 2):
        bench.transport.silent = True
        bench.clock.advance(11)
        wait_until(lambda number=episode: len(seen) == number)
        bench.clock.advance(1)
        with pytest.raises(Unavailable):
            lease.verify()
        bench.transport.silent = False
        lease.verify()
        assert lease.state is LeaseState.HELD
    assert seen == [(lease, LeaseState.AT_RISK)] * 2


def test_on_at_risk_is_called_once_when_the_connection_is_lost(bench, wait_until) -> None:
    client = bench.client()
    lease, seen, ended = client.lock("a", ttl=30).acquire(), list[object](), threading.Event()
    lease.on_at_risk(seen.append)
    bench.transport.silent = True
    for _ in range(3):
        probe.registry(client).mark_all_at_risk("the connection broke")
    probe.core(client).callbacks.submit(ended.set)  # behind all callbacks of the loss
    assert ended.wait(60)
    assert seen == [lease]


def test_on_at_risk_is_called_at_once_if_registered_late(bench, wait_until) -> None:
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        lease.verify()
    seen: list[str] = []
    lease.on_at_risk(lambda _: seen.append(threading.current_thread().name))
    wait_until(lambda: seen == ["leasehold-callbacks"])


def test_on_at_risk_is_called_once_if_registered_during_a_failure(bench, wait_until, monkeypatch) -> None:
    client = bench.client(on_event=lambda _: None)  # its event is submitted before the callbacks
    lease, seen = client.lock("a", ttl=30).acquire(), list[object]()
    callbacks = probe.core(client).callbacks
    submit = callbacks.submit

    def register_and_submit(*args) -> None:
        monkeypatch.setattr(callbacks, "submit", submit)
        lease.on_at_risk(seen.append)
        submit(*args)

    monkeypatch.setattr(callbacks, "submit", register_and_submit)
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        lease.verify()
    ended = threading.Event()
    callbacks.submit(ended.set)  # behind all callbacks of the failure
    assert ended.wait(60)
    assert seen == [lease]


def test_on_at_risk_is_not_called_after_the_loss(bench, wait_until) -> None:
    lease, seen, goes_on = bench.client().lock("a", ttl=30).acquire(), list[str](), threading.Event()

    def first(_) -> None:
        seen.append("at risk")
        goes_on.wait(60)

    lease.on_at_risk(first)
    lease.on_at_risk(lambda _: seen.append("second"))
    lease.on_lost(lambda _: seen.append("lost"))
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        lease.verify()
    wait_until(lambda: seen == ["at risk"])
    bench.clock.advance(31)
    wait_until(lambda: lease.state is LeaseState.LOST)
    goes_on.set()
    wait_until(lambda: "lost" in seen)
    assert seen == ["at risk", "lost"]


def test_on_at_risk_is_not_called_for_ended_leases(bench) -> None:
    lease, seen = bench.client().lock("a", ttl=30).acquire(), []
    lease.release()
    lease.on_at_risk(seen.append)
    with pytest.raises(ConfigError, match="plain function"):
        lease.on_at_risk(None)
    assert seen == []


def test_multilock_reports_a_lease_at_risk(bench, wait_until) -> None:
    leases = bench.client().multilock(["a", "b"], ttl=30).acquire()
    seen: list[object] = []
    leases.on_at_risk(seen.append)
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        leases["b"].verify()
    wait_until(lambda: seen == [leases])


# ------------------------------------------------------------------------ strict


def test_strict_lease_is_lost_at_the_first_failed_renewal(bench, wait_until) -> None:
    events: list[str] = []
    client = bench.client(on_event=lambda event: events.append(event.kind))
    lease = client.lock("a", ttl=30, strict=True).acquire()
    bench.transport.silent = True
    bench.clock.advance(11)
    wait_until(lambda: lease.state is LeaseState.LOST)
    assert lease.lost_reason == "unreachable"
    wait_until(lambda: "lost" in events)
    assert "renew_failed" in events
    assert "at_risk" not in events


def test_strict_lease_is_lost_when_its_renewal_is_overdue(bench) -> None:
    lease = bench.client().lock("a", ttl=30, strict=True).acquire()
    assert lease.remaining == pytest.approx(20)
    bench.clock.at += 19.9
    assert lease.state is LeaseState.HELD
    bench.clock.at += 0.2
    assert (lease.state, lease.lost_reason) == (LeaseState.LOST, "stalled")
    assert not lease.release()
    assert bench.held_names() == []


def test_strict_lease_that_was_renewed_is_lost_when_the_next_is_overdue(bench) -> None:
    lease = bench.client().lock("a", ttl=30, strict=True).acquire()
    bench.clock.at += 5
    lease.renew()
    assert lease.remaining == pytest.approx(20)
    bench.clock.at += 20.1
    assert (lease.state, lease.lost_reason) == (LeaseState.LOST, "stalled")
    lease.release()


def test_strict_lease_is_lost_when_the_holder_gets_no_answer(bench) -> None:
    lease = bench.client().lock("a", ttl=30, strict=True).acquire()
    bench.transport.silent = True
    with pytest.raises(LeaseLost, match="did not answer"):
        lease.verify()


def test_strict_lease_is_ensured_before_its_renewal_is_overdue(bench) -> None:
    lease = bench.client().lock("a", ttl=30, strict=True).acquire()
    lease.ensure(60)
    assert lease.remaining >= 60
    assert lease.ttl == pytest.approx((60 + CALL) * 3 / 2)


@pytest.mark.parametrize(
    "build",
    [
        lambda client: client.rwlock("a").read(strict=True),
        lambda client: client.rwlock("a").write(strict=True),
        lambda client: client.semaphore("a", 2, strict=True),
        lambda client: client.election("a", strict=True).lead(),
    ],
)
def test_strict_applies_to_every_kind_of_lock(bench, build) -> None:
    with build(bench.client()) as lease:
        assert lease.remaining == pytest.approx(20)


def test_strict_applies_to_multilock_and_decorator(bench) -> None:
    client = bench.client()
    with client.multilock(["a", "b"], strict=True) as leases:
        assert leases.remaining == pytest.approx(20)

    @client.locked("c", strict=True)
    def remaining(lease) -> float:
        return lease.remaining

    assert remaining() == pytest.approx(20)


def test_strict_must_be_a_bool(bench) -> None:
    with pytest.raises(ConfigError, match="strict must be True or False"):
        bench.client().lock("a", strict="yes")


# ------------------------------------------------------------------------- drift


@pytest.mark.parametrize(
    ("drift", "ttl", "trusted"), [(0.0, 30, 29.998), (0.1, 30, 27), (0.5, 30, 15), (0.1, 0.01, 0.008)]
)
def test_drift_of_the_client_is_taken_off_every_ttl(bench, drift, ttl, trusted) -> None:
    lease = bench.client(drift=drift).lock("a", ttl=ttl).acquire()
    assert lease.remaining == pytest.approx(trusted)
    lease.renew()
    assert lease.remaining == pytest.approx(trusted)


@pytest.mark.parametrize("drift", [-0.01, 0.51, float("nan"), True, "1%", None])
def test_drift_that_is_no_share_is_refused(drift) -> None:
    with pytest.raises(ConfigError, match="drift must be a share between 0 and"):
        Client("memory://", drift=drift)


def test_drift_survives_pickling_and_reaches_the_engine() -> None:
    with Client("memory://", drift=0.2) as client, pickle.loads(pickle.dumps(client)) as copy:
        assert probe.config(copy).drift == probe.core(copy).options.drift == 0.2


def test_advised_ttl_covers_worst_case_times_safety() -> None:
    for work, network, safety in ((0.5, 0.2, 3), (2, 5, 3), (60, 1, 1), (0, 1, 10)):
        trusted = timing.valid_until(0.0, advise_ttl(work, network, safety))
        assert safety * (work + network) <= trusted + 1e-9 <= safety * (work + network) * 1.02
    assert advise_ttl(0, 0) == 1.0
    assert advise_ttl(work=1, network=1) == advise_ttl(1, 1, safety=3)


@pytest.mark.parametrize("wrong", [(-1, 1), (1, -1), (1, 1, 0.5), (float("nan"), 1), (1, float("inf")), ("soon", 1)])
def test_advise_ttl_refuses_invalid_arguments(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="advise_ttl"):
        advise_ttl(*wrong)


def test_advised_ttl_includes_the_drift() -> None:
    assert advise_ttl(9, 1, 1, drift=0.5) == 20
    with pytest.raises(ConfigError, match="drift"):
        advise_ttl(9, 1, 1, drift=2)
