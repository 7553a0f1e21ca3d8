"""Stores that are not what their URL seems to say, and URLs that say too much."""

import socket
import threading
import time
import uuid

import pytest

from leasehold import Client, ConfigError, Unavailable, stores
from leasehold.config import EngineConfig
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads
from leasehold.store import Record
from leasehold.testing.rig import Absent
from leasehold.testing.servers.postgresql import PgBouncer
from leasehold.testing.servers.process import free_ports
from leasehold.testing.servers.redis import RedisServer


def record(data: bytes = b"data") -> Record:
    return Record(uuid.uuid4().hex, data)


def test_behind_a_pooler_in_transaction_mode(server, opened, key):
    """Its sessions are shared: nothing that was prepared on one is there on the next."""
    try:
        pooler = PgBouncer(server("postgresql")).start()
    except Absent as absent:
        pytest.skip(str(absent))
    bench, wrong = opened(f"postgresql://postgres@127.0.0.1:{pooler.port}/postgres"), []

    def use(number: int) -> None:
        was = ""
        for _ in range(20):
            new = record()
            try:
                assert step(bench.write(f"{key}/{number}", new, was))
                assert step(bench.read(f"{key}/{number}")) == new
            except Exception as error:
                wrong.append(error)
                return
            was = new.edition

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    bench.store.close()
    pooler.stop()
    assert wrong == []


def test_a_node_of_a_cluster_is_said_to_be_one(opened, key):
    """It would send us to another node for most keys, and we would not go."""
    bus = str(free_ports(1)[0])  # of its own choice it would be the port and 10,000, which may be too high
    node = RedisServer("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", bus).start()
    try:
        bench = opened(f"redis://127.0.0.1:{node.port}")
        with pytest.raises(ConfigError, match="cluster"):
            step(bench.read(key))
        with pytest.raises(ConfigError, match="cluster"):
            step(bench.write(key, record()))
    finally:
        node.stop()


@pytest.mark.parametrize("scheme", ["redis+sentinel", "redis+cluster", "redlock", "etcd", "zookeeper", "http"])
@pytest.mark.parametrize("beside", [True, False])
def test_an_engine_that_keeps_no_records_is_refused_with_the_way_out(scheme, beside):
    config = EngineConfig.parse(f"{scheme}://user:s3cret@a:1,b:2/0", 5.0)
    with pytest.raises(ConfigError, match=r"keeps no records.*store=.*postgresql://") as refused:
        stores.opened(config, Threads(), beside=beside)
    assert "s3cret" not in str(refused.value)


def test_records_beside_locks_at_a_socket(tmp_path):
    path = tmp_path / "redis.sock"
    running = RedisServer("--unixsocket", str(path)).start()
    try:
        with Client(f"redis+unix://{path}?db=3") as client:
            assert client.once("a", lambda: 1) == 1
            assert client.once("a", lambda: 2) == 1
        assert running.ask("EXISTS", "lh1:record:once::a") == 0, "in the database that the URL says"
    finally:
        running.stop()


@pytest.mark.parametrize("scheme", ["redis", "rediss", "mysql", "postgresql"])
@pytest.mark.parametrize("secret", ["s3cret/x", "s3cret#x", "x:s3cret", "s3cret?y=1", "[s3cret"])
def test_a_password_that_was_not_encoded_is_not_shown(scheme, secret):
    """It ends where the URL has a reason to end: what follows is read as something else, and complained of."""
    said = ""
    try:
        stores.opened(EngineConfig.parse(f"{scheme}://user:{secret}@localhost:70000/0", 5.0), Threads(), beside=False)
    except ConfigError as refused:
        said = f"{refused} {refused.__cause__}"
    assert "s3cret" not in said


@pytest.mark.parametrize("scheme", ["redis", "mysql", "postgresql"])
def test_a_server_that_accepts_and_says_nothing_costs_no_more_than_the_call(scheme, opened, key, mode):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        bench = opened(f"{scheme}://user:pw@127.0.0.1:{deaf.getsockname()[1]}/0", mode, 0.5)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            bench.run(bench.read(key))
        assert time.monotonic() - began < 0.5 + 0.5
