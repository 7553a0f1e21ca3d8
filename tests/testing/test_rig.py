"""Rigs inject the faults that the suite relies on, and declare what they cannot do."""

import asyncio
import time

import pytest

import leasehold
from leasehold.engines.memory import MemoryEngine
from leasehold.model import Alive, Busy, Gone, Grant
from leasehold.runtime.base import run_sync
from leasehold.testing import RIGS, Absent, CaseContext, ClientPath, Rig, conformance_tests, register
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.memory_rig import MemoryRig
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import Skipped, all_cases, rig_or_skip, run_case

CASES = {case.name: case for case in all_cases()}


@pytest.fixture
def rig():
    rig = MemoryRig()
    yield rig
    rig.restore_all()
    rig.close()


@pytest.fixture
def client(rig):
    with rig.client(call_timeout=0.1) as client:
        yield client
        rig.restore_all()


@pytest.fixture
def other(rig):
    with rig.client() as client:
        yield client


@pytest.fixture
def context(rig):
    context = CaseContext(rig, "blocking")
    yield context
    run_sync(context.close())


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("registered", "seconds"),
    [({}, 60.0), ({"expires": True}, 60.0), ({"slow": True}, 60.0), ({"rig": {"pause"}}, 2.0)],
)
def test_calls_are_short_only_in_cases_that_get_no_answer(rig, registered, seconds):
    """Where a ttl has to pass, a busy machine may still take seconds to answer a call."""
    cases, given = {}, []

    @case(**registered, into=cases)
    async def notes_its_deadlines(t):
        given.append((t.call_timeout, t.ttl < 60))

    run_case(cases["notes_its_deadlines"], CaseContext(rig, "blocking"))
    assert given == [(seconds, bool(registered))]


def test_clients_of_one_rig_share_one_engine(rig, client, other):
    with client.lock("job"):
        assert other.lock("job").try_acquire() is None
    assert MemoryRig().client().lock("job").locked() is False


def test_cut_disconnects_only_that_client(rig, client, other):
    rig.cut(client)
    with pytest.raises(leasehold.Unavailable):
        client.lock("job").acquire()
    with other.lock("job"):
        pass
    rig.restore(client)
    with client.lock("job"):
        pass


def test_call_of_cut_off_client_lasts_until_its_deadline(rig, client):
    rig.cut(client)
    began = time.monotonic()
    with pytest.raises(leasehold.Unavailable):
        client.ping()
    assert time.monotonic() - began >= 0.1


def test_wakeup_is_lost_while_client_is_cut_off(rig, context):
    holder, waiter = context.driver(), context.driver()
    held, claim = run_sync(holder.acquire(holder.claim())), waiter.waiter()
    run_sync(waiter.busy(claim))
    rig.cut(waiter)
    run_sync(holder.release(held))
    rig.restore(waiter)
    assert not waiter.registry.waiting[claim.id_hash].woken
    assert [holding.state for holding in run_sync(holder.inspect())] == ["reserved"], "the engine believes it notified"


def test_paused_engine_executes_requests_after_resume(rig, client, other):
    rig.pause()
    for caller in (client, client):
        with pytest.raises(leasehold.Unavailable):
            caller.lock("job", ttl=60).acquire()
    assert len(rig.queued_requests) >= 4, "two attempts, and the releases of both abandoned claims"
    rig.resume()
    wait_until(lambda: other.inspect() == [])


def test_call_with_long_deadline_survives_a_pause(rig, other):
    rig.pause()
    context = CaseContext(rig, "blocking")
    inspection = context.spawn(_inspect(other))
    wait_until(lambda: rig.queued_requests)
    assert not inspection.done()
    rig.resume()
    assert run_sync(inspection.result()) == []


async def _inspect(client):
    return client.inspect()


def test_killed_session_is_not_notified_until_its_next_call(rig, context):
    holder, waiter = context.driver(), context.driver()
    held, claim = run_sync(holder.acquire(holder.claim())), waiter.waiter()
    run_sync(waiter.busy(claim))
    rig.kill_session(waiter)
    run_sync(holder.release(held))
    assert [holding.state for holding in run_sync(holder.inspect())] == ["passed over"]
    waiter.registry.waiting[claim.id_hash].recheck_at = None
    run_sync(waiter.engine.ping(waiter.deadline()))
    assert waiter.registry.waiting[claim.id_hash].recheck_at is not None, "after a reconnect its waiters must re-check"
    assert isinstance(run_sync(waiter.attempt(claim)), Grant)


def test_advance_clock_moves_engine_and_clients_and_wakes_sleepers(rig, client, other):
    lost = client.lock("max", ttl=30, max_hold=60).acquire()
    kept = client.lock("kept", ttl=30).acquire()
    for _ in range(8):
        rig.advance_clock(11)
        wait_until(lambda: kept.state == "HELD")
    assert lost.lost_reason == "max_hold"
    assert other.lock("kept").try_acquire() is None
    kept.release()
    lost.release()


def test_residue_counts_what_a_namespace_keeps(rig, other):
    assert rig.residue("") == 0
    with other.lock("job"):
        assert rig.residue("") == 1
        assert rig.residue("elsewhere") == 0
    assert rig.residue("") == 0


def test_cut_disconnects_async_client(rig, other):
    async def work():
        async with rig.async_client(call_timeout=0.1) as client:
            rig.cut(client)
            with pytest.raises(leasehold.Unavailable):
                await client.lock("job").acquire()
            rig.restore(client)
            async with client.lock("job"):
                assert other.lock("job").locked()

    asyncio.run(work())


# ----------------------------------------------------------------- declarations


class MinimalRig(Rig):
    """The least that an author has to write."""

    scheme = "memory"

    def client_path(self):
        return ClientPath("memory://a-bare-rig")


