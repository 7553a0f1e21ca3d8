"""Sentinels and cluster nodes: stale and malformed answers, authentication, TLS, URLs."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import hiredis
import pytest

from harness.rigs.redis import RedisRig, single_server
from harness.servers.process import free_ports, poll
from harness.servers.redis import RedisServer
from harness.servers.redis_ha import RedisCluster, SentinelSetup
from leasehold import AsyncClient, Client, ConfigError, LeaseholdError, NotAcquired, Unavailable
from leasehold.config import EngineConfig
from leasehold.engines.redis import sentinel
from leasehold.engines.redis.cluster import SlotMap, slot_of
from leasehold.engines.redis.discovery import DiscoveryNode
from leasehold.engines.redis.protocol import lock_keys
from leasehold.engines.redis.sentinel import Primary, SentinelSet
from leasehold.engines.redis.server import RedisEndpoint, encode_command
from leasehold.engines.redis.server_settings import Unreachable, parse_settings
from leasehold.engines.redis.url import parse_cluster_url, parse_sentinel_url
from leasehold.runtime.base import run_sync
from leasehold.runtime.net.blocking import SocketAddress
from leasehold.runtime.threads import Threads
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe, probe_redis
from tests.support.timing import check_elapsed


class FakeServer:
    """A server whose replies a test defines."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.requests = 0
        self._listener = socket.create_server((self.host, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        reader = hiredis.Reader()
        with connection, suppress(OSError):
            while data := connection.recv(65_536):
                reader.feed(data)
                while (request := reader.gets()) is not False:
                    self.requests += 1
                    connection.sendall(
                        b"+PONG\r\n" if request == [b"PING"] else self.answer(b" ".join(request[:2]).decode())
                    )

    def answer(self, request: str) -> bytes:
        raise NotImplementedError

    def close(self) -> None:
        with suppress(OSError):  # the listener was closed
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def start_fake():
    started: list[FakeServer] = []

    def start(kind: type[FakeServer], *args: object) -> FakeServer:
        started.append(kind(*args))
        return started[-1]

    yield start
    for server in started:
        server.close()


# ------------------------------------------------------------- sentinels


class FakeSentinel(FakeServer):
    answer_after = 0.0  # seconds

    def __init__(self, epoch: int | str, port: int) -> None:
        self.epoch, self.reported_port = epoch, port
        super().__init__()

    def answer(self, request: str) -> bytes:
        time.sleep(self.answer_after)  # pause: the network's
        return encode_command("ip", "127.0.0.1", "port", self.reported_port, "config-epoch", self.epoch)


@pytest.fixture
def make_sentinels(start_fake):
    """Fake sentinels with these answers, and a `SentinelSet` that queries them."""

    def make(*answers: tuple[int | str, int]) -> tuple[SentinelSet, list[FakeSentinel]]:
        fakes = [start_fake(FakeSentinel, *answer) for answer in answers]
        nodes = [DiscoveryNode(SocketAddress("127.0.0.1", sentinel.port), None, title="sentinel") for sentinel in fakes]
        return SentinelSet(nodes, "locks", RedisEndpoint, Threads()), fakes

    return make


def find_primary_port(sentinels: SentinelSet) -> int:
    runtime = Threads()
    return run_sync(sentinels.find(runtime, runtime.now() + 5)).address.port


def test_stale_sentinel_answer_is_ignored(make_sentinels) -> None:
    sentinels, fakes = make_sentinels((1, 7001), (2, 7002), (2, 7002))
    assert find_primary_port(sentinels) == 7002, "the first sentinel alone reports 7001"
    for fake in fakes[1:]:
        fake.close()
    with pytest.raises(Unreachable, match="outdated sentinels"):
        find_primary_port(sentinels)


def test_sentinels_in_a_slow_network_get_more_time_after_a_timeout(make_sentinels, monkeypatch, wait_until) -> None:
    monkeypatch.setattr(*probe_redis.MAX_NODE_SECONDS, 0.1)
    monkeypatch.setattr(FakeSentinel, "answer_after", 0.25)
    sentinels, _ = make_sentinels((1, 7001), (1, 7001), (1, 7001))
    with pytest.raises(Unreachable, match="no sentinel reported"):
        find_primary_port(sentinels)

    def is_found() -> bool:
        with suppress(Unreachable):
            return find_primary_port(sentinels) == 7001
        return False

    wait_until(is_found, 60)


def test_stale_majority_of_sentinels_is_ignored(make_sentinels) -> None:
    """Right after a failover only the sentinel that led it knows the new primary."""
    sentinels, fakes = make_sentinels((1, 7001), (1, 7001), (1, 7001))
    assert find_primary_port(sentinels) == 7001
    fakes[2].epoch, fakes[2].reported_port = 2, 7002
    runtime = Threads()
    run_sync(sentinels.confirm_switch(sentinels.nodes[2], runtime, runtime.now() + 5))  # it published the switch
    assert find_primary_port(sentinels) == 7002
    fakes[2].close()
    with pytest.raises(Unreachable, match="outdated sentinels"):
        find_primary_port(sentinels)


def test_late_sentinel_answer_does_not_replace_a_newer_one(make_sentinels, monkeypatch) -> None:
    sentinels, _ = make_sentinels((1, 7001))
    assert find_primary_port(sentinels) == 7001
    parse_reply = getattr(*probe_redis.PARSE_PRIMARY.of(sentinels))

    def parse_reply_late(node: DiscoveryNode, replies: list[object]) -> object:
        answer = parse_reply(node, replies)
        # as another thread would meanwhile
        probe_redis.update_primary(sentinels, Primary(2, SocketAddress("127.0.0.1", 7002)))
        return answer

    monkeypatch.setattr(*probe_redis.PARSE_PRIMARY.of(sentinels), parse_reply_late)
    assert find_primary_port(sentinels) == 7002


def test_sentinels_may_restart_their_epochs_at_zero(make_sentinels) -> None:
    """`SENTINEL REMOVE` and `SENTINEL MONITOR` restart the epoch at 0."""
    sentinels, fakes = make_sentinels((5, 7001), (5, 7001), (5, 7001))
    assert find_primary_port(sentinels) == 7001
    for fake in fakes:
        fake.epoch, fake.reported_port = 0, 7002
    assert find_primary_port(sentinels) == 7002


def test_malformed_sentinel_replies_are_ignored(make_sentinels) -> None:
    sentinels, _ = make_sentinels(("x", 7001), (1, 99_999_999), (1, 7001))
    assert find_primary_port(sentinels) == 7001
    sentinels, _ = make_sentinels(("x", 7001))
    with pytest.raises(Unreachable, match="unexpected reply from the sentinel"):
        find_primary_port(sentinels)


class FloodingSentinel(FakeSentinel):
    """Publishes failovers without end."""

    def answer(self, request: str) -> bytes:
        if not request.startswith("SUBSCRIBE"):
            return super().answer(request)
        message = encode_command("message", "+switch-master", "locks 127.0.0.1 1 127.0.0.1 1")
        return encode_command("subscribe", "+switch-master", 1) + 20_000 * message


def test_flood_of_failover_messages_opens_few_connections(start_fake) -> None:
    """Each message made the client open a connection, so a sentinel could make it open hundreds a second."""
    rig_or_skip(RedisRig)
    flooder = start_fake(FloodingSentinel, 1, single_server()[0].port)
    url = f"redis+sentinel://127.0.0.1:{flooder.port}/locks"
    with Client(url) as holder, Client(url) as client, holder.lock("flooded"):
        began = time.monotonic()
        with pytest.raises(NotAcquired):
            client.lock("flooded").acquire(wait=2)
        elapsed = time.monotonic() - began
        assert flooder.requests < 50 + 2 * 2 * elapsed / 0.1, "of two clients, two requests for each query"


class TalkativeSentinel(FakeSentinel):
    """Publishes something about another service again and again."""

    here = threading.local()

    def _talk(self, connection: socket.socket) -> None:
        self.here.connection = connection
        super()._talk(connection)

    def answer(self, request: str) -> bytes:
        if not request.startswith("SUBSCRIBE"):
            return super().answer(request)
        threading.Thread(target=self._publish, args=(self.here.connection,), daemon=True).start()
        return encode_command("subscribe", "+switch-master", 1)

    def _publish(self, connection: socket.socket) -> None:
        message = encode_command("message", "+switch-master", "others 127.0.0.1 1 127.0.0.1 1")
        with suppress(OSError):
            while True:
                connection.sendall(message)
                time.sleep(0.05)  # pause: the sentinel's


def test_sentinel_that_is_never_silent_hides_no_failover(start_fake, monkeypatch, wait_until, caplog) -> None:
    """The client asked the other sentinels only after five seconds without a message of this one."""
    rig_or_skip(RedisRig)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sentinel, "HEARTBEAT_INTERVAL", 0.2)
    port = single_server()[0].port
    talkative, *others = start_fake(TalkativeSentinel, 1, port), *(start_fake(FakeSentinel, 1, port) for _ in range(2))
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in (talkative, *others))
    with Client(f"redis+sentinel://{hosts}/locks") as client, client.lock("hidden", ttl=60):
        watcher = probe_redis.switch_watcher(client)
        wait_until(lambda: watcher.active, 60)
        for each in others:
            each.epoch, each.reported_port = 2, 1
        wait_until(lambda: "to 127.0.0.1:1" in caplog.text, 60)
        for each in (talkative, *others):
            each.epoch, each.reported_port = 3, port


