"""What `leasehold top` shows: polled on a thread, so that keys work while an engine is slow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from leasehold.blocking import Client
from leasehold.cli.console import Console
from leasehold.cli.server_api import ServerApi, is_server, reading
from leasehold.core.deadlocks import Deadlock, deadlocks
from leasehold.engines.remote import wire
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Holding
from leasehold.runtime.base import Runtime

_MAX_CLAIMS: Final = 50_000  # of a server's list
_LIST_SECONDS: Final = 30.0  # that all its pages may take
_MAX_TIME: Final = 1e11  # Unix time that a calendar has
_STATS_INTERVAL: Final = 2.0
_STATS_SECONDS: Final = 60  # that rates and latencies are about
_RENEWED_SECONDS: Final = 2.0  # a larger change of the life left is a renewal; some engines count whole seconds

_log = logging.getLogger("leasehold.cli")


@dataclass(frozen=True, slots=True)
class Rates:
    """What only a server knows: about the last minute, and leases lost in the last hour."""

    acquires: float  # per second
    p95: float | None  # seconds, without those that waited
    lost: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One answer of the engine. `at` and ages are by this machine's monotonic clock."""

    holdings: tuple[Holding, ...] = ()
    deadlocks: tuple[Deadlock, ...] = ()
    at: float = 0.0
    seconds: float | None = None  # that the engine took to answer; None: there was no answer yet
    error: str = ""  # why there was no newer answer
    stale: bool = False  # the server says that its engine does not answer
    rates: Rates | None = None
    ttls: Mapping[str, float] = field(default_factory=dict)  # by fingerprint: the longest life left that was seen

    @property
    def taken(self) -> bool:
        return self.seconds is not None


class _Life(NamedTuple):
    """What was last seen of a grant."""

    at: float
    left: float
    ttl: float  # as far as it is known


