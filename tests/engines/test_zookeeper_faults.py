"""ZooKeeper hurt on purpose: members killed, stopped and parted, clients cut off, clocks apart, sessions shorter than
a ttl, numbers running out. In every one of these there are never two who both trust their lease.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from leasehold import Client, LeaseLost, LeaseState, NotAcquired, Unavailable
from leasehold.engines.zookeeper.session import Session
from leasehold.testing.rig import Absent
from leasehold.testing.servers.process import free_ports, program, scratch
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.zookeeper import Ensemble, Zookeeper, class_path
from leasehold.testing.suite import made
from leasehold.testing.zookeeper_rig import ZookeeperEnsembleRig, ZookeeperRig, alone, ensemble

FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
SESSION = 4.0


def url_of(*servers: Zookeeper | Proxy, options: str = "") -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"zookeeper://{hosts}/test-{os.urandom(6).hex()}{options}"


@pytest.fixture
def three() -> Iterator[Ensemble]:
    made(ZookeeperEnsembleRig)
    yield ensemble()
    ensemble().heal()


@pytest.fixture(scope="module")
def partable() -> Iterator[Ensemble]:
    made(ZookeeperRig)
    # Followers stay with a leader they do not hear of for five seconds: long against a session of four.
    found = Ensemble({"syncLimit": 10}, partable=True).started
    yield found
    found.kill()


class Watcher:
    """Two clients after one name; notes whenever both trust a lease at once."""

    def __init__(self, one: Client, two: Client, name: str = "a", ttl: float = 30.0) -> None:
        self.clients, self.name, self.ttl = (one, two), name, ttl
        self.leases: list = []
        self.overlaps: list = []
        self.granted_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.first = one.lock(name, ttl=ttl).acquire(wait=30)
        self.leases.append(self.first)
        self._thread.start()

    def follow(self, wait: float = 200.0) -> threading.Thread:
        """The second one stands in line from now on."""

        def take() -> None:
            lease = self.clients[1].lock(self.name, ttl=self.ttl).acquire(wait=wait)
            self.granted_at = time.monotonic()
            self.leases.append(lease)

        thread = threading.Thread(target=take)
        thread.start()
        return thread

    def _look(self) -> None:
        over = False
        while not over:
            over = self._over.wait(0.001)  # and then looks once more, after whatever came last
            trusted = [lease for lease in self.leases if lease.held]
            if len(trusted) > 1:
                self.overlaps.append(trusted)

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)
        assert self.overlaps == [], "two trusted their lease at once"
        tokens = [lease.token for lease in self.leases]
        assert tokens == sorted(set(tokens))


def in_line(client: Client, name: str = "a") -> int:
    return sum(one.state == "waiting" for one in client.inspect(name, exact=True))


# --------------------------------------------------- a client cut off silently


@pytest.mark.parametrize(("session", "ttl"), [(2.0, 30.0), (6.0, 1.5)], ids=["session-ends-it", "ttl-ends-it"])
def test_a_client_cut_off_stops_before_anybody_else_begins(session, ttl, until) -> None:
    made(ZookeeperRig)
    near, far = Proxy(alone().port), Proxy(alone().port)
    place = f"/test-{os.urandom(6).hex()}?session={session}"
    urls = [f"zookeeper://127.0.0.1:{proxy.port}{place}" for proxy in (near, far)]
    with Client(urls[0], call_timeout=1) as one, Client(urls[1]) as two:
        both = Watcher(one, two, ttl=ttl)
        following = both.follow()
        until(lambda: in_line(two) == 1)
        near.cut()
        cut = time.monotonic()
        until(lambda: both.first.state is LeaseState.AT_RISK or not both.first.held)
        following.join(30)
        assert both.granted_at - cut < min(session, ttl) * 1.1 + 4, "within its session or its ttl, and a tick or two"
        assert both.first.lost_reason == "unreachable"
        both.close()
        near.mend()
        with pytest.raises(LeaseLost):
            both.first.renew()
    near.close()
    far.close()


def test_every_answer_lost_leaves_nothing_and_grants_nobody_twice(until) -> None:
    made(ZookeeperRig)
    proxy = Proxy(alone().port)
    place = f"/test-{os.urandom(6).hex()}?session=6"
    with (
        Client(f"zookeeper://127.0.0.1:{proxy.port}{place}", call_timeout=0.4) as lossy,
        Client(f"zookeeper://127.0.0.1:{alone().port}{place}") as other,
    ):
        lossy.ping()
        for number in range(3):
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                lossy.lock(f"n{number}", ttl=60).acquire(wait=5)
            proxy.mend()
            until(lambda: not other.inspect(), 20)  # the create landed; its release was owed
            with other.lock(f"n{number}", wait=5):
                pass
        lease = lossy.lock("kept", ttl=60).acquire(wait=10)
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            lease.renew()
        assert lease.state is LeaseState.AT_RISK
        assert other.lock("kept").try_acquire() is None
        proxy.mend()
        until(lambda: lease.state is LeaseState.HELD, 10)
        assert lease.release()
    proxy.close()


def test_a_broken_connection_puts_at_risk_at_once_and_heals(until) -> None:
    """SUSPENDED: not after a missed renewal, but as soon as the connection is seen to be gone."""
    made(ZookeeperRig)
    proxy, events = Proxy(alone().port), []
    with Client(url_of(proxy), on_event=lambda event: events.append(event.kind)) as client:
        lease = client.lock("a", ttl=600).acquire()
        proxy.reset()
        until(lambda: "at_risk" in events, 5)
        assert lease.held
        until(lambda: lease.state is LeaseState.HELD, 10)
        assert lease.release()
    proxy.close()


def test_waiters_outlast_a_broken_connection(until) -> None:
    made(ZookeeperRig)
    proxy = Proxy(alone().port)
    place = f"/test-{os.urandom(6).hex()}"
    with (
        Client(f"zookeeper://127.0.0.1:{alone().port}{place}") as holder,
        Client(f"zookeeper://127.0.0.1:{proxy.port}{place}") as waiter,
    ):
        both = Watcher(holder, waiter)
        following = both.follow()
        until(lambda: in_line(holder) == 1)
        for _ in range(5):
            proxy.reset()
        released = time.monotonic()
        assert both.first.release()
        following.join(30)
        assert both.granted_at - released < 4, "it looked again as soon as it was connected"
        both.close()
    proxy.close()


# ------------------------------------------------------------ the ensemble


@pytest.mark.parametrize("who", ["leader", "follower"])
@pytest.mark.parametrize("how", ["kill", pytest.param("pause", marks=pytest.mark.faults)])
def test_one_member_lost_costs_no_lease(who, how, three, until) -> None:
    url = url_of(*three.members, options="?session=10")
    with Client(url, call_timeout=10) as one, Client(url, call_timeout=10) as two:
        both = Watcher(one, two)
        following = both.follow()
        until(lambda: in_line(two) == 1)
        getattr(getattr(three, who)(), how)()
        lost = time.monotonic()
        until(lambda: answers(one), 30)
        print(f"{who} {how}: answers again after {time.monotonic() - lost:.2f} s")
        both.first.renew()
        assert both.first.held
        assert both.first.release()
        following.join(30)
        assert len(both.leases) == 2
        three.heal()
        both.leases[1].renew()
        both.close()


def answers(client: Client) -> bool:
    try:
        client.lock(f"x{os.urandom(4).hex()}").call(lambda: None)
    except (Unavailable, LeaseLost):
        return False
    return True


def test_the_whole_ensemble_restarted_keeps_its_leases(three, until) -> None:
    url = url_of(*three.members, options="?session=10")
    with Client(url, call_timeout=20) as one, Client(url, call_timeout=20) as two:
        both = Watcher(one, two)
        for member in three.members:
            member.kill()
        three.heal()
        until(lambda: answers(two), 30)
        assert two.lock("a").try_acquire() is None
        both.first.renew()
        assert both.first.release()
        with two.lock("a", wait=10) as lease:
            assert lease.token > both.first.token
        both.close()


class Parted(Watcher):
    """The first client reaches one member, the second the others; then that member is parted from them."""

    def __init__(self, three: Ensemble, lonely: Zookeeper, session: float, clients: ExitStack) -> None:
        others = [member for member in three.members if member is not lonely]
        place = f"/test-{os.urandom(6).hex()}?session={session}"
        there = f"zookeeper://127.0.0.1:{lonely.port}{place}"
        here = f"zookeeper://{','.join(f'127.0.0.1:{member.port}' for member in others)}{place}"
        self.three, self.member = three, lonely
        super().__init__(
            clients.enter_context(Client(there, call_timeout=1)), clients.enter_context(Client(here, call_timeout=60))
        )
        clients.callback(three.heal)
        clients.callback(self.close)

    def part(self) -> float:
        self.three.part(self.member)
        return time.monotonic()


def test_a_full_disk_takes_one_member_and_no_lease(until) -> None:
    """As a limit on the size of its files: its log cannot grow any more, and it gives up."""
    made(ZookeeperRig)
    three = Ensemble()
    full = three.members[0]
    command = full.command()
    full.command = lambda: ["prlimit", "--fsize=400000", "--", command[0], "-Dzookeeper.preAllocSize=16", *command[1:]]
    try:
        url = url_of(*three.started.members, options="?session=10")
        with Client(url, call_timeout=20) as one, Client(url, call_timeout=20) as two:
            both = Watcher(one, two)
            lock = two.lock("other", purpose="x" * 200)
            until(lambda: lock.call(lambda: None) or not full.mode(), 60, every=0)
            both.first.renew()
            assert both.first.release()
            with two.lock("a", wait=10):
                pass
            both.close()
    finally:
        three.kill()


@pytest.mark.faults
def test_a_leader_cut_off_from_the_majority_grants_nothing(partable, until) -> None:
    with ExitStack() as clients:
        both = Parted(partable, partable.leader(), SESSION, clients)
        lonely, many = both.clients
        following = both.follow()
        until(lambda: in_line(many) == 1)
        began = both.part()
        with pytest.raises(Unavailable):
            lonely.lock("other").acquire(wait=0)
        assert time.monotonic() - began < 1 + 0.5 + 1, "refused by its deadline"
        following.join(60)
        print(f"followed {both.granted_at - began:.2f} s after the cut")
        for _ in range(3):
            with pytest.raises(Unavailable):
                lonely.lock("other").acquire(wait=0)


def test_a_follower_cut_off_answers_on_and_is_not_believed(partable, until) -> None:
    """The trap of sessions: an answer comes from a follower that the leader has not heard of this session for a while,
    and is cut off before the leader hears of it again. Counted from that answer the first would trust too long."""
    with ExitStack() as clients:
        both = Parted(partable, partable.follower(), 8, clients)
        lonely, many = both.clients
        following = both.follow()
        until(lambda: in_line(many) == 1)
        stop_renewing(lonely)
        until(lambda: lonely._desk.dog._engine is None)
        session = engine_session(lonely)
        until(lambda: session.now() - session.trust._touches[-1][0] > 1.5)  # nothing was heard of it for so long
        both.first.renew()
        cut = both.part()
        following.join(60)
        print(f"trusted {both.first.ttl:.2f} s, followed {both.granted_at - cut:.2f} s after the cut")
        assert both.granted_at - cut < 2 * 8 + 2


def stop_renewing(client: Client) -> None:
    client._desk.dog._stopped = True
    client._desk.dog._signal.set()


def engine_session(client: Client) -> Session:
    return client._desk._engine._session


# ------------------------------------------------------------------ clocks


@pytest.mark.faults
@pytest.mark.skipif(not os.path.exists(FAKETIME), reason="libfaketime is not installed: apt-get install faketime")
@pytest.mark.parametrize("ahead", [10, -10])
def test_leaders_clocks_ten_seconds_apart_end_nobodys_lease(ahead, until, tmp_path) -> None:
    """The next leader's clock is ten seconds off: no live holder is ended by that, and a dead one still is."""
    made(ZookeeperRig)
    clocks = [tmp_path / f"clock{n}" for n in range(3)]
    environments = []
    for clock in clocks:
        clock.write_text("+0")
        environments.append(
            {
                "LD_PRELOAD": FAKETIME,
                "FAKETIME_TIMESTAMP_FILE": str(clock),
                "FAKETIME_CACHE_DURATION": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
        )
    three = Ensemble({"tickTime": 2000}, environments).started  # false clocks are slow: an election takes seconds
    try:
        url = url_of(*three.members, options="?session=40")
        with Client(url, call_timeout=30) as one, Client(url, call_timeout=30) as two:
            both = Watcher(one, two, ttl=18.0)
            following = both.follow()
            until(lambda: in_line(two) == 1)
            leader = three.leader()
            for member, clock in zip(three.members, clocks, strict=True):
                if member is not leader:
                    clock.write_text(f"{ahead:+d}")
            leader.kill()
            three.leader()
            end = time.monotonic() + 25
            until(lambda: time.monotonic() > end or not both.first.held or len(both.leases) > 1)
            assert both.first.held, f"a clock ended a live holder: {both.first.lost_reason}"
            stop_renewing(one)  # but its session lives
            following.join(120)
            assert len(both.leases) == 2
            both.close()
    finally:
        three.kill()


# ---------------------------------------------------------------- processes


def test_a_killed_holder_is_followed_within_its_session(child, until) -> None:
    made(ZookeeperRig)
    url = url_of(alone(), options="?session=2")
    holder = child("hold", url, "a", 30)
    holder.hear()
    waiter = child("wait", url, "a", 30)
    assert waiter.hear() == "waiting"
    holder.kill()
    killed = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert waiter.hear()["at"] - killed < 2 + 4


def test_a_killed_waiter_holds_up_nobody_for_longer_than_its_session(child, until) -> None:
    made(ZookeeperRig)
    url = url_of(alone(), options="?session=2")
    with Client(url) as client:
        lease = client.lock("a", ttl=60).acquire()
        dead = child("wait", url, "a", 60)
        assert dead.hear() == "waiting"
        next_ = child("wait", url, "a", 60)
        assert next_.hear() == "waiting"
        dead.kill()
        lease.release()
        released = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert next_.hear()["at"] - released < 2 + 4


def test_a_stopped_holder_loses_its_lease_and_finds_out(child) -> None:
    import signal

    made(ZookeeperRig)
    url = url_of(alone(), options="?session=2")
    holder = child("hold", url, "a", 30)
    first = holder.hear()
    holder.signal(signal.SIGSTOP)
    with Client(url) as client, client.lock("a", wait=30) as lease:
        assert lease.token > first["token"]
        holder.signal(signal.SIGCONT)
        holder.go()
        said = holder.hear()
        assert not said["held"]
        assert not said["released"]
        lease.renew()


def test_eight_processes_count_in_one_plain_file(child, tmp_path) -> None:
    made(ZookeeperRig)
    file = tmp_path / "count"
    file.write_text("0")
    url = url_of(alone())
    children = [child("count", url, "a", file, 25) for _ in range(8)]
    found = sorted(pair for one in children for pair in one.hear(120))
    assert file.read_text() == "200"
    assert [number for number, _ in found] == list(range(200))
    tokens = [token for _, token in found]
    assert tokens == sorted(set(tokens))


# --------------------------------------------------------- out of numbers

_NEAR_THE_END = """
import java.io.*; import java.util.concurrent.*; import org.apache.zookeeper.ZooDefs;
import org.apache.zookeeper.server.*; import org.apache.zookeeper.server.persistence.*;
public class NearTheEnd { public static void main(String[] a) throws Exception {
  DataTree tree = new DataTree();
  tree.createNode("/lh1", new byte[0], ZooDefs.Ids.OPEN_ACL_UNSAFE, 0, 0, 1, 0);
  tree.createNode("/lh1/:a", new byte[0], ZooDefs.Ids.OPEN_ACL_UNSAFE, 0, 0, 2, 0); // not to be swept meanwhile
  tree.setCversionPzxid("/lh1/:a", Integer.parseInt(a[1]), 3); tree.lastProcessedZxid = 3;
  FileTxnSnapLog log = new FileTxnSnapLog(new File(a[0]), new File(a[0]));
  log.save(tree, new ConcurrentHashMap<Long, Integer>(), false); log.close(); } }
"""


def near_the_end(count: int) -> Zookeeper:
    """A real server that has numbered so many nodes of the line of "a" already."""
    made(ZookeeperRig)
    folder = scratch()
    try:
        javac = program("javac", package="default-jdk-headless")
    except Absent as absent:
        pytest.skip(str(absent))
    server = Zookeeper(folder, free_ports(1)[0], {"snapshot.trust.empty": "true"}, {"snapshot.trust.empty": "true"})
    source = os.path.join(folder, "NearTheEnd.java")
    with open(source, "w") as written:
        written.write(_NEAR_THE_END)
    path = f"{folder}:{class_path()}"
    subprocess.run([javac, "-cp", path, "-d", folder, source], check=True, capture_output=True)
    subprocess.run(["java", "-cp", path, "NearTheEnd", server.data, str(count)], check=True, capture_output=True)
    return server.start()


def test_a_real_line_at_its_last_numbers_drains_and_begins_anew() -> None:
    server = near_the_end(2**31 - 10**6 - 5)
    try:
        url = f"zookeeper://127.0.0.1:{server.port}"
        tokens = []
        with Client(url) as one, Client(url) as two:
            for number in range(5):
                with (one, two)[number % 2].lock("a", ttl=60, wait=10) as lease:
                    tokens.append(lease.token)
            last = one.lock("a", ttl=60).acquire(wait=10)
            assert next(iter(engine_session(one).mine.values())).name.endswith("-2146483648"), "the last good number"
            with pytest.raises(NotAcquired):
                two.lock("a", wait=0.5).acquire()
            taken = []
            thread = threading.Thread(target=lambda: taken.append(two.lock("a", ttl=60).acquire(wait=30)))
            thread.start()
            with pytest.raises(NotAcquired):
                one.lock("a", wait=0).acquire()
            assert last.release()
            thread.join(30)
            assert next(iter(engine_session(two).mine.values())).name.endswith("-0000000000"), "it begins anew"
            tokens += [last.token, taken[0].token]
            assert taken[0].release()
            with one.lock("a", wait=0) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))
    finally:
        server.kill()
