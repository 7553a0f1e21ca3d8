"""Child process for the tests of `once` and of schedules.

once_child.py pay LOCKS STORE DATABASE KEY SECONDS TTL        pays once for KEY; STORE: a URL, or "within"
once_child.py sleep LOCKS STORE KEY TTL                       runs once for KEY, until its input ends
once_child.py ticks LOCKS STORE NAME EVERY COUNT FILE
    reads a tick, runs COUNT from there and appends them to FILE; on a busy machine until all processes have run COUNT
"""

import os
import select
import sys
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from leasehold import Client, LeaseholdError
from leasehold.records import stores


def connected(database: str):
    if database.startswith("postgresql"):
        import psycopg

        return closing(psycopg.connect(database))
    import pymysql

    parts = urlsplit(database)
    return closing(
        pymysql.connect(
            host=parts.hostname, port=parts.port, user=parts.username, password=parts.password, database=parts.path[1:]
        )
    )


def pay(locks: str, store: str, database: str, key: str, seconds: str, ttl: str) -> None:
    """`within`: effect and record commit in one transaction. With another store, the resource checks the key."""

    def within(lease):
        with connection.cursor() as cursor:
            cursor.execute("insert into paid (name, pid) values (%s, %s)", (key, os.getpid()))
        inside(lease)
        return {"pid": os.getpid()}

    def elsewhere(lease):
        with connection.cursor() as cursor:
            if lease.token % 2:
                inside(lease)
            cursor.execute("insert into keyed (name, pid) values (%s, %s) on conflict do nothing", (key, os.getpid()))
            connection.commit()
            if not lease.token % 2:
                inside(lease)  # the effect is committed, the record is not
            cursor.execute("select pid from keyed where name = %s", (key,))
            return {"pid": cursor.fetchone()[0]}

    def inside(lease):
        print("inside", lease.token, flush=True)
        time.sleep(float(seconds))  # pause: the test kills the process here

    with Client(locks, ttl=float(ttl), call_timeout=30) as client, connected(database) as connection:
        record_store = stores.within(connection) if store == "within" else store
        result = client.once(key, within if store == "within" else elsewhere, store=record_store, wait=120)
        connection.commit()
    print("result", result["pid"], flush=True)


def sleep(locks: str, store: str, key: str, ttl: str) -> None:
    def work(lease):
        print("inside", lease.token, flush=True)
        sys.stdin.read()
        return {"pid": os.getpid()}

    with Client(locks, ttl=float(ttl), call_timeout=30) as client:
        try:
            print("result", client.once(key, work, store=store)["pid"], flush=True)
        except LeaseholdError as error:
            print("refused", type(error).__name__, flush=True)


def ticks(locks: str, store: str, name: str, every: str, count: str, file: str) -> None:
    with Client(locks, namespace=name, ttl=5, call_timeout=30) as client:
        job = client.schedule(name, float(every), store=store, missed="all", late=float(every))
        seconds = float(every)

        def work(tick):
            with open(file, "a") as runs:
                runs.write(f"{round(tick.timestamp() / seconds)} {os.getpid()}\n")

        print("clock", time.time(), flush=True)
        first = int(sys.stdin.readline())
        while time.time() < first * seconds:
            time.sleep(seconds / 20)
        end = (first + int(count) - 0.5) * seconds
        while time.time() < end or len(Path(file).read_text().splitlines()) < int(count):
            try:
                job.run_due(work)
            except LeaseholdError as error:
                print("again", error, flush=True)
            time.sleep(seconds / 20)
    print("end", flush=True)


if __name__ == "__main__":
    time.sleep = lambda seconds: select.select([], [], [], seconds)  # faketime breaks time.sleep, but not select
    {"pay": pay, "sleep": sleep, "ticks": ticks}[sys.argv[1]](*sys.argv[2:])
