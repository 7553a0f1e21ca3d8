"""Rigs: they hurt an engine in the ways that the suite relies on, and say what they cannot do."""

import asyncio
import time
from dataclasses import replace

import pytest

import leasehold
from leasehold.engines.memory import MemoryEngine
from leasehold.model import Alive, Busy, Gone, Grant
from leasehold.runtime.base import step
from leasehold.testing import RIGS, Absent, Machine, Rig, Trial, conformance, register
from leasehold.testing.memory_rig import MemoryRig
from leasehold.testing.rig import rig_type
from leasehold.testing.suite import Skipped, all_cases, made, run_case

CASES = {case.name: case for case in all_cases()}


@pytest.fixture
def rig():
    rig = MemoryRig()
    yield rig
    rig.heal()
    rig.close()


@pytest.fixture
def client(rig):
    with rig.client(call_timeout=0.1) as client:
        yield client
        rig.heal()


@pytest.fixture
def other(rig):
    with rig.client() as client:
        yield client


@pytest.fixture
def trial(rig):
    trial = Trial(rig, "blocking")
    yield trial
    step(trial.close())


def until(what, seconds=5.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_clients_are_machines_of_their_own_on_one_engine(rig, client, other):
    with client.lock("job"):
        assert other.lock("job").try_acquire() is None
    assert MemoryRig().client().lock("job").locked() is False


def test_one_machine_is_cut_off_and_the_others_are_not(rig, client, other):
    rig.cut(client)
    with pytest.raises(leasehold.Unavailable):
        client.lock("job").acquire()
    with other.lock("job"):
        pass
    rig.mend(client)
    with client.lock("job"):
        pass


def test_cutting_off_takes_calls_to_their_deadline(rig, client):
    rig.cut(client)
    began = time.monotonic()
    with pytest.raises(leasehold.Unavailable):
        client.ping()
    assert time.monotonic() - began >= 0.1


def test_wake_ups_are_lost_while_cut_off(rig, trial):
    holder, waiter = trial.seat(), trial.seat()
    held, claim = step(holder.takes(holder.claim())), waiter.waiter()
    step(waiter.busy(claim))
    rig.cut(waiter)
    step(holder.release(held))
    rig.mend(waiter)
    assert not waiter.book.waiting[claim.mark].go
    assert [holding.state for holding in step(holder.inspect())] == ["reserved"], "the engine believes it was told"


def test_a_paused_engine_does_later_what_it_was_sent(rig, client, other):
    rig.pause()
    for caller in (client, client):
        with pytest.raises(leasehold.Unavailable):
            caller.lock("job", ttl=60).acquire()
    assert len(rig.letters) >= 4, "two attempts, and the releases of what nobody waits for any more"
    rig.resume()
    until(lambda: other.inspect() == [])


def test_a_call_that_is_patient_enough_outlasts_a_pause(rig, other):
    rig.pause()
    trial = Trial(rig, "blocking")
    asking = trial.spawn(_inspect(other))
    until(lambda: rig.letters)
    assert not asking.done()
    rig.resume()
    assert step(asking.result()) == []


async def _inspect(client):
    return client.inspect()


def test_a_killed_session_cannot_be_told_until_it_asks_again(rig, trial):
    holder, waiter = trial.seat(), trial.seat()
    held, claim = step(holder.takes(holder.claim())), waiter.waiter()
    step(waiter.busy(claim))
    rig.kill_session(waiter)
    step(holder.release(held))
    assert [holding.state for holding in step(holder.inspect())] == ["passed over"]
    waiter.book.waiting[claim.mark].look_at = None
    step(waiter.engine.ping(waiter.deadline()))
    assert waiter.book.waiting[claim.mark].look_at is not None, "connected anew, it has its waiters ask"
    assert isinstance(step(waiter.attempt(claim)), Grant)


def test_travelling_moves_engine_and_clients_and_stirs_whoever_sleeps(rig, client, other):
    lost = client.lock("max", ttl=30, max_hold=60).acquire()
    kept = client.lock("kept", ttl=30).acquire()
    for _ in range(8):
        rig.travel(11)
        until(lambda: kept.state == "HELD")
    assert lost.lost_reason == "max_hold"
    assert other.lock("kept").try_acquire() is None
    kept.release()
    lost.release()


def test_residue_counts_what_inspect_might_not_show(rig, other):
    assert rig.residue("") == 0
    with other.lock("job"):
        assert rig.residue("") == 1
        assert rig.residue("elsewhere") == 0
    assert rig.residue("") == 0


def test_an_async_client_is_cut_off_as_well(rig, other):
    async def work():
        async with rig.async_client(call_timeout=0.1) as client:
            rig.cut(client)
            with pytest.raises(leasehold.Unavailable):
                await client.lock("job").acquire()
            rig.mend(client)
            async with client.lock("job"):
                assert other.lock("job").locked()

    asyncio.run(work())


# -------------------------------------------------------------------- declaring


class Bare(Rig):
    """The least an author writes."""

    scheme = "memory"

    def machine(self):
        return Machine("memory://a-bare-rig")


def test_a_rig_can_do_no_more_than_it_declares():
    rig = Bare()
    who = rig.client()
    for ability, call in {
        "cut": lambda: rig.cut(who),
        "pause": rig.pause,
        "kill": lambda: rig.kill_session(who),
        "travel": lambda: rig.travel(1),
        "count": lambda: rig.residue(""),
        "restart": rig.restart,
        "lose_minority": rig.lose_minority,
    }.items():
        assert not Bare.can(ability)
        with pytest.raises(NotImplementedError):
            call()
    for call in (rig.resume, rig.regain, lambda: rig.mend(who)):
        with pytest.raises(NotImplementedError):
            call()
    who.close()
    rig.heal()
    rig.close()


def test_a_bare_rig_reaches_the_engine_by_its_url():
    run_case(CASES["an_exclusive_grant_stands_alone"], Trial(Bare(), "asyncio"))


def test_what_a_case_misses_is_named(monkeypatch):
    with pytest.raises(Skipped, match="the rig does not have the ability 'pause'"):
        run_case(CASES["a_paused_engine_is_unavailable_in_time"], Trial(Bare(), "blocking"))
    monkeypatch.setattr(MemoryEngine, "traits", replace(MemoryEngine.traits, shared=False))
    with pytest.raises(Skipped, match="the engine does not promise the trait 'shared'"):
        run_case(CASES["readers_in_line_go_together"], Trial(Bare(), "asyncio"))


def test_rigs_are_found_by_name(monkeypatch):
    assert rig_type("memory") is MemoryRig
    with pytest.raises(KeyError):
        rig_type("nobody")
    monkeypatch.setattr("leasehold.testing.rig.RIGS", dict(RIGS))
    assert register("bare")(Bare) is Bare
    assert rig_type("bare") is Bare


class NotInstalled(Bare):
    def __init__(self):
        raise Absent("no such server here")


def test_an_absent_server_is_a_skip_and_in_ci_a_failure(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no such server"):
        made(NotInstalled)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no such server"):
        made(NotInstalled)


# --------------------------------------------- what the memory engine does not need


class Durable(MemoryRig):
    """As a server with its data on disk would be."""

    can_restart = can_lose_minority = True
    keeps = True

    def restart(self):
        self.store.mailboxes.clear()
        if not self.keeps:
            self.store.lines.clear()

    lose_minority = restart

    def regain(self):
        pass


class Forgetful(Durable):
    keeps = False


@pytest.mark.parametrize("mode", ["blocking", "asyncio"])
@pytest.mark.parametrize("name", ["grants_survive_a_restart_of_the_engine", "grants_survive_the_loss_of_a_minority"])
def test_what_survives_is_put_to_the_test(name, mode, monkeypatch):
    monkeypatch.setattr(MemoryEngine, "traits", replace(MemoryEngine.traits, survives="minority"))
    run_case(CASES[name], Trial(Durable(), mode))
    with pytest.raises(AssertionError):
        run_case(CASES[name], Trial(Forgetful(), mode))


class Session(MemoryRig):
    """As ZooKeeper, where a grant lives no longer than the session it was made in."""

    def machine(self):
        machine = super().machine()
        machine.kill_session = lambda: [
            self.store.release(line_claim) for line_claim in list(self.claims) if self.mortal
        ]
        return machine

    mortal = True
    claims = ()


@pytest.mark.parametrize("mode", ["blocking", "asyncio"])
def test_a_dead_session_is_put_to_the_test(mode, monkeypatch):
    rig = Session()
    rig.claims = []
    true = rig.store.attempt
    monkeypatch.setattr(rig.store, "attempt", lambda claim, who: (rig.claims.append(claim), true(claim, who))[1])
    monkeypatch.setattr(MemoryEngine, "traits", replace(MemoryEngine.traits, liveness="session"))
    run_case(CASES["a_dead_session_holds_nothing"], Trial(rig, mode))


class RealTime(MemoryRig):
    """A rig that cannot travel, as those of servers: the same cases let the time pass."""

    can_travel = False
    ttl = 1.0


test_without_travelling = conformance(
    RealTime,
    name="real-time",
    cases=[
        CASES[name]
        for name in (
            "a_grant_lives_as_long_as_it_was_told_and_no_longer",
            "a_delay_keeps_the_name_after_a_lapse",
            "a_late_release_is_harmless",
            "an_idle_name_has_no_kind",
        )
    ],
)


def test_slow_cases_are_left_to_the_fault_runs_where_time_really_passes():
    slow = CASES["a_waiter_not_heard_of_loses_its_place"]
    for rig, marks in ((MemoryRig, []), (RealTime, ["faults"])):
        (parameters,) = conformance(rig, cases=[slow]).pytestmark
        assert [[mark.name for mark in one.marks] for one in parameters.args[1]] == [marks] * 2


def test_answers_are_what_the_store_says(trial):
    """The link in between adds nothing of its own."""
    seat = trial.seat()
    claim = seat.claim()
    grant = step(seat.attempt(claim))
    assert isinstance(grant, Grant)
    assert isinstance(step(seat.attempt(seat.claim())), Busy)
    alive, gone = step(seat.renew(claim._replace(token=grant.token), seat.claim()))
    assert isinstance(alive, Alive)
    assert isinstance(gone, Gone)
    assert step(seat.release(claim))