@pytest.mark.parametrize("answer", [b"-NOPERM this user may not subscribe\r\n", b":1\r\n", b"$-1\r\n"])
def test_sentinel_that_publishes_nothing_is_asked_or_left(start_fake, wait_until, caplog, answer) -> None:
    """A missing permission was not reported, and a sentinel could keep the thread busy with replies without end."""
    rig_or_skip(RedisRig)
    caplog.set_level(logging.DEBUG)
    fake = start_fake(FakeSentinel, 1, single_server()[0].port)
    plain_answer = fake.answer
    fake.answer = lambda request: 1000 * answer if request.startswith("SUBSCRIBE") else plain_answer(request)
    with Client(f"redis+sentinel://127.0.0.1:{fake.port}/locks") as client, client.lock("published") as lease:
        if b"NOPERM" in answer:
            wait_until(lambda: "failovers are noticed late" in caplog.text, 60)
            assert "check user, password, permissions" in caplog.text
        else:
            wait_until(lambda: "a reply that is not a message" in caplog.text, 60)
        assert lease.held


def test_replica_reported_as_primary_is_not_used(start_fake) -> None:
    rig_or_skip(RedisRig)
    replica = RedisServer(primary=single_server.own()[0]).start()
    try:
        sentinel = start_fake(FakeSentinel, 1, replica.port)
        with Client(f"redis+sentinel://127.0.0.1:{sentinel.port}/locks", call_timeout=0.5) as client:
            with pytest.raises(Unavailable, match="is a replica"):
                client.lock("job").acquire()
            sentinel.epoch, sentinel.reported_port = 2, single_server.own()[0].port
            with client.lock("job") as lease:
                assert lease.held
    finally:
        replica.kill()


