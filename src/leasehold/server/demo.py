"""`leasehold serve --demo`: a server with example traffic, so that its dashboard has something to show.

The clients of the demo are tasks of the server. They send the requests of the HTTP API to the application itself, so
everything that they do is real: grants, queues, renewals, leases that expire. Before it begins, the hour that a new
server does not have is made up, and put into the history alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from leasehold.events import Event, EventKind
from leasehold.model import Holder, Holding
from leasehold.server.messages import Request, Response
from leasehold.server.picture import Snapshot

if TYPE_CHECKING:
    from leasehold.server.app import App

NAMESPACE: Final = "shop"
_HOUR: Final = 3600
_WAIT: Final = 50.0  # seconds, of one request

_log = logging.getLogger("leasehold.server.demo")


class DemoLease(NamedTuple):
    name: str
    claim_id: str
    token: int
    ttl: float


class DemoClient:
    """One client of the demo. Its owner shows which claims belong together, so that deadlocks can be found."""

    def __init__(self, app: App, label: str, chance: random.Random) -> None:
        self.label, self._app, self._chance = label, app, chance
        self._owner = f"{chance.getrandbits(32):08x}"

    async def acquire(self, name: str, ttl: float = 10.0, wait: float = _WAIT, **more: Any) -> DemoLease | None:
        claim_id = f"{self._owner}.{self._chance.getrandbits(128):032x}"
        answer = await self._post(
            "/v1/acquire", {"name": name, "id": claim_id, "ttl": ttl, "wait": wait, "holder": self.label, **more}
        )
        if answer is None:
            await self._post("/v1/release", {"name": name, "id": claim_id})
            return None
        return DemoLease(name, claim_id, answer["token"], ttl)

    async def hold(self, lease: DemoLease, seconds: float) -> bool:
        """Hold it for this long, and renew it in time. False: it was lost."""
        left = seconds
        while left > 0:
            await asyncio.sleep(min(left, lease.ttl / 3))
            left -= lease.ttl / 3
            if left > 0 and not await self.renew(lease):
                return False
        return True

    async def renew(self, lease: DemoLease) -> bool:
        body = {"name": lease.name, "id": lease.claim_id, "token": lease.token, "ttl": lease.ttl}
        return await self._post("/v1/renew", body) is not None

    async def release(self, lease: DemoLease) -> None:
        await self._post("/v1/release", {"name": lease.name, "id": lease.claim_id})

    async def use(self, name: str, seconds: float, **more: Any) -> None:
        """Acquire, work, release."""
        lease = await self.acquire(name, **more)
        if lease is not None and await self.hold(lease, seconds):
            await self.release(lease)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None: it was refused."""
        data = json.dumps({"namespace": NAMESPACE, **body}).encode()

        async def read() -> bytes:
            return data

        answer = await self._app.answer(Request("POST", path, read_body=read))
        if not isinstance(answer, Response) or answer.status != 200:
            return None
        found: dict[str, Any] = json.loads(answer.body)
        return found


