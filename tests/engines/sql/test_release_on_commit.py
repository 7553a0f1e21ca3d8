"""A lease that the application's own commit releases: with the commit, never before it, and not by a rollback."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import aiomysql
import psycopg
import pymysql
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, LeaseState, Unsupported, transaction
from leasehold.core.names import bucket
from leasehold.transaction import release_on_commit, release_on_commit_async
from tests.support import probe
from tests.support.timing import check_elapsed


class Application:
    """Connections of an application to the server that also keeps the locks."""

    def __init__(self, sql: Any) -> None:
        self._sql, self._opened = sql, list[Any]()
        self.is_mysql = sql.url().startswith("mysql")

    def connect(self, **options: Any) -> Any:
        port = self._sql.server.port
        if self.is_mysql:
            connection = pymysql.connect(**{"host": "127.0.0.1", "port": port, "user": "root", **options})
        else:
            connection = psycopg.connect(self._sql.server.url(), **options)
        self._opened.append(connection)
        return connection

    async def connect_async(self) -> Any:
        if self.is_mysql:
            return await aiomysql.connect(host="127.0.0.1", port=self._sql.server.port, user="root", autocommit=False)
        return await psycopg.AsyncConnection.connect(self._sql.server.url())

    def engine_url(self) -> str:
        user, dialect = ("root", "mysql+pymysql") if self.is_mysql else ("postgres", "postgresql+psycopg")
        database = "" if self.is_mysql else self._sql.server.url().rpartition("/")[2]
        return f"{dialect}://{user}@127.0.0.1:{self._sql.server.port}/{database}"

    def close(self) -> None:
        for connection in self._opened:
            with suppress(pymysql.Error):  # closed by the test
                connection.close()


@pytest.fixture
def sql(shared_sql) -> Any:
    return shared_sql


@pytest.fixture
def application(sql) -> Iterator[Application]:
    found = Application(sql)
    yield found
    found.close()


@pytest.fixture
def namespace() -> str:
    return f"it's: %s {uuid4().hex[:8]}"


@pytest.fixture
def client(sql, namespace) -> Iterator[Client]:
    with Client(sql.url(), namespace=namespace, ttl=60) as client:
        yield client


@pytest.fixture
def other(sql, namespace) -> Iterator[Client]:
    with Client(sql.url(), namespace=namespace, ttl=60) as client:
        yield client


def is_free(client: Client, name: str = "job") -> bool:
    lease = client.lock(name).try_acquire()
    return lease is not None and lease.release()


def test_lease_ends_with_the_commit_and_not_before(client, other, application) -> None:
    connection = application.connect()
    with client.lock("job") as lease:
        release_on_commit(lease, connection)
        for _ in range(3):
            assert not is_free(other)
        connection.commit()
        assert is_free(other)
    assert lease.state is LeaseState.RELEASED


def test_rollback_keeps_the_lease(client, other, application) -> None:
    connection = application.connect()
    with client.lock("job") as lease:
        release_on_commit(lease, connection)
        connection.rollback()
        lease.verify()
        assert not is_free(other)
        release_on_commit(lease, connection)
        connection.commit()
        assert is_free(other)
    assert lease.state is LeaseState.RELEASED


def test_lease_that_was_rolled_back_is_released_at_the_end_of_its_block(client, other, application) -> None:
    connection = application.connect()
    with client.lock("job") as lease:
        release_on_commit(lease, connection)
        connection.rollback()
    assert lease.state is LeaseState.RELEASED
    assert is_free(other)


def test_rollback_to_a_savepoint_keeps_the_lease(client, other, application) -> None:
    connection = application.connect()
    with client.lock("job") as lease:
        cursor = connection.cursor()
        cursor.execute("select 1")
        cursor.execute("savepoint before_release")
        release_on_commit(lease, connection)
        cursor.execute("rollback to savepoint before_release")
        connection.commit()
        lease.verify()
        assert not is_free(other)


def test_savepoint_that_is_kept_does_not_keep_the_lease(client, other, application) -> None:
    connection = application.connect()
    with client.lock("job") as lease:
        cursor = connection.cursor()
        release_on_commit(lease, connection)
        cursor.execute("savepoint after_release")
        cursor.execute("rollback to savepoint after_release")
        connection.commit()
        assert is_free(other)
    assert lease.state is LeaseState.RELEASED


def test_savepoints_of_the_application_stay_usable(client, other, application) -> None:
    connection = application.connect()
    lease, second = client.lock("job").acquire(), client.lock("job-2").acquire()
    cursor = connection.cursor()
    release_on_commit(lease, connection)
    cursor.execute("savepoint middle")
    release_on_commit(second, connection)
    release_on_commit(lease, connection)
    cursor.execute("rollback to savepoint middle")  # the first call stays, the others are undone
    connection.commit()
    assert is_free(other)
    assert not is_free(other, "job-2")
    second.verify()
    assert second.release()
    assert not lease.release()


def test_call_may_be_repeated_after_its_savepoint_was_released(client, other, application) -> None:
    connection = application.connect()
    with client.lock("job") as lease:
        cursor = connection.cursor()
        cursor.execute("select 1")
        cursor.execute("savepoint inner_block")
        release_on_commit(lease, connection)
        cursor.execute("release savepoint inner_block")
        release_on_commit(lease, connection)
        assert not is_free(other)
        connection.commit()
        assert is_free(other)
    assert lease.state is LeaseState.RELEASED


def test_call_after_a_commit_holds_off_others_or_is_refused(client, other, application) -> None:
    connection = application.connect()
    with client.lock("job") as lease:
        release_on_commit(lease, connection)
        connection.commit()
        with suppress(LeaseLost):  # no other client has had the name yet
            release_on_commit(lease, connection)
            assert not is_free(other)
        connection.rollback()
        with other.lock("job"), pytest.raises(LeaseLost, match="it was released"):
            release_on_commit(lease, connection)
        connection.rollback()
    assert other.inspect() == []


def test_process_that_dies_before_its_commit_keeps_the_lease(client, other, application) -> None:
    connection = application.connect()
    lease = client.lock("job").acquire()
    release_on_commit(lease, connection)
    connection.close()
    lease.verify()
    assert not is_free(other)
    assert lease.release()


def test_call_may_be_repeated_in_one_transaction(client, other, application) -> None:
    connection = application.connect()
    lease, second = client.lock("job").acquire(), client.lock("job-2").acquire()
    for _ in range(2):
        release_on_commit(lease, connection)
        release_on_commit(second, connection)
    assert not is_free(other)
    connection.commit()
    assert is_free(other)
    assert is_free(other, "job-2")
    with pytest.raises(LeaseLost, match="it was released"):
        release_on_commit(lease, connection)
    connection.rollback()
    assert not lease.release()
    assert not second.release()
    assert lease.state is second.state is LeaseState.RELEASED


def test_one_commit_releases_several_leases_of_any_kind(client, other, application) -> None:
    connection = application.connect()
    locks = [
        client.semaphore("slots", limit=2),
        client.semaphore("slots", limit=2),
        client.rwlock("rows").read(),
        client.lock("job"),
    ]
    leases = [lock.acquire() for lock in locks]
    for lease in leases:
        release_on_commit(lease, connection)
    assert other.semaphore("slots", limit=2).try_acquire() is None
    assert len(other.inspect()) == 4
    connection.commit()
    assert other.inspect() == []
    for lease in leases:
        lease.release()


def test_next_holder_sees_what_was_committed(sql, client, other, application) -> None:
    """The waiter is granted the name as soon as the commit has ended the lease, and not before it can see the row."""
    sql.ask("create table {s}.orders (id integer)")
    connection, reader = application.connect(), application.connect(autocommit=True)
    table = f"{'`' if application.is_mysql else chr(34)}{sql.schema}{'`' if application.is_mysql else chr(34)}.orders"
    for round_ in range(1, 21):
        counted: list[int] = []

        def count(counted: list[int] = counted) -> None:
            with other.lock("job", wait=30):
                cursor = reader.cursor()
                cursor.execute(f"select count(*) from {table}")
                counted.append(cursor.fetchone()[0])

        with client.lock("job", wait=30) as lease:
            thread = threading.Thread(target=count)
            thread.start()
            connection.cursor().execute(f"insert into {table} values ({round_})")
            release_on_commit(lease, connection)
            connection.commit()
        thread.join(60)
        assert counted == [round_]


def test_waiter_is_woken_by_the_commit_or_the_end_of_the_block(
    sql, client, other, application, namespace, wait_until
) -> None:
    connection = application.connect()
    lease = client.lock("job").acquire()
    granted: list[Any] = []
    thread = threading.Thread(target=lambda: granted.append(other.lock("job", wait=50).acquire()))
    thread.start()
    wait_until(lambda: len(client.inspect()) == 2)
    release_on_commit(lease, connection)
    began = time.monotonic()
    connection.commit()
    if application.is_mysql:  # no server of this kind notifies when a transaction commits
        lease.release()
    # Reserved, or already claimed; without a wake-up, the waiter would ask for itself some seconds later.
    assert len(sql.ask("select 1 from {s}.lh_grant where namespace = %s", namespace)) == 1
    thread.join(50)
    check_elapsed(began, 2)
    assert granted[0].release()
    lease.release()


def test_block_left_before_the_commit_keeps_the_name_until_then(client, other, application) -> None:
    """The thread that leaves the block is the one that is to commit: the release must not wait for it."""
    connection = application.connect()
    began = time.monotonic()
    with client.lock("job") as lease:
        release_on_commit(lease, connection)
    assert lease.state is LeaseState.RELEASED
    check_elapsed(began, 1.5)
    assert not is_free(other)
    connection.commit()
    assert other.lock("job", wait=30).acquire().release()


def test_block_left_before_the_rollback_releases_the_lease(client, other, application) -> None:
    connection = application.connect()
    with client.lock("job") as lease:
        release_on_commit(lease, connection)
    connection.rollback()
    assert other.lock("job", wait=30).acquire().release()


def test_open_transaction_keeps_only_its_own_name(client, other, application) -> None:
    connection = application.connect()
    neighbours = [name for name in map(str, range(20_000)) if bucket(name) == bucket("job")][:5]
    with client.lock("job") as lease:
        release_on_commit(lease, connection)
        began = time.monotonic()
        for name in neighbours:
            with other.lock(name), client.lock(f"else-{name}"):
                pass
        with pytest.raises(TimeoutError):
            other.lock("job", wait=0.3).acquire()
        check_elapsed(began, 2.5)
        connection.commit()


def test_expired_lease_is_refused_and_the_next_holder_keeps_the_name(
    sql, client, other, application, namespace
) -> None:
    """The holder was paused: its release comes too late, and its transaction must not commit as if it held the lock."""
    connection = application.connect()
    lease = client.lock("job").acquire()
    sql.ask("update {s}.lh_grant set until = 1 where namespace = %s", namespace)
    next_lease = other.lock("job", wait=30).acquire()
    with pytest.raises(LeaseLost):
        release_on_commit(lease, connection)
    connection.commit()
    next_lease.verify()
    assert not lease.release()
    assert next_lease.release()


def test_expired_lease_is_refused_though_no_other_client_has_the_name(sql, client, application, namespace) -> None:
    connection = application.connect()
    lease = client.lock("job").acquire()
    sql.ask("update {s}.lh_grant set until = 1 where namespace = %s", namespace)
    with pytest.raises(LeaseLost):
        release_on_commit(lease, connection)
    connection.rollback()
    assert not lease.release()


def test_name_is_not_granted_before_the_commit_though_the_ttl_is_over(sql, other, application, namespace) -> None:
    connection = application.connect()
    with Client(sql.url(), namespace=namespace) as client:
        lease = client.lock("job", ttl=1.5).acquire()
        release_on_commit(lease, connection)
        if application.is_mysql:
            assert lease.wait_lost(30), "renewals do not extend a lease whose row is locked"
        else:
            sql.ask("update {s}.lh_grant set until = 1 where namespace = %s", namespace)
        for _ in range(3):
            assert not is_free(other)
        connection.commit()
        assert is_free(other)
        lease.release()


def test_min_hold_outlasts_the_commit(client, other, application) -> None:
    connection = application.connect()
    with client.lock("job", min_hold=30) as lease:
        release_on_commit(lease, connection)
        connection.commit()
        assert not is_free(other)
    assert [holding.state for holding in other.inspect()] == ["cooling"]


def test_renewal_after_the_commit_ends_the_lease_as_released(client, application, wait_until) -> None:
    connection = application.connect()
    lost: list[object] = []
    lease = client.lock("job").acquire()
    lease.on_lost(lost.append)
    release_on_commit(lease, connection)
    lease.verify()
    connection.commit()
    with pytest.raises(LeaseLost, match="it was released"):
        lease.verify()
    assert lease.state is LeaseState.RELEASED
    assert not lease.release()
    assert lost == []


def test_lease_that_is_broken_after_a_rollback_is_lost(client, other, application, wait_until) -> None:
    connection = application.connect()
    lease = client.lock("job").acquire()
    release_on_commit(lease, connection)
    connection.rollback()
    assert other.break_lock("job", token=lease.token)
    if application.is_mysql:  # no break notice
        with pytest.raises(LeaseLost, match="broke"):
            lease.verify()
    wait_until(lambda: lease.state is LeaseState.LOST)
    assert not lease.release()


@pytest.mark.parametrize("reentrant", [False, True])
def test_same_thread_gets_a_new_lease_after_the_commit(client, application, reentrant) -> None:
    connection, lock = application.connect(), client.lock("job", reentrant=reentrant, wait=20)
    with lock as lease:
        release_on_commit(lease, connection)
        connection.commit()
        with lock as next_lease:
            assert next_lease.token > lease.token
            assert next_lease.held
    assert lease.state is LeaseState.RELEASED


def test_renewals_and_commits_of_many_leases_never_deadlock(sql, client, application) -> None:
    """A renewal locks the rows of a batch one after the other, and a commit those of all its leases."""
    failed: list[BaseException] = []
    done = threading.Event()
    leases: list[Any] = []

    def renew() -> None:
        while not done.is_set():
            for lease in leases:
                try:
                    lease.renew()
                except LeaseLost:
                    pass
                except BaseException as error:
                    failed.append(error)

    connection = application.connect()
    thread = threading.Thread(target=renew)
    thread.start()
    for _ in range(15):
        leases[:] = [client.lock(f"job-{number}", wait=20).acquire() for number in range(6)]
        for lease in reversed(leases):
            release_on_commit(lease, connection)
        connection.commit()
        for lease in leases:
            lease.release()
    done.set()
    thread.join(60)
    assert failed == []


# ------------------------------------------------------------- connections


def test_autocommit_is_refused_and_the_lease_stays_held(client, other, application) -> None:
    connection = application.connect(autocommit=True)
    with client.lock("job") as lease:
        with pytest.raises(ConfigError, match="not in a transaction"):
            release_on_commit(lease, connection)
        assert not is_free(other)
        lease.verify()
        connection.cursor().execute("begin")
        release_on_commit(lease, connection.cursor())
        connection.commit()
        assert is_free(other)


def test_refused_call_does_not_hide_a_later_loss(sql, client, application, namespace) -> None:
    lease = client.lock("job").acquire()
    with pytest.raises(ConfigError, match="not in a transaction"):
        release_on_commit(lease, application.connect(autocommit=True))
    sql.ask("delete from {s}.lh_grant where namespace = %s", namespace)
    with pytest.raises(LeaseLost, match="no longer knows"):
        lease.verify()
    assert lease.state is LeaseState.LOST


def test_grant_ends_only_for_its_own_id_hash(sql, client, application, namespace) -> None:
    """All clients can see the token: it must not suffice to release what another client holds."""
    connection = application.connect()
    with client.lock("job") as lease:
        quote = "`" if application.is_mysql else '"'
        call = f"{'call' if application.is_mysql else 'select'} {quote}{sql.schema}{quote}.lh_release_on_commit_v1"
        cursor = connection.cursor()
        if not application.is_mysql:
            cursor.execute("select pg_current_xact_id()")
        cursor.execute(f"{call}(%s, %s, %s, %s)", (namespace, "job", lease.token, "another"))
        assert cursor.fetchone()[0] == "not held"
        connection.commit()
        lease.verify()


def test_lease_of_another_engine_is_refused(application) -> None:
    with Client("memory://") as client, client.lock("job") as lease, pytest.raises(Unsupported, match="memory://"):
        release_on_commit(lease, application.connect())


def test_connection_to_another_kind_of_database_is_refused(client) -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with client.lock("job") as lease, engine.begin() as connection:
        for given in (connection, connection.connection.driver_connection):
            with pytest.raises(ConfigError, match="is to sqlite"):
                release_on_commit(lease, given)
    engine.dispose()


def test_connection_without_the_functions_is_refused(sql, client, application) -> None:
    """To another database than the lock's, or of an account without rights."""
    role = f"app-{uuid4().hex[:8]}"
    sql.create_login_role(role)
    with client.lock("job") as lease:
        for call in (release_on_commit, transaction.check):
            connection = application.connect(user=role)
            with pytest.raises(ConfigError, match="leasehold schema"):
                call(lease, connection)
            connection.close()
    sql.drop_role(role)


