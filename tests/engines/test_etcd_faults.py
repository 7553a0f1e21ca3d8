"""Clusters of etcd that lose members, leaders, disks, users and time; TLS and access control."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from leasehold import Client, ConfigError, LeaseholdError, LeaseLost, NotAcquired, Unavailable, Unsupported
from leasehold.runtime.base import step
from leasehold.testing.etcd_rig import EtcdClusterRig
from leasehold.testing.servers.etcd import Cluster, Etcd
from leasehold.testing.servers.process import free_ports, scratch
from leasehold.testing.suite import made

MOMENT = 2.5  # to elect a leader, with a timeout of 1 s


@pytest.fixture
def trio():
    """Three members, all of them up before and after."""
    cluster = made(EtcdClusterRig).cluster
    yield cluster
    cluster.start()


@pytest.fixture
def url(trio) -> str:
    return f"etcd://{trio.hosts}/test-{os.urandom(5).hex()}"


def eventually(true, seconds: float = 30.0):
    end = time.monotonic() + seconds
    while True:
        with suppress(LeaseholdError, OSError):
            if found := true():
                return found
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


def in_line(client: Client, name: str = "job") -> tuple[threading.Thread, list[int]]:
    """Somebody who waits for it, in a thread of its own; the tokens of its grants."""
    tokens: list[int] = []

    def wait() -> None:
        with client.lock(name) as lease:
            tokens.append(lease.token)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: any(holding.state == "waiting" for holding in client.inspect(name)))
    return thread, tokens


# ------------------------------------------------------------------- members


@pytest.mark.parametrize("fate", ["killed", "paused"])
@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_member_lost_costs_no_lease_and_no_place_in_line(trio, url, who, fate) -> None:
    with Client(url, call_timeout=8) as holder, Client(url, call_timeout=8) as other:
        lease = holder.lock("job", ttl=9).acquire()
        waiting, tokens = in_line(other)
        lost = trio.leader() if who == "leader" else trio.followers()[0]
        (lost.kill if fate == "killed" else lost.pause)()
        began = time.monotonic()
        with holder.lock("elsewhere", wait=20):
            pass
        assert time.monotonic() - began < 8
        lease.verify()
        assert not tokens
        assert lease.release()
        waiting.join(20)
        assert tokens > [lease.token]


def test_without_a_majority_nobody_is_granted_and_everybody_is_told_in_time(trio, url) -> None:
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


def test_leases_and_tokens_survive_a_restart_of_the_whole_cluster(trio, url) -> None:
    with Client(url, call_timeout=8) as holder, Client(url, call_timeout=8) as other:
        lease = holder.lock("job", ttl=30).acquire()
        waiting, tokens = in_line(other)
        trio.kill()
        trio.start()
        eventually(lambda: lease.verify() is None)
        assert lease.held
        lease.release()
        waiting.join(30)
        assert tokens > [lease.token]


def test_a_dead_holder_is_followed_though_the_leader_dies_too(trio, url) -> None:
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


# ------------------------------------------------------- one member of its own


@pytest.fixture
def single():
    """Starts members with settings of their own; ends them."""
    started: list[Etcd] = []

    def start(*more: str) -> Etcd:
        cluster = Cluster(1, *more)
        started.append(cluster.members[0])
        return cluster.start().members[0]

    yield start
    for member in started:
        member.kill()


def ctl(member: Etcd, *words: str, user: str = "") -> str:
    command = ["etcdctl", "--endpoints", f"127.0.0.1:{member.port}", *(["--user", user] if user else []), *words]
    environment = {**os.environ, "ETCDCTL_API": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_longer_election_timeout_makes_a_longer_least_ttl(single) -> None:
    member = single("--heartbeat-interval", "200", "--election-timeout", "4000")
    with Client(f"etcd://127.0.0.1:{member.port}") as client, client.lock("job", ttl=2) as lease:
        assert 5 < lease.ttl <= 6
        assert client.traits.min_ttl == 6.0
        lease.renew()
        assert 5.9 < lease.ttl <= 6


def test_a_full_database_refuses_newcomers_and_keeps_what_is_held(single) -> None:
    member = single("--quota-backend-bytes", str(2 * 1024 * 1024))
    with Client(f"etcd://127.0.0.1:{member.port}", call_timeout=3) as client:
        lease = client.lock("job", ttl=10).acquire()
        with suppress(OSError):
            for number in range(200):
                member.put(f"fill{number}", "x" * 100_000)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="NOSPACE"):
            client.lock("other").acquire()
        assert time.monotonic() - began < 2, "said at once"
        lease.verify()
        assert lease.release(), "to give up needs no room"
        for number in range(200):
            member.delete(f"fill{number}")
        member.compact()
        ctl(member, "defrag")
        ctl(member, "alarm", "disarm")
        eventually(lambda: client.lock("other").acquire(wait=0).release())
        assert client.inspect() == []


def with_users(member: Etcd, prefix: str) -> str:
    """A server with users, and a role that may do what locks need and no more: what docs/guarantees/etcd.md says."""
    ctl(member, "user", "add", "root:top")
    ctl(member, "role", "add", "locks")
    ctl(member, "role", "grant-permission", "--prefix=true", "locks", "readwrite", f"{prefix}/lh1/")
    ctl(member, "user", "add", "app:s3cr:t/?")
    ctl(member, "user", "grant-role", "app", "locks")
    ctl(member, "user", "grant-role", "root", "root")
    ctl(member, "auth", "enable")
    return f"etcd://app:s3cr%3At%2F%3F@127.0.0.1:{member.port}/{prefix}"


def test_the_least_a_role_needs(single) -> None:
    member = single()
    url = with_users(member, "app")
    with Client(url) as client, Client(url) as other:
        client.ping()
        lease = client.lock("job").acquire()
        waiting, tokens = in_line(other)
        lease.renew(60)
        assert other.break_lock("job", token=lease.token)
        eventually(lambda: not lease.held, 2)
        waiting.join(20)
        assert tokens
        with client.semaphore("s", 2), client.rwlock("r").read(), client.lock("d", delay=1):
            pass
        with client.lock("m", min_hold=2):
            pass
        step(client._rebase(0))
    with pytest.raises(ConfigError) as denied, Client(url.replace("/app", "/elsewhere")) as client:
        client.lock("job").acquire()
    assert "s3cr" not in str(denied.value)
    for wrong in (f"etcd://app:wrong@127.0.0.1:{member.port}/app", f"etcd://127.0.0.1:{member.port}/app"):
        with pytest.raises(ConfigError), Client(wrong) as client:
            client.lock("job").acquire()


def test_a_user_where_there_are_none_is_a_config_error(single) -> None:
    with pytest.raises(ConfigError), Client(f"etcd://app:pw@127.0.0.1:{single().port}") as client:
        client.ping()


def test_a_token_that_ended_is_replaced_without_a_word(single) -> None:
    member = single()
    url = with_users(member, "app")
    with Client(url, call_timeout=8) as client, Client(url, call_timeout=8) as other:
        lease = client.lock("job", ttl=30).acquire()
        waiting, tokens = in_line(other)
        member.restart()  # it forgets all tokens
        lease.verify()
        ctl(member, "user", "add", "somebody:x", user="root:top")  # and now they are of an older time
        lease.verify()
        assert lease.release()
        waiting.join(20)
        assert tokens


def test_a_right_revoked_while_it_is_held_puts_at_risk_and_then_loses(single) -> None:
    member = single()
    url = with_users(member, "app")
    with Client(url, call_timeout=1) as client:
        lease = client.lock("job", ttl=4).acquire()
        ctl(member, "user", "revoke-role", "app", "locks", user="root:top")
        eventually(lambda: lease.state == "AT_RISK", 4)
        with pytest.raises(ConfigError, match="permit"):
            client.lock("other").acquire()
        assert lease.wait_lost(10)
        assert lease.lost_reason == "unreachable"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tls")

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    run(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-days",
        "2",
        "-subj",
        "/CN=ca",
    )
    for who in ("server", "client"):
        (folder / "ext").write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        run(
            "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{who}.key", "-out", f"{who}.csr", "-subj", f"/CN={who}"
        )
        sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "ext")
        run("x509", "-req", "-in", f"{who}.csr", "-out", f"{who}.crt", *sign)
    run("rsa", "-in", "client.key", "-aes256", "-passout", "pass:x", "-out", "locked.key")
    return folder


class Sealed(Etcd):
    """A member that speaks TLS, and only to clients with a certificate."""

    def __init__(self, certificates: Path) -> None:
        port, peer = free_ports(2)
        urls = (
            "--listen-client-urls",
            f"https://127.0.0.1:{port}",
            "--advertise-client-urls",
            f"https://127.0.0.1:{port}",
        )
        files = ("--cert-file", f"{certificates}/server.crt", "--key-file", f"{certificates}/server.key")
        trust = ("--client-cert-auth", "true", "--trusted-ca-file", f"{certificates}/ca.crt")
        super().__init__(scratch(), port, [peer], 0, *urls, *files, *trust)

    def command(self) -> list[str]:
        words = list(super().command())
        place = words.index("--client-cert-auth")
        return [*words[:place], "--client-cert-auth=true", *words[place + 2 :]]

    def ready(self) -> bool:
        return "ready to serve client requests" in self.tail() or "serving client traffic" in self.tail()


def test_tls_with_certificates_on_both_sides(certificates) -> None:
    member = Sealed(certificates).start()
    try:
        own = f"ca={certificates}/ca.crt&cert={certificates}/client.crt&key={certificates}/client.key"
        for host in ("127.0.0.1", "localhost"):
            with Client(f"etcds://{host}:{member.port}/app?{own}") as client, client.lock("job") as lease:
                waiting, tokens = in_line(client)
                lease.renew()
                assert lease.release()
                waiting.join(20)
                assert tokens
        threads = []
        with Client(f"etcds://127.0.0.1:{member.port}?{own}") as client:

            def work() -> None:
                for _ in range(10):
                    with client.lock("job"):
                        pass

            threads = [threading.Thread(target=work) for _ in range(10)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        refused = {
            "no certificate": f"etcds://127.0.0.1:{member.port}?ca={certificates}/ca.crt",
            "a server nobody vouches for": f"etcds://127.0.0.1:{member.port}",
            "no TLS": f"etcd://127.0.0.1:{member.port}",
        }
        for why, url in refused.items():
            began = time.monotonic()
            with pytest.raises(Unavailable), Client(url, call_timeout=2) as client:
                client.ping()
            assert time.monotonic() - began < 2.5, why
        locked = own.replace("client.key", "locked.key")
        with pytest.raises(ConfigError, match="encrypted"):
            Client(f"etcds://127.0.0.1:{member.port}?{locked}")
    finally:
        member.kill()


def test_a_restore_from_a_snapshot_is_noticed_and_mended(single, tmp_path) -> None:
    member = single()
    url = f"etcd://127.0.0.1:{member.port}"
    with Client(url, call_timeout=5) as live:
        with live.lock("job"):
            pass
        ctl(member, "snapshot", "save", str(tmp_path / "snapshot"))
        tokens = []
        for _ in range(20):
            with live.lock("job") as lease:
                tokens.append(lease.token)
        held = live.lock("held", ttl=30).acquire()
        member.stop()
        os.rename(member.data, f"{member.data}.old")
        peer = f"http://127.0.0.1:{member.peers[0]}"
        ctl(
            member,
            *("snapshot", "restore", str(tmp_path / "snapshot"), "--name", "e0", "--data-dir", member.data),
            *("--initial-cluster", f"e0={peer}", "--initial-advertise-peer-urls", peer),
            *("--initial-cluster-token", f"t{member.peers[0]}"),
        )
        member.start()
        with pytest.raises(ConfigError, match="rebase"):
            live.lock("job").acquire()
        with pytest.raises(ConfigError, match="rebase"):
            live.lock("other").acquire()
        with pytest.raises(LeaseLost):
            held.verify()
    with Client(url) as new:
        with new.lock("job") as lease:
            assert lease.token <= tokens[-1], "this is why"
        step(new._rebase(0))
        with new.lock("job") as lease:
            assert lease.token > tokens[-1]


# ------------------------------------------------------------- only as root


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
def test_a_leader_cut_off_from_the_majority() -> None:
    """In network namespaces: the minority refuses within the deadline and never grants, the majority goes on."""
    as_root()
    scenario = Path(__file__).parent / "etcd_partition.py"
    made(EtcdClusterRig)  # or it is absent
    done = subprocess.run(["unshare", "-n", "-m", "python3", "-c", "pass"], capture_output=True)
    if done.returncode:
        pytest.skip("no network namespace may be made here")
    done = subprocess.run(
        ["unshare", "-n", "-m", sys.executable, str(scenario)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_an_engine_survives_is_known_from_url_and_server(trio, url, single) -> None:
    one = f"etcd://127.0.0.1:{trio.members[0].port}"
    assert Client(url).traits.survives == "minority"
    assert Client(one).traits.survives == "restart", "if that very member is lost, this client is"
    with pytest.raises(Unsupported), Client(one) as client:
        client.lock("job", require={"survives-minority"})
    with Client(url) as client, client.lock("job", require={"survives-minority"}):
        pass
