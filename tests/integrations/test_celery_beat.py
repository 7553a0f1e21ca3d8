"""The scheduler of Celery beat with a stand-by: no tick is lost, and none is sent twice."""

import json
import os
import signal
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.schedules import crontab, schedule
from kombu.exceptions import OperationalError

from leasehold import Unavailable, versioned
from leasehold.integrations.celery import beat, client
from tests.support import probe_integrations
from tests.support.celery_workers import Shop
from tests.support.client_fixtures import poll_until


class Beats:
    """Schedulers of one app, in one process, with a clock that the test sets and a broker that is a list."""

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setattr(*probe_integrations.celery_beat_wait(), 0)
        self.app = Celery("shop", set_as_current=False)
        self.app.conf.update(leasehold=f"memory://{uuid.uuid4().hex}", result_expires=None)
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.sent: list[tuple[str, str]] = []
        self.broken: Exception | None = None
        self.started: list[beat.Scheduler] = []
        monkeypatch.setattr(self.app, "send_task", self._send_task)

    def _send_task(self, task, *_, task_id, **__):
        if self.broken is not None and task != "other":
            raise self.broken
        self.sent.append((task, task_id))

    def start(self, **schedules: schedule) -> beat.Scheduler:
        entries = {name: {"task": name, "schedule": each} for name, each in schedules.items()}
        self.app.conf.beat_schedule = entries or {"task": {"task": "task", "schedule": self.every(10)}}
        self.started.append(beat.Scheduler(self.app, Producer=lambda _: None))
        return self.started[-1]

    def every(self, seconds: float) -> schedule:
        return schedule(seconds, nowfun=lambda: self.now, app=self.app)

    def run(self, scheduler: beat.Scheduler, after: float = 0.0) -> int:
        """Run it until it would sleep, and return how many messages it sent."""
        self.now += timedelta(seconds=after)
        before = len(self.sent)
        while scheduler.tick() == 0.0 and probe_integrations.beat_lease(scheduler) is not None:
            pass
        return len(self.sent) - before


@pytest.fixture
def beats(monkeypatch) -> Iterator[Beats]:
    beats = Beats(monkeypatch)
    monkeypatch.setattr(beat.Scheduler, "producer", None)
    yield beats
    for scheduler in beats.started:
        probe_integrations.step_down(scheduler)
    client(beats.app).close()


def pause(scheduler: beat.Scheduler) -> None:
    """As if the process stood still, with a lease that it believes to hold, while its lease expires."""
    probe_integrations.step_down(scheduler)
    probe_integrations.replace_beat_lease(
        scheduler, SimpleNamespace(held=True, check=lambda: None, release=lambda: None)
    )


def test_standby_sends_nothing_until_the_leader_is_gone(beats) -> None:
    leader, standby = beats.start(), beats.start()
    assert beats.run(leader) == 0
    assert [beats.run(standby, after=5), beats.run(leader, after=5), beats.run(standby)] == [0, 1, 0]
    leader.close()
    assert [beats.run(standby), beats.run(standby, after=10)] == [0, 1]
    assert len(set(beats.sent)) == 2


def test_new_leader_sends_every_tick_that_it_finds_due(beats) -> None:
    leader = beats.start()
    beats.run(leader)
    leader.close()
    beats.now += timedelta(seconds=55)
    assert beats.run(beats.start()) == 5  # it started later, and goes on from when the first one did
    assert beats.run(beats.start()) == 0
    assert len(set(beats.sent)) == 5


def test_one_tick_is_sent_after_a_long_pause(beats) -> None:
    schedules = {"often": beats.every(1), "cron": crontab(nowfun=lambda: beats.now, app=beats.app)}
    leader = beats.start(**schedules)
    beats.run(leader)
    leader.close()
    beats.run(beats.start(**schedules), after=86_400)
    assert sorted(task for task, _ in beats.sent) == ["cron", "often"]


def test_paused_leader_does_not_send_a_tick_of_the_new_one(beats) -> None:
    paused, leader = beats.start(), beats.start()
    beats.run(paused)
    pause(paused)
    assert beats.run(leader, after=10) == 1
    assert beats.run(paused) == 0
    assert beats.run(leader, after=10) == 1


