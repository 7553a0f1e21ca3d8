"""Regressions of the Redlock engine: late messages, split votes, leaks."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import threading
import time

import hiredis
import pytest

from harness.rigs.redis import AOF_ALWAYS
from harness.rigs.redlock import RedlockRig
from harness.servers.redlock import RedlockNodes, lock_keys
from leasehold import AsyncClient, Client, Unavailable, engines
from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.engines.redis.protocol import as_eval
from leasehold.engines.registry import ClaimRegistry
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.loop import Loop
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.paths import SUPPORT


@pytest.fixture
def nodes():
    rig_or_skip(RedlockRig)  # skips if Redis is not installed
    nodes = RedlockNodes()
    yield nodes
    nodes.close()


def send_raw(node, data: bytes) -> object:
    """Send this on a new connection, as a late message arrives, and return the reply."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as connection:
        connection.sendall(data)
        reader = hiredis.Reader()
        while (reply := reader.gets()) is False:
            reader.feed(connection.recv(65_536))
    return reply


# --------------------------------------------------------------- late messages


def test_late_undo_does_not_end_a_newer_grant(nodes, make_driver) -> None:
    """Otherwise the holder would count votes that its nodes had dropped, and another claim could get them."""
    driver, other = make_driver(nodes.url), make_driver(nodes.url)
    claim = driver.claim()
    requests = driver.engine._requests
    name = requests.name_keys("", "job")
    early = driver.engine._proposals.next_number()
    late = as_eval(requests.scripts.release, requests.undo_attempt(name, claim, early))
    held = driver.acquire(claim)
    for node in nodes.all:
        assert send_raw(node, late) == 0
    assert isinstance(driver.renew(held), Alive)
    late = as_eval(requests.scripts.release, requests.undo_attempt(name, claim, driver.engine._proposals.next_number()))
    assert isinstance(driver.renew(held), Alive), "a renewal also outdates the undo of an older attempt"
    for node in nodes.all:
        assert send_raw(node, late) == 0
    assert isinstance(other.attempt(other.claim()), Busy)


def test_rejoin_after_its_deadline_is_refused(nodes, make_driver) -> None:
    """By the node's clock. Otherwise a released lease could come back with its old token."""
    driver = make_driver(nodes.url)
    held = driver.acquire(driver.claim())
    assert driver.release(held)
    requests = driver.engine._requests
    now = int(time.time() * 1e6)
    rejoin = requests.rejoin(requests.name_keys("", "job"), held, driver.engine._proposals.next_number(), now - 1)
    for node in nodes.all:
        assert send_raw(node, as_eval(requests.scripts.rejoin, rejoin)) == 0
    assert nodes.remaining_keys() == []


def test_rejoin_does_not_take_a_node_from_its_holder(nodes, make_driver) -> None:
    driver, other = make_driver(nodes.url), make_driver(nodes.url)
    lost = driver.claim()._replace(token=17)
    held = other.acquire(other.claim())
    requests = driver.engine._requests
    rejoin = requests.rejoin(requests.name_keys("", "job"), lost, driver.engine._proposals.next_number())
    for node in nodes.all:
        assert send_raw(node, as_eval(requests.scripts.rejoin, rejoin)) == 0
    assert isinstance(other.renew(held), Alive)


def test_repeated_attempt_keeps_token_after_minority_lost_data(nodes, make_driver) -> None:
    driver = make_driver(nodes.url)
    held = driver.acquire(driver.claim())
    nodes.all[0].ask("FLUSHALL")
    nodes.all[1].ask("FLUSHALL")
    again = driver.attempt(held._replace(token=0))
    assert isinstance(again, Grant)
    assert again.token == held.token
    assert isinstance(driver.renew(held), Alive)
    nodes.all[2].ask("FLUSHALL")
    nodes.all[3].ask("FLUSHALL")
    assert isinstance(driver.renew(held), Gone) is False, "the repeated attempt restored the first two votes"


def test_renewal_with_wrong_token_is_gone_and_harmless(nodes, make_driver) -> None:
    driver = make_driver(nodes.url)
    held = driver.acquire(driver.claim())
    for difference in (-1, 1):
        assert isinstance(driver.renew(held._replace(token=held.token + difference)), Gone)
    assert isinstance(driver.renew(held), Alive), "the wrong token did no harm"
    assert not driver.release(held._replace(id="")), "a release without the claim's id ends no grant"
    assert isinstance(driver.renew(held), Alive)


def test_huge_counter_on_one_node_does_not_exhaust_tokens(nodes) -> None:
    with Client(nodes.url) as client:
        with client.lock("job") as lease:
            first = lease.token
        (counter,) = [key for key in nodes.all[0].ask("KEYS", "lh1:*") if key.endswith(b"}")]
        nodes.all[0].ask("SET", counter, 2**53 - 10)
        for _ in range(5):
            with client.lock("job") as lease:
                assert first < lease.token < 2**52
                first = lease.token