def test_other_arguments_than_a_lease_are_refused(client, application) -> None:
    with pytest.raises(ConfigError, match="not a Lock"):
        release_on_commit(client.lock("job"), application.connect())


def test_sqlalchemy_sessions_and_connections_release_on_commit(client, other, application) -> None:
    engine = sqlalchemy.create_engine(application.engine_url())
    with client.lock("job") as lease:
        with Session(engine) as session, session.begin():
            release_on_commit(lease, session)
            assert not is_free(other)
        assert is_free(other)
    with client.lock("job") as lease:
        with engine.begin() as connection:
            release_on_commit(lease, connection)
        assert is_free(other)
    with client.lock("job") as lease:
        autocommit = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        with autocommit as connection, pytest.raises(ConfigError, match="not in a transaction"):
            release_on_commit(lease, connection)
        with pytest.raises(ZeroDivisionError), Session(engine) as session, session.begin():
            release_on_commit(lease, session)
            raise ZeroDivisionError
        assert not is_free(other)
    engine.dispose()


def test_error_of_sqlalchemy_does_not_show_the_id_hash(sql, client, application) -> None:
    engine = sqlalchemy.create_engine(application.engine_url())
    with client.lock("job") as lease, engine.connect() as connection:
        connection.execute(sqlalchemy.text("select 1"))
        connection.connection.driver_connection.close()
        with pytest.raises(sqlalchemy.exc.DBAPIError) as raised:
            release_on_commit(lease, connection)
        assert probe.claim(lease).id_hash not in str(raised.value)
        connection.invalidate()
    engine.dispose()


