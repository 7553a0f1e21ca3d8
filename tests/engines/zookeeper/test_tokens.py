"""Tokens rise across rebases, and when a queue runs out of sequence numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from kazoo.exceptions import NoNodeError

from harness.rigs.zookeeper import ZookeeperRig
from harness.servers.folders import scratch
from harness.servers.process import free_ports, program
from harness.servers.zookeeper import Zookeeper, class_path
from leasehold import Client, ConfigError, NotAcquired
from leasehold.engines.zookeeper import attempt as attempt_module
from leasehold.engines.zookeeper import nodes
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.rig import Absent
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe


def test_rebase_raises_tokens_and_never_lowers_them(url) -> None:
    with Client(url) as client:
        engine = probe.engine(client)

        def rebase(floor: int) -> int:
            return run_sync(engine.rebase(floor, probe.core(client).deadline()))

        with client.lock("a") as lease:
            first = lease.token
        floor = 10**15
        assert rebase(floor) == floor
        with client.lock("a", ttl=60) as lease:
            assert lease.token > floor > first
            assert client.inspect()[0].token == lease.token
            assert rebase(floor // 2) == floor
            raised = rebase(2 * floor)
            lease.renew()  # a grant keeps the token it was given
            assert not client.break_lock("a", token=lease.token + 1)
        with client.lock("a") as lease:
            assert raised < lease.token < 2**53
        for bad in (-1, 2**53 - 2**40, 2**53):
            with pytest.raises(ConfigError):
                rebase(bad)


def test_rebase_without_a_floor_starts_far_above_the_clock(url) -> None:
    with Client(url) as client:
        base = probe.rebase(client, 0)
        assert base > time.time() * 1e6 + 2000 * 2**32
        with client.lock("a") as lease:
            assert base < lease.token < 2**53
        assert probe.rebase(client, 5) == base


def test_concurrent_rebases_keep_the_highest_floor(url) -> None:
    with Client(url) as client:
        engine = probe.engine(client)
        threads = [
            threading.Thread(target=lambda n=n: run_sync(engine.rebase(10**12 + n, probe.core(client).deadline())))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert run_sync(engine.rebase(1, probe.core(client).deadline())) == 10**12 + 7


def test_rebase_command_raises_tokens(url) -> None:
    command = [sys.executable, "-m", "leasehold", "-u", url, "-o", "json", "rebase", "--above", str(10**15)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"base": 10**15}
    with Client(url) as client, client.lock("a") as lease:
        assert lease.token > 10**15


def test_token_of_two_to_the_53_or_more_is_not_granted(url, root, kazoo, wait_until) -> None:
    with Client(url) as client:
        client.lock("a").acquire().release()
        kazoo.create(f"{root}/lh1/base", str(2**53 - 1).encode())
        with pytest.raises(ConfigError, match="too high"):
            client.lock("a").acquire(wait=0)
        wait_until(lambda: not client.inspect())


@pytest.mark.parametrize("data", [b"-1", b"-99999999999", b"1_0", b"", b"1e3"])
def test_base_that_would_lower_tokens_is_refused(data, url, root, kazoo, session_of) -> None:
    with Client(url) as client:
        client.lock("a").call(lambda: None)
        kazoo.create(f"{root}/lh1/base", data)
        with pytest.raises(ConfigError, match="base"):
            client.lock("a").acquire(wait=0)
        assert not session_of(client).unconfirmed


# ------------------------------------------------------------------------------------------------ last sequence numbers
def test_queue_out_of_sequence_numbers_drains_and_restarts(url, root, kazoo, monkeypatch) -> None:
    monkeypatch.setattr(attempt_module, "LAST_SEQUENCE", 40)
    tokens, failed, stop = [], [], threading.Event()

    def work() -> None:
        try:
            with Client(url, call_timeout=30) as client:
                while not stop.is_set():
                    with client.lock("a", ttl=60, wait=60) as lease:
                        tokens.append(lease.token)
                        assert tokens[-1] == lease.token
                        if len(tokens) >= 150:
                            stop.set()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    assert stop.is_set()
    assert tokens == sorted(set(tokens))
    with suppress(NoNodeError):  # after a minute the server removes an empty container
        assert kazoo.get_children(f"{root}/lh1/:a") == []


def test_exhausted_queue_with_a_foreign_node_is_a_config_error(url, root, kazoo, monkeypatch) -> None:
    """The engine cannot recreate a queue that contains a foreign node. Only an operator can remove that node."""
    monkeypatch.setattr(attempt_module, "LAST_SEQUENCE", 2)
    with Client(url) as client:
        client.lock("a").call(lambda: None)
        kazoo.create(f"{root}/lh1/:a/junk", makepath=True)
        with pytest.raises(ConfigError, match="not ours"):
            for _ in range(5):
                client.lock("a", wait=1).call(lambda: None)
        kazoo.delete(f"{root}/lh1/:a/junk")
        client.lock("a", wait=20).call(lambda: None)


_JAVA_SOURCE = """
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


def start_server_near_last_sequence(count: int) -> Zookeeper:
    """Start a real server that has already created `count` nodes in the queue of "a"."""
    rig_or_skip(ZookeeperRig)
    folder = scratch()
    try:
        javac = program("javac", package="default-jdk-headless")
    except Absent as absent:
        pytest.skip(str(absent))
    server = Zookeeper(folder, free_ports(1)[0], {"snapshot.trust.empty": "true"}, {"snapshot.trust.empty": "true"})
    source = os.path.join(folder, "NearTheEnd.java")
    with open(source, "w") as file:
        file.write(_JAVA_SOURCE)
    path = f"{folder}:{class_path()}"
    subprocess.run([javac, "-cp", path, "-d", folder, source], check=True, capture_output=True)
    subprocess.run(["java", "-cp", path, "NearTheEnd", server.data, str(count)], check=True, capture_output=True)
    return server.start()


@pytest.mark.extended  # seconds of a processor
def test_real_queue_at_its_last_sequence_numbers_drains_and_restarts(session_of) -> None:
    server = start_server_near_last_sequence(2**31 - 10**6 - 5)
    try:
        url = f"zookeeper://127.0.0.1:{server.port}"
        tokens = []
        with Client(url) as one, Client(url) as two:
            for number in range(5):
                with (one, two)[number % 2].lock("a", ttl=60, wait=10) as lease:
                    tokens.append(lease.token)
            last = one.lock("a", ttl=60).acquire(wait=10)
            assert next(iter(session_of(one).own_nodes.values())).name.endswith("-2146483648"), "not the last number"
            with pytest.raises(NotAcquired):
                two.lock("a", wait=0.5).acquire()
            leases = []
            thread = threading.Thread(target=lambda: leases.append(two.lock("a", ttl=60).acquire(wait=30)))
            thread.start()
            with pytest.raises(NotAcquired):
                one.lock("a", wait=0).acquire()
            assert last.release()
            thread.join(30)
            assert next(iter(session_of(two).own_nodes.values())).name.endswith("-0000000000"), "queue not restarted"
            tokens += [last.token, leases[0].token]
            assert leases[0].release()
            with one.lock("a", wait=0) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))
    finally:
        server.kill()


def test_base_that_is_not_a_number_is_a_config_error():
    assert nodes.parse_base(b"17") == 17
    with pytest.raises(ConfigError):
        nodes.parse_base(b"junk")
