"""Every store keeps S1 to S4: in blocking mode and under asyncio, on its real server."""

import os
import re
import threading
import time
from contextlib import suppress

import pytest

from leasehold import ConfigError, Unavailable, stores
from leasehold.config import EngineConfig
from leasehold.runtime.base import settle, step
from leasehold.runtime.threads import Threads
from leasehold.store import Record
from leasehold.testing.servers.proxy import Proxy


def record(text: bytes = b"data") -> Record:
    return Record(os.urandom(16).hex(), text)


def test_a_record_is_written_read_and_replaced(bench, key):
    async def work():
        assert await bench.read(key) is None
        first, second = record(b"one"), record(b"two \x00\xff'%s:key")
        assert await bench.write(key, first)
        assert await bench.read(key) == first
        assert await bench.write(key, second, first.edition)
        assert await bench.read(key) == second

    bench.run(work())


def test_a_write_over_another_edition_changes_nothing(bench, key):
    async def work():
        first = record()
        assert not await bench.write(key, record(), first.edition), "there is no record to replace"
        assert await bench.read(key) is None
        assert await bench.write(key, first)
        assert not await bench.write(key, record()), "there is one"
        assert not await bench.write(key, record(), record().edition), "another one"
        assert await bench.read(key) == first

    bench.run(work())


def test_a_record_is_over_when_its_time_is(bench, key):
    async def work():
        old, new = record(b"old"), record(b"new")
        assert await bench.write(key, old, keep=1.0)
        assert await bench.read(key) == old
        end = time.monotonic() + 10
        while await bench.read(key) is not None:
            assert time.monotonic() < end
            await bench.runtime.sleep(0.01)
        assert not await bench.write(key, record(), old.edition), "as if it had never been"
        assert await bench.write(key, new)
        assert await bench.read(key) == new
        assert not await bench.write(key, record(), old.edition)

    bench.run(work())


def test_a_record_kept_for_ever_may_get_an_end_and_lose_it(bench, key):
    async def work():
        first, second = record(), record()
        assert await bench.write(key, first, keep=None)
        assert await bench.write(key, second, first.edition, keep=100.0)
        assert await bench.write(key, first, second.edition, keep=None)
        assert await bench.read(key) == first

    bench.run(work())


def test_long_keys_and_a_megabyte(bench):
    async def work():
        name = f"once:{'%41' * 255}:{'%42' * 255}{os.urandom(16).hex()}"
        big = record(os.urandom(1_000_000))
        assert await bench.write(name, big)
        assert await bench.read(name) == big

    bench.run(work())


@pytest.mark.parametrize("was", ["", "there"])
def test_of_many_writers_one_wins(kind, key, url_of, opened, was):
    benches = [opened(url_of(kind)) for _ in range(4)]
    first = record()
    if was:
        assert step(benches[0].write(key, first))
    barrier, won = threading.Barrier(16), []

    def one(bench):
        mine = record()
        barrier.wait(60)
        if step(bench.write(key, mine, first.edition if was else "")):
            won.append(mine)

    threads = [threading.Thread(target=one, args=(benches[number % 4],)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1
    assert step(benches[0].read(key)) == won[0]


def test_records_that_are_over_are_removed(kind, url_of, opened, monkeypatch):
    bench = opened(url_of(kind))
    monkeypatch.setattr(bench.runtime, "fraction", lambda: 0.0)  # else one new record in sixteen looks
    names = [f"test:{os.urandom(8).hex()}" for _ in range(3)]
    for name in names:
        assert step(bench.write(name, record(), keep=0.05))
    end = time.monotonic() + 10
    while any(step(bench.read(name)) for name in names):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert step(bench.write(f"test:{os.urandom(8).hex()}", record()))
    if hasattr(bench.store, "table"):
        from leasehold.stores.sql import TABLE, ask

        connection = bench.store.connect(5.0)
        bench.store.bound(connection, 5.0)
        rows, _ = step(ask(connection, f"select name from {TABLE}", {}))
        connection.close()
        assert not {row[0] for row in rows} & set(names)


# --------------------------------------------------------------- when it cannot tell

SERVERS = ["redis", "postgresql", "mysql"]


@pytest.mark.parametrize("which", SERVERS)
def test_a_silent_network_ends_in_time(which, server, opened, mode, key):
    proxy = Proxy(server(which).port)
    try:
        bench = opened(server(which).url(port=proxy.port), mode, 2.0)

        async def work():
            assert await bench.write(key, record())
            proxy.cut()
            for verb in (lambda: bench.read(key), lambda: bench.write(key, record())):
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    await verb()
                assert time.monotonic() - began < 2.0 + 1.5
            proxy.mend()
            assert await bench.read(key) is not None, "it connects anew"

        bench.run(work())
    finally:
        proxy.close()


@pytest.mark.parametrize("which", SERVERS)
def test_a_restart_of_the_server_costs_an_answer_and_no_record(which, server, opened, key):
    bench = opened(server(which).url())
    first = record()
    assert step(bench.write(key, first))
    server(which).restart()
    with suppress(Unavailable):  # some drivers notice before they ask
        step(bench.read(key))
    assert step(bench.read(key)) == first


@pytest.mark.parametrize("which", ["sqlite", *SERVERS])
def test_a_forked_child_uses_connections_of_its_own(which, url_of, opened, key):
    bench = opened(url_of(which))
    first, second = record(), record()
    assert step(bench.write(key, first))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if step(bench.read(key)) == first and step(bench.write(key, second, first.edition)) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert step(bench.read(key)) == second, "the parent's connection lives"


# ------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "url",
    [
        "etcd://localhost",
        "redis://localhost?color=red",
        "mysql://localhost",
        "mysql://localhost:port/x",
        "sqlite://relative.db",
    ],
)
def test_what_cannot_work_is_refused_at_once_and_shows_no_password(url):
    url = url.replace("localhost", "user:s3cret@localhost") if "localhost" in url else url
    with pytest.raises(ConfigError) as refused:
        stores.opened(EngineConfig.parse(url, 5.0), Threads(), beside=False)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("which", ["postgresql", "mysql"])
def test_who_may_not_is_told_so_without_the_password(which, server, opened, key):
    url = server(which).url()
    wrong = url.replace("postgres@", "nobody:s3cret@") if which == "postgresql" else url.replace("t:t@", "t:s3cret@")
    with pytest.raises((ConfigError, Unavailable)) as refused:  # libpq tells no code of what it meets on connecting
        step(opened(wrong).read(key))
    assert re.search("nobody|Access denied", str(refused.value))
    assert "s3cret" not in str(refused.value)


def test_a_file_that_is_none_of_sqlite(tmp_path, opened, key):
    path = tmp_path / "records.db"
    path.write_bytes(b"this is no database, and long enough to be seen as such" * 20)
    with pytest.raises(ConfigError, match="not a database"):
        step(opened(f"sqlite://{path}").read(key))


def test_options_of_the_engine_are_none_of_the_stores(tmp_path):
    config = EngineConfig.parse(f"sqlite://{tmp_path}/locks.db?durable=no", 5.0)
    store = stores.opened(config, Threads(), beside=True)
    assert step(settle(store.write("a:b", record(), "", None, 1.0)))
    assert (tmp_path / "locks.db.records").exists()
    assert not (tmp_path / "locks.db").exists()
    with pytest.raises(ConfigError):
        stores.opened(config, Threads(), beside=False)


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql", "mysql"])
def test_the_schema_can_be_had_as_text(dialect):
    assert stores.schema(dialect).count("leasehold_records") >= 2
    with pytest.raises(ConfigError):
        stores.schema("oracle")
