"""Metrics of an engine's servers: up, leader, members, storage, lag, clocks, unsafe settings.

    health = leasehold.telemetry.EngineHealth("etcd://a:2379,b:2379,c:2379")
    page = leasehold.telemetry.metrics_text(metrics, health)

A thread probes the servers every 10 seconds, each time for at most 2, on connections that no lock uses. Reading the
metrics never waits for a probe: it shows the last result. What an engine does not report, or this user may not read, is
absent, never 0.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from typing import Final

from leasehold.config import ClientOptions, Duration, check_seconds
from leasehold.engines import health as probe_engine
from leasehold.engines.probe import Health, MemberHealth
from leasehold.errors import LeaseholdError, Unsupported
from leasehold.runtime.base import Runtime, Signal, restarting
from leasehold.runtime.threads import Threads
from leasehold.telemetry.families import Family, counter, gauge

_log = logging.getLogger("leasehold.health")

_HANGS_AFTER: Final = 5.0  # seconds past the deadline of a probe
_Labels = dict[str, str]


class EngineHealth:
    """A source of metrics.

    url       as for `Client`
    interval  seconds from one probe to the next
    timeout   seconds that a probe may take
    addresses whether the label `member` is the server's address; False: a number, for readers who must not learn it
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        interval: Duration = 10.0,
        timeout: Duration = 2.0,
        addresses: bool = True,
    ) -> None:
        self._interval = check_seconds("interval", interval, allow_zero=False)
        self._timeout = check_seconds("timeout", timeout, allow_zero=False)
        self._config = ClientOptions(url).engine_config()
        self._addresses = addresses
        self._numbers: dict[str, int] = {}  # of members, in order of appearance
        self._runtime = Threads()
        self._closed = False
        self._mutex = threading.Lock()
        self._pid = 0  # of the process that runs the thread
        self._start()

    def __repr__(self) -> str:
        return f"<EngineHealth {self._config.scheme}://>"  # the URL may hold a password

    def _start(self) -> None:
        """Also in a forked child, which does not have the parent's thread."""
        with self._mutex:
            if self._closed or self._pid == os.getpid():
                return
            self._pid = os.getpid()
            self._signal: Signal = self._runtime.signal()
            self._health: Health | None = None
            self._began_at: float | None = None  # of a probe that runs
            self._leader: str | None = None
            self._leader_changes = 0
            self._findings: set[tuple[str, str]] = set()  # (member, setting), ever found
        self._runtime.start_thread(restarting(self._run, _log, "the health probe"), "leasehold-health")

    def close(self) -> None:
        """End the thread. The metrics are empty from now on."""
        self._closed, self._health = True, None
        self._signal.set()

    @property
    def health(self) -> Health | None:
        """The last result; None before the first, and while a probe hangs."""
        began_at, limit = self._began_at, self._timeout + _HANGS_AFTER
        return None if began_at is not None and self._runtime.now() > began_at + limit else self._health

    # ----------------------------------------------------- on its own thread

    async def _run(self, runtime: Runtime) -> None:
        while not self._closed:
            self._began_at = runtime.now()
            try:
                self._on_result(await probe_engine(self._config, runtime, self._began_at + self._timeout))
            except Unsupported as error:
                _log.warning("no metrics of the engine's health: %s", error)
                return
            except LeaseholdError as error:
                self._on_result(Health(self._config.scheme, up=False, error=str(error)))
            finally:
                self._began_at = None
            await self._signal.wait(self._interval)

    def _on_result(self, found: Health) -> None:
        before = self._health
        if not found.up and (before is None or before.up):
            _log.warning("%s is down: %s", self._config.scheme, found.error or "it does not answer")
        elif found.up and before is not None and not before.up:
            _log.info("%s is up again", self._config.scheme)
        leader = next((each.member for each in found.members if each.role in ("leader", "primary")), None)
        if leader is not None:
            if self._leader is not None and leader != self._leader:
                self._leader_changes += 1
                _log.info("the leader of %s is now %s; it was %s before", self._config.scheme, leader, self._leader)
            self._leader = leader
        self._findings |= {(each.member, finding.setting) for each in found.members for finding in each.findings}
        if not self._closed:
            self._health = found

    # -------------------------------------------------------------- reading

    def families(self) -> Iterable[Family]:
        """All metrics, from the last probe."""
        self._start()
        if self._closed:
            return []
        found = self.health
        if found is None:
            hangs = self._health is not None  # else the first probe has not ended
            return self._engine_families(Health(self._config.scheme, up=False)) if hangs else []
        return [*self._engine_families(found), *self._member_families(found.members), *self._storage(found.members)]

    def _engine_families(self, found: Health) -> list[Family]:
        engine = {"engine": self._config.scheme}
        families = [gauge("leasehold_engine_up", "Whether the engine can grant locks.", (engine, found.up))]
        counts = {"voting": found.voting, "reachable": found.reachable}
        members = [({**engine, "state": state}, count) for state, count in counts.items() if count is not None]
        if members:
            families.append(gauge("leasehold_engine_members", "Servers that decide, and those that answer.", *members))
        if found.has_leader is not None:
            text = "Whether there is a leader, or primary."
            families.append(gauge("leasehold_engine_has_leader", text, (engine, found.has_leader)))
        reported = [each.leader_changes for each in found.members if each.leader_changes is not None]
        if reported or self._leader is not None:
            changes = max(reported, default=self._leader_changes)
            families.append(counter("leasehold_engine_leader_changes", "Changes of the leader.", (engine, changes)))
        return families

    def _member_families(self, members: tuple[MemberHealth, ...]) -> Iterable[Family]:
        for name, text, field in (
            ("replication_lag_seconds", "How far the slowest replica is behind.", "replication_lag"),
            ("clock_offset_seconds", "The server's clock minus ours, where it is more than its error.", "clock_offset"),
            ("memory_bytes", "Memory in use.", "memory"),
            ("connections_used_ratio", "Share of the allowed connections in use.", "connections_ratio"),
            ("cache_hit_ratio", "Share of reads that the server's cache answered.", "cache_hit_ratio"),
        ):
            samples = [(self._labels(each), getattr(each, field)) for each in members]
            if known := [(labels, value) for labels, value in samples if value is not None]:
                yield gauge(f"leasehold_engine_{name}", text, *known)
        evictions = [(self._labels(each), each.evictions) for each in members if each.evictions is not None]
        if evictions:
            yield counter("leasehold_engine_evictions", "Keys evicted: locks may be among them.", *evictions)
        settings = [
            ({**self._labels(each), "setting": setting}, setting in {finding.setting for finding in each.findings})
            for each in members
            if each.up
            for member, setting in sorted(self._findings)
            if member == each.member
        ]
        if settings:
            yield gauge("leasehold_engine_unsafe_settings", "Settings that weaken locks: 1 until changed.", *settings)
        infos = [
            ({**self._labels(each), "version": each.version or "", "role": each.role or ""}, 1)
            for each in members
            if each.version or each.role
        ]
        if infos:
            yield gauge("leasehold_engine_info", "Version and role of each server.", *infos)

    def _storage(self, members: tuple[MemberHealth, ...]) -> Iterable[Family]:
        used: list[tuple[_Labels, float]] = []
        limits: list[tuple[_Labels, float]] = []
        ratios: list[tuple[_Labels, float]] = []
        for each in members:
            for storage in each.storage:
                labels = {**self._labels(each), "store": storage.store}
                used.append((labels, storage.used))
                if storage.limit is not None:
                    limits.append((labels, storage.limit))
                if storage.used_ratio is not None:
                    ratios.append((labels, storage.used_ratio))
        for name, text, samples in (
            ("used_bytes", "Bytes in use.", used),
            ("limit_bytes", "Bytes that can be in use.", limits),
            ("used_ratio", "Share of them in use.", ratios),
        ):
            if samples:
                yield gauge(f"leasehold_engine_storage_{name}", text, *samples)

    def _labels(self, member: MemberHealth) -> _Labels:
        number = self._numbers.setdefault(member.member, len(self._numbers) + 1)
        return {"engine": self._config.scheme, "member": member.member if self._addresses else str(number)}