def test_abandoned_attempt_is_followed_by_its_release(nodes, make_driver, wait_until) -> None:
    """The engine itself sends the release: this test has no client and no watchdog to repeat it."""
    driver = make_driver(nodes.url)
    assert driver.release(driver.acquire(driver.claim()))  # loads the scripts
    before = nodes.all[0].calls()
    nodes.pause(0, 1, 2)
    with pytest.raises(Unavailable):
        run_sync(driver.engine.attempt(driver.claim(ttl=60.0), driver.deadline(0.3)))
    nodes.resume()
    wait_until(lambda: nodes.all[0].calls()["evalsha"] > before["evalsha"])
    wait_until(lambda: not any(lock_keys(node) for node in nodes.all[:3]), 5)
    assert lock_keys(nodes.all[3]), "this node answered: its vote is for the caller to forget"


def test_abandoned_attempt_under_asyncio_is_followed_by_its_release(nodes, wait_until) -> None:
    async def main() -> None:
        runtime = Loop()
        registry = ClaimRegistry(runtime, "address")
        engine = engines.opener("redlock")(EngineConfig.parse(nodes.url, 5.0), runtime, registry)
        first, second = (
            Claim("", "job", claim_id, hash_id(claim_id), Holder("me"), 60.0) for claim_id in ("one", "two")
        )
        assert isinstance(await engine.attempt(first, runtime.now() + 5), Grant)  # loads the scripts
        assert await engine.release(first, runtime.now() + 5)
        before = nodes.all[0].calls()
        nodes.pause(0, 1, 2)
        with pytest.raises(Unavailable):
            await engine.attempt(second, runtime.now() + 0.3)
        nodes.resume()
        end = time.monotonic() + 5
        while any(lock_keys(node) for node in nodes.all[:3]) or nodes.all[0].calls()["evalsha"] == before["evalsha"]:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        await engine.close()

    asyncio.run(main())


def test_node_that_was_down_receives_the_release_after_restart(wait_until) -> None:
    """The node kept its vote on disk, and no other call reaches it meanwhile."""
    rig_or_skip(RedlockRig)
    durable_nodes = RedlockNodes(*AOF_ALWAYS, count=3)
    try:
        with Client(durable_nodes.url) as client:
            lease = client.lock("job", ttl=600).acquire()
            wait_until(lambda: lock_keys(durable_nodes.all[0]))
            durable_nodes.all[0].kill()
            assert lease.release()
            durable_nodes.all[0].start()
            wait_until(lambda: durable_nodes.remaining_keys() == [], 15)
    finally:
        durable_nodes.close()


# ------------------------------------------------------------------ the queue


def test_minority_reservation_makes_waiter_attempt_again_soon(nodes, wait_until) -> None:
    """If waiters arrive together, the nodes may reserve the name for different waiters. None of them has a majority,
    and all would wait."""
    with Client(nodes.url) as holder, Client(nodes.url) as other:
        lease = holder.lock("job", ttl=60).acquire()
        waiter_thread = threading.Thread(target=lambda: other.lock("job", wait=60).acquire().release())
        waiter_thread.start()
        wait_until(lambda: sum(h.state == "waiting" for h in holder.inspect()) == 1)
        registry = other._core.registry
        (waiter_id_hash,) = registry.waiting
        (key,) = [kept_key for kept_key in lock_keys(nodes.all[1]) if kept_key.endswith(b":job")]
        engine, attempted_at = other._core._engine, []
        attempt = engine.attempt

        def recorded_attempt(claim, deadline):
            attempted_at.append(time.monotonic())
            return attempt(claim, deadline)

        engine.attempt = recorded_attempt
        wait_until(lambda: attempted_at, 20)  # its re-check; the next one is due in 5 s
        nodes.all[0].ask(
            "PUBLISH", f"lh1:c:{registry.client_id}", b"go 0 " + key + b" " + bytes.fromhex(waiter_id_hash)
        )
        wait_until(lambda: len(attempted_at) > 1, 20)
        assert attempted_at[1] - attempted_at[0] < 3
        lease.release()
        waiter_thread.join(20)


