"""The Redlock engine on five servers: supported locks, split votes, order of grants, tokens.

Threads, forks and event loops are tested in tests/engines/test_concurrency.py, commands and messages in
tests/engines/redis/test_costs.py.
"""

from __future__ import annotations

import threading

import pytest

from harness.rigs import with_own_server
from harness.rigs.redlock import RedlockRig
from harness.servers.redlock import lock_keys
from leasehold import Client, Unsupported
from leasehold.engines.redis.protocol import as_eval
from leasehold.model import Alive, Gone, Grant
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_redlock
from tests.support.redis_servers import has_waiters, send_raw


@pytest.fixture(scope="module")
def servers():
    return rig_or_skip(with_own_server(RedlockRig)).nodes


@pytest.fixture
def url(servers):
    for server in servers:
        server.ask("FLUSHALL")
    return "redlock://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def remaining_keys(servers) -> list[bytes]:
    return [key for server in servers for key in lock_keys(server)]


def test_only_exclusive_locks_can_be_built(url) -> None:
    with Client(url) as client:
        with pytest.raises(Unsupported, match="redlock"):
            client.semaphore("permits", 2)
        with pytest.raises(Unsupported, match="redlock"):
            client.rwlock("book").read()
        with pytest.raises(Unsupported, match="fair"):
            client.lock("job", require={"fair"})
        with pytest.raises(Unsupported, match="survives-minority"):
            client.lock("job", require={"survives-minority"}).acquire()  # these servers have no persistence
        client.lock("job", require={"fencing", "push", "break-notice", "outlives"}).acquire().release()


def test_majority_grants_name_held_by_plain_client_on_one_node(url, servers) -> None:
    with Client(f"redis://127.0.0.1:{servers[0].port}") as plain, Client(url) as client:
        theirs = plain.lock("job").acquire()
        with client.lock("job") as lease:
            assert lease.held
        assert theirs.release()
        assert remaining_keys(servers) == []


def test_simultaneous_attempts_grant_at_most_one_and_leave_no_keys(url, servers, wait_until) -> None:
    """Simultaneous attempts split the vote. A client without a majority must release the votes it got."""
    clients = [Client(url) for _ in range(8)]
    barrier = threading.Barrier(len(clients))
    results = []

    def work(client: Client) -> None:
        client.ping()
        for number in range(20):
            barrier.wait(60)
            lease = client.lock(f"job-{number}", ttl=60).try_acquire()
            results.append((number, lease))

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for number in range(20):
        winners = [lease for result_number, lease in results if result_number == number and lease is not None]
        assert len(winners) <= 1
        for lease in winners:
            lease.release()
    wait_until(lambda: remaining_keys(servers) == [])
    for client in clients:
        client.close()


def test_waiters_are_granted_in_arrival_order(url, wait_until) -> None:
    """The order depends on the clocks of the clients. Here all waiters share one client."""
    order: list[int] = []
    with Client(url) as client:
        lock, threads = client.lock("hot", wait=60), []
        held = lock.acquire()

        def work(number: int) -> None:
            with lock:
                order.append(number)

        for number in range(8):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            wait_until(lambda count=number + 1: has_waiters(client, count))
        held.release()
        for thread in threads:
            thread.join(60)
    assert order == list(range(8))


# ------------------------------------------------------------ tokens and votes


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


def test_rejoin_does_not_take_a_node_from_its_holder(nodes, make_driver) -> None:
    driver, other = make_driver(nodes.url), make_driver(nodes.url)
    lost = driver.claim()._replace(token=17)
    held = other.acquire(other.claim())
    requests = probe_redlock.requests(driver.engine)
    rejoin = requests.rejoin(requests.name_keys("", "job"), lost, probe_redlock.proposals(driver.engine).next_number())
    for node in nodes.all:
        assert send_raw(node, as_eval(requests.scripts.rejoin, rejoin)) == 0
    assert isinstance(other.renew(held), Alive)
