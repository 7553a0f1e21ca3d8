"""Every store keeps S1 to S4, in blocking mode and under asyncio, on its real server."""

import os
import re
import threading
import time
from contextlib import suppress

import pytest

from leasehold import Client, ConfigError, Unavailable
from leasehold.records import stores
from leasehold.records.store import Record
from leasehold.runtime.base import maybe_await, run_sync
from tests.records.stores.conftest import PERSISTENT, SERVERS
from tests.support import probe_records
from tests.support.timing import check_elapsed


def record(text: bytes = b"data") -> Record:
    return Record(os.urandom(16).hex(), text)


def test_record_is_written_read_and_replaced(runner, key):
    async def work():
        assert await runner.read(key) is None
        first, second = record(b"one"), record(b"two \x00\xff'%s:key")
        assert await runner.write(key, first)
        assert await runner.read(key) == first
        assert await runner.write(key, second, first.version)
        assert await runner.read(key) == second

    runner.run(work())


def test_write_over_another_version_changes_nothing(runner, key):
    async def work():
        first = record()
        assert not await runner.write(key, record(), first.version), "there is no record to replace"
        assert await runner.read(key) is None
        assert await runner.write(key, first)
        assert not await runner.write(key, record()), "there is a record already"
        assert not await runner.write(key, record(), record().version), "the record has another version"
        assert await runner.read(key) == first

    runner.run(work())


def test_record_expires_after_its_keep_time(runner, key):
    async def work():
        old, new = record(b"old"), record(b"new")
        assert await runner.write(key, old, keep=1.0)
        assert await runner.read(key) == old
        end = time.monotonic() + 60
        while await runner.read(key) is not None:
            assert time.monotonic() < end
            await runner.runtime.sleep(0.01)
        assert not await runner.write(key, record(), old.version), "an expired record is the same as no record"
        assert await runner.write(key, new)
        assert await runner.read(key) == new
        assert not await runner.write(key, record(), old.version)

    runner.run(work())


def test_keep_time_of_record_can_be_set_and_removed(runner, key):
    async def work():
        first, second = record(), record()
        assert await runner.write(key, first, keep=None)
        assert await runner.write(key, second, first.version, keep=100.0)
        assert await runner.write(key, first, second.version, keep=None)
        assert await runner.read(key) == first

    runner.run(work())


def test_store_keeps_long_keys_and_large_records(runner):
    async def work():
        name = f"once:{'%41' * 255}:{'%42' * 255}{os.urandom(16).hex()}"
        big = record(os.urandom(1_000_000))
        assert await runner.write(name, big)
        assert await runner.read(name) == big

    runner.run(work())


