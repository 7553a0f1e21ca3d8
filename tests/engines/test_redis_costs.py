"""What a lock costs a Redis server, and what it keeps there: of one server, and of each of the five of a redlock."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from leasehold import Client
from leasehold.runtime.base import step
from leasehold.testing import redis_rig, redlock_rig
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.servers.redlock import Nodes
from leasehold.testing.suite import made


class Place(NamedTuple):
    scheme: str
    servers: Sequence[RedisServer]

    @property
    def url(self) -> str:
        return f"{self.scheme}://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def calls(self, name: str) -> list[int]:
        """How often each server was asked to do this."""
        return [server.calls().get(name, 0) for server in self.servers]

    def since(self, before: Sequence[int], name: str) -> list[int]:
        return [new - old for new, old in zip(self.calls(name), before, strict=True)]


@pytest.fixture(params=["redis", "redlock"])
def place(request) -> Place:
    if request.param == "redis":
        found = Place("redis", [made(redis_rig.RedisRig).server])
    else:
        found = Place("redlock", made(redlock_rig.RedlockRig).nodes)
    for server in found.servers:
        server.ask("FLUSHALL")
    return found


def in_line(client: Client, count: int) -> bool:
    return sum(holding.state == "waiting" for holding in client.inspect()) == count


def test_no_secret_is_on_any_server(place) -> None:
    with Client(place.url) as client, client.lock("secret") as lease:
        waiting = threading.Thread(target=lambda: client.lock("secret").try_acquire())
        waiting.start()
        waiting.join()
        for server in place.servers:
            kept = b"".join(key + (server.ask("DUMP", key) or b"") for key in server.ask("KEYS", "*"))
            assert lease._claim.id.encode() not in kept
            assert bytes.fromhex(lease._claim.id.partition(".")[2]) not in kept
            assert bytes.fromhex(lease._claim.mark) in kept


@pytest.mark.parametrize(("scheme", "count"), [("redis", 1), ("redlock", 3)])
def test_a_dropped_client_leaves_no_thread_and_no_connection(scheme, count, until) -> None:
    made(redis_rig.RedisRig)  # a skip where there is no Redis
    own = Nodes(count=count)  # what other tests left behind on shared ones would be counted, and goes by and by
    place = Place(scheme, own.all)

    def connections() -> int:
        return sum(int(server.info("clients")["connected_clients"]) for server in place.servers)

    before, threads, files = connections(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    client = Client(place.url)
    assert client.lock("job").acquire().release()
    assert connections() > before
    assert threading.active_count() <= threads + 4, "watchdog, teller, one that listens: none for each node"
    del client

    def gone() -> bool:
        gc.collect()  # its parts know each other
        return (
            connections() <= before
            and threading.active_count() <= threads
            and len(os.listdir("/proc/self/fd")) <= files
        )

    until(gone, 20, every=0.05)
    own.close()


def test_a_pair_costs_each_server_two_commands(place) -> None:
    with Client(place.url) as client:
        lock = client.lock("pair")
        for _ in range(3):
            with lock:
                pass
        before = place.calls("evalsha")
        for _ in range(100):
            with lock:
                pass
        spent = place.since(before, "evalsha")
    # A machine that stands still for 3 ms between two sends needs a second round to agree on a redlock's token.
    most = 200 if place.scheme == "redis" else 230
    assert all(200 <= each <= most for each in spent), spent


@pytest.mark.parametrize("crowd", [5, 50])
def test_a_hand_off_costs_each_server_few_commands_and_messages(place, until, crowd) -> None:
    with Client(place.url) as client:
        lock = client.lock("hot", wait=60)
        held = lock.acquire()

        def work() -> None:
            with lock:
                pass

        threads = [threading.Thread(target=work) for _ in range(crowd)]
        for thread in threads:
            thread.start()
        until(lambda: in_line(client, crowd), every=0.05)
        asked, told = place.calls("evalsha"), place.calls("publish")
        held.release()
        for thread in threads:
            thread.join(60)
        asked, told = place.since(asked, "evalsha"), place.since(told, "publish")
    # A machine so slow that it takes seconds sees heart-beats and looks around on top.
    alone = place.scheme == "redis"
    assert max(asked) <= (2.1 * crowd + 4 if alone else 4 * crowd + 10)
    assert max(told) <= (2 if alone else 3) * crowd


def test_a_batch_of_renewals_is_one_trip(place) -> None:
    with Client(place.url) as client:
        leases = [client.lock(f"name-{number}", ttl=60).acquire() for number in range(100)]
        leases[0].renew()  # the servers know the script
        before = place.calls("evalsha")
        desk = client._desk
        replies = step(desk._engine.renew([lease._renewal() for lease in leases], desk.deadline()))
        assert all(reply.ttl == 60 for reply in replies)
        assert place.since(before, "evalsha") == [100] * len(place.servers)
