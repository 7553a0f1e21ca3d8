"""A process that acquires and releases locks of a SQLite file until its time is over, for the recording of a power cut.

power_cut_child.py URL FACTS SECONDS SEED

After each call that returned, it appends to the file FACTS what must be true from then on:

GRANTED TOKEN -       no later token may be lower
KEPT TOKEN NAME       the grant outlives this process: it must be found
DROPPED TOKEN NAME    the grant is about to be released: it may be found, or not
"""

import os
import random
import sys
import time

from leasehold import Client, NotAcquired
from tests.support import probe_sqlite

CEILING_STEP = 20_000  # tokens, that is 20 ms: the ceiling is raised often
CHECKPOINT_PAGES = 60  # the log is checkpointed and restarted often


def checkpoint_often() -> None:
    connect = getattr(*probe_sqlite.CONNECT)

    def connect_and_set(self):
        db = connect(self)
        db.execute(f"pragma wal_autocheckpoint = {CHECKPOINT_PAGES}")
        return db

    setattr(*probe_sqlite.CONNECT, connect_and_set)


def run(url: str, facts: str, seconds: float, seed: int) -> None:
    rnd, file = random.Random(seed), os.open(facts, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def state(*words: object) -> None:
        os.write(file, (" ".join(map(str, words)) + "\n").encode())

    end = time.monotonic() + seconds
    with Client(url, ttl=30) as client:
        while time.monotonic() < end:
            name, options = f"plain{rnd.randrange(2)}", {}
            if (chance := rnd.random()) < 0.2:
                name, options = f"kept{rnd.randrange(4)}", {"delay": 5.0} if chance < 0.1 else {"require": {"outlives"}}
            elif chance < 0.22:  # its name stays occupied after the release
                name, options = f"cools{rnd.randrange(10**6)}", {"min_hold": 60.0}
            try:
                lease = client.lock(name, wait=0 if options else 5, **options).acquire()
            except NotAcquired:
                continue
            state("GRANTED", lease.token, "-")
            if options:
                state("KEPT", lease.token, name)
            if "min_hold" not in options:
                state("DROPPED", lease.token, name)
            lease.release()


if __name__ == "__main__":
    setattr(*probe_sqlite.CEILING_STEP, CEILING_STEP)
    checkpoint_often()
    run(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