def test_asyncio_connections_release_on_commit(sql, application) -> None:
    async def main() -> None:
        async with AsyncClient(sql.url()) as client, AsyncClient(sql.url()) as other:
            connection = await application.connect_async()
            async with client.lock("job") as lease:
                await release_on_commit_async(lease, connection)
                assert await other.lock("job").try_acquire() is None
                await connection.rollback()
                await lease.verify()
                await release_on_commit_async(lease, connection)
                await connection.commit()
                assert await (await other.lock("job", wait=20).acquire()).release()
            closing = connection.close()
            if closing is not None:
                await closing
            if not application.is_mysql:
                engine = create_async_engine(application.engine_url())
                async with client.lock("job") as lease:
                    async with AsyncSession(engine) as session, session.begin():
                        await release_on_commit_async(lease, session)
                    assert await (await other.lock("job", wait=20).acquire()).release()
                await engine.dispose()

    asyncio.run(main())


DJANGO = """
import sys
from django.conf import settings
url, engine, port, user, name = sys.argv[1:]
database = {"ENGINE": engine, "HOST": "127.0.0.1", "PORT": port, "USER": user, "NAME": name}
settings.configure(DATABASES={"default": database})
import django
django.setup()
import pymysql
pymysql.version_info = (2, 2, 1, "final", 0)
pymysql.install_as_MySQLdb()
from django.db import connection, transaction
import leasehold, leasehold.transaction
with leasehold.Client(url) as client, client.lock("job") as lease:
    with transaction.atomic():
        with transaction.atomic():
            leasehold.transaction.release_on_commit(lease, connection)
        print(client.lock("job").locked())
    print(client.lock("job").locked())
"""


@pytest.mark.extended
def test_django_connection_releases_on_commit(sql, application) -> None:
    engine, user, name = ("mysql", "root", "mysql") if application.is_mysql else ("postgresql", "postgres", "postgres")
    arguments = [sql.url(), f"django.db.backends.{engine}", str(sql.server.port), user, name]
    command = [sys.executable, "-c", DJANGO, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_two_connections_of_one_holder_release_with_the_last_commit(client, other, application) -> None:
    """PostgreSQL: both transactions keep the name. MySQL: the second one waits for the first."""
    if application.is_mysql:
        pytest.skip("the second transaction waits for the first: both lock the row")
    first, second = application.connect(), application.connect()
    with client.lock("job") as lease:
        release_on_commit(lease, first)
        release_on_commit(lease, second)
        first.commit()
        assert not is_free(other)
        second.commit()
        assert is_free(other)
