"""What a lock costs a Redis server and what it stores there: on a single server and on each of five Redlock nodes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from harness.rigs import redis, redlock, with_own_server
from harness.servers.redis import RedisServer
from harness.servers.redlock import RedlockNodes
from leasehold import Client
from leasehold.core.timing import HEARTBEAT_INTERVAL, RESERVATION_PROBE
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe
from tests.support.redis_servers import has_waiters
from tests.support.timing import MEASURING


class Deployment(NamedTuple):
    scheme: str
    servers: Sequence[RedisServer]

    @property
    def url(self) -> str:
        return f"{self.scheme}://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def call_counts(self, name: str) -> list[int]:
        """How often each server ran this command."""
        return [server.calls().get(name, 0) for server in self.servers]

    def calls_since(self, before: Sequence[int], name: str) -> list[int]:
        return [new - old for new, old in zip(self.call_counts(name), before, strict=True)]


@pytest.fixture(params=["redis", "redlock"])
def deployment(request) -> Deployment:
    if request.param == "redis":
        servers_found = Deployment("redis", [rig_or_skip(with_own_server(redis.RedisRig)).server])
    else:
        servers_found = Deployment("redlock", rig_or_skip(with_own_server(redlock.RedlockRig)).nodes)
    for server in servers_found.servers:
        server.ask("FLUSHALL")
    return servers_found


def test_first_renewal_needs_no_round_trip_to_load_its_script(start_redis) -> None:
    """After a failover every client renews at once, and the new primary knows no script."""
    server = start_redis()  # its own: renewals of other tests' clients would be counted, too
    with Client(f"redis://127.0.0.1:{server.port}") as client, client.lock("job") as lease:
        server.ask("SCRIPT", "FLUSH")
        before = server.info("errorstats").get("errorstat_NOSCRIPT")
        lease.renew()
        assert server.info("errorstats").get("errorstat_NOSCRIPT") == before


def test_server_stores_id_hash_but_never_the_claim_id(deployment) -> None:
    with Client(deployment.url) as client, client.lock("secret") as lease:
        attempt_thread = threading.Thread(target=lambda: client.lock("secret").try_acquire())
        attempt_thread.start()
        attempt_thread.join()
        for server in deployment.servers:
            stored = b"".join(key + (server.ask("DUMP", key) or b"") for key in server.ask("KEYS", "*"))
            assert probe.claim(lease).id.encode() not in stored
            assert bytes.fromhex(probe.claim(lease).id.partition(".")[2]) not in stored
            assert bytes.fromhex(probe.claim(lease).id_hash) in stored


@pytest.mark.parametrize(("scheme", "count"), [("redis", 1), ("redlock", 3)])
def test_garbage_collected_client_leaves_no_thread_or_connection(scheme, count, wait_until) -> None:
    rig_or_skip(redis.RedisRig)  # skips if Redis is not installed
    nodes = RedlockNodes(count=count)  # own servers: earlier tests may still have connections to the shared ones
    deployment = Deployment(scheme, nodes.all)

    def connections() -> int:
        return sum(int(server.info("clients")["connected_clients"]) for server in deployment.servers)

    before, earlier_threads, files = connections(), set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    client = Client(deployment.url)
    assert client.lock("job").acquire().release()
    assert connections() > before
    assert len(set(threading.enumerate()) - earlier_threads) <= 4, "watchdog, callbacks and listener, but none per node"
    del client

    def all_released() -> bool:
        gc.collect()  # the client has reference cycles
        return (
            connections() <= before
            and set(threading.enumerate()) <= earlier_threads
            and len(os.listdir("/proc/self/fd")) <= files
        )

    wait_until(all_released, 60, every=0.05)
    nodes.close()


@pytest.mark.measured
def test_acquire_and_release_cost_each_server_two_commands(deployment) -> None:
    with Client(deployment.url) as client:
        lock = client.lock("pair")
        for _ in range(3):
            with lock:
                pass
        before = deployment.call_counts("evalsha")
        for _ in range(100):
            with lock:
                pass
        spent = deployment.calls_since(before, "evalsha")
    # If the machine stalls for 3 ms between two sends, Redlock needs a second round to agree on the token.
    second_rounds = 30 if MEASURING else 100
    maximum = 200 if deployment.scheme == "redis" else 200 + second_rounds
    assert all(200 <= count <= maximum for count in spent), spent


@pytest.mark.parametrize("waiter_count", [5, 50])
def test_handoff_costs_each_server_few_commands_and_messages(deployment, wait_until, waiter_count) -> None:
    with Client(deployment.url) as client:
        lock = client.lock("hot", wait=60)
        held = lock.acquire()

        def work() -> None:
            with lock:
                pass

        threads, began = [threading.Thread(target=work) for _ in range(waiter_count)], time.monotonic()
        for thread in threads:
            thread.start()
        wait_until(lambda: has_waiters(client, waiter_count), every=0.05)
        script_calls, published = deployment.call_counts("evalsha"), deployment.call_counts("publish")
        held.release()
        for thread in threads:
            thread.join(60)
        script_calls, published = (
            deployment.calls_since(script_calls, "evalsha"),
            deployment.calls_since(published, "publish"),
        )
    # On a machine so slow that this takes seconds, each waiter also sends heartbeats and re-checks.
    took = time.monotonic() - began
    unprompted = waiter_count * (2 * int(took / HEARTBEAT_INTERVAL) + (took >= RESERVATION_PROBE))
    single_server = deployment.scheme == "redis"
    assert max(script_calls) - unprompted <= (2.1 * waiter_count + 4 if single_server else 4 * waiter_count + 10)
    assert max(published) - unprompted <= (2 if single_server else 3) * waiter_count


def test_renewal_batch_costs_each_server_one_command_per_lease(deployment) -> None:
    with Client(deployment.url) as client:
        leases = [client.lock(f"name-{number}", ttl=60).acquire() for number in range(100)]
        leases[0].renew()  # loads the script
        before = deployment.call_counts("evalsha")
        core = probe.core(client)
        replies = run_sync(
            probe.engine(client).renew([probe.renewal_claim(lease) for lease in leases], core.deadline())
        )
        assert all(reply.ttl == 60 for reply in replies)
        assert deployment.calls_since(before, "evalsha") == [100] * len(deployment.servers)
