"""`once` on the stores of engines while servers restart, pause and fail over, and answers are lost.

Two machines call `once` for the same keys, each through its own proxies, until both have a result. A store that lost a
record, applied a write twice or took a lost answer for a refusal would give them different results.
"""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from harness.rigs import with_own_server
from harness.rigs.etcd import EtcdClusterRig, EtcdRig
from harness.rigs.redis_ha import RedisSentinelRig
from harness.rigs.zookeeper import ZookeeperEnsembleRig, ZookeeperRig
from harness.servers.machine import ProxiedMachine
from harness.servers.postgresql import PostgreSQL
from harness.servers.redis_ha import RedisCluster, SentinelSetup
from leasehold import Client, ConfigError, LeaseholdError, stores
from leasehold.records.store import Record
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.rig import Absent
from tests.records.stores.conftest import ENGINE_STORES

# Seconds of faults; then the network is restored, and every call must succeed.
SHORT = 1.5
LONG = pytest.param(8.0, marks=pytest.mark.faults)


def test_record_survives_a_crash_if_commits_need_not(open_runner):
    """`synchronous_commit = off` may be the default of the database: commits do not wait for the disk then."""
    try:
        server = PostgreSQL("wal_writer_delay=10s").start()
    except Absent as absent:
        pytest.skip(str(absent))
    try:
        server.ask("alter database postgres set synchronous_commit = off")
        runner = open_runner(server.url())
        versions = [""]
        for _ in range(2):  # inserted, and then updated
            new = Record(uuid.uuid4().hex, b"done")
            assert run_sync(runner.write("key", new, versions[-1]))
            versions.append(new.version)
            server.kill()
            server.start()
            assert run_sync(runner.read("key")) == new
    finally:
        server.kill()


def test_mysql_store_reads_nothing_that_may_be_rolled_back(server, url_of, open_runner, key):
    """READ UNCOMMITTED may be the default of the server. A record is uncommitted in a transaction of `within`."""
    url, mariadb = url_of("mysql"), server("mysql").server
    written = Record(uuid.uuid4().hex, b"done")
    run_sync(open_runner(url).write(f"{key}-other", written))  # creates the table
    mariadb.run("set global tx_isolation = 'READ-UNCOMMITTED'")
    try:
        with mariadb.connect(autocommit=False, database="test") as application:
            assert run_sync(stores.within(application).write(key, written, "", None, 30.0))
            assert run_sync(open_runner(url).read(key)) is None
            application.rollback()
    finally:
        mariadb.run("set global tx_isolation = 'REPEATABLE-READ'")


def test_mysql_record_that_is_too_large_is_refused(server, url_of, open_runner, key):
    """Refused by the server, whose answer may be lost: it ends the session with most of the statement unread. The
    caller could not tell that from a failure that a repetition mends."""
    url, mariadb = url_of("mysql"), server("mysql").server
    mariadb.run("set global max_allowed_packet = 2097152")
    try:
        runner = open_runner(url)
        for size in (1_100_000, 3_000_000):
            with pytest.raises(ConfigError, match="max_allowed_packet"):
                run_sync(runner.write(key, Record(uuid.uuid4().hex, b"x" * size)))
        assert run_sync(runner.write(key, Record(uuid.uuid4().hex, b"x" * 1_000_000)))
    finally:
        mariadb.run("set global max_allowed_packet = 16777216")


class Machine(threading.Thread):
    """Runs `once` for each key until it has the result."""

    def __init__(self, url: str, keys: list[str]) -> None:
        super().__init__(daemon=True)
        self._url, self._keys = url, keys
        self.results: dict[str, str] = {}
        self.unexpected: list[BaseException] = []

    def run(self) -> None:
        try:
            with Client(self._url, ttl=2, call_timeout=1) as client:
                for key in self._keys:
                    self._get_result(client, key)
        except BaseException as error:
            self.unexpected.append(error)

    def _get_result(self, client: Client, key: str) -> None:
        def work() -> str:
            time.sleep(random.uniform(0, 0.05))  # pause: the work
            return os.urandom(4).hex()

        end = time.monotonic() + 120
        while key not in self.results and time.monotonic() < end:
            with suppress(LeaseholdError):  # the result is unknown: ask again
                self.results[key] = client.once(key, work, wait=5)


