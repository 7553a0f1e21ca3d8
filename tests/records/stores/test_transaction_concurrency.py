"""Many concurrent callers, each in its own transaction: no caller waits for a row of one that waits for the lock."""

import contextlib
import threading
import time

import pytest

from leasehold import Client
from leasehold.records import stores


@pytest.fixture(params=["postgresql", "mysql"])  # SQLite allows only one writing transaction at a time
def database(request, database_of):
    return database_of(request.param)


def run_together(jobs, release=lambda: None):
    """Start all jobs together and return what each returns or raises. `release` is called once all are running."""
    results, barrier = {}, threading.Barrier(len(jobs))

    def run(number, job):
        barrier.wait(30)
        try:
            results[number] = job()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=numbered_job, daemon=True) for numbered_job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    release()
    for thread in threads:
        thread.join(60)
    assert len(results) == len(jobs), f"some jobs never returned: {results}"
    return [results[number] for number in range(len(jobs))]


def payer(client, database, key, effect):
    def pay(connection):
        connection.cursor().execute(database.insert(), (effect,))
        return effect

    def job():
        with contextlib.closing(database.connect()) as connection:
            result = client.once(key, pay, connection, store=stores.within(connection), wait=15)
            connection.commit()
            return result

    return job


def run_queued(client, key, jobs):
    """Queue all jobs for the lock of the key before the first gets it."""
    lease = client.lock(f"once:{key}").acquire()

    def release():
        end = time.monotonic() + 30
        while sum(holding.state == "waiting" for holding in client.inspect()) < len(jobs):
            assert time.monotonic() < end
            time.sleep(0.01)
        lease.release()

    return run_together(jobs, release)


def test_queued_callers_of_a_key_do_not_block_its_runner(database, key):
    with Client("memory://", ttl=30) as client:
        assert run_queued(client, key, [payer(client, database, key, key)] * 8) == [key] * 8
    assert database.paid(key) == 1


def test_queued_callers_of_a_failed_key_do_not_block_its_runner(database, key):
    with Client("memory://", ttl=30) as client:
        with contextlib.closing(database.connect()) as connection:
            with pytest.raises(ZeroDivisionError):
                client.once(key, lambda: 1 // 0, store=stores.within(connection))
            connection.commit()
        assert run_queued(client, key, [payer(client, database, key, key)] * 8) == [key] * 8
    assert database.paid(key) == 1


def test_callers_of_different_keys_do_not_block_each_other(database, key):
    """An absent row cannot be locked: MySQL locks the gap where it would be."""
    with Client("memory://", ttl=30) as client:
        for round_number in range(2):
            names = [f"{key}/{round_number}/{number}" for number in range(8)]
            assert run_together([payer(client, database, name, name) for name in names]) == names
            assert [database.paid(name) for name in names] == [1] * 8
