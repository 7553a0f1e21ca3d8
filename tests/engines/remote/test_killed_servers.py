"""Lock servers that are killed, at every call of their engine and under many holders and waiters: no lease is lost, no
two clients hold a name, and nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from uuid import uuid4

import pytest

from harness.servers.lock_server import LockServer
from leasehold import AsyncClient, Client, Lease
from leasehold.core.timing import WAITER_TTL
from tests.engines.remote.conftest import make_client
from tests.support import probe
from tests.support.paths import SUPPORT
from tests.support.timing import check_elapsed


class DyingServer(LockServer):
    """Kills itself before or after the n-th call of its engine."""

    def __init__(self, url: str, number: int, when: str) -> None:
        super().__init__(url)
        self._death = [str(number), when]

    def command(self) -> Sequence[str]:
        program, _, _, *arguments = super().command()  # python -m leasehold
        return [program, str(SUPPORT / "dying_server.py"), *self._death, *arguments]


class Tenure:
    """A client that waits for a name on a thread, holds it for a moment, and notes when."""

    def __init__(self, client: Client, name: str) -> None:
        self.granted_at = self.ended_at = 0.0
        self.token = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(client, name), daemon=True)
        self._thread.start()

    def _run(self, client: Client, name: str) -> None:
        try:
            lease = client.lock(name, ttl=60).acquire(wait=120)
            self.granted_at, self.token = time.monotonic(), lease.token
            self._end(lease)
        except BaseException as error:
            self.error = error

    def _end(self, lease: Lease) -> None:
        lease.check()
        self.ended_at = time.monotonic()
        lease.release()

    def finish(self) -> Tenure:
        self._thread.join(120)
        assert not self._thread.is_alive(), "still waiting"
        if self.error is not None:
            raise self.error
        return self


def waiters(watcher: Client, name: str) -> int:
    return sum(holding.position is not None for holding in watcher.inspect(name))


def hand_over_twice(servers: Sequence[LockServer], engine_url: str, wait_until: Callable[..., None]) -> None:
    """One client holds a name, two wait for it, and all of them keep to the first server until it dies."""
    namespace = uuid4().hex
    clients = [make_client(Client, servers, 0, namespace=namespace) for _ in range(3)]
    with Client(engine_url, namespace=namespace) as watcher:
        lease = clients[0].lock("job", ttl=60).acquire(wait=0)
        tenures = []
        for client in clients[1:]:
            tenures.append(Tenure(client, "job"))
            wait_until(lambda: waiters(watcher, "job") == len(tenures))
        lease.renew()
        lease.check()
        began = released_at = time.monotonic()
        token = lease.token
        lease.release()
        for tenure in sorted((each.finish() for each in tenures), key=lambda each: each.granted_at):
            assert tenure.granted_at >= released_at, "two holders"
            assert tenure.token > token
            released_at, token = tenure.ended_at, tenure.token
        check_elapsed(began, 5.0, "both hand-offs")
        for client in clients:
            client.close()
        wait_until(lambda: not watcher.inspect("job"), 2 * WAITER_TTL)


def die_at(number: int, when: str, url: str, other: LockServer, wait_until: Callable[..., None]) -> bool:
    """Run the scenario. False: the server has survived it, because it makes fewer calls."""
    dying = DyingServer(url, number, when).start()
    try:
        hand_over_twice([dying, other], url, wait_until)
        return not dying.running
    finally:
        dying.kill()


@pytest.mark.extended
@pytest.mark.parametrize(("number", "when"), [(1, "after"), (3, "before"), (6, "after")])
def test_server_that_dies_at_a_call_costs_no_lease(number, when, redis_url, start_lock_server, wait_until) -> None:
    assert die_at(number, when, redis_url, start_lock_server(redis_url), wait_until)


@pytest.mark.faults
@pytest.mark.parametrize("when", ["before", "after"])
def test_server_that_dies_at_any_call_costs_no_lease(when, redis_url, start_lock_server, wait_until) -> None:
    other = start_lock_server(redis_url)
    died = itertools.takewhile(lambda number: die_at(number, when, redis_url, other, wait_until), itertools.count(1))
    assert len(list(died)) >= 8, "attempts, waits, a renewal and releases"


# -- kill -9 under many holders and waiters

NAMES, DEPTH = 10, 10  # names with waiters, and waiters of each
HELD = 90  # further names that are held, without waiters


def in_flight(server: LockServer, kind: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as page:
        (line,) = [line for line in page.read().decode().splitlines() if f'in_flight{{kind="{kind}"}}' in line]
    return int(float(line.split()[-1]))


async def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def kill_under_load(servers: Sequence[LockServer], engine_url: str) -> None:
    namespace, lost = uuid4().hex, []
    grants: dict[str, list[tuple[int, float]]] = {f"hot/{number}": [] for number in range(NAMES)}

    def note(event: object) -> None:
        if getattr(event, "kind", "") == "lost":
            lost.append(event)

    def client_at(number: int) -> AsyncClient:
        return make_client(AsyncClient, servers, number % 2, namespace=namespace, on_event=note, holder=f"c{number}")

    async def wait_for(client: AsyncClient, number: int, name: str) -> None:
        async with client.lock(name, ttl=60, wait=240):
            grants[name].append((number, time.monotonic()))

    def all_have(count: int) -> bool:
        return all(waiters(watcher, name) == count for name in grants)

    with Client(engine_url, namespace=namespace) as watcher:
        async with AsyncExitStack() as stack:
            holders, waiting = [
                [await stack.enter_async_context(client_at(number)) for number in range(count)] for count in (10, DEPTH)
            ]
            names = [*grants, *(f"held/{number}" for number in range(HELD))]
            # Renewed every 5 s, so once or more before they would be lost.
            leases = [await holders[n % 10].lock(name, ttl=15).acquire() for n, name in enumerate(names)]
            tasks = []
            for number, client in enumerate(waiting):
                tasks += [asyncio.create_task(wait_for(client, number, name)) for name in grants]
                await until(partial(all_have, number + 1))

            before = [probe.trusted_until(lease) for lease in leases]
            servers[0].kill()
            await until(
                lambda: in_flight(servers[1], "parked") == NAMES * DEPTH and in_flight(servers[1], "stream") == 20
            )
            for name in grants:
                queue = [h for h in watcher.inspect(name) if h.position is not None]
                assert [(h.holder.label, h.position) for h in queue] == [(f"c{n}", n) for n in range(DEPTH)]
            await until(
                lambda: all(probe.trusted_until(lease) > then for lease, then in zip(leases, before, strict=True))
            )
            assert all(lease.held for lease in leases)
            assert not lost

            began = {}
            for name, lease in zip(grants, leases, strict=False):
                began[name] = time.monotonic()
                await lease.release()
            await asyncio.gather(*tasks)
            for name, order in grants.items():
                assert [number for number, _ in order] == list(range(DEPTH)), name
            slowest = max(
                later - earlier
                for name, order in grants.items()
                for earlier, later in itertools.pairwise([began[name], *(at for _, at in order)])
            )
            check_elapsed(time.monotonic() - slowest, 1.0, "the slowest hand-off")
            assert all(lease.held for lease in leases[NAMES:])
            assert not lost


@pytest.mark.extended
def test_killed_server_under_100_holders_and_100_waiters(pair_of_servers, redis_url) -> None:
    """No lease is lost, no position, and the order is kept."""
    asyncio.run(kill_under_load(pair_of_servers, redis_url))
