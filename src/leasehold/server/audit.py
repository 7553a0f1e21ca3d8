"""The audit log of a server: who was granted which name, how the grant ended, and who broke it or was refused."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from leasehold import tracing
from leasehold.errors import ConfigError
from leasehold.events import Event
from leasehold.server.messages import Request
from leasehold.server.problems import Forbidden, ServerOverloaded
from leasehold.telemetry.audit.file import AuditFile, fields_of


class Audit:
    """Records are written once per turn of the loop: a busy server makes one call of the system for many of them. An
    answer waits for the records of its request, so what a caller knows is in the file even if the server is killed."""

    def __init__(self, file: AuditFile, required: bool) -> None:
        self.file, self._required = file, required
        self._flushed: asyncio.Future[None] | None = None  # by the next flush; None: nothing is to be written

    def check(self) -> None:
        """Raise if a grant needs a record and none can be written. Renewals and releases do not ask."""
        if self._required:
            try:
                self.file.check()
            except (OSError, ConfigError):
                detail = "the audit log cannot be written, so this server grants nothing: ask another"
                raise ServerOverloaded(detail, retry_after=None) from None  # an outage: waiters are not kept waiting

    def note(self, event: Event, request: Request) -> None:
        found = fields_of(event)
        if found is None:
            return
        action, fields = found
        fields |= {
            "subject": request.caller.who,
            "host": None,
            "pid": None,
        }  # not this process: the caller's are unknown
        fields["request"] = request.request_id
        self.file.write(action, **fields)
        self._flush_soon()

    def note_denied(self, request: Request, problem: Forbidden) -> None:
        self.file.write(
            "denied",
            namespace=problem.namespace,
            name=problem.name,
            subject=request.caller.who,
            why=str(problem),
            result=request.path,
            request=request.request_id,
            trace=tracing.find(None),
        )
        self._flush_soon()

    async def written(self) -> None:
        """Wait until all records so far are in the file, or could not be written."""
        if self._flushed is not None:
            await asyncio.shield(self._flushed)

    def _flush_soon(self) -> None:
        if self._flushed is None:
            loop = asyncio.get_running_loop()
            self._flushed = loop.create_future()
            loop.call_soon(self._flush, self._flushed)

    def _flush(self, flushed: asyncio.Future[None]) -> None:
        self._flushed = None
        try:
            with suppress(OSError, ConfigError):  # logged and counted by the file; `check` refuses the next attempts
                self.file.flush()
        finally:
            flushed.set_result(None)
