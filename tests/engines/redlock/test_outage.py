"""The Redlock engine while nodes are killed, paused, restarted empty, cut off or full.

Each test starts its own nodes. Faults that apply to a single Redis server, too, are in
tests/engines/redis/test_outage.py.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from harness.servers.proxy import Proxy
from harness.servers.redlock import lock_keys
from leasehold import AsyncClient, Client, LeaseLost, NotAcquired, Unavailable
from tests.support.foreign_clients import Waiter
from tests.support.redis_servers import has_waiters
from tests.support.slow_network import check_lease_is_kept
from tests.support.timing import check_elapsed, check_seconds


@pytest.fixture
def url_with_slow_node(nodes):
    """A URL that leads to node 1 through a slow network."""
    proxy = Proxy(nodes.all[1].port)
    proxy.watch = lambda _from_client, _data: time.sleep(0.05)  # pause: the network's
    yield nodes.url.replace(f":{nodes.all[1].port}", f":{proxy.port}")
    proxy.close()


# ----------------------------------------------------------- without an address


def test_silent_name_server_of_two_of_five_nodes_delays_no_lock(nodes, monkeypatch) -> None:
    original, end = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host, *args, **kwargs):
        return end.wait(120) and [] if str(host).endswith(".example") else original(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    url = nodes.url
    for number in (0, 2):
        url = url.replace(f"127.0.0.1:{nodes.all[number].port}", f"node{number}.example:{nodes.all[number].port}")
    assert url.count(".example") == 2
    with Client(url, call_timeout=60) as client:
        for _ in range(3):
            began = time.monotonic()
            lease = client.lock("job", ttl=30).acquire()
            check_elapsed(began, 2, "the majority decides, as if these nodes were silent")
            lease.renew()
            assert not end.is_set()
            lease.release()
        end.set()


def test_second_address_of_nodes_whose_first_is_silent_is_tried(start_nodes, monkeypatch) -> None:
    """Such as an IPv6 address to which nothing leads: a blocking client never tried another one."""
    nodes, original = start_nodes().all, socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        if host != "dual.example":
            return original(host, *args, **kwargs)
        return [(socket.AF_INET, 1, 6, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    url = "redlock://" + ",".join(f"dual.example:{node.port}" for node in nodes)
    with ExitStack() as silent, Client(url, call_timeout=3) as client:
        for node in nodes:
            silent.enter_context(socket.create_server(("127.0.0.2", node.port)))
        with suppress(Unavailable):
            client.lock("job").acquire().release()
        client.lock("job").acquire().release()


# ---------------------------------------------------------------------- killed


def test_locks_work_with_two_of_five_nodes_down(nodes, wait_until) -> None:
    with Client(nodes.url) as client, Client(nodes.url) as other:
        first = client.lock("job").acquire()
        nodes.all[0].kill()
        nodes.all[3].kill()
        first.renew()
        assert other.lock("job").try_acquire() is None
        waiter = Waiter(other)
        wait_until(lambda: has_waiters(client))
        began = time.monotonic()
        assert first.release()
        second = waiter.wait_granted()
        check_seconds(waiter.granted_at - began, 2, "woken by the three remaining nodes")
        assert second.token > first.token
        assert other.break_lock("job", token=second.token)
        began = time.monotonic()
        for _ in range(20):
            with client.lock("job", ttl=30):
                pass
        check_elapsed(began, 5)
    wait_until(lambda: nodes.remaining_keys() == [])


@pytest.mark.parametrize("silently", [False, True])
def test_nothing_is_granted_with_three_of_five_nodes_down(nodes, wait_until, silently) -> None:
    with Client(nodes.url, call_timeout=0.5) as client, Client(nodes.url, call_timeout=0.5, ttl=60) as other:
        lease = client.lock("held", ttl=1.0).acquire()
        other.ping()
        for node in nodes.all[:3]:
            node.pause() if silently else node.kill()
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(Unavailable, match=r"2 of 5 nodes answered, 3 are needed.*127\.0\.0\.1") as error:
                other.lock("job").acquire(wait=5)
            check_elapsed(began, 0.5 + 0.5)
            assert str(nodes.all[0].port) in str(error.value)
            assert str(nodes.all[4].port) not in str(error.value), "this node answered"
            assert error.value.no_majority
        assert lease.wait_lost(5)
        assert lease.lost_reason == "unreachable"
        nodes.resume()
        for node in nodes.all[:3]:
            if not node.running:
                node.start()
        wait_until(lambda: nodes.remaining_keys() == [])  # long before the attempts' ttl of 60 s
        with other.lock("job", wait=10) as again:
            assert again.token > lease.token


def test_restarted_nodes_take_part_again(nodes, wait_until) -> None:
    with Client(nodes.url) as client:
        nodes.all[0].kill()
        nodes.all[1].kill()
        with client.lock("job"):
            pass
        nodes.all[0].start()
        nodes.all[1].start()

        def lock_is_on_every_node() -> bool:
            with client.lock("job"):
                return all(lock_keys(node) for node in nodes.all)

        wait_until(lock_is_on_every_node, 60, every=0.05)
        nodes.all[2].kill()
        nodes.all[3].kill()
        with client.lock("job"):
            pass


# ------------------------------------------------------------- restarted empty


@pytest.mark.extended  # the holder must renew every second
def test_node_restarted_empty_rejoins_the_lease(nodes, wait_until) -> None:
    """At the next renewal. Otherwise a lease would be lost although a majority of nodes never restarted at once."""
    with Client(nodes.url) as client, Client(nodes.url) as other:
        lease = client.lock("job", ttl=3).acquire()
        for node in nodes.all:  # all nodes, one after the other
            node.restart()
            wait_until(lambda node=node: lock_keys(node))
            assert lease.held
            assert other.lock("job").try_acquire() is None
        assert lease.release()
    wait_until(lambda: nodes.remaining_keys() == [])


def test_node_restarted_empty_may_admit_second_holder_but_token_rises(nodes) -> None:
    """Documented: two nodes were paused during the first grant, and one that voted for it then loses its data."""
    with Client(nodes.url, call_timeout=1) as holder, Client(nodes.url, call_timeout=1) as other:
        other.ping()
        nodes.all[3].pause()
        nodes.all[4].pause()
        first = holder.lock("job", ttl=300).acquire()
        nodes.resume()
        nodes.all[2].restart()
        end = time.monotonic() + 20
        second = None
        while second is None:
            assert time.monotonic() < end
            second = other.lock("job", ttl=300).try_acquire()
        assert second.token > first.token, "from now on a fence refuses the first holder"
        with pytest.raises(LeaseLost):
            first.renew()


def test_tokens_rise_after_nodes_lose_their_data(nodes) -> None:
    """As long as the clocks of the nodes do not go back."""
    tokens = []
    with Client(nodes.url) as client:
        for number in range(12):
            lease = client.lock("job", wait=20).acquire()
            tokens.append(lease.token)
            nodes.all[number % 5].ask("FLUSHALL")
            nodes.all[(number + 1) % 5].ask("FLUSHALL")
            lease.release()
    assert tokens == sorted(set(tokens))


# ---------------------------------------------------------------------- paused


def test_paused_minority_delays_only_the_first_call(nodes, wait_until) -> None:
    with Client(nodes.url) as client:
        client.lock("job").acquire().release()
        nodes.pause(1, 4)
        began = time.monotonic()
        with client.lock("job", ttl=30):
            pass
        check_elapsed(began, 4)
        began = time.monotonic()
        for _ in range(50):
            with client.lock("job", ttl=30):
                pass
        check_elapsed(began, 20, "the client waited half a second for the silent nodes in every call")
        nodes.resume()
        wait_until(lambda: nodes.remaining_keys() == [])


def test_paused_minority_keeps_no_claims_after_it_resumes(nodes, wait_until) -> None:
    """Resumed nodes run old attempts in the middle of newer claims, but each attempt is followed by its release."""
    with Client(nodes.url) as client, Client(nodes.url) as other:
        client.ping()
        other.ping()
        for round_number in range(3):
            nodes.pause(round_number, (round_number + 1) % 5)
            for _ in range(2):
                with client.lock("job", ttl=30), pytest.raises(NotAcquired):
                    other.lock("job", ttl=30).acquire(wait=0)
            nodes.resume()
        wait_until(lambda: nodes.remaining_keys() == [])


def test_resumed_minority_counts_when_another_minority_is_paused(nodes, url_with_slow_node) -> None:
    """The resumed nodes are still in backoff. They do not know the script either: the first to say so must not end the
    wait for the second."""
    with Client(url_with_slow_node, call_timeout=20) as client:
        nodes.pause(0, 1)
        first = client.lock("first", ttl=60).acquire()
        nodes.resume()
        nodes.pause(2, 3)
        with client.lock("second", ttl=60, wait=20) as second:
            assert first.held
            assert second.held
        nodes.resume()
        first.release()


def test_resumed_minority_counts_for_an_asyncio_client(nodes, url_with_slow_node) -> None:
    async def main() -> None:
        async with AsyncClient(url_with_slow_node, call_timeout=20) as client:
            nodes.pause(0, 1)
            first = await client.lock("first", ttl=60).acquire()
            nodes.resume()
            nodes.pause(2, 3)
            async with client.lock("second", ttl=60, wait=20) as second:
                assert first.held
                assert second.held
            nodes.resume()
            await first.release()

    asyncio.run(main())


# --------------------------------------------------------------------- network


def test_lost_answers_of_a_minority_leave_no_keys(nodes, proxied_nodes, wait_until) -> None:
    url, proxies = proxied_nodes
    with Client(url) as client:
        client.ping()
        proxies[0].lose_answers()
        proxies[4].lose_answers()
        for _ in range(5):
            with client.lock("job", ttl=30) as lease:
                lease.renew()
        wait_until(lambda: not lock_keys(nodes.all[1]))
        for proxy in proxies:
            proxy.restore()
        wait_until(lambda: nodes.remaining_keys() == [])


def test_silent_network_raises_unavailable_at_the_deadline(nodes, proxied_nodes) -> None:
    url, proxies = proxied_nodes
    with Client(url, call_timeout=0.5) as client:
        lease = client.lock("job", ttl=1.2).acquire()
        for proxy in proxies:
            proxy.cut()
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.lock("other").acquire()
        check_elapsed(began, 1.0)
        assert lease.wait_lost(5)
        for proxy in proxies:
            proxy.restore()


def test_silent_minority_does_not_slow_asyncio_client(nodes, proxied_nodes) -> None:
    url, proxies = proxied_nodes

    async def main() -> None:
        async with AsyncClient(url) as client:
            async with client.lock("job"):
                pass
            proxies[1].cut()
            proxies[2].cut()
            began = time.monotonic()
            for _ in range(30):
                async with client.lock("job", ttl=30):
                    pass
            check_elapsed(began, 15, "each of 60 calls waited half a second for the silent nodes")
            for proxy in proxies:
                proxy.restore()

    asyncio.run(main())


def test_full_nodes_refuse_new_locks_and_keep_held_ones(nodes) -> None:
    with Client(nodes.url, call_timeout=1) as client:
        lease = client.lock("kept", ttl=3).acquire()
        for node in nodes.all[:3]:
            node.ask("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(Unavailable, match="OOM"):
            client.lock("new").acquire(wait=0)
        lease.renew()
        for node in nodes.all[:3]:
            node.ask("CONFIG", "SET", "maxmemory", 0)
        assert lease.release()
        with client.lock("new", wait=5):
            pass


@pytest.mark.parametrize("client_count", [5])
def test_lock_is_exclusive_and_fast_over_jittery_networks(nodes, client_count) -> None:
    """Each message to each node is delayed by up to 8 ms, so that votes are often split."""
    inside, tokens, routes = [], [], [nodes.proxied() for _ in range(client_count)]
    rng = random.Random(7)

    def delay(_outward: bool, _data: bytes) -> None:
        time.sleep(rng.random() * 0.008)  # pause: the network's

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
                    time.sleep(0.002)  # pause: others may come in
                    inside.remove(lease)

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(url,)) for url, _ in routes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    for _, proxies in routes:
        for proxy in proxies:
            proxy.close()
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 4 * client_count
    check_elapsed(began, 30, "waiters wait for reservations to expire")


@pytest.mark.faults
def test_slow_network_costs_no_lease(proxied_nodes) -> None:
    check_lease_is_kept(*proxied_nodes)