class ExampleTraffic:
    """The example traffic of one server."""

    def __init__(self, app: App, seed: int = 7) -> None:
        self._app, self._chance = app, random.Random(seed)  # noqa: S311  # an example
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        Past(self._app, self._chance).write()
        self._start()
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self) -> None:
        self._run_several("settler", 5, self._settle, pause=(0.5, 4.0))
        self._run_several("encoder", 6, self._encode, pause=(0.1, 2.0))
        self._run_several("api", 8, self._sell, pause=(0.05, 0.6))
        self._run_several("cron", 3, self._report, pause=(1.0, 5.0))
        self._run_several("sched", 3, self._lead, pause=(0.0, 1.0))
        self._run_several("web", 4, self._read_settings, pause=(0.2, 3.0))
        self._run_several("indexer", 2, self._index, pause=(0.5, 1.0))
        self._run("deploy-881", self._configure, pause=(20.0, 40.0))
        self._run("biller", self._close_day, pause=(4.0, 9.0))
        self._run("packer-6", self._go_quiet, pause=(15.0, 40.0))
        self._run("packer-2", self._pack, pause=(0.5, 2.0))
        first, second = asyncio.Event(), asyncio.Event()
        self._run("loader-1", self._cross("stock/17", "stock/23", first, second), pause=(60.0, 90.0))
        self._run("loader-2", self._cross("stock/23", "stock/17", second, first), pause=(60.0, 90.0))

    def _run_several(
        self, label: str, count: int, work: Callable[[DemoClient], Awaitable[None]], pause: tuple[float, float]
    ) -> None:
        for number in range(1, count + 1):
            self._run(f"{label}-{number}", work, pause)

    def _run(self, label: str, work: Callable[[DemoClient], Awaitable[None]], pause: tuple[float, float]) -> None:
        client = DemoClient(self._app, label, self._chance)

        async def forever() -> None:
            while True:
                try:
                    await work(client)
                except Exception as error:  # the others continue
                    _log.error("a client of the demo failed", exc_info=error)
                await asyncio.sleep(self._chance.uniform(*pause))

        self._tasks.append(asyncio.get_running_loop().create_task(forever()))

    # ---------------------------------------------------------------- what clients do

    async def _settle(self, client: DemoClient) -> None:
        """Long holds and a queue. Now and then a settler is paused: it loses its lease, and writes nevertheless."""
        batch = f"settle batch {self._chance.randint(1, 40)}"
        lease = await client.acquire("orders/settlement", purpose=batch, delay=1.0)
        if lease is None:
            return
        if client.label == "settler-3":
            await client.hold(lease, 8.0)
            await asyncio.sleep(lease.ttl * 1.9)  # its machine swaps
            if not await client.renew(lease):
                self._refuse(client, lease)
            return
        if await client.hold(lease, self._chance.uniform(5.0, 14.0)):
            await client.release(lease)

    def _refuse(self, client: DemoClient, lease: DemoLease) -> None:
        """The late write of a paused holder, and the fence that refuses it."""
        grants = self._app.history.grants(NAMESPACE, lease.name)
        seen = max((grant.token or 0 for grant in grants), default=0)
        fingerprint = next((grant.fingerprint for grant in grants if grant.token == lease.token), None)
        self._note(
            "stale_token",
            lease.name,
            client.label,
            self._app.service.runtime.wall(),
            token=lease.token,
            fingerprint=fingerprint,
            fence="sql",
            seen=seen,
            reason="the fence has seen a higher token",
        )

    async def _encode(self, client: DemoClient) -> None:
        await client.use("media/encode", self._chance.uniform(2.0, 9.0), limit=3, purpose="encode a film")

    async def _sell(self, client: DemoClient) -> None:
        if self._chance.random() < 0.7:
            await client.use(f"user:{self._chance.randint(1000, 9999)}", self._chance.uniform(0.05, 0.6), wait=1.0)
        else:
            await client.use(f"stock/{self._chance.randint(14, 19)}", self._chance.uniform(0.3, 1.6), wait=5.0)

    async def _report(self, client: DemoClient) -> None:
        await client.use("reports/monthly", self._chance.uniform(6.0, 12.0), ttl=12.0, purpose="monthly report")

    async def _lead(self, client: DemoClient) -> None:
        await client.use("scheduler", 600.0, ttl=8.0, purpose="the leader plans jobs")

    async def _read_settings(self, client: DemoClient) -> None:
        await client.use("settings", self._chance.uniform(0.5, 4.0), mode="shared", wait=5.0)

    async def _configure(self, client: DemoClient) -> None:
        await client.use("settings", 0.4, wait=20.0, purpose="new prices")

    async def _index(self, client: DemoClient) -> None:
        await client.use("search/reindex", self._chance.uniform(20.0, 40.0), ttl=15.0, purpose="rebuild the index")

    async def _close_day(self, client: DemoClient) -> None:
        await client.use("billing/close-day", 0.2, min_hold=5.0, wait=5.0, purpose="once a day")

    async def _pack(self, client: DemoClient) -> None:
        await client.use(f"pack/line-{self._chance.randint(2, 3)}", 2.0, wait=20.0)

    async def _go_quiet(self, client: DemoClient) -> None:
        """Takes three locks and is killed: they expire by themselves."""
        names = ("pack/line-2", "pack/line-3", "labels/printer")
        leases = [await client.acquire(name, ttl=20.0, purpose="pack parcels") for name in names]
        for lease in leases:
            if lease is not None:
                await client.renew(lease)
        await asyncio.sleep(30.0)

    def _cross(
        self, name: str, other: str, mine: asyncio.Event, theirs: asyncio.Event
    ) -> Callable[[DemoClient], Awaitable[None]]:
        """Two clients that take the same two locks in opposite order: a deadlock, until both give up."""

        async def work(client: DemoClient) -> None:
            lease = await client.acquire(name, ttl=30.0, wait=20.0)
            mine.set()
            if lease is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(25.0):
                        await theirs.wait()
                        taken = await client.acquire(other, ttl=30.0, wait=9.0)
                        if taken is not None:
                            await client.release(taken)
                await client.release(lease)
            mine.clear()

        return work

    def _note(self, kind: EventKind, name: str, holder: str, at: float, **more: Any) -> None:
        scheme = self._app.service.config.scheme
        self._app.history(Event(kind, scheme, NAMESPACE, name, at, holder=holder, **more))