@pytest.mark.parametrize("existing", ["", "there"])
def test_one_of_many_concurrent_writers_wins(kind, key, url_of, open_runner, existing):
    runners = [open_runner(url_of(kind)) for _ in range(4)]
    first = record()
    if existing:
        assert run_sync(runners[0].write(key, first))
    barrier, winners = threading.Barrier(16), []

    def write_once(runner):
        mine = record()
        barrier.wait(60)
        if run_sync(runner.write(key, mine, first.version if existing else "")):
            winners.append(mine)

    threads = [threading.Thread(target=write_once, args=(runners[number % 4],)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(winners) == 1
    assert run_sync(runners[0].read(key)) == winners[0]


def test_expired_records_are_removed(kind, url_of, open_runner, monkeypatch):
    runner = open_runner(url_of(kind))
    # otherwise one write in sixteen sweeps
    monkeypatch.setattr(probe_records.runtime_of(runner.store), "random", lambda: 0.0)
    names = [f"test:{os.urandom(8).hex()}" for _ in range(3)]
    for name in names:
        assert run_sync(runner.write(name, record(), keep=0.05))
    end = time.monotonic() + 60
    while any(run_sync(runner.read(name)) for name in names):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert run_sync(runner.write(f"test:{os.urandom(8).hex()}", record()))
    if hasattr(runner.store, "table"):
        from leasehold.records.stores.sql import TABLE

        connection = runner.store.connect(5.0)
        runner.store.set_timeout(connection, 5.0)
        rows, _ = run_sync(runner.store.table.dialect.run(connection, f"select name from {TABLE}", {}))
        connection.close()
        assert not {row[0] for row in rows} & set(names)


# -------------------------------------------------------- when the store cannot tell


@pytest.mark.extended  # the first call has two seconds, too
@pytest.mark.parametrize("which", SERVERS)
def test_silent_network_is_unavailable_in_time_and_store_reconnects(which, server, open_runner, mode, key):
    path = server(which).path()
    try:
        runner = open_runner(path.url, mode, 2.0)

        async def work():
            assert await runner.write(key, record())
            path.cut()
            for call in (lambda: runner.read(key), lambda: runner.write(key, record())):
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    await call()
                check_elapsed(began, 2 + 6, "one call, not one timeout after another")
            path.restore()
            assert await runner.read(key) is not None, "the store reconnects"

        runner.run(work())
    finally:
        path.close()


@pytest.mark.parametrize("which", PERSISTENT)
def test_server_restart_loses_no_record(which, server, url_of, open_runner, key):
    runner = open_runner(url_of(which))
    first = record()
    assert run_sync(runner.write(key, first))
    server(which).restart()
    with suppress(Unavailable):  # some drivers notice before they send
        run_sync(runner.read(key))
    assert run_sync(runner.read(key)) == first


@pytest.mark.parametrize("which", ["sqlite", *SERVERS])
def test_forked_child_uses_its_own_connections(which, url_of, open_runner, key):
    runner = open_runner(url_of(which))
    first, second = record(), record()
    assert run_sync(runner.write(key, first))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = (
                0 if run_sync(runner.read(key)) == first and run_sync(runner.write(key, second, first.version)) else 2
            )
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run_sync(runner.read(key)) == second, "the parent's connection still works"


# ------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "url",
    [
        "etcd://localhost?color=red",
        "zookeeper://localhost?color=red",
        "redis+cluster://localhost/7",
        "redis+sentinel://localhost",
        "redis://localhost?color=red",
        "mysql://localhost",
        "mysql://localhost:port/x",
        "sqlite://relative.db",
    ],
)
def test_invalid_url_is_refused_at_once_without_its_password(url, open_runner):
    url = url.replace("localhost", "user:s3cret@localhost") if "localhost" in url else url
    with pytest.raises(ConfigError) as refused:
        open_runner(url)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("which", ["postgresql", "mysql"])
def test_denied_login_is_reported_without_the_password(which, url_of, open_runner, key):
    url = url_of(which)
    wrong = url.replace("postgres@", "nobody:s3cret@") if which == "postgresql" else url.replace("t:t@", "t:s3cret@")
    with pytest.raises((ConfigError, Unavailable)) as refused:  # libpq gives no error code for a failed connection
        run_sync(open_runner(wrong).read(key))
    assert re.search("nobody|Access denied", str(refused.value))
    assert "s3cret" not in str(refused.value)


def test_sqlite_store_refuses_file_that_is_not_a_database(tmp_path, open_runner, key):
    path = tmp_path / "records.db"
    path.write_bytes(b"this is no database, and long enough to be seen as such" * 20)
    with pytest.raises(ConfigError, match="not a database"):
        run_sync(open_runner(f"sqlite://{path}").read(key))


def test_engine_options_in_url_are_ignored_only_for_shared_url(tmp_path):
    url = f"sqlite://{tmp_path}/locks.db?durable=no"
    with Client(url) as client:
        store = stores.open_store(client, None)
        assert run_sync(maybe_await(store.write("a:b", record(), "", None, 1.0)))
        assert (tmp_path / "locks.db.records").exists()
        assert not (tmp_path / "locks.db").exists()
        with pytest.raises(ConfigError):
            stores.open_store(client, url)


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql", "mysql"])
def test_schema_is_returned_as_text(dialect):
    assert stores.schema(dialect).count("leasehold_records") >= 2
    with pytest.raises(ConfigError):
        stores.schema("oracle")
