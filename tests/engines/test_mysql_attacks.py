"""Attacks on the MySQL engine that once succeeded: calls that kept each other waiting, and settings of a server's."""

from __future__ import annotations

import ssl
import threading
import time
from contextlib import closing

import pytest

from leasehold import Client, ConfigError, NotAcquired, Unavailable
from leasehold.core.names import bucket
from leasehold.engines.mysql import schema
from leasehold.model import Busy
from leasehold.runtime.base import step
from leasehold.testing.servers.mysql import MariaDB
from leasehold.testing.servers.proxy import Proxy

# ------------------------------------------------------------------ wake-ups


def listened(client: Client, other: Client, name: str = "met"):
    """The ear of a client that has waited."""
    with other.lock(name, ttl=60), pytest.raises(NotAcquired):
        client.lock(name, wait=0.5).acquire()
    ear = client._desk.book.shelf["mysql"]
    assert ear.address
    return ear


def test_those_who_wake_one_client_do_not_keep_each_other_waiting(mysql) -> None:
    """MariaDB keeps the second of two who kill one SLEEP() waiting for 2 s, and with it all who sleep."""
    with Client(mysql.url(), call_timeout=30) as first:
        first.inspect()
    lasted: list[float] = []

    def work() -> None:
        with Client(mysql.url(), ttl=60, call_timeout=30) as client:
            for _ in range(25):
                lease = client.lock("job", wait=60).acquire()
                time.sleep(0.001)  # give the others their chance
                began = time.monotonic()
                lease.release()
                lasted.append(time.monotonic() - began)

    crowd = [threading.Thread(target=work) for _ in range(6)]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join(90)
    assert len(lasted) == 150
    assert max(lasted) < 1.8


def test_the_end_of_a_proof_of_life_is_noticed_though_nothing_says_so(mysql, until) -> None:
    """As when something between drops the one connection and not the other: the server alone knows."""
    with Client(mysql.url()) as client, Client(mysql.url()) as other:
        client.inspect()
        ear = listened(client, other)
        before = ear.address
        ear._beside.usable = lambda: True  # its end has not reached us
        mysql.server.run(f"kill {ear._beside.number}")
        until(lambda: ear.address != before, 4.0)


# --------------------------------------------------------- without procedures


def test_without_procedures_a_delay_is_waited_out_once(mysql, bare) -> None:
    """What cools ends when its delay does. Its row was taken for one that lapsed, and kept for the same time again."""
    one = bare(mysql.url(procedures="no"))
    held = one.takes(one.claim(delay=3600.0))
    assert step(one.engine.break_("", "job", held.token, one.by()))
    assert isinstance(one.attempt(one.claim()), Busy)
    mysql.ask("update {s}.lh_grant set until = until - 3600 * 1000000")
    assert one.takes(one.claim()).token > held.token


# --------------------------------------------------------------- connections


def test_no_authority_is_read_where_none_is_checked(mysql, monkeypatch) -> None:
    """It took nine tenths of every hand-shake, 20 ms: at load, with many sessions to be made anew, whole deadlines."""
    read: list[bool] = []
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: read.append(True))
    with Client(mysql.url()) as client:
        client.ping()
    assert not read


# -------------------------------------------------------------------- rights


def test_rights_taken_away_and_given_back_in_the_midst_of_a_hold(mysql, until) -> None:
    with Client(mysql.url()) as owner:
        owner.inspect()
    with Client(mysql.role("tenant"), ttl=60) as client:
        lease = client.lock("job").acquire()
        mysql.server.run("revoke all privileges, grant option from tenant")
        with pytest.raises(Unavailable):
            lease.renew()
        assert lease.held, "that somebody may not ask says nothing of what is held"
        with pytest.raises(ConfigError):
            client.lock("other").try_acquire()
        assert not lease.release(), "not confirmed: it is owed"
        mysql.server.run(*schema.statements(schema.grants("tenant", mysql.schema)))
        until(lambda: not mysql.ask("select 1 from {s}.lh_grant"))
    mysql.drop_role("tenant")


# ------------------------------------------------------------------ settings


@pytest.fixture(scope="module")
def odd():
    """A server whose defaults are none that an application would choose."""
    server = MariaDB("innodb-flush-method=nosync").start()
    with Client(f"mysql://root@127.0.0.1:{server.port}/leasehold", call_timeout=30) as client:
        client.inspect()
    yield server
    server.kill()


@pytest.mark.parametrize("procedures", ["yes", "no"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("completion_type", "'CHAIN'"),
        ("completion_type", "'RELEASE'"),
        ("sql_select_limit", "1"),
        ("max_join_size", "1"),
        ("tx_read_only", "1"),
        ("tx_isolation", "'SERIALIZABLE'"),
        ("sql_mode", "'ORACLE,NO_BACKSLASH_ESCAPES'"),
        ("autocommit", "0"),
        ("max_statement_time", "0.001"),
    ],
)
def test_no_default_of_the_servers_applies_to_us(odd, setting, value, procedures) -> None:
    ((before,),) = odd.ask(f"select @@global.{setting}")
    url = f"mysql://root@127.0.0.1:{odd.port}/leasehold?procedures={procedures}"
    with odd.connect() as operator, operator.cursor() as cursor:
        cursor.execute(f"set global {setting} = {value}")
        try:
            with Client(url, ttl=60) as client:
                leases = [client.lock(name).acquire() for name in "abc"]
                assert len(client.inspect()) == 3
                for lease in leases:
                    lease.renew()
                    assert lease.release()
        finally:
            cursor.execute(f"set global {setting} = %s", (before,))


# -------------------------------------------------------------- vanished


def test_a_client_that_vanished_in_the_midst_of_a_call_keeps_no_bucket(mysql, until) -> None:
    """The server ended its call, and that left a transaction open in a session nobody would ever hang up on: for the
    hours until the system's probes find out."""
    neighbour = next(name for name in map(str, range(20_000)) if bucket(name) == bucket("job"))
    with (
        Client(mysql.url(), ttl=60, call_timeout=2) as client,
        closing(Proxy(mysql.server.port)) as proxy,
        closing(mysql.server.connect(autocommit=False)) as session,
    ):
        client.inspect()
        gone = Client(mysql.url(port=proxy.port, procedures="no"), call_timeout=1, ttl=60)
        lease = gone.lock("job").acquire()
        session.cursor().execute(f"select 1 from `{mysql.schema}`.lh_grant lock in share mode")
        thread = threading.Thread(target=lease.release)
        thread.start()
        until(lambda: mysql.blocked(""), every=0.2)  # it has the bucket, and waits for the row
        proxy.cut()
        thread.join(30)
        until(lambda: not mysql.blocked(""), every=0.2)  # the server has ended it
        session.rollback()

        def free() -> bool:
            try:
                return client.lock(neighbour).acquire().release()
            except Unavailable:
                return False

        until(free, 12.0)
        gone.close()