@pytest.mark.parametrize("arrived", [False, True])
def test_tick_of_a_killed_leader_is_sent_with_the_same_id(beats, monkeypatch, arrived) -> None:
    killed = beats.start()
    beats.run(killed)
    send = getattr(*probe_integrations.beat_send(killed))

    def die(*args):
        if arrived:
            send(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(*probe_integrations.beat_send(killed), die)
    with pytest.raises(KeyboardInterrupt):
        beats.run(killed, after=10)
    pause(killed)
    assert beats.run(beats.start()) == 1
    assert len(set(beats.sent)) == 1  # once, or twice with one id


def test_tick_is_sent_again_if_the_broker_is_down(beats) -> None:
    leader = beats.start(task=beats.every(10), other=beats.every(3600))
    beats.run(leader)
    beats.broken = OperationalError("the broker is down")
    assert [beats.run(leader, after=10), beats.run(leader, after=10)] == [0, 0]
    beats.broken = None
    assert beats.run(leader) == 2
    assert len(set(beats.sent)) == 2


def test_entry_that_cannot_be_sent_does_not_stop_the_others(beats) -> None:
    leader = beats.start(task=beats.every(10), other=beats.every(10))
    beats.run(leader)
    beats.broken = TypeError("not JSON")
    assert beats.run(leader, after=10) == 1


def test_closed_beat_ends_instead_of_leading_again(beats) -> None:
    """A signal that interrupts a destructor closes it, and the SystemExit of the handler is ignored by Python."""
    closed, standby = beats.start(), beats.start()
    beats.run(closed)
    closed.close()
    with pytest.raises(SystemExit):
        beats.run(closed, after=10)
    assert beats.run(standby) == 1


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_unknown_outcome_of_a_write_does_not_send_twice(beats, monkeypatch, number, written) -> None:
    leader = beats.start()
    beats.run(leader)
    write = versioned.Value.write
    answers = iter([True] * number + [False])

    def lose(self, value, version):
        if next(answers, True):
            return write(self, value, version)
        if written:
            write(self, value, version)
        raise Unavailable("the answer was lost")

    monkeypatch.setattr(versioned.Value, "write", lose)
    beats.now += timedelta(seconds=10)
    for _ in range(10):
        leader.tick()
    assert len(beats.sent) == 1


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["redis", pytest.param("postgresql", marks=pytest.mark.faults)])
def test_no_tick_is_lost_when_one_of_two_beats_is_killed(tmp_path, engine) -> None:
    every = 0.5
    shop = Shop(
        tmp_path,
        engine,
        beat_scheduler="leasehold.integrations.celery.beat:Scheduler",
        beat_schedule={"tick": {"task": "tick", "schedule": every}},
    )
    locks = client(shop.app)
    value = versioned.Value(locks, "celery-beat:shop")

    def leader() -> int | None:
        return next((h.holder.pid for h in locks.inspect("celery-beat:shop") if h.state == "held"), None)

    def state() -> tuple[datetime, int, str | None]:
        found = json.loads(value.read().value)
        last_run_at, count = found["entries"]["tick"]
        return datetime.fromisoformat(last_run_at), count, (found["sending"] or {}).get("id")

    with shop.run("beat", "-l", "INFO", count=2) as processes:
        poll_until(lambda: len(shop.queue()) > 3, 120)
        began, count, _ = state()
        killed = leader()
        os.kill(killed, signal.SIGKILL)
        sent = len(shop.queue())
        poll_until(lambda: len(shop.queue()) > sent + 3, 120)
        survivor = next(process for process in processes if process.pid != killed)
        assert leader() == survivor.pid
    assert leader() is None  # ended by TERM, it has released its lock
    ended, total, sending = state()
    assert ended == began + timedelta(seconds=every) * (total - count)  # no tick left out
    ids = [message["headers"]["id"] for message in shop.queue()]
    assert len({*ids, sending} - {None}) == total  # the second beat may have been ended while it sent one
    assert len(ids) <= total + 1  # one twice, with the same id, if the first was killed while it sent it
    locks.close()