def test_redis_server_is_refused_as_sentinel() -> None:
    rig_or_skip(RedisRig)
    url = f"redis+sentinel://127.0.0.1:{single_server()[0].port}/locks"
    with Client(url, call_timeout=0.5) as client, pytest.raises(ConfigError, match="the kind of server"):
        client.lock("job").acquire()


# ---------------------------------------------------------- cluster nodes


class FakeNode(FakeServer):
    """The only node of a cluster, unless a test sets other slots."""

    info = b"redis_version:7.0.0\r\nrole:master\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
    state = b"cluster_state:ok\r\ncluster_current_epoch:1\r\n"
    sign_in = b"+OK\r\n"

    def __init__(self) -> None:
        self.slots = self.script = self.subscription = b"-ERR not now\r\n"
        self.redirect: Callable[[], bytes] | None = None  # instead of `script`
        super().__init__()

    def answer(self, request: str) -> bytes:
        known = {
            "INFO server": bulk_string(self.info),
            "CLUSTER INFO": bulk_string(self.state),
            "CLUSTER SLOTS": self.slots,
        }
        if request.startswith("SSUBSCRIBE"):
            return self.subscription
        if request.startswith("AUTH"):
            return self.sign_in
        if request.startswith("EVAL") and self.redirect is not None:
            return self.redirect()
        return (
            encode_command("appendfsync", "always") if request.startswith("CONFIG") else known.get(request, self.script)
        )


