"""Stores on the connections of an engine: lost answers, moved records, and what a record leaves behind."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest
from kazoo.security import make_acl

from harness.rigs import etcd, redis_ha, zookeeper
from harness.servers.process import poll
from harness.servers.redis import RedisServer
from leasehold import AsyncClient, Client, ConfigError, Unavailable
from leasehold.engines.zookeeper.kazoo_adapter import ZookeeperConnectionLost
from leasehold.records.access import RecordAccess, open_records
from leasehold.records.store import Record
from leasehold.runtime.base import run_sync
from tests.records.stores.conftest import ENGINE_STORES, SERVERS
from tests.support import probe, probe_records


def record(data: bytes = b"data") -> Record:
    return Record(os.urandom(16).hex(), data)


# ------------------------------------------------------------- lost answers


class Applied:
    """A write that was applied and whose answer is lost, sent by a thread through proxies."""

    def __init__(self, access, path, key, first, monkeypatch, call):
        version = os.urandom(16)
        self.record, self.result = Record(version.hex(), b"new"), []

        def lose_answers(from_client, data):
            if from_client and version.hex().encode() in data:
                for proxy in path.proxies:
                    proxy.watch = None
                    proxy.lose_answers()

        for proxy in path.proxies:
            proxy.watch = lose_answers
        monkeypatch.setattr(access.core.runtime, "random_bytes", lambda _: version)
        self._thread = threading.Thread(target=self._call, args=(call,))
        self._thread.start()

    def _call(self, call):
        try:
            self.result.append(run_sync(call(self.record)))
        except Unavailable as error:
            self.result.append(error)

    def end(self):
        self._thread.join(60)
        return self.result[0]


@pytest.fixture(params=SERVERS)
def which(request):
    return request.param


@pytest.fixture(params=["", "there"])
def lossy(request, which, server, url_of, open_runner, key):
    """A runner behind proxies, another one, and the record to replace, if any."""
    existing = request.param
    path, other = server(which).path(), open_runner(url_of(which))
    runner = open_runner(path.url, call_timeout=3.0)
    access = RecordAccess(probe.core(runner.client), runner.store)
    # Even without a record, scripts and nodes must exist: otherwise the first answer is not the write's. Where an
    # expired record takes a second statement, another one serves.
    first_key = key if existing or which in ENGINE_STORES else f"{key}-other"
    first = run_sync(access.swap(first_key, b"first", None, None if existing else 0.001))
    if not existing:
        poll(lambda: run_sync(runner.read(key)) is None, 60, lambda: "the first record has expired")
        first = None
    yield access, path, other, first
    path.restore()
    runner.close()
    path.close()


def test_write_with_lost_answer_is_recognised(lossy, key, monkeypatch):
    """The same write is sent again."""
    access, path, other, first = lossy
    applied = Applied(access, path, key, first, monkeypatch, lambda _: access.swap(key, b"new", first, 100.0))
    poll(lambda: run_sync(other.read(key)) == applied.record, 60, lambda: "the write is applied")
    path.restore()
    assert applied.end() == applied.record


def test_write_replaced_before_its_answer_was_lost_is_unavailable(lossy, key, monkeypatch):
    """The store must not say that it was refused: it was applied, and only then replaced."""
    access, path, other, first = lossy
    applied = Applied(
        access,
        path,
        key,
        first,
        monkeypatch,
        lambda new: access.store.write(key, new, first.version if first else "", None, 30.0),
    )
    poll(lambda: run_sync(other.read(key)) == applied.record, 60, lambda: "the write is applied")
    assert run_sync(other.write(key, record(b"other"), applied.record.version))
    poll(lambda: any(proxy.has_lost_bytes for proxy in path.proxies), 60, lambda: "the answer is lost")
    path.restore()
    assert isinstance(applied.end(), Unavailable)


@pytest.mark.parametrize("which", ENGINE_STORES)
def test_repeated_write_is_the_same_write(which, url_of, open_runner, key):
    """A store that applied a write before its answer was lost must not take itself for another writer."""
    runner, first, second = open_runner(url_of(which)), record(b"first"), record(b"second")
    for _ in range(2):
        assert run_sync(runner.write(key, first, keep=100.0))
    for _ in range(2):
        assert run_sync(runner.write(key, second, first.version, keep=100.0))
    assert not run_sync(runner.write(key, first)), "replaced meanwhile"
    assert run_sync(runner.read(key)) == second


# ---------------------------------------------------- the client's own engine


@pytest.mark.parametrize("which", ENGINE_STORES)
def test_store_of_the_same_url_uses_the_engine_of_the_client(which, url_of):
    with Client(url_of(which)) as client:
        store = open_records(client, None).store
        assert probe_records.engine_of(store) is probe.engine(client)
        other = open_records(client, url_of(which)).store
        assert probe_records.engine_of(other) is not probe.engine(client)
        assert client.once(os.urandom(8).hex(), lambda: 1) == 1
        other_core = probe.core(other)
        assert run_sync(other.read("a:b:c", 5.0)) is None
    assert other_core.closed, "the store's own client is closed with the client"


@pytest.mark.parametrize("which", ENGINE_STORES)
def test_client_with_an_engine_of_its_own_still_has_a_store(which, url_of):
    """A wrapped engine, as in fault injection, has no connections that the store could use."""

    class Wrapped:
        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            if name in ("executor", "rpc", "session"):
                raise AttributeError(name)
            return getattr(self._engine, name)

    from leasehold import engines

    opener = engines.opener(url_of(which).partition("://")[0])
    with Client(url_of(which), engine=lambda *arguments: Wrapped(opener(*arguments))) as client:
        assert client.once(os.urandom(8).hex(), lambda: 1) == 1


def test_subclass_with_other_arguments_can_use_another_store(url_of):
    class ShopClient(Client):
        def __init__(self):
            super().__init__("memory://")

    with ShopClient() as client:
        assert client.once(os.urandom(8).hex(), lambda: 1, store=url_of("redis")) == 1


@pytest.mark.parametrize("which", ENGINE_STORES)
def test_cancelled_write_disturbs_no_later_call(which, url_of, key):
    async def work():
        async with AsyncClient(url_of(which)) as client:
            access = open_records(client, None)
            first = await access.swap(key, b"0", None, None)
            for number in range(30):
                task = asyncio.create_task(access.swap(f"{key}-{number}", b"1", None, 100.0))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                task.cancel()
                assert await access.read(key) == first
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(work())


def test_redis_store_needs_no_redis_py(url_of):
    program = (
        "import sys; sys.modules['redis'] = None\n"
        f"import leasehold; print(leasehold.Client({url_of('redis')!r}).once('{os.urandom(8).hex()}', lambda: 41 + 1))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("42\n", 0), done.stderr


# -------------------------------------------------------- Redis: several servers


def test_unconfirmed_write_is_unavailable_with_min_replicas(open_runner, key):
    server = RedisServer().start()
    try:
        runner = open_runner(f"redis://127.0.0.1:{server.port}?min_replicas=1", call_timeout=1.0)
        with pytest.raises(Unavailable):
            run_sync(runner.write(f"{key}-first", record()))
        with pytest.raises(Unavailable, match=r"replicas|timed out"):  # repeated: still unconfirmed
            run_sync(RecordAccess(probe.core(runner.client), runner.store).swap(key, b"new", None, None))
    finally:
        server.stop()


def test_record_follows_its_slot_to_another_node(url_of, open_runner, key):
    cluster, runner, first = redis_ha.three_node_cluster(), open_runner(redis_ha.three_node_cluster().url()), record()
    assert run_sync(runner.write(key, first))
    slot = cluster.primaries[0].ask("CLUSTER", "KEYSLOT", f"lh1:record:{{{key}}}")
    source = next(node for node in cluster.primaries if node.ask("CLUSTER", "COUNTKEYSINSLOT", slot))
    target = cluster.other_than(source)
    cluster.move(slot, source, target)
    try:
        second = record()
        assert run_sync(runner.read(key)) == first
        assert run_sync(runner.write(key, second, first.version))
        assert run_sync(runner.read(key)) == second
    finally:
        cluster.move(slot, target, source)


# ------------------------------------------------------------ etcd: its leases


def test_records_leave_no_etcd_leases_behind(open_runner, key):
    cluster = etcd.single_member_cluster.own()
    runner, member = open_runner(f"etcd://{cluster.hosts}"), cluster.members[0]
    assert run_sync(runner.read(key)) is None
    before = member.leases()
    old = record()
    assert run_sync(runner.write(key, old, keep=1000.0))
    for _ in range(5):
        new = record()
        assert run_sync(runner.write(key, new, old.version, keep=1000.0))
        assert not run_sync(runner.write(key, record(), "", keep=1000.0)), "refused: its lease is revoked"
        old = new
    poll(lambda: len(member.leases() - before) == 1, 60, lambda: "one record, one lease")
    assert run_sync(runner.write(key, record(), old.version, keep=None))
    poll(lambda: member.leases() <= before, 60, lambda: "a record that is kept for ever needs no lease")


# -------------------------------------------------- ZooKeeper: nodes and clocks


@pytest.fixture
def zookeeper_runner(open_runner):
    return open_runner(f"zookeeper://127.0.0.1:{zookeeper.shared_server.own().port}")


def test_record_created_again_is_not_taken_for_the_old_one(zookeeper_runner, kazoo, key, monkeypatch):
    """ZooKeeper counts the versions of a new node from 0 again: comparing these would replace the wrong record."""
    runner, old, new = zookeeper_runner, record(b"old"), record(b"new")
    assert run_sync(runner.write(key, old))
    read, path = getattr(*probe_records.READ.of(runner.store)), probe_records.node_path(runner.store, key)

    async def read_and_create_again(*arguments):
        stored = await read(*arguments)
        monkeypatch.setattr(*probe_records.READ.of(runner.store), read)
        kazoo.delete(path, recursive=True)
        assert await runner.write(key, new)
        return stored

    monkeypatch.setattr(*probe_records.READ.of(runner.store), read_and_create_again)
    assert not run_sync(runner.write(key, record(b"late"), old.version))
    assert run_sync(runner.read(key)) == new


@pytest.mark.parametrize("existing", ["", "there"])
def test_missing_zookeeper_permission_is_a_config_error(zookeeper_runner, kazoo, key, existing):
    """Of the operations of a transaction that is refused, one has the reason, and the others were rolled back."""
    first = record()
    assert run_sync(zookeeper_runner.write(key, first))
    path = probe_records.node_path(zookeeper_runner.store, key)
    if not existing:
        kazoo.delete(path, recursive=True)
    denied = path if existing else path.rpartition("/")[0]
    kazoo.set_acls(denied, [make_acl("world", "anyone", read=True, admin=True)])
    try:
        with pytest.raises(ConfigError, match="does not permit"):
            run_sync(zookeeper_runner.write(key, record(), first.version if existing else ""))
    finally:
        kazoo.set_acls(denied, [make_acl("world", "anyone", all=True)])


def test_connection_lost_at_any_step_of_a_write_is_unavailable(zookeeper_runner, kazoo, monkeypatch):
    """Its requests are: read, transaction, creation of the bucket, transaction, and those of a sweep."""
    store, pipeline = zookeeper_runner.store, getattr(*probe_records.PIPELINE.of(zookeeper_runner.store))
    monkeypatch.setattr(probe_records.runtime_of(store), "random", lambda: 0.0)
    outcomes = []
    for step in range(1, 12):
        key, calls = f"test:{os.urandom(8).hex()}", []
        monkeypatch.setattr(*probe_records.ROOT, f"/lh1/records-{os.urandom(4).hex()}")

        async def lose(deadline, *requests, calls=calls, step=step):
            calls.append(requests)
            if len(calls) == step:
                raise ZookeeperConnectionLost
            return await pipeline(deadline, *requests)

        monkeypatch.setattr(*probe_records.PIPELINE.of(store), lose)
        try:
            outcomes.append(run_sync(zookeeper_runner.write(key, record(), keep=0.001)))
        except Unavailable:
            outcomes.append("unavailable")
    assert outcomes[:4] == [True, "unavailable", "unavailable", "unavailable"]  # the read is repeated
    assert outcomes[4:] == [True] * 7  # the record is written


def test_expired_zookeeper_records_are_swept(zookeeper_runner, kazoo, monkeypatch):
    runner = zookeeper_runner
    monkeypatch.setattr(*probe_records.BUCKETS, 1)
    kept = record()
    kept_key = f"test:{os.urandom(8).hex()}"
    assert run_sync(runner.write(kept_key, kept, keep=1000.0))
    bucket = probe_records.node_path(runner.store, kept_key).rpartition("/")[0]
    for _ in range(300):
        assert run_sync(runner.write(f"test:{os.urandom(8).hex()}", record(), keep=0.001))
    poll(
        lambda: (
            run_sync(runner.write(f"test:{os.urandom(8).hex()}", record(), keep=0.001))
            and len(kazoo.get_children(bucket)) < 150
        ),
        60,
        lambda: "at most about half of the records are expired ones",
    )
    assert run_sync(runner.read(kept_key)) == kept


def test_sweep_does_not_delete_a_record_that_was_replaced(zookeeper_runner, key, monkeypatch):
    runner, old, new = zookeeper_runner, record(), record()
    # else the write may sweep its own record
    monkeypatch.setattr(probe_records.runtime_of(runner.store), "random", lambda: 0.99)
    assert run_sync(runner.write(key, old, keep=0.001))
    poll(lambda: run_sync(runner.read(key)) is None, 60, lambda: "expired")
    pipeline = getattr(*probe_records.PIPELINE.of(runner.store))

    async def replace_before_delete(deadline, *requests):
        if type(requests[0]).__name__ == "Transaction":
            monkeypatch.setattr(*probe_records.PIPELINE.of(runner.store), pipeline)
            assert await runner.write(key, new)
        return await pipeline(deadline, *requests)

    monkeypatch.setattr(*probe_records.PIPELINE.of(runner.store), replace_before_delete)
    bucket = probe_records.node_path(runner.store, key).rpartition("/")[0]
    probe_records.sweep(runner.store, bucket, runner.runtime.now() + 30)
    assert run_sync(runner.read(key)) == new


def test_zookeeper_record_that_is_too_large_is_refused_at_once(zookeeper_runner, key):
    with pytest.raises(ConfigError, match="1,000,000 bytes"):
        run_sync(zookeeper_runner.write(key, record(b"x" * 1_000_001)))


@pytest.mark.parametrize("size", [1_600_000, 2_500_000])
def test_etcd_record_that_is_too_large_is_refused(url_of, open_runner, key, size):
    """Beyond the second size the server refuses the message before it reads the request."""
    runner = open_runner(url_of("etcd"))
    with pytest.raises(ConfigError, match=r"larger than max|too large"):
        run_sync(runner.write(key, record(b"x" * size)))
