"""What is MySQL's own: its URLs, wake-ups by kill, accounts, and clients without procedures."""

from __future__ import annotations

import threading
import time

import pytest

from leasehold import Client, ConfigError, Mismatch, NotAcquired, Unavailable, Unsupported, inside
from leasehold.config import EngineConfig
from leasehold.engines.mysql.meaning import MyFailed
from leasehold.engines.mysql.url import parsed
from leasehold.engines.mysql.wire import literals, packet
from leasehold.runtime.base import step
from leasehold.testing.servers.proxy import Proxy


@pytest.mark.parametrize(
    "url",
    [
        "mysql://localhost/db?nope=1",
        "mysql://localhost/db?create=maybe",
        "mysql://localhost/db?procedures=maybe",
        "mysql://localhost/" + "x" * 65,
        "mysql://localhost/db%00",
        "mysql://user:s3cret@[::1/db",
        "mysql://user:s3cret@host:port/db",
        "mysql://a:1,b:2/db",
    ],
)
def test_a_url_that_cannot_work_is_refused_when_the_client_is_made(url) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert "s3cret" not in str(caught.value)


def test_what_a_url_says() -> None:
    def options(url: str):
        return parsed(EngineConfig.parse(url, 5.0))

    one = options("mysql://u:p%40ss@h:7/a%20b?ssl_ca=/ca.pem&create=no")
    assert (one.target.host, one.target.port, one.database, one.create) == ("h", 7, "a b", False)
    assert one.target.arguments["password"] == b"p@ss"
    assert one.target.arguments["ssl_verify_cert"] is one.target.arguments["ssl_verify_identity"] is True
    assert options("mariadb://h").database == "leasehold"
    assert options("mysql://h/d?ssl_ca=x&ssl_verify_identity=no").target.arguments["ssl_verify_identity"] is False
    assert options("mysql://h/d?unix_socket=/s").target.path == "/s"
    assert "p@ss" not in repr(one)


def test_values_on_their_way() -> None:
    assert literals(["a'b", 7, True, None, ""]) == [b"x'612762'", b"7", b"1", b"null", b"x''"]
    assert literals([["a", "b"], [1, 2], 5]) == [b"""'[["61",1],["62",2]]'""", b"5"]
    assert packet(b"call p", [1]) == b"\x0a\0\0\0\x03call p(1)"
    long = packet(b"x" * 0xFFFFFF, [])  # goes on in a second packet
    assert long[:4] == b"\xff\xff\xff\0"
    assert long[4 + 0xFFFFFF :] == b"\x01\0\0\x01x"


# ------------------------------------------------------------------ wake-ups


def test_accounts_wake_each_other_with_no_right_to_kill(mysql, until) -> None:
    """The sleep and the kill are both inside procedures, and have the rights of whoever made them."""
    with Client(mysql.url()) as owner:
        owner.inspect()
    urls = [mysql.role("one"), mysql.role("two")]
    got: list[float] = []
    with Client(urls[0], ttl=60) as one, Client(urls[1], ttl=60) as two:
        lease = one.lock("job").acquire()

        def wait() -> None:
            with two.lock("job", wait=60):
                got.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: [each.state for each in one.inspect()] == ["held", "waiting"])
        began = time.monotonic()
        lease.release()
        thread.join(60)
        assert got[0] - began < 2.5, "woken, not found by its own look after 5 s"


def test_a_row_from_before_a_restart_ends_nobody_elses_statement(mysql, bare) -> None:
    """Only a session that holds the user lock of an address is hit: here nobody does, whatever its number was."""
    one = bare(mysql.url())
    held = one.takes(one.claim())
    waiter = one.claim(queue=True)
    one.attempt(waiter)
    mysql.ask("update {s}.lh_waiter set client = 'ffffffffffffffff'")  # of a client long gone
    with mysql.server.connect() as stranger, stranger.cursor() as cursor:
        thread = threading.Thread(target=lambda: cursor.execute("select sleep(1)"))
        thread.start()
        assert one.release(held)
        thread.join(30)
        assert cursor.fetchall() == ((0,),), "its sleep was not cut short"
    assert [each.state for each in step(one.engine.inspect("", "", False, one.by()))] == ["passed over"]


def test_a_proof_of_life_that_ended_is_made_again(mysql, until) -> None:
    with Client(mysql.named("mortal"), ttl=60) as client, Client(mysql.url(), ttl=60) as other:
        client.inspect()
        lease = other.lock("job").acquire()
        with pytest.raises(NotAcquired):
            client.lock("job", wait=1).acquire()
        ear = client._desk.book.shelf["mysql"]
        before = ear.address
        assert before
        mysql.server.run(f"kill {ear._beside.number}")
        until(lambda: not ear._lives() or not ear.address)  # seen from here, or by the ear itself before
        with pytest.raises(NotAcquired):
            client.lock("job", wait=1).acquire()
        assert ear.address not in ("", before)
        lease.release()


# --------------------------------------------------------- without procedures


@pytest.fixture
def plain(mysql):
    """The URL of an account that may have tables, and no procedures."""
    mysql.newcomer("poor")
    mysql.server.run(f"create database `{mysql.schema}`")
    mysql.server.run(f"grant create, index, select, insert, update, delete on `{mysql.schema}`.* to poor")
    return mysql.url("poor", procedures="no")


