"""What only MySQL has: its URLs, wake-ups by kill, accounts, and clients without procedures."""

from __future__ import annotations

import threading
import time

import pytest

from harness.servers.proxy import Proxy
from leasehold import Client, ConfigError, LeaseLost, Mismatch, NotAcquired, Unavailable, Unsupported, transaction
from leasehold.config import EngineConfig
from leasehold.engines.mysql.errors import MyServerError
from leasehold.engines.mysql.session import literals, packet
from leasehold.engines.mysql.url import parse_url
from leasehold.runtime.base import run_sync


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
def test_invalid_url_is_refused_when_the_client_is_built(url) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert "s3cret" not in str(caught.value)


def test_url_is_parsed_into_connection_options() -> None:
    def options(url: str):
        return parse_url(EngineConfig.parse(url, 5.0))

    parsed_url = options("mysql://u:p%40ss@h:7/a%20b?ssl_ca=/ca.pem&create=no")
    assert (parsed_url.target.host, parsed_url.target.port, parsed_url.database, parsed_url.create) == (
        "h",
        7,
        "a b",
        False,
    )
    assert parsed_url.target.arguments["password"] == b"p@ss"
    assert parsed_url.target.arguments["ssl_verify_cert"] is parsed_url.target.arguments["ssl_verify_identity"] is True
    assert options("mariadb://h").database == "leasehold"
    assert options("mysql://h/d?ssl_ca=x&ssl_verify_identity=no").target.arguments["ssl_verify_identity"] is False
    assert options("mysql://h/d?unix_socket=/s").target.path == "/s"
    assert "p@ss" not in repr(parsed_url)


def test_values_are_encoded_as_literals_and_packets() -> None:
    assert literals(["a'b", 7, True, None, ""]) == [b"x'612762'", b"7", b"1", b"null", b"x''"]
    assert literals([["a", "b"], [1, 2], 5]) == [b"""'[["61",1],["62",2]]'""", b"5"]
    assert packet(b"call p", [1]) == b"\x0a\0\0\0\x03call p(1)"
    long = packet(b"x" * 0xFFFFFF, [])  # continues in a second packet
    assert long[:4] == b"\xff\xff\xff\0"
    assert long[4 + 0xFFFFFF :] == b"\x01\0\0\x01x"


# ------------------------------------------------------------------ wake-ups


def test_accounts_without_kill_privilege_wake_each_other(mysql, wait_until) -> None:
    """The sleep and the kill both run inside procedures, with the rights of the account that created them."""
    with Client(mysql.url()) as owner:
        owner.inspect()
    urls = [mysql.create_granted_role("one"), mysql.create_granted_role("two")]
    got: list[float] = []
    with Client(urls[0], ttl=60) as one, Client(urls[1], ttl=60) as two:
        lease = one.lock("job").acquire()

        def wait() -> None:
            with two.lock("job", wait=60):
                got.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: [each.state for each in one.inspect()] == ["held", "waiting"])
        began = time.monotonic()
        lease.release()
        thread.join(60)
        assert got[0] - began < 2.5, "the waiter was woken before its re-check after 5 s"


def test_stale_waiter_row_kills_no_foreign_statement(mysql, make_driver) -> None:
    """The kill hits only a session that holds the user lock of the address. Here no session holds it."""
    driver = make_driver(mysql.url())
    held = driver.acquire(driver.claim())
    waiter = driver.claim(queue=True)
    driver.attempt(waiter)
    mysql.ask("update {s}.lh_waiter set client = 'ffffffffffffffff'")  # a client that ended long ago
    with mysql.server.connect() as stranger, stranger.cursor() as cursor:
        thread = threading.Thread(target=lambda: cursor.execute("select sleep(1)"))
        thread.start()
        assert driver.release(held)
        thread.join(30)
        assert cursor.fetchall() == ((0,),), "the stranger's sleep was not cut short"
    assert [each.state for each in run_sync(driver.engine.inspect("", "", False, driver.deadline()))] == ["passed over"]


def test_killed_liveness_session_is_reopened(mysql, wait_until) -> None:
    with Client(mysql.named_url("mortal"), ttl=60) as client, Client(mysql.url(), ttl=60) as other:
        client.inspect()
        lease = other.lock("job").acquire()
        with pytest.raises(NotAcquired):
            client.lock("job", wait=1).acquire()
        listener = client._core.registry.shared["mysql"]
        before = listener.address
        assert before
        mysql.server.run(f"kill {listener._liveness_session.connection_id}")
        wait_until(
            lambda: not listener._is_liveness_session_alive() or not listener.address
        )  # noticed here, or earlier by the listener
        with pytest.raises(NotAcquired):
            client.lock("job", wait=1).acquire()
        assert listener.address not in ("", before)
        lease.release()


@pytest.mark.parametrize("delay", [0, 30])
@pytest.mark.parametrize("procedures", ["yes", "no"])
def test_renewal_of_a_broken_lease_says_broken(mysql, procedures, delay) -> None:
    url = mysql.url(procedures=procedures)
    with Client(url, ttl=60) as holder, Client(url) as operator:
        leases = [holder.lock(f"job-{number}", delay=delay).acquire() for number in range(3)]
        for lease in leases:
            assert operator.break_lock(lease.name, token=lease.token)
        for lease in leases:
            with pytest.raises(LeaseLost):
                lease.renew()
            assert lease.lost_reason == "broken"
        vanished = holder.lock("vanished").acquire()
        mysql.ask("delete from {s}.lh_grant")
        with pytest.raises(LeaseLost):
            vanished.renew()
        assert vanished.lost_reason == "unknown", "no operator broke it"


