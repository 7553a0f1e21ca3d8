"""Idempotent execution: a function runs once per key, however many callers there are and whatever dies meanwhile.

Each key has a lock and a record. The *lock* saves work and wakes waiters: one caller runs, the others wait, and if the
runner dies, the next one takes over when its lease ends. The *record* decides: a result counts only if it replaces the
very record that its runner began with (S1). If a runner was paused past its lease and another one took over, its result
is refused (`StaleToken`), whatever the runner believes.

Not promised: that what a refused or killed runner did outside the store is undone. Commit the effect and the record
together (`stores.within`), or let the resource refuse the older token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict

from leasehold.client.base import BaseClient
from leasehold.client.decorator import accepted_parameters, call_filled, refuse_coroutine
from leasehold.client.lease import BaseLease
from leasehold.client.lock import BaseLock
from leasehold.config import DAY, MAX_RESULT, Duration, check_seconds
from leasehold.core import once as core
from leasehold.core.record_fields import is_text
from leasehold.errors import ConfigError, LeaseLost, Mismatch, RunFailed, StaleToken, Unavailable
from leasehold.model import Outcome
from leasehold.records.access import RecordAccess, key_lock, open_records
from leasehold.records.store import Record, Store
from leasehold.runtime.base import maybe_await

OnFailure: TypeAlias = Literal["retry", "keep"]

_log = logging.getLogger("leasehold.once")

KIND: Final = "once"
_TRIES: Final = 20  # to write the record of a run; each is lost to another writer, of which the lock leaves few
_ABANDONED_KEEP: Final = 30 * DAY  # how long the record of a run that never ends is kept, unless another run takes over


class OnceArguments(TypedDict, total=False):
    """The keyword arguments of `AsyncClient.once`, for its overloads."""

    keep: Duration | None
    wait: Duration | None
    ttl: Duration | None
    on_failure: OnFailure
    request: str
    max_result: int
    store: Store | str | None


@dataclass(frozen=True, slots=True)
class OnceOptions:
    """The options of `once` and `once_per`, checked."""

    keep: float | None = DAY
    on_failure: OnFailure = "retry"
    request: str = ""
    max_result: int = MAX_RESULT

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_seconds("keep", self.keep, allow_zero=False)
        if self.on_failure not in ("retry", "keep"):
            raise ConfigError(f"on_failure must be 'retry' or 'keep', not {self.on_failure!r}")
        if not is_text(self.request) or len(self.request) > 200:
            raise ConfigError("request must be a string of at most 200 characters, such as a hash of the request")
        if isinstance(self.max_result, bool) or not isinstance(self.max_result, int) or self.max_result < 0:
            raise ConfigError(f"max_result must be a number of bytes (0: keep no result), not {self.max_result!r}")


class Once:
    """One call of `once`."""

    def __init__(
        self, lock: BaseLock[Any], records: RecordAccess, key: str, options: OnceOptions, kind: str = KIND
    ) -> None:
        self._lock, self._records, self._key, self._options = lock, records, key, options
        self._core = records.core
        self._record_key = records.key(kind, key)
        self._finished_run: core.RunRecord | None = None
        self.ran = False  # by this very call

    @property
    def finished(self) -> bool:
        """Whether this call knows, from running or from waiting, that the key need not run again."""
        return self._finished_run is not None and self._finished_run.finished

    async def is_running(self) -> bool:
        """Whether the record says that a run has begun and not ended. Its runner may be dead."""
        if not self._records.may_read_before_lock:
            return True
        found = await self._read()
        return found is not None and found[1].state == "running"

    async def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **offered: object
    ) -> Any:
        """The result of `fn`, from now or from an earlier run. `fn` gets `lease` and those of `offered` that it has
        parameters for."""
        found = await self._read() if self._records.may_read_before_lock else None
        if found is not None and found[1].finished:
            return self._replay(found[1])
        accepted = accepted_parameters(fn, self._core.runtime.blocking, "lease", *offered)

        async def work(lease: BaseLease) -> Any:
            started = await self._begin(lease)
            if started is None:
                assert self._finished_run is not None  # noqa: S101  # for the type checker
                return self._replay(self._finished_run)
            available = {"lease": lease, **offered}

            def call() -> Any:
                value = call_filled(fn, args, kwargs, accepted, available)
                return refuse_coroutine(value, fn) if self._core.runtime.blocking else value

            return await self._execute(call, *started)

        try:
            return await self._lock._run_locked(work)
        except LeaseLost:
            if self._finished_run is None or self._finished_run.state != "done":
                raise
            return self._finished_run.result  # lost, but recorded before another runner took over: the record decides

    async def _read(self) -> tuple[Record, core.RunRecord] | None:
        record = await self._records.read(self._record_key)
        if record is None:
            return None
        run = core.load(record.data)
        if run.request != self._options.request:
            raise Mismatch(
                self._key,
                wanted=f"run of {self._options.request or 'an unnamed request'}",
                found=f"run of {run.request or 'an unnamed request'}",
                advice="use another key for another request",
            )
        return record, run

    async def _begin(self, lease: BaseLease) -> tuple[Record, core.RunRecord] | None:
        """The record of our run. None: another run has finished meanwhile, and there is nothing to run."""
        for _ in range(_TRIES):
            lease.check()
            record, run = await self._read() or (None, None)
            if run is not None and run.finished:
                self._finished_run = run
                return None
            new = core.next_run(
                run,
                token=lease.token,
                holder=lease.holder,
                at=self._core.runtime.wall(),
                request=self._options.request,
            )
            # Not for `keep` seconds: the record must not expire during the run.
            own_record = await self._records.swap(self._record_key, core.dump(new), record, _ABANDONED_KEEP)
            if own_record is not None:
                return own_record, new
            # A runner whose lease is over wrote in between, or another runner took over from us: read again.
        raise Unavailable(
            f"{self._key} was not run: the store refused {_TRIES} times to replace what it shows as the record; look "
            "for programs, triggers and policies that write or hide records"
        )

    async def _execute(self, fn: Callable[[], Any], own_record: Record, run: core.RunRecord) -> Any:
        began, self.ran = self._core.runtime.now(), True
        try:
            value = fn()
            if not self._core.runtime.blocking:
                value = await maybe_await(value)
        except LeaseLost:
            raise  # not a failure of `fn`: the next holder takes over
        except BaseException as error:
            if isinstance(error, BaseExceptionGroup) and error.subgroup(LeaseLost) is not None:
                raise  # of a TaskGroup in `fn`
            if isinstance(error, Exception) or self._core.runtime.is_stray_cancellation(error):
                final = self._options.on_failure == "keep"
                await self._record_failure(own_record, core.failed_run(run, error, final), error)
            raise
        try:
            result = core.json_round_trip(value, self._options.max_result)
            await self._finish(own_record, run._replace(state="done", result=result))
        except (ConfigError, RecursionError) as error:  # not JSON, too large or too deep, perhaps only for the record
            await self._record_failure(own_record, core.failed_run(run, error, final=True), error)
            raise
        self._emit("ran", run.token, since=began)
        return result

    async def _finish(self, own_record: Record, run: core.RunRecord) -> None:
        """Record how the run ended, replacing the record it began with and no other."""
        if await self._records.swap(self._record_key, core.dump(run), own_record, self._options.keep) is None:
            found = await self._records.read(self._record_key)
            highest = core.load(found.data).token if found is not None else 0
            stale = StaleToken(f"the record of {self._key}", token=run.token, highest=highest)
            claim = self._lock._new_claim()
            self._core.report_refusal(claim, run.token, stale, "once")
            raise stale
        self._finished_run = run

    async def _record_failure(self, own_record: Record, run: core.RunRecord, error: BaseException) -> None:
        """Record a failure. The caller gets the function's own error even if that fails."""
        try:
            await self._finish(own_record, run)
        except Exception as write_error:  # even a driver's error, in a transaction that the failure has broken
            error.add_note(f"the failure of {self._key} could not be recorded: {write_error}")
            _log.warning("the failure of %s could not be recorded: %s", self._key, write_error)

    def _replay(self, run: core.RunRecord) -> Any:
        if run.state == "failed":
            raise RunFailed(self._key, error=run.error, token=run.token)
        self._emit("replayed", run.token)
        return run.result

    def _emit(self, kind: Literal["ran", "replayed"], token: int, since: float | None = None) -> None:
        if self._core.reports():
            self._core.emit(kind, self._lock._new_claim(), token=token, since=since)


async def outcome(lock: BaseLock[Any], records: RecordAccess, key: str) -> Outcome | None:
    """The state of a key. It is expired if the record named the same run before and after the lock was seen free."""
    record_key = records.key(KIND, key)
    before = await records.read(record_key)
    if before is None:
        return None
    run = core.load(before.data)
    state: Literal["running", "done", "failed", "expired"] = run.state
    if run.state == "running" and not await lock._locked():
        after = await records.read(record_key)
        if after is None:
            return None
        run = core.load(after.data)
        state = "expired" if after.version == before.version else run.state
    return Outcome(key, state, run.token, run.runs, run.holder, run.at, run.result, run.error)


def make_once(
    client: BaseClient,
    key: str,
    wait: Duration | None,
    ttl: Duration | None,
    store: Store | str | None,
    options: OnceOptions,
) -> Once:
    return Once(key_lock(client, KIND, key, wait=wait, ttl=ttl), open_records(client, store), key, options)
