"""Clients without stored procedures (`procedures=no`), alone and beside clients that have them."""

from __future__ import annotations

import threading

import pytest

from leasehold import Client, ConfigError, Mismatch, Unsupported, transaction
from leasehold.model import Busy
from leasehold.runtime.base import run_sync


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


def test_delay_is_waited_out_only_once_without_procedures(mysql, make_driver) -> None:
    """A cooling grant ends with its delay. Its row was taken for an expired grant, and its delay ran a second time."""
    driver = make_driver(mysql.url(procedures="no"))
    held = driver.acquire(driver.claim(delay=3600.0))
    assert run_sync(driver.engine.break_("", "job", held.token, driver.deadline()))
    assert isinstance(driver.attempt(driver.claim()), Busy)
    mysql.ask("update {s}.lh_grant set until = until - 3600 * 1000000")
    assert driver.acquire(driver.claim()).token > held.token
