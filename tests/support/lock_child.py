"""A process of its own for the tests of the SQLite engine: says what happened, one JSON value a line.

sqlite_child.py hold URL NAME TTL        takes, says the token; releases when a line comes in
sqlite_child.py wait URL NAME TTL        says "waiting" once in line, then as hold
sqlite_child.py count URL NAME FILE N    adds one to a plain file under the lock, N times
sqlite_child.py crowd URL NAME N         N threads take the name once each
sqlite_child.py churn URL                takes name after name until killed, and says each
sqlite_child.py limit URL SIZE           as hold, then meets a disk that is full, then one that is not
"""

import json
import os
import resource
import sys
import threading
import time

from leasehold import Client, LeaseholdError


def say(value) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def hold(url: str, name: str, ttl: str) -> None:
    with Client(url, ttl=float(ttl)) as client:
        lease = client.lock(name).acquire(wait=60)
        say({"token": lease.token, "at": time.clock_gettime(time.CLOCK_BOOTTIME)})
        sys.stdin.readline()
        say({"held": lease.held, "reason": lease.lost_reason, "released": lease.release()})


def wait(url: str, name: str, ttl: str) -> None:
    with Client(url, ttl=float(ttl)) as client:
        client.ping()
        threading.Thread(target=report_when_queued, args=(client, name), daemon=True).start()
        lease = client.lock(name).acquire(wait=60)
        say({"token": lease.token, "at": time.clock_gettime(time.CLOCK_BOOTTIME)})
        sys.stdin.readline()
        say({"released": lease.release()})


def report_when_queued(client: Client, name: str) -> None:
    while not any(
        holding.holder.pid == os.getpid() and holding.state == "waiting" for holding in client.inspect(name, exact=True)
    ):
        time.sleep(0.005)
    say("waiting")


def count(url: str, name: str, file: str, times: str) -> None:
    tokens = []
    with Client(url) as client:
        lock = client.lock(name, ttl=60)
        for _ in range(int(times)):
            with lock as lease:
                with open(file) as before:
                    number = int(before.read())
                with open(file, "w") as after:
                    after.write(str(number + 1))
                tokens.append((number, lease.token))
    say(tokens)


def crowd(url: str, name: str, size: str) -> None:
    tokens = []
    with Client(url, ttl=120, call_timeout=60) as client:
        sys.stdin.readline()

        def acquire_once() -> None:
            with client.lock(name, wait=None) as lease:
                tokens.append(lease.token)

        threads = [threading.Thread(target=acquire_once) for _ in range(int(size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    say(tokens)


def churn(url: str) -> None:
    with Client(url, ttl=120) as client:
        say("on")
        leases = []
        while True:
            leases.append(client.lock(f"churn{os.getpid()}-{len(leases)}").acquire())
            os.write(1, f"{json.dumps([leases[-1].name, leases[-1].token])}\n".encode())


def limit(url: str, path: str) -> None:
    with Client(url, ttl=60, call_timeout=1.0) as client:
        lease = client.lock("before").acquire()
        size = os.path.getsize(f"{path}-wal")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        leases = []
        try:
            while len(leases) < 5000:
                leases.append(client.lock(f"n{len(leases)}").acquire(wait=0))
        except LeaseholdError as error:
            say({"error": type(error).__name__, "text": str(error), "held": lease.held})
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        after = client.lock("after").acquire(wait=0)
        names = {holding.name for holding in client.inspect()}
        say(
            {
                "token": after.token,
                "before": lease.token,
                "kept": {"before", "after"} <= names,
                "verified": renew_and_check(lease),
            }
        )


def renew_and_check(lease) -> bool:
    lease.renew()
    return bool(lease.held)


if __name__ == "__main__":
    command = {f.__name__: f for f in (hold, wait, count, crowd, churn, limit)}[sys.argv[1]]
    command(*sys.argv[2:])