def bulk_string(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def slots_reply(port: int, host: str = "127.0.0.1", first: int = 0, last: int = 16_383) -> bytes:
    """The reply to CLUSTER SLOTS when one node owns them all."""
    return b"*1\r\n*3\r\n:%d\r\n:%d\r\n*2\r\n%b:%d\r\n" % (first, last, bulk_string(host.encode()), port)


def error_of_attempt(*nodes: FakeServer) -> str:
    """The error of an attempt. Both clients must raise it in time."""
    url = f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in nodes)}"

    async def run_asyncio() -> None:
        async with AsyncClient(url, call_timeout=0.5) as client:
            began = time.monotonic()
            with pytest.raises((Unavailable, ConfigError)):
                await client.lock("job").try_acquire()
            check_elapsed(began, 1.0)

    asyncio.run(run_asyncio())
    with Client(url, call_timeout=0.5) as client:
        began = time.monotonic()
        with pytest.raises((Unavailable, ConfigError)) as caught:
            client.lock("job").try_acquire()
        check_elapsed(began, 1.0)
    return str(caught.value)


@pytest.mark.parametrize("redirect", ["MOVED", "ASK"])
def test_endless_redirects_between_nodes_end_at_the_deadline(start_fake, redirect) -> None:
    one, other = start_fake(FakeNode), start_fake(FakeNode)
    for node, next_ in ((one, other), (other, one)):
        node.slots, node.script = slots_reply(one.port), f"-{redirect} 3 127.0.0.1:{next_.port}\r\n".encode()
    assert f"{redirect} 3" in error_of_attempt(one, other)
    assert one.requests + other.requests < 1000


def test_endless_subscription_redirects_send_few_requests(start_fake) -> None:
    one, other = start_fake(FakeNode), start_fake(FakeNode)
    slot = slot_of(lock_keys("", "job")[0].partition(":")[2])
    for node, next_ in ((one, other), (other, one)):
        node.slots, node.subscription = slots_reply(one.port), b"-MOVED %d 127.0.0.1:%d\r\n" % (slot, next_.port)
    one.script = b"*6\r\n:0\r\n:1000\r\n:0\r\n:5\r\n$4\r\nh\x001\x00\r\n:0\r\n"  # busy, and no client is subscribed
    with Client(f"redis+cluster://127.0.0.1:{one.port}", call_timeout=0.5) as client:
        with pytest.raises((NotAcquired, Unavailable)):
            client.lock("job", wait=0.5).acquire()
        assert one.requests + other.requests < 1000


@pytest.mark.parametrize(
    "answer", [b"-MOVED\r\n", b"-MOVED x y\r\n", b"-MOVED 3 127.0.0.1:999999\r\n", b"-MOVED 99999 127.0.0.1:1\r\n"]
)
def test_invalid_redirect_is_refused(start_fake, answer) -> None:
    node = start_fake(FakeNode)
    node.slots, node.script = slots_reply(node.port), answer
    assert "invalid redirect" in error_of_attempt(node)


@pytest.mark.parametrize("answer", [b"-TRYAGAIN x\r\n", b"-CLUSTERDOWN x\r\n", b"-READONLY x\r\n", b"-NOSCRIPT x\r\n"])
def test_error_names_the_node_that_keeps_refusing(start_fake, answer) -> None:
    node = start_fake(FakeNode)
    node.slots, node.script = slots_reply(node.port), answer
    message = error_of_attempt(node)
    assert f"127.0.0.1:{node.port}" in message
    assert answer[1:-2].decode() in message


@pytest.mark.parametrize(
    "slots",
    [
        *(b"*0\r\n", b"*1\r\n:3\r\n", b"$-1\r\n", b"+OK\r\n", b"-ERR unknown\r\n"),
        *(
            slots_reply(99_999_999),
            slots_reply(7000, "a" * 300),
            slots_reply(7000, "x..y"),
            slots_reply(5, first=-5, last=99_999),
            slots_reply(5, last=100),
        ),
    ],
)
def test_malformed_slot_map_is_refused(start_fake, slots) -> None:
    node = start_fake(FakeNode)
    node.slots = slots
    assert error_of_attempt(node)


def test_slot_map_with_thousands_of_nodes_is_refused(start_fake) -> None:
    node = start_fake(FakeNode)
    ranges = (slots_reply(7000, f"127.1.{slot >> 8}.{slot & 255}", slot, slot)[4:] for slot in range(16_384))
    node.slots = b"*16384\r\n" + b"".join(ranges)
    assert "unexpected reply" in error_of_attempt(node)


def test_slot_map_that_gives_slots_twice_is_refused(start_fake) -> None:
    """Every range costs as many steps as it has slots: twenty thousand ranges of all slots took seconds."""
    node = start_fake(FakeNode)
    node.slots = b"*2\r\n" + 2 * slots_reply(node.port)[4:]
    assert "unexpected reply" in error_of_attempt(node)


