"""A process that acquires locks for the engine tests. It prints what happened, one JSON value per line.

lock_child.py hold URL NAME TTL        acquires and prints the token; releases when it reads a line
lock_child.py fork URL NAME TTL        acquires, starts two children, prints their pids and waits for ever
lock_child.py lose URL N TTL           acquires the names 0 to N - 1, and prints why they were lost once all are
lock_child.py wait URL NAME TTL        prints "waiting" when it is queued, then the same as hold
lock_child.py count URL NAME FILE N    adds one to the number in a file while it holds the lock, N times
lock_child.py crowd URL NAME N         N threads acquire the name once each
lock_child.py churn URL                acquires one name after another until it is killed, and prints each
lock_child.py limit URL PATH           acquires until the file at PATH cannot grow, then again with the limit removed
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time

from leasehold import Client, LeaseholdError

ALLOW_TRIGGERS = "LEASEHOLD_TESTS_ALLOW_TRIGGERS"  # if set, a SQLite file may have triggers of the test on our tables


def say(value) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def hold(url: str, name: str, ttl: str) -> None:
    with Client(url, ttl=float(ttl)) as client:
        lease = client.lock(name).acquire(wait=60)
        say({"token": lease.token, "at": time.clock_gettime(time.CLOCK_BOOTTIME)})
        sys.stdin.readline()
        say({"held": lease.held, "reason": lease.lost_reason, "released": lease.release()})


def fork(url: str, name: str, ttl: str) -> None:
    client = Client(url, ttl=float(ttl))
    lease = client.lock(name).acquire(wait=60)
    other_program = subprocess.Popen(["sleep", "600"])
    if not (pid := os.fork()):
        time.sleep(600)
        os._exit(0)
    say([other_program.pid, pid])
    threading.Event().wait()
    lease.release()


def lose(url: str, names: str, ttl: str) -> None:
    all_lost = threading.Semaphore(0)
    with Client(url, ttl=float(ttl)) as client:
        leases = [client.lock(str(number)).acquire() for number in range(int(names))]
        for lease in leases:
            lease.on_lost(lambda _: all_lost.release())
        say("holding")
        for _ in leases:
            all_lost.acquire(timeout=60)
        say(sorted({str(lease.lost_reason) for lease in leases}))


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


def allow_triggers() -> None:
    from leasehold.engines.sqlite import schema

    schema.check_schema = lambda db, path: None


if __name__ == "__main__":
    if ALLOW_TRIGGERS in os.environ:
        allow_triggers()
    command = {f.__name__: f for f in (hold, fork, lose, wait, count, crowd, churn, limit)}[sys.argv[1]]
    command(*sys.argv[2:])
