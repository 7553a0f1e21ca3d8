"""Child process for the tests of multilocks and elections on any engine; prints one JSON value per line.

multilock_election_child.py dine URL SPACE ROUNDS SEED FOLDER  locks 2 or 3 random forks; a fork in use is a file
multilock_election_child.py grab URL SPACE FIRST SECOND        holds FIRST; after a line on stdin, waits for SECOND
multilock_election_child.py run URL SPACE NAME TTL             a candidate: prints when it leads and when it stops
multilock_election_child.py look URL SPACE NAME TTL            an observer: prints each term it sees

SPACE is the test's namespace.
"""

import json
import os
import random
import sys
import time

from leasehold import Client, LeaseholdError

FORKS = [f"fork {number}" for number in range(12)]


def say(value) -> None:
    os.write(1, f"{json.dumps(value)}\n".encode())


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def dine(url: str, space: str, rounds: str, seed: str, folder: str) -> None:
    rng = random.Random(int(seed))
    with Client(url, namespace=space, ttl=120, call_timeout=60) as client:
        sys.stdin.readline()
        for _ in range(int(rounds)):
            forks = rng.sample(FORKS, rng.choice([2, 3]))  # in random order
            with client.multilock(forks) as leases:
                files = [os.path.join(folder, fork) for fork in forks]
                for file in files:
                    os.close(os.open(file, os.O_CREAT | os.O_EXCL))  # fails while another process uses this fork
                leases.check()
                for file in files:
                    os.unlink(file)
    say("fed")


def grab(url: str, space: str, first: str, second: str) -> None:
    with Client(url, namespace=space, ttl=120, call_timeout=60) as client:
        try:
            with client.lock(first) as lease:
                say({"owner": next(h.owner for h in client.inspect(first, exact=True) if h.token == lease.token)})
                sys.stdin.readline()
                client.lock(second).acquire().release()
                lease.verify()  # ask the engine: this client may not be notified of a break yet
            say("done")
        except LeaseholdError as error:
            say(type(error).__name__)


def run(url: str, space: str, name: str, ttl: str) -> None:
    with Client(url, namespace=space, call_timeout=2) as client:
        client.ping()
        say({"what": "campaigns", "at": now()})
        client.election(name, ttl=float(ttl)).serve(
            lambda term: say({"what": "leads", "token": term.token, "at": now()}),
            lambda term: say({"what": "stops", "token": term.token, "at": now()}),
        )


def look(url: str, space: str, name: str, ttl: str) -> None:
    with Client(url, namespace=space, call_timeout=2) as client:
        client.ping()
        say("on")
        for term in client.election(name, ttl=float(ttl)).observe():
            say([term.token, term.holder.pid, term.missed])


if __name__ == "__main__":
    command = {f.__name__: f for f in (dine, grab, run, look)}[sys.argv[1]]
    command(*sys.argv[2:])