def test_renewal_says_broken_for_every_permit_of_one_name(mysql) -> None:
    with Client(mysql.url(), ttl=60) as holder:
        leases = [holder.semaphore("job", 16).acquire() for _ in range(16)]
        for lease in leases:
            assert holder.break_lock("job", token=lease.token)
        for lease in leases:
            with pytest.raises(LeaseLost):
                lease.renew()
        assert {lease.lost_reason for lease in leases} == {"broken"}


# --------------------------------------------------------- without procedures


@pytest.fixture
def no_procedures_url(mysql):
    """The URL of an account that may create tables but no procedures."""
    mysql.create_login_role("poor")
    mysql.server.run(f"create database `{mysql.schema}`")
    mysql.server.run(f"grant create, index, select, insert, update, delete on `{mysql.schema}`.* to poor")
    return mysql.url("poor", procedures="no")


def test_client_without_procedures_supports_only_locks(no_procedures_url, mysql) -> None:
    with Client(mysql.url("poor")) as client, pytest.raises(ConfigError, match="procedures=no"):
        client.lock("job").acquire()
    with Client(no_procedures_url) as client, Client(no_procedures_url) as other:
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
                transaction.check(lease, connection)
        with other.lock("job", wait=10) as after:
            assert after.token > lease.token
    assert mysql.ask("select count(*) from {s}.lh_grant") == [(0,)]


@pytest.mark.parametrize("name", ["a`b", "percent%s", "{db}", "semi;colon"])
def test_client_without_procedures_works_with_any_database_name(mysql, name) -> None:
    mysql.schema = name
    with Client(mysql.url(procedures="no")) as client, client.lock("job") as lease:
        lease.renew()


def test_clients_with_and_without_procedures_exclude_each_other(no_procedures_url, mysql, wait_until) -> None:
    with Client(no_procedures_url, ttl=60) as plain_client, Client(mysql.url(), ttl=60) as procedure_client:
        with procedure_client.lock("job"):
            assert plain_client.lock("job").try_acquire() is None
        lease = plain_client.lock("job").acquire()
        assert procedure_client.lock("job").try_acquire() is None
        got: list[int] = []
        checked = threading.Event()

        def wait() -> None:
            with procedure_client.lock("job", wait=60) as taken:
                got.append(taken.token)
                checked.wait(30)

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: [each.state for each in procedure_client.inspect()] == ["held", "waiting"])
        lease.release()
        assert plain_client.lock("job").try_acquire() is None, "an attempt does not overtake the waiter"
        checked.set()
        thread.join(60)
        assert got[0] > lease.token


def test_clients_with_and_without_procedures_share_one_queue(no_procedures_url, mysql, wait_until) -> None:
    """A client with procedures grants to waiters without procedures in order, and queues behind them."""
    with Client(no_procedures_url, ttl=60) as plain_client, Client(mysql.url(), ttl=60) as procedure_client:
        lease = procedure_client.lock("job").acquire()
        got: list[str] = []

        def wait(client: Client, who: str) -> None:
            with client.lock("job", wait=60):
                got.append(who)

        threads = []
        for client, who in ((plain_client, "poor"), (procedure_client, "rich")):
            threads.append(threading.Thread(target=wait, args=(client, who)))
            threads[-1].start()
            wait_until(lambda: len(plain_client.inspect()) == len(threads) + 1)
        assert [each.state for each in plain_client.inspect()] == ["held", "waiting", "waiting"]
        lease.release()
        for thread in threads:
            thread.join(60)
        assert got == ["poor", "rich"]
        wait_until(lambda: not plain_client.inspect())
        with procedure_client.semaphore("job", 3), pytest.raises(Mismatch):
            plain_client.lock("job").try_acquire()
    tables = ("lh_grant", "lh_waiter", "lh_queue")
    assert [mysql.ask(f"select count(*) from {{s}}.{table}") for table in tables] == [[(0,)]] * 3


# -------------------------------------------------------------------- errors


def test_killed_call_is_unavailable_and_taken_back(mysql, wait_until) -> None:
    with Client(mysql.named_url("victim"), ttl=60, call_timeout=20) as client:
        client.lock("job").acquire().release()
        errors: list[BaseException] = []

        def take() -> None:
            try:
                client.lock("job", wait=0).acquire()
            except BaseException as error:
                errors.append(error)

        with mysql.lock_all_buckets():
            thread = threading.Thread(target=take)
            thread.start()
            wait_until(lambda: mysql.is_blocked("victim"), every=0.2)
            ((number,),) = mysql.ask(
                "select trx_mysql_thread_id from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"
            )
            mysql.server.run(f"kill query {number}")
            thread.join(30)
        assert [type(error).__name__ for error in errors] == ["Unavailable"]
        wait_until(
            lambda: not mysql.ask("select 1 from information_schema.innodb_trx"), every=0.2
        )  # the killed call left no transaction open
        with client.lock("job", wait=20) as lease:
            assert lease.held


def test_non_ascii_password_works_and_a_wrong_one_is_not_shown(mysql) -> None:
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


def test_statement_based_logging_is_named_in_the_error(mysql) -> None:
    assert "binlog_format" in str(MyServerError(1665, "Cannot execute statement").classify())


def test_malformed_reply_is_unavailable(mysql) -> None:
    """If bytes change in transit, the client trusts no part of the reply."""
    proxy = Proxy(mysql.server.port)
    with Client(mysql.url()) as first:
        first.inspect()
    try:
        with Client(mysql.url(port=proxy.port), call_timeout=3) as client:
            client.ping()
            session = client._core.engine()._connection._session
            session._buffer += b"\x05\0\0\x01\x01\xfc\xff"  # as if the server had sent it earlier
            with pytest.raises(Unavailable):
                client.lock("job").acquire()
            with client.lock("other") as lease:
                assert lease.held
    finally:
        proxy.close()
