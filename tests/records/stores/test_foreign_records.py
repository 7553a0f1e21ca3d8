"""Values that another program, or a hostile neighbour, has put where a store keeps a record: refused with an error that
says so, on every store, and never replaced."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import Any

import pytest

from harness.rigs import etcd, zookeeper
from harness.servers.etcd import encode_base64
from harness.servers.redis import RedisServer
from leasehold import ConfigError
from leasehold.records.store import MAX_DATA, Record
from leasehold.runtime.base import run_sync
from tests.records.stores.conftest import ENGINE_STORES

VERSION = "0123456789abcdef" * 2
NO_RECORDS = [b"", b"short", b"X" * 40, b"\xff" * 40, VERSION.upper().encode() + b"{}"]


def record() -> Record:
    return Record(os.urandom(16).hex(), b"ours")


def check_refused(runner: Any, key: str) -> None:
    """Neither believed nor replaced."""

    async def work() -> None:
        for _ in range(2):
            with pytest.raises(ConfigError, match="not a record of Leasehold"):
                await runner.read(key)
            try:
                assert not await runner.write(key, record())
                assert not await runner.write(key, record(), record().version)
            except ConfigError:
                pass  # by stores that read before they write

    runner.run(work())


@pytest.mark.parametrize("value", NO_RECORDS)
@pytest.mark.parametrize("which", ENGINE_STORES)
def test_value_of_another_program_is_refused_and_kept(which, url_of, open_runner, key, monkeypatch, value):
    runner = open_runner(url_of(which))
    with monkeypatch.context() as patched:
        for module in (f"leasehold.records.stores.{name}" for name in ("redis", "etcd", "zookeeper")):
            patched.setattr(f"{module}.encode_record", lambda _: value)
        assert run_sync(runner.write(key, record()))
    check_refused(runner, key)


@pytest.mark.parametrize("make", [("LPUSH", "x"), ("HSET", "field", "x"), ("SETRANGE", MAX_DATA + 33, "x")])
def test_redis_key_of_another_type_or_size_is_refused_and_kept(make, server, open_runner, key):
    redis = RedisServer().start()
    try:
        command, *arguments = make
        redis.ask(command, f"lh1:record:{{{key}}}", *arguments)
        check_refused(open_runner(f"redis://127.0.0.1:{redis.port}"), key)
    finally:
        redis.stop()


def test_zookeeper_record_without_the_node_of_its_version_is_refused(open_runner, key, kazoo):
    """It could never be replaced: `once` tried again and again, for ever."""
    runner, first = open_runner(f"zookeeper://127.0.0.1:{zookeeper.shared_server.own().port}"), record()
    assert run_sync(runner.write(key, first))
    bucket = next(bucket for bucket in kazoo.get_children("/lh1/records") if kazoo.exists(path(bucket, key)))
    kazoo.delete(f"{path(bucket, key)}/{first.version}")
    with pytest.raises(ConfigError, match="has no node of its version"):
        run_sync(runner.write(key, record(), first.version))
    assert run_sync(runner.read(key)) == first


def path(bucket: str, key: str) -> str:
    return f"/lh1/records/{bucket}/{key}"


def test_etcd_lease_that_another_program_gave_a_record_lives_on(open_runner, key):
    """It may be the one that keeps locks."""
    cluster = etcd.single_member_cluster.own()
    runner, member, first = open_runner(f"etcd://{cluster.hosts}"), cluster.members[0], record()
    lease = int(member.ask("lease/grant", TTL=600)["ID"])
    assert run_sync(runner.write(key, first))
    (name,) = (name for name in member.keys("l") if name.endswith(key))
    value = encode_base64(first.version.encode() + first.data)
    member.ask("kv/put", key=encode_base64(name.encode()), value=value, lease=lease)
    assert run_sync(runner.write(key, record(), first.version, keep=600.0))
    assert run_sync(runner.read(key)) is not None, "requests are handled in order, also that for the old lease"
    assert lease in member.leases()


def insert(runner: Any, key: str, values: str) -> None:
    connection = runner.store.connect(60.0)
    runner.store.set_timeout(connection, 60.0)
    statement = f"insert into leasehold_records (name, version, data, until) values ('{key}', {values}, null)"
    run_sync(runner.store.table.dialect.run(connection, statement, {}))
    connection.close()


@pytest.mark.parametrize("version", ["", "short", "X" * 32, VERSION.upper()])
@pytest.mark.parametrize("which", ["sqlite", "postgresql", "mysql"])
def test_row_without_a_version_is_refused_and_kept(which, url_of, open_runner, key, version):
    runner = open_runner(url_of(which))
    assert run_sync(runner.write(f"{key}-other", record())), "the table exists now"
    insert(runner, key, f"'{version}', ''")
    check_refused(runner, key)


@pytest.mark.parametrize(
    "values",
    [
        f"'{VERSION}', 5",
        f"'{VERSION}', 1000000000",  # bytes(1000000000) would take a gigabyte
        f"'{VERSION}', 1e999",
        f"'{VERSION}', '{{}}'",
        f"x'{VERSION}', x''",
        f"x'{VERSION.encode().hex()}', x''",
        f"'{VERSION}x', x''",
        f"'{VERSION}', zeroblob({MAX_DATA + 1})",
        f"zeroblob({100 << 20}), x''",
        "5, x''",
    ],
)
def test_row_of_other_types_in_a_sqlite_file_is_refused_and_kept(url_of, open_runner, key, values):
    runner = open_runner(url_of("sqlite"))
    assert run_sync(runner.write(f"{key}-other", record())), "the table exists now"
    insert(runner, key, values)
    check_refused(runner, key)


@pytest.mark.parametrize("columns", ["name text primary key, version, data, until", "name, version text, data, until"])
def test_table_of_another_program_in_a_sqlite_file_is_refused(url_of, open_runner, key, tmp_path, columns):
    path = tmp_path / "records.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"create table leasehold_records ({columns})")
        connection.execute("insert into leasehold_records values (?, ?, ?, null)", (key, VERSION, "not bytes"))
        connection.commit()
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        run_sync(open_runner(f"sqlite://{path}").read(key))


@pytest.mark.parametrize("which", ["sqlite", "redis", "postgresql", "mysql"])  # the others keep smaller ones
def test_largest_record_is_kept_whole(which, url_of, open_runner, key):
    runner, largest = open_runner(url_of(which)), Record(VERSION, os.urandom(1000) * (MAX_DATA // 1000))
    assert run_sync(runner.write(key, largest))
    assert run_sync(runner.read(key)) == largest
