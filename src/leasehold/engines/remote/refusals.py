"""Tokens that fences refused to this client, reported to its lock server for the history, metrics and audit log there.

A refused caller never waits for a report and never sees one fail. Reports are sent by a thread that runs while there
are any. If the server does not note one, that report and those that wait behind it are dropped, counted, and logged. A
report whose answer was lost is sent again, so a server may note it twice.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final
from weakref import ref

from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.remote import wire
from leasehold.engines.remote.connections import new_connections
from leasehold.engines.remote.servers import Call, Failover, Servers
from leasehold.engines.remote.wire import Json
from leasehold.errors import LeaseholdError, StaleToken
from leasehold.model import Claim
from leasehold.runtime.base import Runtime, Signal, restarting

MAX_REPORTS: Final = 100  # that wait to be sent
FLUSH_SECONDS: Final = 1.0  # that closing the client waits for reports

_log = logging.getLogger("leasehold.remote")


class RefusalReports:
    """The reports of one client. Shared by its engine instances."""

    def __init__(self, servers: Servers, runtime: Runtime, registry: ClaimRegistry, call_timeout: float) -> None:
        self._servers, self._runtime, self._call_timeout = servers, runtime, call_timeout
        self._registry_ref = ref(registry)
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: there is no thread, and the reports are the parent's."""
        self._mutex = self._runtime.mutex()
        self._reports: deque[Json] = deque()
        self._sending = False
        self._idle_signals: list[Signal] = []
        self.dropped = 0

    def add(self, claim: Claim, token: int, stale: StaleToken, fence: str) -> None:
        """Report a refused token soon. From any thread; never waits and never raises."""
        report = wire.refusal_to_json(claim, token, stale.highest, fence, stale.resource)
        with self._mutex:
            if len(self._reports) >= MAX_REPORTS:
                self.dropped += 1
                return
            self._reports.append(report)
            if self._sending:
                return
            self._sending = True
        try:
            run = restarting(self._send, _log, "the thread that reports refused tokens")
            self._runtime.start_thread(run, "leasehold-refusals")
        except RuntimeError:  # the interpreter ends, or has no thread left
            self._drop_all()
            self._take()

    async def flush(self, runtime: Runtime) -> None:
        """Wait until all reports are sent or dropped, but not for long: the client is being closed."""
        signal = runtime.signal()
        self._idle_signals.append(signal)
        if self._sending:
            await signal.wait(FLUSH_SECONDS)

    async def _send(self, runtime: Runtime) -> None:
        registry, dropped_before = self._registry_ref(), self.dropped
        error: LeaseholdError | None = None
        if registry is None:  # the client is gone
            self._drop_all()
        else:
            connections = new_connections(runtime, registry, "http")
            failover = Failover(self._servers, connections, runtime, "http")
            try:
                while (report := self._take()) is not None:
                    try:
                        reply = await failover.ask(Call(report, runtime.now() + self._call_timeout))
                        wire.flag_from_json(reply.answer)
                    except LeaseholdError as failure:
                        error = failure
                        self.dropped += 1
                        self._drop_all()
            finally:
                connections.close()
        if self.dropped > dropped_before:
            text = "%d refused tokens were not reported to the lock server: %s"
            _log.warning(text, self.dropped - dropped_before, error or f"more than {MAX_REPORTS} at once")

    def _take(self) -> Json | None:
        """The next report; None: there is none, and the thread must end."""
        with self._mutex:
            if self._reports:
                return self._reports.popleft()
            self._sending = False
        signals, self._idle_signals = self._idle_signals, []
        for signal in signals:
            signal.set()
        return None

    def _drop_all(self) -> None:
        with self._mutex:
            self.dropped += len(self._reports)
            self._reports.clear()
