"""The lease check inside the application's transaction on MariaDB: "still the holder" and the write commit together."""

from __future__ import annotations

import asyncio
import threading
import time

import aiomysql
import pymysql
import pytest
import sqlalchemy

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, NotAcquired, Unavailable, Unsupported, transaction
from leasehold.core.names import bucket
from leasehold.errors import TransactionOpen
from leasehold.runtime.base import run_sync
from tests.support import probe
from tests.support.timing import check_elapsed


@pytest.fixture
def client(mysql):
    with Client(mysql.url(), namespace="it's: %s", ttl=30) as client:
        yield client


@pytest.fixture
def connection(mysql):
    with mysql.server.connect(autocommit=False) as connection:
        yield connection


def test_check_passes_for_a_held_lease_and_fails_for_an_ended_one(client, connection, mysql) -> None:
    lease = client.lock("job").acquire()
    connection.cursor().execute("select 1")  # takes the snapshot in REPEATABLE READ
    lease.renew()
    transaction.check(lease, connection)
    transaction.check(lease, connection.cursor(pymysql.cursors.DictCursor))
    connection.commit()
    connection.cursor().execute(f"select * from `{mysql.schema}`.lh_grant")
    mysql.ask("update {s}.lh_grant set until = 1")
    with pytest.raises(LeaseLost):
        transaction.check(lease, connection)
    connection.rollback()
    lease.release()


def test_character_set_of_the_connection_does_not_matter(mysql, connection) -> None:
    connection.set_character_set("latin1")
    with Client(mysql.url(), namespace="Zürich", ttl=30) as client, client.lock("заказ") as lease:
        transaction.check(lease, connection)
        transaction.release_on_commit(lease, connection)
        connection.commit()


def test_check_outside_a_transaction_is_refused(client, mysql) -> None:
    with client.lock("job") as lease, mysql.server.connect(autocommit=True) as connection:
        with pytest.raises(ConfigError, match="not in a transaction"):
            transaction.check(lease, connection)
        connection.begin()
        transaction.check(lease, connection)
        connection.commit()


def test_name_is_not_granted_before_the_transaction_ends(client, connection, mysql) -> None:
    """This holds even if the lease has expired: the transaction may still commit what it wrote as the holder."""
    lease = client.lock("job", ttl=1.5).acquire()
    transaction.check(lease, connection)
    with Client(mysql.url(), namespace="it's: %s", call_timeout=20) as other:
        assert lease.wait_lost(30), "the lease is not renewed while its row is locked"
        for _ in range(3):
            assert other.lock("job").try_acquire() is None
        began = time.monotonic()
        for name in [name for name in map(str, range(20_000)) if bucket(name) == bucket("job")][:5]:
            with other.lock(name):  # names of the same bucket are not blocked
                pass
        check_elapsed(began, 2.5)
        connection.commit()
        assert other.lock("job", wait=20).acquire().release()
    lease.release()


def test_release_blocked_by_the_transaction_becomes_pending(connection, mysql, wait_until) -> None:
    options = {"namespace": "it's: %s", "ttl": 30}
    with (
        Client(mysql.url(), **options, call_timeout=5) as client,
        Client(mysql.url(), **options, call_timeout=1.2) as operator,
    ):
        lease = client.lock("job").acquire()
        transaction.check(lease, connection)
        lease.renew()  # the answer is the remaining ttl
        assert not lease.release(), "the release is not confirmed, so it is retried"
        with pytest.raises(Unavailable):
            operator.break_lock("job", token=lease.token)
        connection.commit()
        wait_until(lambda: not operator.inspect())


def test_client_without_procedures_locks_no_bucket_during_a_check(client, connection, mysql) -> None:
    """The client's DELETE of expired grants once waited for the locked row, and kept the bucket locked meanwhile."""
    lease = client.lock("job", ttl=1.5).acquire()
    transaction.check(lease, connection)
    with Client(mysql.url(procedures="no"), namespace="it's: %s", call_timeout=20) as plain_client:
        for expired in (False, True):
            began = time.monotonic()
            assert plain_client.lock("job").try_acquire() is None
            with pytest.raises(NotAcquired):
                plain_client.lock("job", wait=0.3).acquire()
            assert len(mysql.ask("select 1 from {s}.lh_waiter")) == 0, "the waiter left the queue at once"
            check_elapsed(began, 2.5)
            assert expired or lease.wait_lost(30)
        connection.commit()
        assert plain_client.lock("job", wait=20).acquire().release()
    lease.release()


