"""Idempotent execution: a function runs once per key, whoever calls, however often, and whatever dies meanwhile.

Two things, each for what it is good at. The key's *lock* saves work and tells waiters: one caller runs, the others
stand in line, and a runner that dies is followed when its lease ends. The key's *record* decides: a result counts when
it is written over the very record that its runner began with (S1). A runner that was paused past its lease and taken
over has its result refused (`StaleToken`), whatever it believes.

What this cannot do is undo what a refused or killed runner did outside the store. Let the effect and the record commit
together (`stores.within`), or let the resource refuse the older token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from leasehold.client.base import BaseClient
from leasehold.client.decorator import accepted_parameters
from leasehold.client.lease import BaseLease
from leasehold.client.lock import BaseLock
from leasehold.config import check_seconds
from leasehold.core import once as core
from leasehold.errors import ConfigError, LeaseLost, Mismatch, RunFailed, StaleToken
from leasehold.model import Outcome
from leasehold.records.access import RecordAccess, key_lock, open_records
from leasehold.records.store import Record, Store
from leasehold.runtime.base import maybe_await

OnFailure: TypeAlias = Literal["retry", "keep"]

_log = logging.getLogger("leasehold.once")

KIND: Final = "once"
DAY: Final = 86_400.0
_ABANDONED_KEEP: Final = 30 * DAY  # so long the record of a run is kept that nobody ends or takes over


@dataclass(frozen=True, slots=True)
class OnceOptions:
    """What `once` and `once_per` are told, checked."""

    keep: float | None = DAY
    on_failure: OnFailure = "retry"
    request: str = ""
    max_result: int = core.MAX_RESULT

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_seconds("keep", self.keep, allow_zero=False)
        if self.on_failure not in ("retry", "keep"):
            raise ConfigError(f"on_failure is 'retry' or 'keep', not {self.on_failure!r}")
        if not isinstance(self.request, str) or len(self.request) > 200 or not _is_encodable(self.request):
            raise ConfigError("request is a short text that stands for what is asked, such as a hash of it")
        if isinstance(self.max_result, bool) or not isinstance(self.max_result, int) or self.max_result < 0:
            raise ConfigError(f"max_result is a number of bytes, 0 for no result at all, not {self.max_result!r}")


def _is_encodable(text: str) -> bool:
    """Whether a record can hold it: half a character, as a lone surrogate is, it cannot."""
    return text.isascii() or text == text.encode(errors="ignore").decode()


class Once:
    """One call of `once`."""

    def __init__(
        self, lock: BaseLock[Any], records: RecordAccess, key: str, options: OnceOptions, kind: str = KIND
    ) -> None:
        self._lock, self._records, self._key, self._options = lock, records, key, options
        self._core = records.core
        self._record_key = records.key(kind, key)
        self._finished_run: core.RunRecord | None = None
        self.ran = False  # here, by this very call

    @property
    def finished(self) -> bool:
        """Whether it is known here, from running it or from waiting for it, that nobody has to run it any more."""
        return self._finished_run is not None and self._finished_run.finished

    async def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **offered: object
    ) -> Any:
        """What `fn` gave, now or when it ran before. Of what is offered, and `lease`, it gets what it has parameters
        for."""
        found = await self._read() if self._records.may_read_before_lock else None
        if found is not None and found[1].finished:
            return self._replay(found[1])
        accepted = accepted_parameters(fn, self._core.runtime.blocking, "lease", *offered)

        async def work(lease: BaseLease) -> Any:
            started = await self._begin(lease)
            if started is None:
                assert self._finished_run is not None
                return self._replay(self._finished_run)
            available = {"lease": lease, **offered}
            extra = {name: available[name] for name in accepted}
            return await self._execute(partial(fn, *args, **kwargs, **extra), *started)

        try:
            return await self._lock._run_locked(work)
        except LeaseLost:
            if self._finished_run is None or self._finished_run.state != "done":
                raise
            return self._finished_run.result  # lost, but recorded before anybody took it over: the record decides

    async def _read(self) -> tuple[Record, core.RunRecord] | None:
        record = await self._records.read(self._record_key)
        if record is None:
            return None
        run = core.load(record.data)
        if run.request != self._options.request:
            raise Mismatch(
                self._key,
                wanted=f"run of {self._options.request or 'a request without a text'}",
                found=f"run of {run.request or 'a request without a text'}",
                advice="use another key for another request",
            )
        return record, run

    async def _begin(self, lease: BaseLease) -> tuple[Record, core.RunRecord] | None:
        """The record of our run. None: it has ended meanwhile, and there is nothing to run."""
        while True:
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
            # Longer than any result is kept: the record of a run must not lapse beneath it.
            own_record = await self._records.swap(self._record_key, core.dump(new), record, _ABANDONED_KEEP)
            if own_record is not None:
                return own_record, new
            # Somebody whose lease is over wrote in between, or took over from us: look again.

    async def _execute(self, fn: Callable[[], Any], own_record: Record, run: core.RunRecord) -> Any:
        began, self.ran = self._core.runtime.now(), True
        try:
            value = fn()
            if not self._core.runtime.blocking:
                value = await maybe_await(value)
        except LeaseLost:
            raise  # not its failure: whoever has the lease now takes it over
        except Exception as error:
            await self._record_failure(
                own_record, core.failed_run(run, error, self._options.on_failure == "keep"), error
            )
            raise
        try:
            result = core.json_round_trip(value, self._options.max_result)
        except ConfigError as error:
            await self._record_failure(own_record, core.failed_run(run, error, final=True), error)
            raise
        await self._finish(own_record, run._replace(state="done", result=result))
        self._emit("ran", run.token, since=began)
        return result

    async def _finish(self, own_record: Record, run: core.RunRecord) -> None:
        """Write how it ended, over the record it began with and no other."""
        if await self._records.swap(self._record_key, core.dump(run), own_record, self._options.keep) is None:
            found = await self._records.read(self._record_key)
            highest = core.load(found.data).token if found is not None else 0
            self._emit("stale_token", run.token)
            raise StaleToken(f"the record of {self._key}", token=run.token, highest=highest)
        self._finished_run = run

    async def _record_failure(self, own_record: Record, run: core.RunRecord, error: Exception) -> None:
        """The caller gets the function's own error, whatever becomes of the note."""
        try:
            await self._finish(own_record, run)
        except Exception as write_error:  # a driver's own, within a transaction that the failure has spoilt
            error.add_note(f"that {self._key} failed could not be recorded: {write_error}")
            _log.warning("that %s failed could not be recorded: %s", self._key, write_error)

    def _replay(self, run: core.RunRecord) -> Any:
        if run.state == "failed":
            raise RunFailed(self._key, error=run.error, token=run.token)
        self._emit("replayed", run.token)
        return run.result

    def _emit(self, kind: Literal["ran", "replayed", "stale_token"], token: int, since: float | None = None) -> None:
        if self._core.options.on_event is not None:
            self._core.emit(kind, self._lock._new_claim(), token=token, since=since)


async def outcome(lock: BaseLock[Any], records: RecordAccess, key: str) -> Outcome | None:
    """Where a key stands. It is lapsed if the same run stood in the record before and after the lock was seen free."""
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
    wait: float | None,
    ttl: float | None,
    store: Store | str | None,
    options: OnceOptions,
) -> Once:
    return Once(key_lock(client, KIND, key, wait=wait, ttl=ttl), open_records(client, store), key, options)
