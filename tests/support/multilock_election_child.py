"""A process of its own for the tests of recipes over many names or candidates, on any engine; says one JSON a line.

many_child.py dine URL SPACE ROUNDS SEED FOLDER  takes random pairs and triples of forks; a fork in use is a file
many_child.py grab URL SPACE FIRST SECOND        holds the first, at a line from outside waits for the second, by hand
many_child.py run URL SPACE NAME TTL             a candidate: says when it leads and when it stops
many_child.py look URL SPACE NAME TTL            an observer: says each term it sees

SPACE is a namespace of the test's own.
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
            forks = rng.sample(FORKS, rng.choice([2, 3]))  # in whatever order
            with client.multilock(forks) as leases:
                files = [os.path.join(folder, fork) for fork in forks]
                for file in files:
                    os.close(os.open(file, os.O_CREAT | os.O_EXCL))  # fails while somebody else has it
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
                lease.verify()  # one that was broken may get on before it is told: the engine knows
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