def test_without_procedures_there_are_locks_and_nothing_else(plain, mysql) -> None:
    with Client(mysql.url("poor")) as client, pytest.raises(ConfigError, match="procedures=no"):
        client.lock("job").acquire()
    with Client(plain) as client, Client(plain) as other:
        traits = client.traits
        assert (traits.shared, traits.max_limit, traits.fair, traits.push) == (False, 1, False, False)
        for build in (lambda: client.semaphore("job", 2), lambda: client.rwlock("job").read()):
            with pytest.raises(Unsupported):
                build()
        with client.lock("job", ttl=60) as lease:
            lease.renew()
            lease.verify()
            assert other.lock("job").try_acquire() is None
            with pytest.raises(Unsupported), mysql.server.connect() as connection:
                inside.check(lease, connection)
        with other.lock("job", wait=10) as after:
            assert after.token > lease.token
    assert mysql.ask("select count(*) from {s}.lh_grant") == [(0,)]


@pytest.mark.parametrize("name", ["a`b", "percent%s", "{db}", "semi;colon"])
def test_without_procedures_in_a_database_of_any_name(mysql, name) -> None:
    mysql.schema = name
    with Client(mysql.url(procedures="no")) as client, client.lock("job") as lease:
        lease.renew()


def test_the_two_kinds_of_client_exclude_each_other(plain, mysql, until) -> None:
    with Client(plain, ttl=60) as poor, Client(mysql.url(), ttl=60) as rich:
        with rich.lock("job"):
            assert poor.lock("job").try_acquire() is None
        lease = poor.lock("job").acquire()
        assert rich.lock("job").try_acquire() is None
        got: list[int] = []
        looked = threading.Event()

        def wait() -> None:
            with rich.lock("job", wait=60) as taken:
                got.append(taken.token)
                looked.wait(30)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: [each.state for each in rich.inspect()] == ["held", "waiting"])
        lease.release()
        assert poor.lock("job").try_acquire() is None, "whoever stands in line is not passed"
        looked.set()
        thread.join(60)
        assert got[0] > lease.token


def test_the_two_kinds_of_client_stand_in_one_line(plain, mysql, until) -> None:
    """Whoever has procedures gives those without their turn, and takes the place behind them."""
    with Client(plain, ttl=60) as poor, Client(mysql.url(), ttl=60) as rich:
        lease = rich.lock("job").acquire()
        got: list[str] = []

        def wait(client: Client, who: str) -> None:
            with client.lock("job", wait=60):
                got.append(who)

        threads = []
        for client, who in ((poor, "poor"), (rich, "rich")):
            threads.append(threading.Thread(target=wait, args=(client, who)))
            threads[-1].start()
            until(lambda: len(poor.inspect()) == len(threads) + 1)
        assert [each.state for each in poor.inspect()] == ["held", "waiting", "waiting"]
        lease.release()
        for thread in threads:
            thread.join(60)
        assert got == ["poor", "rich"]
        until(lambda: not poor.inspect())
        with rich.semaphore("job", 3), pytest.raises(Mismatch):
            poor.lock("job").try_acquire()
    tables = ("lh_grant", "lh_waiter", "lh_line")
    assert [mysql.ask(f"select count(*) from {{s}}.{table}") for table in tables] == [[(0,)]] * 3


# -------------------------------------------------------------------- errors


def test_a_call_that_somebody_killed_is_unknown_and_taken_back(mysql, until) -> None:
    with Client(mysql.named("victim"), ttl=60, call_timeout=20) as client:
        client.lock("job").acquire().release()
        errors: list[BaseException] = []

        def take() -> None:
            try:
                client.lock("job", wait=0).acquire()
            except BaseException as error:
                errors.append(error)

        with mysql.frozen():
            thread = threading.Thread(target=take)
            thread.start()
            until(lambda: mysql.blocked("victim"), every=0.2)
            ((number,),) = mysql.ask(
                "select trx_mysql_thread_id from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"
            )
            mysql.server.run(f"kill query {number}")
            thread.join(30)
        assert [type(error).__name__ for error in errors] == ["Unavailable"]
        until(
            lambda: not mysql.ask("select 1 from information_schema.innodb_trx"), every=0.2
        )  # nothing of it is left open
        with client.lock("job", wait=20) as lease:
            assert lease.held


def test_no_password_is_shown_and_none_is_needed_twice(mysql) -> None:
    mysql.server.run("create user `kéy` identified by 'pä$$ w'")
    mysql.server.run("grant all on *.* to `kéy`")
    try:
        with Client(mysql.url("k%C3%A9y".replace("%C3%A9", "é") + ":p%C3%A4$$ w".replace("%C3%A4", "ä"))) as client:
            client.ping()
        with Client(mysql.url("kéy:wrong")) as client, pytest.raises(ConfigError) as refused:
            client.ping()
        assert "wrong" not in str(refused.value)
    finally:
        mysql.server.run("drop user `kéy`")


def test_statement_logging_is_said_to_be_the_trouble(mysql) -> None:
    assert "binlog_format" in str(MyFailed(1665, "Cannot execute statement").meaning())


def test_a_server_that_says_nonsense_is_unavailable(mysql) -> None:
    """Bytes changed on their way: no half of an answer is believed."""
    proxy = Proxy(mysql.server.port)
    with Client(mysql.url()) as first:
        first.inspect()
    try:
        with Client(mysql.url(port=proxy.port), call_timeout=3) as client:
            client.ping()
            session = client._desk.engine()._lane._session
            session._buffer += b"\x05\0\0\x01\x01\xfc\xff"  # as if it had come before
            with pytest.raises(Unavailable):
                client.lock("job").acquire()
            with client.lock("other") as lease:
                assert lease.held
    finally:
        proxy.close()
