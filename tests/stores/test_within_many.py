"""Many callers at once, each in a transaction of its own: nobody waits for a row of one who waits for the lock."""

import contextlib
import threading
import time

import pytest

from leasehold import Client, stores


@pytest.fixture(params=["postgresql", "mysql"])  # in SQLite one transaction writes at a time
def database(request, database_of):
    return database_of(request.param)


def at_once(jobs, release=lambda: None):
    """What each gives, or raises, when all begin together; `release` is called once they are all under way."""
    got, gate = {}, threading.Barrier(len(jobs))

    def run(number, job):
        gate.wait(30)
        try:
            got[number] = job()
        except Exception as error:
            got[number] = error

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(jobs)]
    for thread in threads:
        thread.start()
    release()
    for thread in threads:
        thread.join(20)
    assert len(got) == len(jobs), f"some never came back: {got}"
    return [got[number] for number in range(len(jobs))]


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


def in_line(client, key, jobs):
    """All of them stand in line for the lock of the key before the first gets it."""
    lease = client.lock(f"once:{key}").acquire()

    def release():
        end = time.monotonic() + 30
        while sum(one.state == "waiting" for one in client.inspect()) < len(jobs):
            assert time.monotonic() < end
            time.sleep(0.01)
        lease.release()

    return at_once(jobs, release)


def test_callers_of_one_key_do_not_keep_its_runner_from_writing(database, key):
    with Client("memory://", ttl=30) as client:
        assert in_line(client, key, [payer(client, database, key, key)] * 8) == [key] * 8
    assert database.paid(key) == 1


def test_nor_where_a_failure_stands_in_the_record(database, key):
    with Client("memory://", ttl=30) as client:
        with contextlib.closing(database.connect()) as connection:
            with pytest.raises(ZeroDivisionError):
                client.once(key, lambda: 1 // 0, store=stores.within(connection))
            connection.commit()
        assert in_line(client, key, [payer(client, database, key, key)] * 8) == [key] * 8
    assert database.paid(key) == 1


def test_callers_of_different_keys_do_not_meet(database, key):
    """An absent row has no lock of its own: what MySQL locks in its place is the gap it would be in."""
    with Client("memory://", ttl=30) as client:
        for turn in range(5):
            names = [f"{key}/{turn}/{number}" for number in range(8)]
            assert at_once([payer(client, database, name, name) for name in names]) == names
            assert [database.paid(name) for name in names] == [1] * 8
