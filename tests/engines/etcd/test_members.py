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

from leasehold import Client, LeaseLost, NotAcquired, Unavailable, Unsupported
from leasehold.testing.etcd_rig import EtcdClusterRig
from leasehold.testing.servers.etcd import Cluster
from leasehold.testing.suite import made

MOMENT = 2.5  # to elect a leader, with a timeout of 1 s


@pytest.fixture
def url(trio, prefix) -> str:
    return f"etcd://{trio.hosts}/{prefix[:-1]}"


@pytest.mark.parametrize("fate", ["killed", "paused"])
@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_member_lost_costs_no_lease_and_no_place_in_line(trio, url, who, fate, in_line) -> None:
    with Client(url, call_timeout=8) as holder, Client(url, call_timeout=8) as other:
        lease = holder.lock("job", ttl=9).acquire()
        waiting = in_line(other)
        lost = trio.leader() if who == "leader" else trio.followers()[0]
        (lost.kill if fate == "killed" else lost.pause)()
        began = time.monotonic()
        with holder.lock("elsewhere", wait=20):
            pass
        assert time.monotonic() - began < 8
        lease.verify()
        assert not waiting.tokens
        assert lease.release()
        waiting.granted(20)
        assert waiting.tokens > [lease.token]


def test_without_a_majority_nobody_is_granted_and_everybody_is_told_in_time(trio, url, eventually) -> None:
    with Client(url, call_timeout=1.0) as holder, Client(url, call_timeout=1.0) as other:
        lease = holder.lock("job", ttl=4).acquire()
        dead = trio.followers()
        for member in dead:
            member.kill()
        for wait in (0, 30):
            began = time.monotonic()
            with pytest.raises(Unavailable):
                other.lock("job").acquire(wait=wait)
            assert time.monotonic() - began < 1.0 + 0.5
        with pytest.raises(Unavailable):
            other.inspect()
        assert lease.wait_lost(10)
        assert lease.lost_reason == "unreachable"
        trio.start()
        successor = eventually(lambda: other.lock("job").acquire(wait=0), 20)
        assert successor.token > lease.token
        successor.release()


def test_a_leader_that_is_paused_grants_nothing_when_it_goes_on(trio, url) -> None:
    """It does not know yet that it leads no more: its answers need a majority all the same."""
    old = trio.leader()
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

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.1)
        old.resume()
        asking.join(20)
        assert results[0] is None or isinstance(results[0], Unavailable)
        lease.verify()
        lease.release()


def test_leases_and_tokens_survive_a_restart_of_the_whole_cluster(trio, url, eventually, in_line) -> None:
    with Client(url, call_timeout=8) as holder, Client(url, call_timeout=8) as other:
        lease = holder.lock("job", ttl=30).acquire()
        waiting = in_line(other)
        trio.kill()
        trio.start()
        eventually(lambda: lease.verify() is None)
        assert lease.held
        lease.release()
        waiting.granted(30)
        assert waiting.tokens > [lease.token]


def test_a_dead_holder_is_followed_though_the_leader_dies_too(trio, url, eventually) -> None:
    """A new leader gives every lease its full ttl once more, never less."""
    with Client(url, call_timeout=8) as other:
        holder = Client(url, call_timeout=8)
        lease = holder.lock("job", ttl=3).acquire()
        granted_at = time.monotonic()
        holder._desk.dog.drop(lease._claim.mark)  # as a killed process would: nobody renews it
        lease._disown("released")
        trio.leader().kill()
        successor = eventually(lambda: other.lock("job").acquire(wait=20), 40)
        assert 3.0 <= time.monotonic() - granted_at < 3 + 3 + MOMENT + 5
        assert successor.token > lease.token
        successor.release()
        holder.close()


@pytest.mark.faults
def test_a_crowd_while_members_come_and_go(trio, url) -> None:
    """Members are killed and paused at random: never two who both trust their lease, tokens in order of time."""
    dice, stop = random.Random(11), threading.Event()
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

    crowd = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for one in crowd:
        one.start()
    end = time.monotonic() + 90
    while time.monotonic() < end:
        victim = dice.choice(trio.members)
        if dice.random() < 0.5:
            victim.kill()
            time.sleep(dice.random() * 3)
            victim.start()
        else:
            victim.pause()
            time.sleep(dice.random() * 4)
            victim.resume()
        time.sleep(dice.random() * 2)
    stop.set()
    for one in crowd:
        one.join(60)
    assert problems == []
    history.sort()
    assert len(history) > 50
    for (_, end_before, token), (begin, _, later) in pairwise(history):
        assert end_before <= begin, "two inside"
        assert token < later


def test_what_an_engine_survives_is_known_from_url_and_server(trio, url, single) -> None:
    one = f"etcd://127.0.0.1:{trio.members[0].port}"
    assert Client(url).traits.survives == "minority"
    assert Client(one).traits.survives == "restart", "if that very member is lost, this client is"
    with pytest.raises(Unsupported), Client(one) as client:
        client.lock("job", require={"survives-minority"})
    with Client(url) as client, client.lock("job", require={"survives-minority"}):
        pass


def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount, or make network namespaces")


@pytest.mark.faults
def test_a_full_disk_on_a_minority(tmp_path) -> None:
    as_root()
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
def test_a_leader_cut_off_from_the_majority(beside) -> None:
    """In network namespaces: the minority refuses within the deadline and never grants, the majority goes on."""
    made(EtcdClusterRig)  # or it is absent
    beside("partition").run("etcd")
