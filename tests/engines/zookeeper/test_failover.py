"""Members of an ensemble of three are killed, paused and partitioned: two clients never trust a lease at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from harness.rigs.zookeeper import ZookeeperEnsembleRig, ZookeeperRig
from harness.servers.zookeeper import Ensemble, Zookeeper
from leasehold import Client, LeaseLost, LeaseState, Unavailable
from leasehold.engines.zookeeper import connection
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import partition, probe, probe_zookeeper
from tests.support.timing import check_seconds


@pytest.fixture(scope="module")
def partitionable() -> Iterator[Ensemble]:
    rig_or_skip(ZookeeperRig)
    # Followers stay with a silent leader for five seconds, longer than a session of four.
    found = Ensemble({"syncLimit": 10}, partitionable=True).started
    yield found
    found.kill()


@pytest.fixture
def connected_port(session_of) -> Callable[[Client], int]:
    """Returns the port of the member that a client is connected to, or last tried."""
    return lambda client: probe_zookeeper.member_port(session_of(client))


@pytest.mark.parametrize(
    ("how", "who"),
    [
        ("kill", "leader"),
        pytest.param("pause", "leader", marks=pytest.mark.extended),
        *(pytest.param(how, "follower", marks=pytest.mark.faults) for how in ("kill", "pause")),
    ],
)
def test_loss_of_one_member_costs_no_lease(
    who, how, three_servers, url_of, connected_port, client_pair, count_waiters, wait_until
) -> None:
    """The holder loses the member that it is connected to. A paused member keeps the connection open and silent. The
    client leaves it before the lease ends, however often the watchdog sends requests."""
    url, member = url_of(*three_servers.members, session=10), getattr(three_servers, who)()
    with ExitStack() as clients:
        for _ in range(100):
            one = clients.enter_context(Client(url, call_timeout=10))
            one.ping()
            if connected_port(one) == member.port:
                break
        two = clients.enter_context(Client(url, call_timeout=10))
        pair = client_pair(one, two)
        waiter_thread = pair.start_second()
        wait_until(lambda: count_waiters(two) == 1)
        pair.first_lease.renew()
        getattr(member, how)()
        lost = time.monotonic()
        wait_until(
            lambda: (
                not pair.first_lease.held
                or (connected_port(one) != member.port and pair.first_lease.state is LeaseState.HELD)
            )
        )
        print(f"{who} {how}: held again after {time.monotonic() - lost:.2f} s")
        pair.first_lease.renew()
        assert pair.first_lease.release()
        waiter_thread.join(30)
        assert len(pair.leases) == 2
        three_servers.restore()
        pair.leases[1].renew()


def is_responsive(client: Client) -> bool:
    try:
        client.lock(f"x{os.urandom(4).hex()}").call(lambda: None)
    except (Unavailable, LeaseLost):
        return False
    return True


@pytest.mark.extended  # it starts three servers again
def test_restart_of_the_whole_ensemble_keeps_leases(three_servers, url_of, client_pair, wait_until) -> None:
    url = url_of(*three_servers.members, session=10)
    with Client(url, call_timeout=20) as one, Client(url, call_timeout=20) as two:
        pair = client_pair(one, two)
        for member in three_servers.members:
            member.kill()
        three_servers.restore()
        wait_until(lambda: is_responsive(two), 30)
        assert two.lock("a").try_acquire() is None
        pair.first_lease.renew()
        assert pair.first_lease.release()
        with two.lock("a", wait=10) as lease:
            assert lease.token > pair.first_lease.token


@pytest.mark.faults
def test_full_disk_stops_one_member_and_costs_no_lease(url_of, client_pair, wait_until) -> None:
    """The disk is full by a file size limit: the member's log cannot grow, and the member stops."""
    rig_or_skip(ZookeeperRig)
    ensemble = Ensemble()
    full_member = ensemble.members[0]
    command = full_member.command()
    full_member.command = lambda: [
        "prlimit",
        "--fsize=400000",
        "--",
        command[0],
        "-Dzookeeper.preAllocSize=16",
        *command[1:],
    ]
    try:
        url = url_of(*ensemble.started.members, session=10)
        with Client(url, call_timeout=20) as one, Client(url, call_timeout=20) as two:
            pair = client_pair(one, two)
            lock = two.lock("other", purpose="x" * 200)
            wait_until(lambda: lock.call(lambda: None) or not full_member.mode(), 60, every=0)
            pair.first_lease.renew()
            assert pair.first_lease.release()
            with two.lock("a", wait=10):
                pass
    finally:
        ensemble.kill()


# ----------------------------------------------------------------------------------------------------------- partitions


@pytest.fixture
def partitioned_pair(partitionable, url_of, client_pair) -> Iterator[Callable[..., tuple]]:
    """Starts a pair whose first client connects to one member and whose second connects to the others. Also returns a
    function that cuts that member off."""
    with ExitStack() as clients:

        def start_pair(isolated: Zookeeper, session: float) -> tuple:
            others = [member for member in partitionable.members if member is not isolated]
            one = clients.enter_context(Client(url_of(isolated, session=session), call_timeout=1))
            two = clients.enter_context(Client(url_of(*others, session=session), call_timeout=60))
            return client_pair(one, two), lambda: partitionable.partition(isolated)

        yield start_pair
        partitionable.restore()


@pytest.mark.faults
def test_leader_cut_off_from_the_majority_grants_nothing() -> None:
    """In network namespaces: the minority refuses within the deadline and never grants; the majority keeps working."""
    rig_or_skip(ZookeeperEnsembleRig)  # skips if ZooKeeper is not installed
    partition.run("zookeeper")


@pytest.mark.extended
def test_answers_of_a_follower_cut_off_from_the_leader_are_not_trusted(
    partitionable, partitioned_pair, count_waiters, session_of, wait_until, wait_no_majority, monkeypatch
) -> None:
    """A follower answers and is cut off before it reports the session to the leader, which last heard of the session a
    while ago. If the client counted from that answer, it would trust its lease too long."""
    monkeypatch.setattr(connection, "HEARTBEAT_SHARE", 1 / 4)  # no other heartbeat in between
    pair, cut_off = partitioned_pair(partitionable.follower(), 8)
    isolated, majority = pair.clients
    waiter_thread = pair.start_second()
    wait_until(lambda: count_waiters(majority) == 1)
    pair.stop_renewing()
    wait_until(lambda: probe.watchdog_engine(isolated) is None)
    session = session_of(isolated)
    wait_until(lambda: probe_zookeeper.seconds_since_heartbeat(session) > 1.5)  # no heartbeat for that long
    pair.first_lease.renew()
    cut_off()
    cut = time.monotonic()
    waiter_thread.join(60)
    print(f"trusted {pair.first_lease.ttl:.2f} s, followed {pair.granted_at - cut:.2f} s after the cut")
    check_seconds(pair.granted_at - cut, 2 * 8 + 2)
    assert "cut off from the majority" in str(wait_no_majority(isolated))