def run_with_faults(paths: list[ProxiedMachine], seconds: float, inject: Callable[[], None]) -> None:
    keys = [os.urandom(6).hex() for _ in range(int(25 * seconds))]
    machines = [Machine(path.url, keys) for path in paths]
    for machine in machines:
        machine.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(random.uniform(0.05, 0.3))
        inject()
    for path in paths:
        path.restore()
    for machine in machines:
        machine.join(300)
    first, second = machines
    assert first.unexpected == second.unexpected == []
    assert first.results.keys() == second.results.keys() == set(keys), "every call must succeed in the end"
    assert first.results == second.results


@pytest.fixture
def paths() -> Iterator[Callable[[Callable[[], Any]], list[ProxiedMachine]]]:
    with ExitStack() as stack:
        yield lambda make: [stack.enter_context(closing(make())) for _ in range(2)]


@pytest.mark.parametrize("seconds", [SHORT, LONG])
@pytest.mark.parametrize("which", ENGINE_STORES)
def test_once_has_one_result_while_answers_are_lost(which, server, paths, seconds):
    machines = paths(server(which).path)

    def inject() -> None:
        path = random.choice(machines)
        fault = random.choice(["cut", "restore", "lose_answers", "reset"])
        for proxy in path.proxies:
            getattr(proxy, fault)()

    run_with_faults(machines, seconds, inject)


@pytest.mark.parametrize("rig_type", [EtcdRig, EtcdClusterRig, ZookeeperRig, ZookeeperEnsembleRig])
@pytest.mark.parametrize("seconds", [LONG])
def test_once_has_one_result_while_servers_restart_and_pause(rig_type, paths, seconds):
    rig = with_own_server(rig_type)()
    machines, begun = paths(rig.client_path), time.monotonic()

    def inject() -> None:
        if time.monotonic() - begun > seconds / 2:
            rig.restart()
        else:
            rig.pause()
            time.sleep(random.uniform(0, 1.5))  # pause: the fault lasts
            rig.resume()

    run_with_faults(machines, seconds, inject)


@pytest.mark.parametrize("seconds", [LONG])
def test_once_has_one_result_through_a_sentinel_failover(paths, seconds):
    """With `min_replicas=1` no record is lost: the promoted replica has confirmed every write."""
    setup = SentinelSetup(1.0)
    try:
        rig = RedisSentinelRig()
        rig.setup = setup
        machines = paths(rig.client_path)
        for machine in machines:
            machine.url += "&min_replicas=1"
        old = setup.primary

        def inject() -> None:
            if old.running and setup.sentinels[0].primary() == old.port:
                old.kill()
            elif not old.running and setup.sentinels[0].primary() == setup.replica.port:
                old.start()

        run_with_faults(machines, seconds, inject)
        assert setup.sentinels[0].primary() == setup.replica.port, "there was a failover"
    finally:
        setup.close()


@pytest.mark.parametrize("seconds", [LONG])
def test_once_has_one_result_through_a_cluster_failover(seconds):
    """A replica is promoted for a third of the slots; the replicas of the others have confirmed every write, too."""
    cluster = RedisCluster(1.0, replicas=True)
    try:
        old = cluster.primaries[0]

        def inject() -> None:
            if old.running and old.slots():
                old.kill()
            elif not old.running and any(replica.slots() for replica in cluster.replicas):
                old.start()

        run_with_faults([ProxiedMachine(cluster.url("?min_replicas=1"), []) for _ in range(2)], seconds, inject)
        assert any(replica.slots() for replica in cluster.replicas), "there was a failover"
    finally:
        cluster.close()
