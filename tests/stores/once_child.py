"""A process of its own for the tests of `once` and of schedules.

once_child.py pay LOCKS DATABASE KEY SECONDS TTL       pays once for KEY, effect and record in one transaction
once_child.py ticks LOCKS STORE NAME EVERY LAST FILE   runs a schedule through tick LAST, and writes each run down
"""

import os
import select
import sys
import time

import psycopg

from leasehold import Client, LeaseholdError, stores


def pay(locks: str, database: str, key: str, seconds: str, ttl: str) -> None:
    def work(lease):
        connection.execute("insert into paid (name, pid) values (%s, %s)", (key, os.getpid()))
        print("inside", lease.token, flush=True)
        time.sleep(float(seconds))  # where the test kills it
        return {"pid": os.getpid()}

    with Client(locks, ttl=float(ttl), call_timeout=30) as client, psycopg.connect(database) as connection:
        result = client.once(key, work, store=stores.within(connection), wait=120)
    print("result", result["pid"], flush=True)


def ticks(locks: str, store: str, name: str, every: str, last: str, file: str) -> None:
    with Client(locks, ttl=5, call_timeout=30) as client:
        job = client.schedule(name, float(every), store=store, missed="all", late=float(every))
        seconds = float(every)

        def work(tick):
            with open(file, "a") as runs:
                runs.write(f"{round(tick.timestamp() / seconds)} {os.getpid()}\n")

        print("skew", time.time(), flush=True)
        while time.time() < (int(last) + 1) * seconds:
            try:
                job.run_due(work)
            except LeaseholdError as error:
                print("again", error, flush=True)
            time.sleep(seconds / 20)
    print("end", flush=True)


if __name__ == "__main__":
    time.sleep = lambda seconds: select.select([], [], [], seconds)  # the kind that faketime does not break
    {"pay": pay, "ticks": ticks}[sys.argv[1]](*sys.argv[2:])