class NodeWithManyAddresses(FakeNode):
    host = ""


def test_redirects_to_ever_new_addresses_leave_few_connections(start_fake) -> None:
    """A hostile node could use up the descriptors of the program, and its memory."""
    node = start_fake(NodeWithManyAddresses)
    addresses = (f"127.{number >> 8}.{number & 255}.1" for number in range(256, 60_000))
    node.slots = slots_reply(node.port)
    node.redirect = lambda: b"-MOVED 3 %b:%d\r\n" % (next(addresses).encode(), node.port)
    before = len(os.listdir("/proc/self/fd"))
    with Client(f"redis+cluster://127.0.0.1:{node.port}", call_timeout=0.5) as client:
        for _ in range(12):
            with pytest.raises(Unavailable):
                client.lock("job").try_acquire()
        assert len(os.listdir("/proc/self/fd")) - before < 100  # with the other ends, which are in this process too
        known = probe_redis.known_by_cluster_client(client)
        assert all(len(each) < 24 for each in known), [len(each) for each in known]


class NodeThatRedirectsSubscriptions(NodeWithManyAddresses):
    """To ever new addresses, all of them its own. Its scripts say that the name is held, and that no client listens."""

    def __init__(self, confirms: bool) -> None:
        self.tag = lock_keys("", "job")[0].partition(":")[2]
        self._slot = slot_of(self.tag)
        self._addresses = (f"127.{number >> 8}.{number & 255}.1" for number in range(256, 60_000))
        self._confirms = confirms  # every other subscription, and ends it at once
        self.subscriptions = 0
        super().__init__()
        self.slots = slots_reply(self.port)
        self.script = b"*6\r\n:0\r\n:1000\r\n:0\r\n:5\r\n$4\r\nh\x001\x00\r\n:0\r\n"

    def answer(self, request: str) -> bytes:
        if not request.startswith("SSUBSCRIBE"):
            return super().answer(request)
        self.subscriptions += 1
        if self._confirms and self.subscriptions % 2:
            channel = bulk_string(request.partition(" ")[2].encode())
            return b"".join(
                b"*3\r\n%b%b:%d\r\n" % (bulk_string(kind), channel, count)
                for count, kind in ((1, b"ssubscribe"), (0, b"sunsubscribe"))
            )
        return b"-MOVED %d %b:%d\r\n" % (self._slot, next(self._addresses).encode(), self.port)


@pytest.mark.extended
@pytest.mark.parametrize(("confirms", "subscriptions", "most"), [(False, 12, 8), (True, 60, 24)])
def test_redirected_subscriptions_leave_few_listeners(start_fake, wait_until, confirms, subscriptions, most) -> None:
    """Each redirect left a listener and a connection behind, sixty times a second, while a single waiter waited."""
    node, stop = start_fake(NodeThatRedirectsSubscriptions, confirms), threading.Event()
    before = len(os.listdir("/proc/self/fd"))
    with Client(f"redis+cluster://127.0.0.1:{node.port}") as client:

        def wait_again_and_again() -> None:
            while not stop.is_set():
                with suppress(NotAcquired, Unavailable):
                    client.lock("job").acquire(wait=0.3)

        waiter = threading.Thread(target=wait_again_and_again)
        waiter.start()
        try:
            wait_until(lambda: node.subscriptions >= subscriptions, 60)
            connections, servers, _ = probe_redis.known_by_cluster_client(client)
            known = (probe_redis.node_listeners(client), connections, servers)
            assert all(len(each) < most for each in known), [len(each) for each in known]
            assert len(os.listdir("/proc/self/fd")) - before < 100  # with the other ends, which are in this process too
        finally:
            stop.set()
            waiter.join()


class NodeThatEndsOddSubscriptions(NodeThatRedirectsSubscriptions):
    def __init__(self, channel: bytes) -> None:
        super().__init__(confirms=False)
        self._channel = channel

    def answer(self, request: str) -> bytes:
        if not request.startswith("SSUBSCRIBE"):
            return super().answer(request)
        self.subscriptions += 1
        channel = bulk_string(request.partition(" ")[2].encode())
        ended = b"*3\r\n$12\r\nsunsubscribe\r\n%b\r\n:0\r\n" % self._channel
        return ended + b"*3\r\n$10\r\nssubscribe\r\n%b:1\r\n" % channel


