"""URLs of stores: their options, their secrets, and servers that are not what the URL suggests."""

import socket
import threading
import time
import uuid
from urllib.parse import quote

import pytest

from harness.rigs import postgresql
from harness.servers.postgresql import PgBouncer, PostgreSQL
from harness.servers.redis import RedisServer
from leasehold import Client, ConfigError, Unavailable
from leasehold.records.store import Record
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.rig import Absent
from tests.support.timing import check_elapsed


def record(data: bytes = b"data") -> Record:
    return Record(uuid.uuid4().hex, data)


def test_postgresql_store_works_behind_pooler_in_transaction_mode(open_runner, key):
    """The pooler shares sessions: a statement prepared in one is missing in the next."""
    try:
        pooler = PgBouncer(postgresql.server()).start()
    except Absent as absent:
        pytest.skip(str(absent))
    runner, errors = open_runner(f"postgresql://postgres@127.0.0.1:{pooler.port}/postgres"), []

    def use(number: int) -> None:
        expected_version = ""
        for _ in range(20):
            new = record()
            try:
                assert run_sync(runner.write(f"{key}/{number}", new, expected_version))
                assert run_sync(runner.read(f"{key}/{number}")) == new
            except Exception as error:
                errors.append(error)
                return
            expected_version = new.version

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    runner.store.close()
    pooler.stop()
    assert errors == []


def test_postgresql_store_uses_the_host_that_is_no_standby(open_runner, key):
    """A standby may lack the last records, and no record can be written there."""
    try:
        primary = PostgreSQL().start()
    except Absent as absent:
        pytest.skip(str(absent))
    standby = primary.standby().start()
    try:
        runner = open_runner(f"postgresql://postgres@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/postgres")
        assert run_sync(runner.read(key)) is None
        assert run_sync(runner.write(key, new := record()))
        assert run_sync(runner.read(key)) == new
    finally:
        standby.kill()
        primary.kill()


def test_postgresql_store_does_without_a_host_that_has_no_address(open_runner, key, monkeypatch):
    """`getaddrinfo` says so at once here; a real name server may take longer."""
    port = postgresql.server.own().port

    def getaddrinfo(host: str, *rest: object, **more: object) -> object:
        if host == "gone.example":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return lookup(host, *rest, **more)

    lookup = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    runner = open_runner(f"postgresql://postgres@gone.example,localhost/postgres?port={port}")
    assert run_sync(runner.read(key)) is None


def test_postgresql_store_passes_options_with_spaces_on(url_of, open_runner, key):
    runner = open_runner(f"{url_of('postgresql')}?options=-c%20application_name%3Dshop1")
    assert run_sync(runner.read(key)) is None
    assert postgresql.server.own().ask("select 1 from pg_stat_activity where application_name = 'shop1'")


def test_mysql_store_signs_in_with_a_password_beyond_ascii(url_of, server, open_runner, key):
    mariadb, url = server("mysql").server, url_of("mysql")
    mariadb.run("create or replace user 'beyond' identified by 'naïve €'", "grant all on test.* to 'beyond'")
    try:
        runner = open_runner(url.replace("//t:t@", f"//beyond:{quote('naïve €')}@"))
        assert run_sync(runner.read(key)) is None
    finally:
        mariadb.run("drop user 'beyond'")


@pytest.mark.parametrize("scheme", ["redlock", "http"])
def test_scheme_without_store_is_refused_with_a_hint(scheme, open_runner):
    with pytest.raises(ConfigError, match=r"keeps no records.*store=.*postgresql://") as refused:
        open_runner(f"{scheme}://user:s3cret@a:1,b:2/0")
    assert "s3cret" not in str(refused.value)


def test_redis_unix_socket_keeps_records_in_database_of_the_url(tmp_path):
    path = tmp_path / "redis.sock"
    running = RedisServer("--unixsocket", str(path)).start()
    try:
        with Client(f"redis+unix://{path}?db=3") as client:
            assert client.once("a", lambda: 1) == 1
            assert client.once("a", lambda: 2) == 1
        assert running.ask("EXISTS", "lh1:record:{once::a}") == 0, "the record must be in the database of the URL"
        assert running.ask("INFO", "keyspace").count(b"db3:") == 1
    finally:
        running.stop()


@pytest.mark.parametrize("scheme", ["redis", "rediss", "etcd", "zookeeper", "redis+cluster", "mysql", "postgresql"])
@pytest.mark.parametrize("secret", ["s3cret/x", "s3cret#x", "x:s3cret", "s3cret?y=1", "[s3cret"])
def test_unencoded_password_in_url_is_not_shown(scheme, secret, open_runner):
    """The URL parser ends the password at a special character and reads the rest as another part, which the error
    quotes."""
    message = ""
    try:
        open_runner(f"{scheme}://user:{secret}@localhost:70000/0")
    except ConfigError as refused:
        message = f"{refused} {refused.__cause__}"
    assert "s3cret" not in message


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel", "etcd", "zookeeper", "mysql", "postgresql"])
def test_silent_server_is_unavailable_within_call_timeout(scheme, open_runner, key, mode):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        runner = open_runner(f"{scheme}://user:pw@127.0.0.1:{listener.getsockname()[1]}/0", mode, 0.5)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            runner.run(runner.read(key))
        check_elapsed(began, 5, "not the timeout of the driver, but that of the call")