@pytest.mark.parametrize("client_count", [5])
def test_lock_is_exclusive_and_fast_over_jittery_networks(nodes, client_count) -> None:
    """Each message to each node is delayed by up to 8 ms, so that votes are often split."""
    inside, tokens, routes = [], [], [nodes.proxied() for _ in range(client_count)]
    rng = random.Random(7)

    def delay(_outward: bool, _data: bytes) -> None:
        time.sleep(rng.random() * 0.008)

    for _, proxies in routes:
        for proxy in proxies:
            proxy.watch = delay

    def work(url: str) -> None:
        with Client(url, ttl=20) as client:
            for _ in range(4):
                with client.lock("hot", wait=60) as lease:
                    inside.append(lease)
                    assert inside == [lease]
                    tokens.append(lease.token)
                    time.sleep(0.002)
                    inside.remove(lease)

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(url,)) for url, _ in routes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    elapsed = time.monotonic() - began
    for _, proxies in routes:
        for proxy in proxies:
            proxy.close()
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 4 * client_count
    assert elapsed < 30, f"{elapsed / len(tokens):.2f} s per grant: waiters wait for reservations to expire"


def test_free_minority_does_not_make_waiters_poll(nodes, wait_until) -> None:
    """A node that lost its data offers reservations that are useless while the lock is held on the others."""
    with Client(nodes.url) as holder, Client(nodes.url) as other:
        lease = holder.lock("job", ttl=600).acquire()  # so long that no renewal happens meanwhile
        waiter_thread = threading.Thread(target=lambda: other.lock("job", wait=60).acquire().release())
        waiter_thread.start()
        wait_until(lambda: sum(h.state == "waiting" for h in holder.inspect()) == 1)
        nodes.all[0].ask("FLUSHALL")
        before, began = nodes.all[1].calls()["evalsha"], time.monotonic()
        (waiter_id_hash,) = other._core.registry.waiting
        other._core.registry.on_notification(
            "head", waiter_id_hash, 0.0, None
        )  # it re-checks now and finds this node free
        wait_until(lambda: time.monotonic() > began + 3)
        assert nodes.all[1].calls()["evalsha"] - before < 12
        lease.release()
        waiter_thread.join(20)
        assert not waiter_thread.is_alive()
    wait_until(lambda: nodes.remaining_keys() == [], 10)


# ------------------------------------------------------------------------------ leaks


def test_failed_calls_leak_no_descriptors_or_threads(nodes, wait_until) -> None:
    with Client(nodes.url, call_timeout=0.3) as client:
        client.lock("job").acquire().release()
        nodes.all[0].kill()
        nodes.all[1].kill()
        nodes.pause(2)
        with pytest.raises(Unavailable):
            client.lock("job").acquire(wait=0)
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(12):
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=0)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= files + 6
        assert threading.active_count() <= threads + 2, "threads for callbacks and listener, but none per call"
        nodes.resume()


def test_failed_asyncio_calls_leave_no_task_and_no_log_message(nodes, caplog) -> None:
    async def main() -> None:
        async with AsyncClient(nodes.url, call_timeout=0.3) as client:
            await client.ping()
            nodes.all[0].kill()
            nodes.pause(1, 2)
            for _ in range(4):
                with pytest.raises(Unavailable):
                    await client.lock("job").acquire(wait=0)
            tasks = [asyncio.create_task(client.lock("job").acquire(wait=5)) for _ in range(20)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            nodes.resume()
            end = time.monotonic() + 5
            while len(asyncio.all_tasks()) > 1:
                assert time.monotonic() < end, asyncio.all_tasks()
                await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main(), debug=True)
    assert "never retrieved" not in caplog.text
    assert "was destroyed" not in caplog.text


def test_released_lease_leaves_no_keys_while_nodes_lose_data(nodes, wait_until) -> None:
    """Rejoins to the nodes that lost data overlap with releases."""
    stopped = threading.Event()

    def flush_nodes() -> None:
        rng = random.Random(3)
        while not stopped.is_set():
            rng.choice(nodes.all[:2]).ask("FLUSHALL")

    def work(client: Client, number: int) -> None:
        for _ in range(20):
            with client.lock(f"name-{number}", ttl=60, wait=30) as lease:
                lease.renew()

    flush_thread = threading.Thread(target=flush_nodes)
    flush_thread.start()
    with Client(nodes.url) as client:
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stopped.set()
        flush_thread.join(10)
        wait_until(lambda: nodes.remaining_keys() == [], 10)


def test_killed_clients_leave_only_claims_that_expire(nodes, child, wait_until) -> None:

    processes = [
        child(nodes.url, "hot", 30, seed, "blocking", script=SUPPORT / "redlock_child.py") for seed in range(3)
    ]
    for process in processes:
        process.read_message()
    wait_until(lambda: any(lock_keys(node) for node in nodes.all))
    for process in processes:
        process.kill()
    with Client(nodes.url) as client:
        began = time.monotonic()
        with client.lock("hot", wait=20):
            assert time.monotonic() - began < 8  # the ttl of 1.5 s, and reservations of killed waiters that expire
