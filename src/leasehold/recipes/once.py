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

from leasehold.config import check_seconds
from leasehold.core import once as core
from leasehold.errors import ConfigError, LeaseLost, Mismatch, RunFailed, StaleToken
from leasehold.model import Outcome
from leasehold.recipes.calling import wants
from leasehold.recipes.lease import BaseLease
from leasehold.recipes.lock import BaseLock
from leasehold.recipes.records import Records
from leasehold.runtime.base import settle
from leasehold.store import Record

OnFailure: TypeAlias = Literal["retry", "keep"]

_log = logging.getLogger("leasehold.once")

KIND: Final = "once"
DAY: Final = 86_400.0
_ABANDONED: Final = 30 * DAY  # so long the record of a run is kept that nobody ends or takes over


@dataclass(frozen=True, slots=True)
class OnceOptions:
    """What `once` and `once_per` are told, checked."""

    keep: float | None = DAY
    on_failure: OnFailure = "retry"
    request: str = ""
    max_result: int = core.MAX_RESULT

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_seconds("keep", self.keep, zero=False)
        if self.on_failure not in ("retry", "keep"):
            raise ConfigError(f"on_failure is 'retry' or 'keep', not {self.on_failure!r}")
        if not isinstance(self.request, str) or len(self.request) > 200 or not _written(self.request):
            raise ConfigError("request is a short text that stands for what is asked, such as a hash of it")
        if isinstance(self.max_result, bool) or not isinstance(self.max_result, int) or self.max_result < 0:
            raise ConfigError(f"max_result is a number of bytes, 0 for no result at all, not {self.max_result!r}")


def _written(text: str) -> bool:
    """Whether a record can hold it: half a character, as a lone surrogate is, it cannot."""
    return text.isascii() or text == text.encode(errors="ignore").decode()


class Once:
    """One call of `once`."""

    def __init__(self, lock: BaseLock[Any], records: Records, key: str, options: OnceOptions, kind: str = KIND) -> None:
        self._lock, self._records, self._key, self._options = lock, records, key, options
        self._desk = records.desk
        self._at = records.key(kind, key)
        self._ended: core.Run | None = None
        self.ran = False  # here, by this very call

    @property
    def over(self) -> bool:
        """Whether it is known here, from running it or from waiting for it, that nobody has to run it any more."""
        return self._ended is not None and self._ended.settled

    async def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **offered: object
    ) -> Any:
        """What `fn` gave, now or when it ran before. Of what is offered, and `lease`, it gets what it has parameters
        for."""
        found = await self._read() if self._records.early else None
        if found is not None and found[1].settled:
            return self._replayed(found[1])
        wanted = wants(fn, self._desk.runtime.blocking, "lease", *offered)

        async def work(lease: BaseLease) -> Any:
            begun = await self._begin(lease)
            if begun is None:
                assert self._ended is not None
                return self._replayed(self._ended)
            given = {"lease": lease, **offered}
            more = {name: given[name] for name in wanted}
            return await self._carry_out(partial(fn, *args, **kwargs, **more), *begun)

        try:
            return await self._lock._under(work)
        except LeaseLost:
            if self._ended is None or self._ended.state != "done":
                raise
            return self._ended.result  # lost, but recorded before anybody took it over: the record decides

    async def _read(self) -> tuple[Record, core.Run] | None:
        record = await self._records.read(self._at)
        if record is None:
            return None
        run = core.unpacked(record.data)
        if run.request != self._options.request:
            raise Mismatch(
                self._key,
                wanted=f"run of {self._options.request or 'a request without a text'}",
                found=f"run of {run.request or 'a request without a text'}",
                advice="use another key for another request",
            )
        return record, run

    async def _begin(self, lease: BaseLease) -> tuple[Record, core.Run] | None:
        """The record of our run. None: it has ended meanwhile, and there is nothing to run."""
        while True:
            lease.check()
            record, run = await self._read() or (None, None)
            if run is not None and run.settled:
                self._ended = run
                return None
            new = core.begun(
                run,
                token=lease.token,
                holder=lease.holder,
                at=self._desk.runtime.wall(),
                request=self._options.request,
            )
            # Longer than any result is kept: the record of a run must not lapse beneath it.
            mine = await self._records.swap(self._at, core.packed(new), record, _ABANDONED)
            if mine is not None:
                return mine, new
            # Somebody whose lease is over wrote in between, or took over from us: look again.

    async def _carry_out(self, fn: Callable[[], Any], mine: Record, run: core.Run) -> Any:
        began, self.ran = self._desk.runtime.now(), True
        try:
            value = fn()
            if not self._desk.runtime.blocking:
                value = await settle(value)
        except LeaseLost:
            raise  # not its failure: whoever has the lease now takes it over
        except Exception as error:
            await self._note_failure(mine, core.failed(run, error, self._options.on_failure == "keep"), error)
            raise
        try:
            result = core.as_json(value, self._options.max_result)
        except ConfigError as error:
            await self._note_failure(mine, core.failed(run, error, final=True), error)
            raise
        await self._end(mine, run._replace(state="done", result=result))
        self._emit("ran", run.token, since=began)
        return result

    async def _end(self, mine: Record, run: core.Run) -> None:
        """Write how it ended, over the record it began with and no other."""
        if await self._records.swap(self._at, core.packed(run), mine, self._options.keep) is None:
            found = await self._records.read(self._at)
            highest = core.unpacked(found.data).token if found is not None else 0
            self._emit("stale_token", run.token)
            raise StaleToken(f"the record of {self._key}", token=run.token, highest=highest)
        self._ended = run

    async def _note_failure(self, mine: Record, run: core.Run, error: Exception) -> None:
        """The caller gets the function's own error, whatever becomes of the note."""
        try:
            await self._end(mine, run)
        except Exception as why:  # a driver's own, within a transaction that the failure has spoilt
            error.add_note(f"that {self._key} failed could not be recorded: {why}")
            _log.warning("that %s failed could not be recorded: %s", self._key, why)

    def _replayed(self, run: core.Run) -> Any:
        if run.state == "failed":
            raise RunFailed(self._key, error=run.error, token=run.token)
        self._emit("replayed", run.token)
        return run.result

    def _emit(self, kind: Literal["ran", "replayed", "stale_token"], token: int, since: float | None = None) -> None:
        if self._desk.options.on_event is not None:
            self._desk.emit(kind, self._lock._claim(), token=token, since=since)


async def outcome(lock: BaseLock[Any], records: Records, key: str) -> Outcome | None:
    """Where a key stands. It is lapsed if the same run stood in the record before and after the lock was seen free."""
    at = records.key(KIND, key)
    before = await records.read(at)
    if before is None:
        return None
    run = core.unpacked(before.data)
    state: Literal["running", "done", "failed", "lapsed"] = run.state
    if run.state == "running" and not await lock._locked():
        after = await records.read(at)
        if after is None:
            return None
        run = core.unpacked(after.data)
        state = "lapsed" if after.edition == before.edition else run.state
    return Outcome(key, state, run.token, run.runs, run.holder, run.at, run.result, run.error)
