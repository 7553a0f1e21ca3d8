"""Clusters that lose members, leaders and majorities."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from contextlib import suppress
from itertools import pairwise

import pytest

from harness.rigs.etcd import EtcdClusterRig
from harness.servers.etcd import Cluster
from harness.servers.proxy import Proxy
from leasehold import Client, LeaseLost, NotAcquired, Unavailable, Unsupported
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import partition, probe
from tests.support.slow_network import check_lease_is_kept
from tests.support.timing import check_elapsed

ELECTION_TIME = 2.5  # seconds to elect a leader, with an election timeout of 1 s


@pytest.fixture
def url(cluster, prefix) -> str:
    return f"etcd://{cluster.hosts}/{prefix[:-1]}"


@pytest.mark.parametrize(
    ("who", "fate"),
    [
        ("leader", "killed"),
        ("follower", "paused"),
        pytest.param("leader", "paused", marks=pytest.mark.extended),
        pytest.param("follower", "killed", marks=pytest.mark.extended),
    ],
)
def test_lost_member_costs_no_lease_and_no_queue_position(cluster, url, who, fate, start_waiter) -> None:
    with Client(url, call_timeout=8) as holder, Client(url, call_timeout=8) as other:
        lease = holder.lock("job", ttl=30).acquire()
        waiting = start_waiter(other)
        lost = cluster.leader() if who == "leader" else cluster.followers()[0]
        (lost.kill if fate == "killed" else lost.pause)()
        began = time.monotonic()
        with holder.lock("elsewhere", wait=60):
            pass
        check_elapsed(began, 8)
        lease.verify()
        assert not waiting.tokens
        assert lease.release()
        waiting.wait_granted(60)
        assert waiting.tokens > [lease.token]


def test_cluster_without_quorum_grants_nothing_and_leases_end_in_time(
    cluster, url, eventually, wait_no_majority
) -> None:
    with Client(url, call_timeout=1.0) as holder, Client(url, call_timeout=1.0) as other:
        lease = holder.lock("job", ttl=4).acquire()
        dead = cluster.followers()
        for member in dead:
            member.kill()
        for wait in (0, 30):
            began = time.monotonic()
            with pytest.raises(Unavailable):
                other.lock("job").acquire(wait=wait)
            check_elapsed(began, 1.0 + 0.5)
        with pytest.raises(Unavailable):
            other.inspect()
        assert "no leader" in str(wait_no_majority(other))
        assert lease.wait_lost(10)
        assert lease.lost_reason == "unreachable"
        cluster.start()
        successor = eventually(lambda: other.lock("job").acquire(wait=0), 20)
        assert successor.token > lease.token
        successor.release()


def test_paused_leader_grants_nothing_when_it_resumes(cluster, url) -> None:
    """The old leader does not know yet that it was replaced, but its answers still need a majority."""
    old = cluster.leader()
    direct = f"etcd://127.0.0.1:{old.port}/{url.rpartition('/')[2]}"
    with Client(url, call_timeout=8) as client, Client(direct, call_timeout=2.0) as stale:
        with stale.lock("warm"):
            pass
        old.pause()
        lease = client.lock("job", ttl=30).acquire(wait=20)
        results: list[object] = []

        def ask() -> None:
            try:
                results.append(stale.lock("job").try_acquire())
            except Unavailable as error:
                results.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.1)  # pause: the request is on its way when the member resumes
        old.resume()
        thread.join(20)
        assert results[0] is None or isinstance(results[0], Unavailable)
        lease.verify()
        lease.release()


def test_leases_and_tokens_survive_a_restart_of_the_whole_cluster(cluster, url, eventually, start_waiter) -> None:
    with Client(url, call_timeout=8) as holder, Client(url, call_timeout=8) as other:
        lease = holder.lock("job", ttl=30).acquire()
        waiting = start_waiter(other)
        cluster.kill()
        cluster.start()
        eventually(lambda: lease.verify() is None)
        assert lease.held
        lease.release()
        waiting.wait_granted(30)
        assert waiting.tokens > [lease.token]


def test_lock_of_a_dead_holder_is_granted_although_the_leader_dies(cluster, url, eventually) -> None:
    """A new leader restarts every lease with its full ttl, never less."""
    with Client(url, call_timeout=8) as other:
        holder = Client(url, call_timeout=8)
        asked = time.monotonic()
        lease = holder.lock("job", ttl=10).acquire()
        probe.watchdog(holder).unwatch(probe.claim(lease).id_hash)  # like a killed process: the lease is not renewed
        probe.invalidate(lease)
        cluster.leader().kill()
        successor = eventually(lambda: other.lock("job").acquire(wait=60), 120)
        assert time.monotonic() - asked >= 10.0
        check_elapsed(asked, 10 + 10 + ELECTION_TIME + 5)
        assert successor.token > lease.token
        successor.release()
        holder.close()


@pytest.mark.faults
def test_holders_never_overlap_while_members_fail(cluster, url) -> None:
    """While members are killed and paused at random, two clients never trust their leases at once, and tokens rise."""
    rng, stop = random.Random(11), threading.Event()
    history: list[tuple[float, float, int]] = []
    problems: list[str] = []

    def work(number: int) -> None:
        with Client(url, call_timeout=4) as client:
            while not stop.is_set():
                try:
                    with client.lock("job", ttl=4, wait=30) as lease:
                        began = time.monotonic()
                        while time.monotonic() - began < 0.05 and lease.held:
                            time.sleep(0.005)
                        end = time.monotonic()
                        if lease.held:
                            history.append((began, end, lease.token))
                except (Unavailable, NotAcquired, LeaseLost):
                    time.sleep(0.05)
                except BaseException as error:
                    problems.append(repr(error))
                    raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 90
    while time.monotonic() < end:
        victim = rng.choice(cluster.members)
        if rng.random() < 0.5:
            victim.kill()
            time.sleep(rng.random() * 3)
            victim.start()
        else:
            victim.pause()
            time.sleep(rng.random() * 4)
            victim.resume()
        time.sleep(rng.random() * 2)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert problems == []
    history.sort()
    assert len(history) > 50
    for (_, end_before, token), (begin, _, later) in pairwise(history):
        assert end_before <= begin, "two holders at once"
        assert token < later


def test_survives_trait_depends_on_url_and_server(cluster, url, start_member) -> None:
    one_member_url = f"etcd://127.0.0.1:{cluster.members[0].port}"
    assert Client(url).traits.survives == "minority"
    assert Client(one_member_url).traits.survives == "restart", "a client with one endpoint depends on that member"
    with pytest.raises(Unsupported), Client(one_member_url) as client:
        client.lock("job", require={"survives-minority"})
    with Client(url) as client, client.lock("job", require={"survives-minority"}):
        pass


def skip_unless_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount, or make network namespaces")


@pytest.mark.faults
def test_full_disk_on_a_minority_costs_no_lease(tmp_path) -> None:
    skip_unless_root()
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "none", str(small)]).returncode:
        pytest.skip("no tmpfs may be mounted here")
    cluster = Cluster(3)
    try:
        cluster.members[0].data = str(small / "data")
        cluster.start()
        with Client(f"etcd://{cluster.hosts}", call_timeout=8) as client:
            lease = client.lock("job", ttl=10).acquire()
            with suppress(OSError), open(small / "ballast", "wb") as ballast:
                while True:
                    ballast.write(bytes(65_536))
            for number in range(400):
                with suppress(OSError):
                    cluster.members[1].put(f"fill{number % 10}", "x" * 50_000)
                if not cluster.members[0].running:
                    break
            lease.verify()
            with client.lock("other", wait=20):
                pass
            assert lease.release()
    finally:
        cluster.kill()
        subprocess.run(["umount", "-l", str(small)], check=False)


@pytest.mark.faults
def test_leader_cut_off_from_the_majority_grants_nothing() -> None:
    """In network namespaces: the minority refuses within the deadline and never grants; the majority keeps working."""
    rig_or_skip(EtcdClusterRig)  # skips if etcd is not installed
    partition.run("etcd")


@pytest.mark.faults
def test_slow_network_costs_no_lease(cluster, url) -> None:
    """No member is the first to answer if each gets less time than an answer takes."""
    proxies = [Proxy(member.port) for member in cluster.members]
    try:
        check_lease_is_kept(url.replace(cluster.hosts, ",".join(f"127.0.0.1:{p.port}" for p in proxies)), proxies)
    finally:
        for proxy in proxies:
            proxy.close()
