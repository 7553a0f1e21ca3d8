"""Asking sentinels and nodes: whom to believe, what of odd answers, how to sign in, what a URL says."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import traceback
from contextlib import suppress

import hiredis
import pytest

from leasehold import AsyncClient, Client, ConfigError, NotAcquired, Unavailable
from leasehold.config import EngineConfig
from leasehold.engines.redis.cluster import slot_of
from leasehold.engines.redis.doors import Door
from leasehold.engines.redis.requests import keys
from leasehold.engines.redis.sentinel import Known, Sentinels
from leasehold.engines.redis.server import Server, pack
from leasehold.engines.redis.settings import Unreached
from leasehold.engines.redis.several import behind_sentinels, in_cluster
from leasehold.runtime.base import step
from leasehold.runtime.streams import Address
from leasehold.runtime.threads import Threads
from leasehold.testing.redis_rig import RedisRig, alone
from leasehold.testing.servers.process import free_ports, poll
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.servers.redis_several import RedisCluster, Watched
from leasehold.testing.suite import made


class Fake:
    """A server that says what it is told to."""

    def __init__(self) -> None:
        self.requests = 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                near, _ = self._door.accept()
                threading.Thread(target=self._talk, args=(near,), daemon=True).start()

    def _talk(self, near: socket.socket) -> None:
        reader = hiredis.Reader()
        with near, suppress(OSError):
            while data := near.recv(65_536):
                reader.feed(data)
                while (request := reader.gets()) is not False:
                    self.requests += 1
                    near.sendall(b"+PONG\r\n" if request == [b"PING"] else self.answer(b" ".join(request[:2]).decode()))

    def answer(self, request: str) -> bytes:
        raise NotImplementedError

    def close(self) -> None:
        with suppress(OSError):  # it is closed
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()


@pytest.fixture
def fake():
    started: list[Fake] = []

    def start(kind: type[Fake], *args: object) -> Fake:
        started.append(kind(*args))
        return started[-1]

    yield start
    for each in started:
        each.close()


# ------------------------------------------------------------- sentinels


class FakeSentinel(Fake):
    def __init__(self, epoch: int | str, port: int) -> None:
        self.epoch, self.says = epoch, port
        super().__init__()

    def answer(self, request: str) -> bytes:
        return pack("ip", "127.0.0.1", "port", self.says, "config-epoch", self.epoch)


@pytest.fixture
def asked(fake):
    """Sentinels with these answers, and a way to ask them."""

    def make(*answers: tuple[int | str, int]) -> tuple[Sentinels, list[FakeSentinel]]:
        fakes = [fake(FakeSentinel, *answer) for answer in answers]
        doors = [Door(Address("127.0.0.1", each.port), None, title="sentinel") for each in fakes]
        return Sentinels(doors, "locks", Server, Threads()), fakes

    return make


def primary(sentinels: Sentinels) -> int:
    runtime = Threads()
    return step(sentinels.find(runtime, runtime.now() + 5)).address.port


def test_a_sentinel_that_is_behind_does_not_lead_back(asked) -> None:
    sentinels, fakes = asked((1, 7001), (2, 7002), (2, 7002))
    assert primary(sentinels) == 7002, "the first alone would have said 7001"
    for fake in fakes[1:]:
        fake.close()
    with pytest.raises(Unreached, match="are behind"):
        primary(sentinels)


def test_a_majority_that_is_behind_does_not_lead_back_either(asked) -> None:
    """For a moment after a fail-over only the sentinel that made it knows."""
    sentinels, fakes = asked((1, 7001), (1, 7001), (1, 7001))
    assert primary(sentinels) == 7001
    fakes[2].epoch, fakes[2].says = 2, 7002
    runtime = Threads()
    step(sentinels.look(sentinels.doors[2], runtime, runtime.now() + 5))  # it told so
    assert primary(sentinels) == 7002
    fakes[2].close()
    with pytest.raises(Unreached, match="are behind"):
        primary(sentinels)


def test_an_answer_that_comes_late_does_not_lead_back(asked, monkeypatch) -> None:
    sentinels, _ = asked((1, 7001))
    assert primary(sentinels) == 7001
    read = sentinels._read

    def overtaken(door: Door, replies: list[object]) -> object:
        answer = read(door, replies)
        sentinels._learn(Known(2, Address("127.0.0.1", 7002)))  # by another thread, meanwhile
        return answer

    monkeypatch.setattr(sentinels, "_read", overtaken)
    assert primary(sentinels) == 7002


def test_all_may_count_anew(asked) -> None:
    """`SENTINEL REMOVE` and `MONITOR` begin again at 0."""
    sentinels, fakes = asked((5, 7001), (5, 7001), (5, 7001))
    assert primary(sentinels) == 7001
    for fake in fakes:
        fake.epoch, fake.says = 0, 7002
    assert primary(sentinels) == 7002


def test_nonsense_is_no_answer(asked) -> None:
    sentinels, _ = asked(("x", 7001), (1, 99_999_999), (1, 7001))
    assert primary(sentinels) == 7001
    sentinels, _ = asked(("x", 7001))
    with pytest.raises(Unreached, match="what no sentinel answers"):
        primary(sentinels)


def test_a_replica_that_a_sentinel_takes_for_the_primary_is_not_used(fake) -> None:
    made(RedisRig)
    replica = RedisServer(primary=alone()[0]).start()
    try:
        sentinel = fake(FakeSentinel, 1, replica.port)
        with Client(f"redis+sentinel://127.0.0.1:{sentinel.port}/locks", call_timeout=0.5) as client:
            with pytest.raises(Unavailable, match="is a replica"):
                client.lock("job").acquire()
            sentinel.epoch, sentinel.says = 2, alone()[0].port
            with client.lock("job") as lease:
                assert lease.held
    finally:
        replica.kill()


def test_a_redis_server_is_no_sentinel() -> None:
    made(RedisRig)
    url = f"redis+sentinel://127.0.0.1:{alone()[0].port}/locks"
    with Client(url, call_timeout=0.5) as client, pytest.raises(ConfigError, match="unknown command"):
        client.lock("job").acquire()


# ------------------------------------------------------ nodes of a cluster


class FakeNode(Fake):
    """Of a cluster that it has all by itself, unless told otherwise."""

    info = b"redis_version:7.0.0\r\nrole:master\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
    state = b"cluster_state:ok\r\ncluster_current_epoch:1\r\n"

    def __init__(self) -> None:
        self.slots = self.script = self.subscription = b"-ERR not now\r\n"
        super().__init__()

    def answer(self, request: str) -> bytes:
        known = {"INFO server": bulk(self.info), "CLUSTER INFO": bulk(self.state), "CLUSTER SLOTS": self.slots}
        if request.startswith("SSUBSCRIBE"):
            return self.subscription
        return pack("appendfsync", "always") if request.startswith("CONFIG") else known.get(request, self.script)


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def lot(port: int, host: str = "127.0.0.1", first: int = 0, last: int = 16_383) -> bytes:
    """All slots, as CLUSTER SLOTS says it."""
    return b"*1\r\n*3\r\n:%d\r\n:%d\r\n*2\r\n%b:%d\r\n" % (first, last, bulk(host.encode()), port)


def refused(*nodes: Fake) -> str:
    """What an attempt says, in both faces; never too late."""
    url = f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in nodes)}"

    async def in_a_loop() -> None:
        async with AsyncClient(url, call_timeout=0.5) as client:
            began = time.monotonic()
            with pytest.raises((Unavailable, ConfigError)):
                await client.lock("job").try_acquire()
            assert time.monotonic() - began < 1.0

    asyncio.run(in_a_loop())
    with Client(url, call_timeout=0.5) as client:
        began = time.monotonic()
        with pytest.raises((Unavailable, ConfigError)) as caught:
            client.lock("job").try_acquire()
        assert time.monotonic() - began < 1.0
    return str(caught.value)


@pytest.mark.parametrize("word", ["MOVED", "ASK"])
def test_nodes_that_send_to_each_other_for_ever(fake, word) -> None:
    one, other = fake(FakeNode), fake(FakeNode)
    for node, next_ in ((one, other), (other, one)):
        node.slots, node.script = lot(one.port), f"-{word} 3 127.0.0.1:{next_.port}\r\n".encode()
    assert f"{word} 3" in refused(one, other)
    assert one.requests + other.requests < 1000


def test_a_subscription_sent_on_for_ever(fake) -> None:
    one, other = fake(FakeNode), fake(FakeNode)
    slot = slot_of(keys("", "job")[0].partition(":")[2])
    for node, next_ in ((one, other), (other, one)):
        node.slots, node.subscription = lot(one.port), b"-MOVED %d 127.0.0.1:%d\r\n" % (slot, next_.port)
    one.script = b"*6\r\n:0\r\n:1000\r\n:0\r\n:5\r\n$4\r\nh\x001\x00\r\n:0\r\n"  # busy, and nobody listens
    with Client(f"redis+cluster://127.0.0.1:{one.port}", call_timeout=0.5) as client:
        with pytest.raises((NotAcquired, Unavailable)):
            client.lock("job", wait=0.5).acquire()
        assert one.requests + other.requests < 1000


@pytest.mark.parametrize(
    "answer", [b"-MOVED\r\n", b"-MOVED x y\r\n", b"-MOVED 3 127.0.0.1:999999\r\n", b"-MOVED 99999 127.0.0.1:1\r\n"]
)
def test_a_redirection_to_nowhere(fake, answer) -> None:
    node = fake(FakeNode)
    node.slots, node.script = lot(node.port), answer
    assert "leads nowhere" in refused(node)


@pytest.mark.parametrize("answer", [b"-TRYAGAIN x\r\n", b"-CLUSTERDOWN x\r\n", b"-READONLY x\r\n", b"-NOSCRIPT x\r\n"])
def test_a_node_that_refuses_for_ever_is_named(fake, answer) -> None:
    node = fake(FakeNode)
    node.slots, node.script = lot(node.port), answer
    said = refused(node)
    assert f"127.0.0.1:{node.port}" in said
    assert answer[1:-2].decode() in said


@pytest.mark.parametrize(
    "slots",
    [
        *(b"*0\r\n", b"*1\r\n:3\r\n", b"$-1\r\n", b"+OK\r\n", b"-ERR unknown\r\n"),
        *(lot(99_999_999), lot(7000, "a" * 300), lot(7000, "x..y"), lot(5, first=-5, last=99_999), lot(5, last=100)),
    ],
)
def test_a_map_that_is_none(fake, slots) -> None:
    node = fake(FakeNode)
    node.slots = slots
    assert refused(node)


# ------------------------------------------------------------- signing in


def test_users_with_the_documented_rights_can_do_everything(rights, caplog) -> None:
    made(RedisRig)
    caplog.set_level(logging.DEBUG)
    watched = Watched(down_after=30)
    try:
        for sentinel in watched.sentinels:
            sentinel.ask("ACL", "SETUSER", "watcher", "on", ">verysecret", *rights.sentinel)
        watched.primary.ask("ACL", "SETUSER", "locks", "on", ">verysecret", *rights.server)
        url = watched.url("?sentinel_user=watcher&sentinel_password=verysecret&min_replicas=1")
        url = url.replace("://", "://locks:verysecret@")
        shown = ""
        with Client(url) as one, Client(url) as other:
            lease = one.lock("job", ttl=60).acquire()
            assert other.lock("job").try_acquire() is None
            lease.renew()
            listener = one._desk.book.shelf["redis"].listener
            poll(lambda: listener.on and listener._watch.on, 10, lambda: "both subscriptions are permitted")
            assert other.break_lock("job", token=lease.token)
            assert lease.wait_lost(5)
            shown += repr(one) + repr(vars(one._desk._engine)) + repr(one._desk.book.shelf)
        for wrong in (url.replace("watcher", "nobody"), url.replace("locks:", "nobody:")):
            with Client(wrong) as client, pytest.raises(ConfigError) as caught:
                client.lock("job").acquire()
            shown += "".join(traceback.format_exception(caught.value))
        assert "verysecret" not in shown + caplog.text
    finally:
        watched.close()


def tls_port(server: RedisServer, certificate: tuple[str, str]) -> int:
    """Have it serve by TLS, too."""
    key, cert = certificate
    port = free_ports(1)[0]
    files = ("tls-cert-file", cert, "tls-key-file", key, "tls-ca-cert-file", cert)
    server.ask("CONFIG", "SET", *files, "tls-auth-clients", "no", "tls-port", port)
    return int(port)


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_tls_and_addresses_that_are_reached_elsewhere(kind, certificate) -> None:
    made(RedisRig)
    deployment = Watched(down_after=30) if kind == "sentinel" else RedisCluster(node_timeout=30)
    try:
        servers = deployment.all[:2] if kind == "sentinel" else deployment.all
        ports = {server.port: tls_port(server, certificate) for server in servers}
        url = deployment.url(f"?tls=yes&ssl_ca_certs={certificate[1]}&remap=")
        if kind == "sentinel":
            url = url.replace("?", "?sentinel_tls=no&")
        else:
            for plain, secure in ports.items():
                url = url.replace(str(plain), str(secure))
        url += ",".join(f"127.0.0.1:{plain}=127.0.0.1:{secure}" for plain, secure in ports.items())
        with Client(url) as one, Client(url) as other:
            leases = [one.lock(f"name-{number}").acquire() for number in range(30)]
            assert len(other.inspect()) == 30
            assert other.break_lock("name-7", token=leases[7].token)
            assert leases[7].wait_lost(5)
    finally:
        deployment.close()


# ---------------------------------------------------------------- the URLs


def test_what_a_url_of_several_servers_says() -> None:
    url = "redis+sentinel://u%40:p%2F@h1,[::1]:5,h3:7/my%2Fservice/2?remap=10.0.0.1:1=h:2,10.0.0.2:1=h:3"
    places = behind_sentinels(EngineConfig.parse(url, 5.0))
    assert [door.address for door in places.doors] == [Address("h1", 26379), Address("::1", 5), Address("h3", 7)]
    assert places.service == "my/service"
    assert places.serve(Address("10.0.0.2", 1)).address == Address("h", 3)
    assert places.serve(Address("10.0.0.3", 1)).address == Address("10.0.0.3", 1)
    places = in_cluster(EngineConfig.parse("redis+cluster://h1,h2:1?min_replicas=2&allow_eviction=yes", 5.0))
    assert [door.address for door in places.doors] == [Address("h1", 6379), Address("h2", 1)]
    assert places.options == (2, True)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis+sentinel://h1,h2", "name of a service"),
        ("redis+sentinel://h1,h2/service/x", "number of a database"),
        ("redis+sentinel://h1,h1/service", "given twice"),
        ("redis+sentinel://h1:x/service", "a host and a port"),
        ("redis+sentinel://h1,,h2/service", "a host and a port"),
        ("redis+sentinel://h1/service?remap=a:1", "pairs such as"),
        ("redis+sentinel://h1/service?ssl_ca_certs=x", "say tls=yes"),
        ("redis+sentinel://h1/service?tls=yes&ssl_ca_certs=/nowhere", "cannot be used"),
        ("redis+sentinel://h1/service?sentinel_tls=maybe", "yes or no"),
        ("redis+sentinel://h1/service?db=1", "known options"),
        ("redis+cluster://h1/1", "one database"),
        ("redis+cluster://h1:99999", "a host and a port"),
        ("redis+cluster://h1?sentinel_user=x", "known options"),
    ],
)
def test_a_bad_url_is_refused_at_once(url, text) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        Client(url.replace("://", "://user:verysecret@"))
    assert "verysecret" not in str(caught.value)