def test_undeclared_ability_raises_not_implemented():
    rig = MinimalRig()
    client = rig.client()
    for ability, call in {
        "cut": lambda: rig.cut(client),
        "pause": rig.pause,
        "kill": lambda: rig.kill_session(client),
        "advance_clock": lambda: rig.advance_clock(1),
        "count": lambda: rig.residue(""),
        "restart": rig.restart,
        "lose_minority": rig.lose_minority,
    }.items():
        assert not MinimalRig.can(ability)
        with pytest.raises(NotImplementedError):
            call()
    for call in (rig.resume, rig.restart_lost_members, lambda: rig.restore(client)):
        with pytest.raises(NotImplementedError):
            call()
    client.close()
    rig.restore_all()
    rig.close()


def test_minimal_rig_reaches_the_engine_by_url():
    run_case(CASES["exclusive_grant_excludes_other_claims"], CaseContext(MinimalRig(), "asyncio"))


def test_skip_names_the_missing_ability_or_trait(monkeypatch):
    with pytest.raises(Skipped, match="the rig does not have the ability 'pause'"):
        run_case(CASES["engine_calls_end_unavailable_in_time_when_paused"], CaseContext(MinimalRig(), "blocking"))
    monkeypatch.setattr(MemoryEngine, "traits", MemoryEngine.traits._replace(shared=False))
    with pytest.raises(Skipped, match="the engine does not promise the trait 'shared'"):
        run_case(CASES["queued_readers_are_granted_together"], CaseContext(MinimalRig(), "asyncio"))


def test_rigs_are_found_by_name(monkeypatch):
    assert rig_type("memory") is MemoryRig
    with pytest.raises(KeyError):
        rig_type("nobody")
    monkeypatch.setattr("leasehold.testing.conformance.rig.RIGS", dict(RIGS))
    assert register("bare")(MinimalRig) is MinimalRig
    assert rig_type("bare") is MinimalRig


class NotInstalled(MinimalRig):
    def __init__(self):
        raise Absent("no such server here")


def test_absent_server_skips_locally_and_fails_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no such server"):
        rig_or_skip(NotInstalled)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no such server"):
        rig_or_skip(NotInstalled)


# --------------------------------------------- what the memory engine does not need


class Durable(MemoryRig):
    """Behaves like a server with its data on disk."""

    can_restart = can_lose_minority = True
    keeps_data = True

    def restart(self):
        self.server.notify_callbacks.clear()
        if not self.keeps_data:
            self.server.lock_states.clear()

    lose_minority = restart

    def restart_lost_members(self):
        pass


class Forgetful(Durable):
    keeps_data = False


@pytest.mark.parametrize("mode", ["blocking", "asyncio"])
@pytest.mark.parametrize("name", ["grants_survive_a_restart_of_the_engine", "grants_survive_the_loss_of_a_minority"])
def test_survival_cases_fail_on_engine_that_forgets_grants(name, mode, monkeypatch):
    monkeypatch.setattr(MemoryEngine, "traits", MemoryEngine.traits._replace(survives="minority"))
    run_case(CASES[name], CaseContext(Durable(), mode))
    with pytest.raises(AssertionError):
        run_case(CASES[name], CaseContext(Forgetful(), mode))


class SessionRig(MemoryRig):
    """Like ZooKeeper, where a grant lives no longer than its session."""

    def client_path(self):
        path = super().client_path()
        path.kill_session = lambda: [self.server.release(claim) for claim in list(self.claims) if self.frees_grants]
        return path

    frees_grants = True
    claims = ()


@pytest.mark.parametrize("mode", ["blocking", "asyncio"])
def test_session_case_passes_on_rig_that_frees_grants(mode, monkeypatch):
    rig = SessionRig()
    rig.claims = []
    original = rig.server.attempt
    monkeypatch.setattr(
        rig.server, "attempt", lambda claim, client_id: (rig.claims.append(claim), original(claim, client_id))[1]
    )
    monkeypatch.setattr(MemoryEngine, "traits", MemoryEngine.traits._replace(liveness="session"))
    run_case(CASES["killed_session_frees_its_grants"], CaseContext(rig, mode))


class RealTimeRig(MemoryRig):
    """A rig that cannot advance the clock, like those of servers: the same cases wait in real time."""

    can_advance_clock = False
    ttl = 1.0


test_timing_cases_on_rig_that_cannot_advance_the_clock = conformance_tests(
    RealTimeRig,
    name="real-time",
    cases=[
        CASES[name]
        for name in (
            "unrenewed_grant_lives_for_its_ttl_and_no_longer",
            "delay_keeps_name_busy_after_expiry",
            "release_after_expiry_is_harmless",
            "idle_name_accepts_any_kind",
        )
    ],
)


def test_slow_cases_are_marked_faults_on_real_time_rigs():
    slow = CASES["waiter_without_heartbeat_loses_its_position"]
    for rig, marks in ((MemoryRig, []), (RealTimeRig, ["faults"])):
        (parameters,) = conformance_tests(rig, cases=[slow]).pytestmark
        assert [[mark.name for mark in parameter_set.marks] for parameter_set in parameters.args[1]] == [marks] * 2


def test_rig_transport_returns_engine_answers_unchanged(context):
    """The transport in between changes no answer."""
    driver = context.driver()
    claim = driver.claim()
    grant = run_sync(driver.attempt(claim))
    assert isinstance(grant, Grant)
    assert isinstance(run_sync(driver.attempt(driver.claim())), Busy)
    alive, gone = run_sync(driver.renew(claim._replace(token=grant.token), driver.claim()))
    assert isinstance(alive, Alive)
    assert isinstance(gone, Gone)
    assert run_sync(driver.release(claim))