class Past:
    """A made-up hour: events and pictures for the history, in the order of their times."""

    def __init__(self, app: App, chance: random.Random) -> None:
        self._app, self._chance = app, chance
        self._events: list[Event] = []
        self._pictures: list[Snapshot] = []

    def write(self) -> None:
        now = self._app.service.runtime.wall()
        for second in range(_HOUR, 3, -1):
            self._traffic(now - second, busy=1700 < second < 1900)
        begin = _HOUR
        while begin > 12:
            begin -= self._settlement(now - begin, most=begin - 3, paused=110 < begin < 128)
        for second in range(_HOUR, 10, -10):
            peak = max(0.0, 1 - abs(second - 1800) / 120)
            self._picture(
                now - second, round(23 + self._chance.gauss(0, 1.5)), round(12 + 40 * peak + self._chance.gauss(0, 2))
            )
        history = self._app.history
        happened: list[tuple[float, Callable[[], None]]] = []
        happened += [(event.at, partial(history, event)) for event in self._events]
        happened += [(snapshot.as_of, partial(history.hour.observe, snapshot)) for snapshot in self._pictures]
        for _, note in sorted(happened, key=lambda each: each[0]):
            note()

    def _add(self, kind: EventKind, name: str, holder: str, at: float, **more: Any) -> None:
        self._events.append(
            Event(kind, self._app.service.config.scheme, NAMESPACE, name, at, holder=holder, mode="exclusive", **more)
        )

    def _traffic(self, at: float, busy: bool) -> None:
        chance = self._chance
        for name, wait in (
            (f"user:{chance.randint(1000, 9999)}", 0.0),
            (f"stock/{chance.randint(14, 19)}", 0.4 if chance.random() < 0.3 else 0.0),
            ("media/encode", chance.uniform(2, 9) if chance.random() < 0.5 else 0.0),
        ):
            seconds = wait or chance.lognormvariate(-6.3, 0.5) * (9 if busy else 1)
            holder, fingerprint = f"api-{chance.randint(1, 8)}", f"{chance.getrandbits(64):016x}"
            fields = {"token": int(at * 1e6), "fingerprint": fingerprint}
            self._add("granted", name, holder, at, seconds=seconds, queued=wait > 0, ttl=10.0, **fields)
            self._add("released", name, holder, at + chance.uniform(0.1, 2.0), **fields)

    def _settlement(self, at: float, most: float, paused: bool) -> int:
        """One grant; returns the seconds until the next."""
        chance, name = self._chance, "orders/settlement"
        holder = "settler-3" if paused else f"settler-{chance.choice((1, 2, 4, 5))}"
        fingerprint = f"{chance.getrandbits(64):016x}"
        fields = {"token": int(at * 1e6), "fingerprint": fingerprint}
        waited = chance.uniform(10, 60)
        batch = f"settle batch {chance.randint(1, 40)}"
        self._add("granted", name, holder, at, seconds=waited, queued=True, ttl=10.0, purpose=batch, **fields)
        held = min(chance.uniform(12, 26), most)
        for renewal in range(1, int(held / 3.3)):
            if not paused or renewal < 3:
                self._add("renewed", name, holder, at + 3.3 * renewal, ttl=10.0, **fields)
        if paused:  # the next one is granted after 18 s, and writes before this one comes back
            self._add("lost", name, holder, at + 30, reason="expired", **fields)
            self._add("stale_token", name, holder, at + 30.4, fence="sql", seen=int((at + 18) * 1e6), **fields)
            return 18
        self._add("released", name, holder, at + held, **fields)
        return round(held) + 1

    def _picture(self, at: float, held: int, waiting: int) -> None:
        def claim(state: Any) -> Holding:
            return Holding(NAMESPACE, "", state, "exclusive", "lock", 1, "", Holder(""), 0.0, 1.0)

        claims = [claim("held")] * max(held, 0) + [claim("waiting")] * max(waiting, 0)
        self._pictures.append(Snapshot(NAMESPACE, at, claims))