class NodeThatEndsOneSubscriptionAgainAndAgain(NodeThatRedirectsSubscriptions):
    def __init__(self) -> None:
        super().__init__(confirms=False)
        self.script = self.script.removesuffix(b":0\r\n") + b":1\r\n"

    def answer(self, request: str) -> bytes:
        if not request.startswith("SSUBSCRIBE"):
            return super().answer(request)
        self.subscriptions += 1
        channel = bulk_string(request.partition(" ")[2].encode())
        confirmed, ended = (
            b"*3\r\n%b%b:0\r\n" % (bulk_string(kind), channel) for kind in (b"ssubscribe", b"sunsubscribe")
        )
        return confirmed + 1000 * ended + confirmed if self.subscriptions == 1 else b""


def test_subscription_that_ends_again_and_again_is_requested_once(start_fake, wait_until) -> None:
    """The client asked for it again each time, and kept each request in memory until it was answered."""
    node = start_fake(NodeThatEndsOneSubscriptionAgainAndAgain)
    with Client(f"redis+cluster://127.0.0.1:{node.port}") as client:
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0.3)
        node.script = b":0\r\n"  # of the release
        subscription = probe_redis.subscriptions(client).for_bucket(node.tag)
        wait_until(lambda: subscription.active and node.subscriptions == 2, 60)
        (listener,) = probe_redis.node_listeners(client).values()
        assert probe_redis.requested_subscriptions(listener) == 0


@pytest.mark.parametrize("channel", [b":200000000", b":-1", b"*1\r\n*0"])
def test_end_of_a_subscription_to_no_channel_is_harmless(start_fake, wait_until, channel, caplog) -> None:
    """The number was taken for a size: the client allocated and decoded that many zeros."""
    node = start_fake(NodeThatEndsOddSubscriptions, channel)
    tracemalloc.start()
    try:
        with Client(f"redis+cluster://127.0.0.1:{node.port}", call_timeout=0.5) as client:
            with pytest.raises(NotAcquired):
                client.lock("job").acquire(wait=0.3)
            subscription = probe_redis.subscriptions(client).for_bucket(node.tag)
            wait_until(lambda: subscription.active, 60)
        assert tracemalloc.get_traced_memory()[1] < 24 * 2**20
    finally:
        tracemalloc.stop()
    assert "unexpected" not in caplog.text


def test_state_of_very_many_lines_is_not_split() -> None:
    """Each line became a text: eight megabytes took two hundred, and of INFO five hundred."""
    lines = b"ab\r\n" * (2**21 - 100)
    url = parse_cluster_url(EngineConfig.parse("redis+cluster://localhost", 5))
    slots = [[0, 16_383, [b"localhost", 7000]]]
    tracemalloc.start()
    try:
        found = probe_redis.parse_slots(SlotMap(url), url.nodes[0], [FakeNode.state + lines, slots])
        settings = parse_settings(FakeNode.info + lines, None)
        assert tracemalloc.get_traced_memory()[1] < 24 * 2**20, "both replies are among it"
    finally:
        tracemalloc.stop()
    assert (found.healthy, found.epoch, settings.role) == (True, 1, "master")


# --------------------------------------------------- authentication, TLS


