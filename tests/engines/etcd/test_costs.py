"""The number of calls, keep-alives and events, by etcd's own counters."""

from __future__ import annotations

import asyncio
import time

import pytest

from harness.servers.etcd import Counters
from leasehold import AsyncClient, Client
from leasehold.core import timing
from leasehold.engines.etcd.leases import MAX_POOLED, EtcdLease
from leasehold.engines.etcd.queue import make_queue_key, view_txn
from leasehold.model import Claim
from tests.support import probe, probe_etcd


def test_acquire_release_pair_costs_two_calls_and_reuses_leases(url, member, claims) -> None:
    with Client(url) as client:
        with client.lock("warm"):
            pass
        leases_before, counted = member.leases(), Counters(member)
        for number in range(300):
            with client.lock(f"n{number % 7}"):
                pass
        per_pair = counted.calls() / 300
        assert per_pair <= 2.03, counted.changes()
        assert len(member.leases() - leases_before) <= MAX_POOLED
        with client.semaphore("s", 3), client.rwlock("r").read():
            pass
    assert member.leases() - leases_before == set(), "close() left leases behind"
    assert claims() == {}


@pytest.mark.parametrize("waiters", [2, 50, pytest.param(200, marks=pytest.mark.extended)])
def test_handoff_cost_is_independent_of_queue_length(url, member, waiters, claims, monkeypatch) -> None:
    # On a machine so slow that this takes seconds, watchdogs also send heartbeats, and waiters would re-check.
    monkeypatch.setattr(timing, "recheck_interval", lambda position: 600.0)
    heartbeats: list[Claim] = []
    kept_alive: list[EtcdLease] = []  # by the watch thread, every second
    send_renewals, send_keep_alive = getattr(*probe.SEND_RENEWALS), getattr(*probe_etcd.SEND_KEEP_ALIVE)

    def recorded_keep_alive(waiter_leases, connection, lease, now):
        kept_alive.append(lease)
        send_keep_alive(waiter_leases, connection, lease, now)

    monkeypatch.setattr(*probe_etcd.SEND_KEEP_ALIVE, recorded_keep_alive)

    async def recorded(watchdog, runtime, claims, *args):
        heartbeats.extend(claims)
        return await send_renewals(watchdog, runtime, claims, *args)

    monkeypatch.setattr(*probe.SEND_RENEWALS, recorded)

    async def main() -> dict[str, float]:
        async with AsyncClient(url) as one, AsyncClient(url) as two:
            order: list[int] = []
            held = await one.lock("job").acquire()

            async def work(number: int, client: AsyncClient) -> None:
                async with client.lock("job"):
                    order.append(number)

            tasks = []
            for number in range(waiters):
                tasks.append(asyncio.create_task(work(number, (one, two)[number % 2])))
                while len(claims()) < number + 2:
                    await asyncio.sleep(0.001)
            await wait_until_idle(member)
            counted, sent_before, kept_before = Counters(member), len(heartbeats), len(kept_alive)
            await held.release()
            await asyncio.gather(*tasks)
            assert order == list(range(waiters))
            print(f"among {waiters}: {counted.changes()}")
            return {
                "calls": (counted.calls() - (len(heartbeats) - sent_before)) / waiters,
                "keep-alives": (counted.keep_alives() - (len(kept_alive) - kept_before)) / waiters,
                "events": counted.events() / waiters,
            }

    per = asyncio.run(main())
    # The first release is counted too, and each client creates one lease for its first grant.
    assert per["calls"] <= 2.1 + 3 / waiters
    assert per["keep-alives"] <= 1.1
    assert per["events"] <= 1.1 + 3 / waiters  # with two waiters, one more event is a half


async def wait_until_idle(member) -> None:
    """Wait until the member receives no more calls."""
    end = time.monotonic() + 120
    while True:
        counted = Counters(member)
        await asyncio.sleep(0.15)
        if not counted.calls():
            return
        assert time.monotonic() < end


def test_view_of_an_exclusive_claim_sorts_its_queue_only_twice(url) -> None:
    """etcd reads all keys of a sorted range, whatever the limit is: each of them costs 1.5 us for each waiter."""
    with Client(url) as client:
        claims = [probe.new_claim(lock) for lock in (client.lock("job"), client.semaphore("job", 2))]
    sorted_ranges = [
        sum(bool(op.range and op.range.sort_target) for op in view_txn(make_queue_key("", claim), 7).success)
        for claim in claims
    ]
    assert sorted_ranges == [2, 3]


def test_claims_of_a_name_share_a_few_keys(url, member, claims) -> None:
    """A new key for every claim would slow reads down: until etcd compacts, it reads all keys that ever existed."""
    used: set[str] = set()
    with Client(url) as client:
        for _ in range(300):
            with client.lock("job"):
                used.update(claims())
        assert claims() == {}
    assert 100 < len(used) <= 256, "keys are chosen by two digits of the claim's id hash"