class Source:
    """One URL. `read` asks once; `start` asks repeatedly on a thread of its own."""

    def __init__(self, console: Console, client: Client, prefix: str) -> None:
        self._client, self._namespace, self._prefix = client, console.namespace, prefix
        self._server = ServerApi(console.url) if is_server(console.url) else None
        self._rates: Rates | None = None
        self._rates_at = float("-inf")
        self._lives: dict[str, _Life] = {}  # by fingerprint
        self._runtime = client._core.runtime
        self._closed, self._closing = False, self._runtime.signal()
        self.engine = client._core.config.scheme
        self.snapshot = Snapshot()

    def read(self) -> Snapshot:
        """Ask now. Raises LeaseholdError."""
        began = time.monotonic()
        if self._server is None:
            holdings, age, stale = tuple(self._client.inspect(self._prefix)), 0.0, False
        else:
            with reading("/v1/locks"):
                holdings, age, stale = self._read_server(self._server)
            with reading("/v1/stats"):
                self._update_rates(self._server, began)
        at = began - age
        self._lives = {each.fingerprint: self._life(each, at) for each in holdings if each.position is None}
        self.snapshot = Snapshot(
            holdings,
            tuple(deadlocks(holdings)),
            at,
            time.monotonic() - began,
            stale=stale,
            rates=self._rates,
            ttls={fingerprint: life.ttl for fingerprint, life in self._lives.items()},
        )
        return self.snapshot

    def _life(self, each: Holding, at: float) -> _Life:
        """Engines do not report the ttl, so the longest life left counts as it, until a renewal sets a shorter one."""
        before = self._lives.get(each.fingerprint)
        if before is None:
            return _Life(at, each.left, each.left)
        changed = abs(each.left - (before.left - (at - before.at))) > _RENEWED_SECONDS
        shorter = changed and each.left < before.ttl / 2
        return _Life(at, each.left, each.left if shorter else max(each.left, before.ttl))

    def _read_server(self, server: ServerApi) -> tuple[tuple[Holding, ...], float, bool]:
        """From the picture of the server, which all readers share: any number of screens costs its engine little."""
        found: list[Holding] = []
        cursor: str | None = ""
        until = time.monotonic() + _LIST_SECONDS
        while cursor is not None:
            if len(found) > _MAX_CLAIMS or time.monotonic() > until:
                text = f"the server's list did not end after {len(found):,} claims: ask for the names with one prefix"
                raise Unavailable(text, engine=self.engine)
            page = server.get("/v1/locks", namespace=self._namespace, prefix=self._prefix, cursor=cursor)
            as_of = float(page.get("as_of") or time.time())
            holders = [_holding(self._namespace, each, as_of) for each in page["holdings"]]
            by_name = {each.name: each for each in holders}
            found += [*holders, *(_waiter(self._namespace, each, by_name.get(each["name"])) for each in page["queue"])]
            cursor = page["cursor"]
        found.sort(key=lambda each: (each.name, each.position is not None, each.position or 0))
        return tuple(dict.fromkeys(found)), max(0.0, time.time() - as_of), bool(page.get("stale"))

    def _update_rates(self, server: ServerApi, now: float) -> None:
        if now < self._rates_at + _STATS_INTERVAL:
            return
        self._rates_at = now
        try:
            minute = server.get("/v1/stats", namespace=self._namespace, seconds=_STATS_SECONDS)["stats"]["total"]
            hour = server.get("/v1/stats", namespace=self._namespace)["stats"]["total"]
        except LeaseholdError:  # not permitted, or an older server
            self._rates = None
            return
        direct = minute["direct"]
        lost = sum((hour["counts"].get("lost") or {}).values())
        self._rates = Rates(float(minute["rate"]), float(direct[1]) if direct else None, int(lost))

    # ------------------------------------------------------ on its own thread

    def start(self, interval: float, on_change: Callable[[], None]) -> None:
        async def run(_runtime: Runtime) -> None:
            while not self._closed:
                try:
                    self.read()
                except LeaseholdError as error:
                    self.snapshot = replace(self.snapshot, error=str(error))
                except Exception as error:  # a bug: the screen must say so, and go on
                    _log.debug("unexpected error", exc_info=error)
                    self.snapshot = replace(self.snapshot, error=f"unexpected {type(error).__name__}: {error}")
                on_change()
                await self._closing.wait(interval)

        self._runtime.start_thread(run, "leasehold-top")

    def close(self) -> None:
        self._closed = True
        self._closing.set()
        if self._server is not None:
            self._server.close()


def _holding(namespace: str, made: Mapping[str, Any], as_of: float) -> Holding:
    acquired_at = made["acquired_at"]
    if acquired_at is not None and not 0 <= acquired_at < _MAX_TIME:
        raise ValueError("not a time")
    members = {
        **{member: made[member] for member in ("name", "state", "mode", "kind", "limit", "fingerprint")},
        "namespace": namespace,
        "holder": [made["holder"], made["host"] or "", made["pid"] or 0, made["purpose"] or ""],
        "age": max(0.0, as_of - acquired_at) if acquired_at is not None else 0.0,
        "left": max(0.0, made["expires_in"]),
        "token": made["token"],
        "slot": made["slot"],
        "owner": made.get("owner", ""),
        "since_grant": acquired_at is not None,
    }
    return wire.holding_from_json(members)._replace(acquired_at=acquired_at)


def _waiter(namespace: str, made: Mapping[str, Any], holder: Holding | None) -> Holding:
    """`holder` has the same name, and so the same kind and limit."""
    members = {
        **{member: made[member] for member in ("name", "mode", "fingerprint", "position")},
        "namespace": namespace,
        "state": "waiting",
        "kind": "lock" if holder is None else holder.kind,
        "limit": 1 if holder is None else holder.limit,
        "holder": [made["holder"], "", 0, made["purpose"] or ""],
        "age": max(0.0, made["waiting_for"]),
        "left": 0.0,
        "owner": made.get("owner", ""),
        "since_grant": True,
    }
    return wire.holding_from_json(members)