@pytest.mark.parametrize("redirect", ["MOVED x {}", "MOVED 3 {}:x", "ASK {}", "MOVED {}", "TRYAGAIN {}", "ERR {}"])
def test_password_that_a_node_repeats_in_a_redirect_is_not_shown(start_fake, redirect, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    node = start_fake(FakeNode)
    node.slots, node.script = slots_reply(node.port), f"-{redirect.format('verysecret')}\r\n".encode()
    node.subscription = node.script
    url = f"redis+cluster://locks:verysecret@127.0.0.1:{node.port}"
    with Client(url, call_timeout=0.5) as client, pytest.raises(LeaseholdError) as caught:
        client.lock("job", wait=0.2).acquire()
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert redirect.split()[0] in shown
    assert "verysecret" not in shown


def test_users_with_documented_permissions_can_use_every_call(rights, caplog) -> None:
    rig_or_skip(RedisRig)
    caplog.set_level(logging.DEBUG)
    sentinel_setup = SentinelSetup(down_after=30)
    try:
        for sentinel in sentinel_setup.sentinels:
            sentinel.ask("ACL", "SETUSER", "watcher", "on", ">verysecret", *rights.sentinel)
        sentinel_setup.primary.ask("ACL", "SETUSER", "locks", "on", ">verysecret", *rights.server)
        url = sentinel_setup.url("?sentinel_user=watcher&sentinel_password=verysecret&min_replicas=1")
        url = url.replace("://", "://locks:verysecret@")
        output = ""
        with Client(url) as one, Client(url) as other:
            lease = one.lock("job", ttl=60).acquire()
            assert other.lock("job").try_acquire() is None
            lease.renew()
            listener = probe_redis.subscriptions(one)
            poll(
                lambda: listener.active and probe_redis.switch_watcher(one).active,
                60,
                lambda: "both subscriptions are permitted",
            )
            assert other.break_lock("job", token=lease.token)
            assert lease.wait_lost(60)
            assert one.once("k", lambda: 1) == other.once("k", lambda: 2) == 1
            output += repr(one) + repr(vars(probe.engine(one))) + repr(probe.engine_state(one))
        for wrong in (url.replace("watcher", "nobody"), url.replace("locks:", "nobody:")):
            with Client(wrong) as client, pytest.raises(ConfigError) as caught:
                client.lock("job").acquire()
            output += "".join(traceback.format_exception(caught.value))
        assert "verysecret" not in output + caplog.text
    finally:
        sentinel_setup.close()


def enable_tls(server: RedisServer, certificate: tuple[str, str]) -> int:
    """Make the server accept TLS on a second port, and return that port."""
    key, cert = certificate
    port = free_ports(1)[0]
    files = ("tls-cert-file", cert, "tls-key-file", key, "tls-ca-cert-file", cert)
    server.ask("CONFIG", "SET", *files, "tls-auth-clients", "no", "tls-port", port)
    return int(port)


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_tls_works_with_remapped_addresses(kind, certificate) -> None:
    rig_or_skip(RedisRig)
    deployment = SentinelSetup(down_after=30) if kind == "sentinel" else RedisCluster(node_timeout=30)
    try:
        servers = deployment.all[:2] if kind == "sentinel" else deployment.all
        ports = {server.port: enable_tls(server, certificate) for server in servers}
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
            assert leases[7].wait_lost(60)
    finally:
        deployment.close()


# -------------------------------------------------------------------- URLs


def test_multi_server_url_is_parsed() -> None:
    url = "redis+sentinel://u%40:p%2F@h1,[::1]:5,h3:7/my%2Fservice/2?remap=10.0.0.1:1=h:2,10.0.0.2:1=h:3"
    parsed = parse_sentinel_url(EngineConfig.parse(url, 5.0))
    assert [node.address for node in parsed.nodes] == [
        SocketAddress("h1", 26379),
        SocketAddress("::1", 5),
        SocketAddress("h3", 7),
    ]
    assert parsed.service == "my/service"
    assert parsed.make_server(SocketAddress("10.0.0.2", 1)).address == SocketAddress("h", 3)
    assert parsed.make_server(SocketAddress("10.0.0.3", 1)).address == SocketAddress("10.0.0.3", 1)
    parsed = parse_cluster_url(EngineConfig.parse("redis+cluster://h1,h2:1?min_replicas=2&allow_eviction=yes", 5.0))
    assert [node.address for node in parsed.nodes] == [SocketAddress("h1", 6379), SocketAddress("h2", 1)]
    assert parsed.options == (2, True)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis+sentinel://h1,h2", "a service name"),
        ("redis+sentinel://h1,h2/service/x", "database number"),
        ("redis+sentinel://h1,h1/service", "same host and port twice"),
        ("redis+sentinel://h1:x/service", "expected HOST:PORT"),
        ("redis+sentinel://h1,,h2/service", "expected HOST:PORT"),
        ("redis+sentinel://h1/service?remap=a:1", "pairs such as"),
        ("redis+sentinel://h1/service?ssl_ca_certs=x", "add tls=yes"),
        ("redis+sentinel://h1/service?tls=yes&ssl_ca_certs=/nowhere", "invalid TLS options"),
        ("redis+sentinel://h1/service?sentinel_tls=maybe", "yes or no"),
        ("redis+sentinel://h1/service?db=1", "known options"),
        ("redis+cluster://h1/1", "one database"),
        ("redis+cluster://h1:99999", "expected HOST:PORT"),
        ("redis+cluster://h1?sentinel_user=x", "known options"),
    ],
)
def test_bad_url_is_refused_when_the_client_is_made(url, text) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        Client(url.replace("://", "://user:verysecret@"))
    assert "verysecret" not in str(caught.value)
