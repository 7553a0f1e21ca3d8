"""APScheduler 3: every process has the same jobs, and one of them runs each tick.

scheduler = BackgroundScheduler(executors={"default": OncePerTick(client)})
scheduler.add_job(report, "cron", hour=3, id="report")

Each tick of a job is a key of `once`, so its record decides, not a lock: one process runs the tick, the others wait for
that process, and one of them takes over if it dies. The processes must agree on the job's id and on the times of its
ticks, as they do with cron and date triggers.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Final

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.base import BaseExecutor
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore

from leasehold.aio import AsyncClient
from leasehold.blocking import Client
from leasehold.client.decorator import accepted_parameters, refuse_coroutine
from leasehold.config import Duration
from leasehold.errors import ConfigError, NotAcquired, RunFailed

_log = logging.getLogger("leasehold.integrations.apscheduler")

_RANDOM_ID: Final = re.compile("[0-9a-f]{32}")  # which APScheduler gives to a job without one


class _Tick:
    """A job as executors see it, for one of its ticks."""

    def __init__(self, job: Any, run_time: datetime, call: Callable[[str, Callable[..., Any]], Any]) -> None:
        self._job = job
        key = f"apscheduler:{job.id}@{run_time.astimezone(UTC).isoformat()}"
        self.func = functools.wraps(job.func)(call(key, job.func))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def __str__(self) -> str:
        return str(self._job)


class _PerTick(BaseExecutor):  # type: ignore[misc]  # APScheduler has no types
    """An executor that submits every tick of a job by itself."""

    def _call(self, key: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        store = self._scheduler._lookup_jobstore(job._jobstore_alias)
        if isinstance(store, MemoryJobStore) and _RANDOM_ID.fullmatch(job.id):
            raise ConfigError(f"the job {job.name} needs an id= that is the same in every process, and did not run")
        if isinstance(store, MemoryJobStore) and _has_jitter(job.trigger):
            raise ConfigError(f"the job {job.name} has a jitter=, so each process has times of its own; it did not run")
        for run_time in run_times:
            super()._do_submit_job(_Tick(job, run_time, self._call), [run_time])
        self._instances[job.id] += len(run_times) - 1  # the caller counts one, and each is counted off when it ends


class OncePerTick(_PerTick, ThreadPoolExecutor):  # type: ignore[misc]
    """An executor with threads, for `BackgroundScheduler` and `BlockingScheduler`: each tick of a job runs in one
    process of all. In a job, `leasehold.current_lease()` is its lease.

    client       decides where records and locks are kept: all processes need the same
    max_workers  threads; a tick that another process runs takes one of them until that run ends
    keep         seconds for which a tick is known to have run: longer than clocks differ and `misfire_grace_time`
    wait         seconds to wait for the process that runs a tick, to take over if it dies; longer than the ttl

    A tick that raises is not run again. If the engine does not answer, the tick fails with `Unavailable`.
    """

    def __init__(
        self, client: Client, max_workers: int = 10, *, keep: Duration = 86_400.0, wait: Duration = 60.0
    ) -> None:
        super().__init__(max_workers)
        self._client, self._keep, self._wait = client, keep, wait

    def _call(self, key: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                job = functools.partial(fn, **kwargs)
                self._client.once(key, job, *args, keep=self._keep, wait=self._wait, on_failure="keep", max_result=0)
            except (NotAcquired, RunFailed) as error:
                _log.info("not run here: %s", error)

        return run


class AsyncOncePerTick(_PerTick, AsyncIOExecutor):  # type: ignore[misc]
    """The executor for `AsyncIOScheduler`: as `OncePerTick`, for async functions. Plain functions run in a thread."""

    def __init__(self, client: AsyncClient, *, keep: Duration = 86_400.0, wait: Duration = 60.0) -> None:
        super().__init__()
        self._client, self._keep, self._wait = client, keep, wait

    def _call(self, key: str, fn: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, None]]:
        async def run(*args: Any, **kwargs: Any) -> None:
            try:
                job = functools.partial(fn, **kwargs)
                if not inspect.iscoroutinefunction(fn):
                    accepted_parameters(fn, True)  # refuses a generator function
                    job = functools.partial(asyncio.to_thread, _call_plain, job)
                await self._client.once(
                    key, job, *args, keep=self._keep, wait=self._wait, on_failure="keep", max_result=0
                )
            except (NotAcquired, RunFailed) as error:
                _log.info("not run here: %s", error)

        return run


def _has_jitter(trigger: Any) -> bool:
    """Itself, or one of the triggers that it combines."""
    return bool(getattr(trigger, "jitter", None)) or any(map(_has_jitter, getattr(trigger, "triggers", ())))


def _call_plain(job: functools.partial[Any], *args: Any) -> Any:
    """In a thread, where nothing awaits the result."""
    return refuse_coroutine(job(*args), job.func)
