"""APScheduler: several schedulers with the same jobs, each tick run by one of them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger

from leasehold import AsyncClient, Client, current_lease
from leasehold.integrations.apscheduler import AsyncOncePerTick, OncePerTick
from tests.support import probe_integrations
from tests.support.client_fixtures import poll_until
from tests.support.paths import child_environment

PAST = datetime(2026, 1, 1, tzinfo=UTC)
OPTIONS = {"misfire_grace_time": None, "coalesce": False, "max_instances": 100}  # no tick is skipped


class Schedulers:
    """Two schedulers, each with a client of its own, and what their jobs report."""

    def __init__(self, path) -> None:
        self.clients = [Client(f"sqlite://{path}/locks.db") for _ in range(2)]
        self.schedulers = [BackgroundScheduler(executors={"default": OncePerTick(client)}) for client in self.clients]
        self.runs: list[str] = []
        self.ended: list[int] = []
        for scheduler in self.schedulers:
            scheduler.add_listener(lambda event: self.ended.append(event.code), EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)

    def note(self, text: str) -> None:
        self.runs.append(f"{text} {current_lease().name}")

    def add_job(self, fn, *trigger, **options) -> None:
        for scheduler in self.schedulers:
            scheduler.add_job(fn, *trigger, **OPTIONS, **options)

    def run(self, ticks: int) -> None:
        """Until this many ticks have ended in both."""
        for scheduler in self.schedulers:
            scheduler.start()
        poll_until(lambda: len(self.ended) >= 2 * ticks, 120)

    def close(self) -> None:
        for scheduler in self.schedulers:
            if scheduler.running:
                scheduler.shutdown()
        for client in self.clients:
            client.close()


@pytest.fixture
def two(tmp_path):
    schedulers = Schedulers(tmp_path)
    yield schedulers
    schedulers.close()


def test_each_tick_of_each_job_runs_in_one_scheduler(two):
    times = {"start_date": PAST, "next_run_time": datetime.now(UTC).replace(microsecond=0) - timedelta(hours=5)}
    two.add_job(two.note, "interval", hours=1, args=["ticks"], id="ticks", **times)
    for number in range(3):
        two.add_job(two.note, "date", run_date=PAST, kwargs={"text": str(number)}, id=f"job-{number}")
    two.run(ticks=9)
    assert max(Counter(two.runs).values()) == 1
    assert Counter(run.split()[0] for run in two.runs) == {"ticks": 6, "0": 1, "1": 1, "2": 1}
    assert all(probe_integrations.running_jobs(scheduler) == {} for scheduler in two.schedulers)


def test_tick_that_raises_fails_in_one_scheduler_and_is_not_repeated(two):
    runs = []

    def fail():
        runs.append(1)
        raise ValueError("no paper")

    two.add_job(fail, "date", run_date=PAST, id="job")
    two.run(ticks=1)
    assert runs == [1]
    assert sorted(two.ended) == [EVENT_JOB_EXECUTED, EVENT_JOB_ERROR]


def test_job_without_an_id_is_refused(two, caplog):
    two.add_job(lambda: two.runs.append("ran"), "date", run_date=PAST)
    for scheduler in two.schedulers:
        scheduler.start()
    # APScheduler fails if it is shut down before its thread has removed the job.
    poll_until(lambda: not any(scheduler.get_jobs() for scheduler in two.schedulers), 60)
    assert sum("needs an id= that is" in str(record.exc_info) for record in caplog.records) == 2
    assert two.runs == []


@pytest.mark.parametrize(
    "trigger", [CronTrigger(year=2099, jitter=1), OrTrigger([CronTrigger(year=2099, jitter=1)])], ids=["own", "inner"]
)
def test_job_with_jitter_is_refused(two, caplog, trigger):
    """Each process would have ticks of its own, and run all of them."""
    two.add_job(lambda: two.runs.append("ran"), trigger, id="job", next_run_time=datetime.now(UTC))
    for scheduler in two.schedulers:
        scheduler.start()
    poll_until(lambda: sum("has a jitter=" in str(record.exc_info) for record in caplog.records) == 2, 60)
    assert two.runs == []


def test_async_schedulers_run_each_tick_once(tmp_path):
    runs: list[str] = []

    async def work(text):
        runs.append(text)

    async def main():
        async with (
            AsyncClient(f"sqlite://{tmp_path}/l.db") as first,
            AsyncClient(f"sqlite://{tmp_path}/l.db") as second,
        ):
            ended = []
            schedulers = [
                AsyncIOScheduler(executors={"default": AsyncOncePerTick(client)}) for client in (first, second)
            ]
            for scheduler in schedulers:
                scheduler.add_listener(
                    lambda event: ended.append(event.exception), EVENT_JOB_EXECUTED | EVENT_JOB_ERROR
                )
                scheduler.add_job(work, "date", run_date=PAST, id="async", kwargs={"text": "async"}, **OPTIONS)
                scheduler.add_job(runs.append, "date", run_date=PAST, id="plain", args=["plain"], **OPTIONS)
                scheduler.start()
            async with asyncio.timeout(120):
                while len(ended) < 4:
                    await asyncio.sleep(0.01)
            for scheduler in schedulers:
                scheduler.shutdown()
            assert ended == [None] * 4

    asyncio.run(main())
    assert sorted(runs) == ["async", "plain"]


def test_async_scheduler_refuses_jobs_that_a_thread_only_creates():
    """Their ticks would count as done, and no body would have run."""

    async def later():
        pass

    def hidden():
        return later()

    def pages():
        yield 1

    async def main():
        async with AsyncClient("memory://") as client:
            errors = []
            scheduler = AsyncIOScheduler(executors={"default": AsyncOncePerTick(client)})
            scheduler.add_listener(
                lambda event: errors.append(str(event.exception)), EVENT_JOB_EXECUTED | EVENT_JOB_ERROR
            )
            for job in (hidden, pages):
                scheduler.add_job(job, "date", run_date=PAST, id=job.__name__, **OPTIONS)
            scheduler.start()
            async with asyncio.timeout(120):
                while len(errors) < 2:
                    await asyncio.sleep(0.01)
            scheduler.shutdown()
            return sorted("generator" in error or "coroutine" in error for error in errors)

    assert asyncio.run(main()) == [True, True]


WORKER = """
import os, time
from datetime import UTC, datetime
from apscheduler.schedulers.blocking import BlockingScheduler
from leasehold import Client
from leasehold.integrations.apscheduler import OncePerTick

def work():
    with open("log", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(3600 if not os.path.exists("killed") else 0)
    open("done", "a").write("done ")

scheduler = BlockingScheduler(executors={"default": OncePerTick(Client("sqlite://./locks.db", ttl=2))})
scheduler.add_job(work, "date", run_date=datetime(2026, 1, 1, tzinfo=UTC), id="work", misfire_grace_time=None)
scheduler.start()
"""


@pytest.mark.extended
def test_tick_of_a_killed_process_is_run_by_another_one(tmp_path):
    workers = [subprocess.Popen([sys.executable, "-c", WORKER], cwd=tmp_path, env=child_environment()) for _ in "ab"]
    try:
        log, done = tmp_path / "log", tmp_path / "done"
        poll_until(lambda: log.exists() and log.read_text().endswith("\n"), 60)
        (tmp_path / "killed").touch()
        os.kill(int(log.read_text()), signal.SIGKILL)
        poll_until(done.exists, 60)
        runners = [int(line) for line in log.read_text().split()]
        assert sorted(runners) == sorted(worker.pid for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