def test_break_without_procedures_locks_no_bucket_during_a_check(client, connection, mysql, wait_until) -> None:
    """The break once waited for the locked row while it kept the bucket locked."""
    lease = client.lock("job").acquire()
    transaction.check(lease, connection)
    broken = []
    with Client(mysql.url(procedures="no"), namespace="it's: %s", call_timeout=30) as plain_client:
        thread = threading.Thread(target=lambda: broken.append(plain_client.break_lock("job", token=lease.token)))
        thread.start()
        wait_until(lambda: mysql.is_blocked(""), every=0.2)
        with Client(mysql.url(), namespace="it's: %s") as other:
            assert other.lock("job").try_acquire() is None
        connection.commit()
        thread.join(30)
        assert broken == [True]
        assert plain_client.lock("job", wait=20).acquire().release()
    assert not lease.release()


def test_open_release_on_commit_does_not_open_the_breaker(connection, mysql, wait_until) -> None:
    """The server answers that the transaction is still open, and the watchdog asks again until it has ended."""
    pending = []

    def on_event(event) -> None:
        if event.kind == "release_pending":
            pending.append(event.reason)

    with Client(mysql.url(), breaker=True, on_event=on_event) as client:
        with client.lock("job") as lease:
            transaction.release_on_commit(lease, connection)
        assert pending == ["the transaction that releases job is still open"]
        engine = probe.core(client).engine()
        for _ in range(6):
            with pytest.raises(TransactionOpen):
                run_sync(engine.release(probe.claim(lease), time.monotonic() + 20))
        assert client.lock("other").acquire().release(), "the breaker is closed"
        connection.commit()
        wait_until(lambda: not client.inspect())


ENDING_GRANT = """
create procedure {s}.lh_can_admit_v1(
    _namespace varbinary(255), _name varbinary(255), _mode varbinary(16), out _fits boolean, out _free_slot integer
)
begin
    declare _queued boolean;
    select not exists (select 1 from lh_grant where namespace = _namespace and name = _name), 0 into _fits, _free_slot;
    select exists (select 1 from lh_queue where namespace = _namespace and name = _name) into _queued;
    if _queued then
        update lh_grant set state = 3, until = since where namespace = _namespace and name = _name and state = 2;
    end if;
end
"""


def test_grant_that_a_commit_ends_between_two_reads_is_no_error(client, mysql) -> None:
    """The commit does not lock the bucket. Here the check of whether a name is free finds the grant held, and the next
    statement of a waiter that joins the queue finds it over: the waiter must attempt again soon."""
    lease = client.lock("job").acquire()
    mysql.ask("drop procedure {s}.lh_can_admit_v1")
    mysql.ask(ENDING_GRANT)
    with Client(mysql.url(), namespace="it's: %s") as other:
        assert other.lock("job", wait=60).acquire().release()
    lease.release()


def test_release_without_procedures_cannot_be_part_of_a_transaction(connection, mysql) -> None:
    refused = pytest.raises(Unsupported, match="procedures=no")
    with Client(mysql.url(procedures="no")) as client, client.lock("job") as lease, refused:
        transaction.release_on_commit(lease, connection)


def test_break_waits_for_a_transaction_that_is_to_release(client, connection, mysql) -> None:
    lease = client.lock("job").acquire()
    transaction.check(lease, connection)
    transaction.release_on_commit(lease, connection)
    with Client(mysql.url(), namespace="it's: %s", call_timeout=1.2) as operator:
        with pytest.raises(Unavailable):
            operator.break_lock("job", token=lease.token)
        connection.commit()
        assert not operator.break_lock("job", token=lease.token)
    assert not lease.release()


def test_check_works_with_sqlalchemy_and_asyncio(client, mysql) -> None:
    engine = sqlalchemy.create_engine(f"mysql+pymysql://root@127.0.0.1:{mysql.server.port}")
    with client.lock("job") as lease:
        with engine.begin() as bound:
            transaction.check(lease, bound)
        autocommit = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        with autocommit as bound, pytest.raises(ConfigError, match="not in a transaction"):
            transaction.check(lease, bound)
    engine.dispose()

    async def main() -> None:
        async with AsyncClient(mysql.url()) as client, client.lock("job") as lease:
            connection = await aiomysql.connect(host="127.0.0.1", port=mysql.server.port, user="root", autocommit=False)
            await transaction.check_async(lease, connection)
            await connection.rollback()
            connection.close()

    asyncio.run(main())
