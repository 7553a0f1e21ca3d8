"""A client that a hostile server answers. Reads commands from stdin, one JSON list per line, and says how each ended.

Usage: hostile_child.py blocking|asyncio URL NAMESPACE CALL_TIMEOUT
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
import time
from typing import Any

import leasehold
from leasehold import aio

api, url, namespace, call_timeout = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()


def run(result: Any) -> Any:
    """The result of a call of either API."""
    return asyncio.run_coroutine_threadsafe(result, loop).result() if inspect.isawaitable(result) else result


def peak_memory() -> int:
    """In bytes. `ru_maxrss` would not do: it begins with the size of the process that started this one."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


class Commands:
    client: Any = None
    lease: Any = None
    text = ""  # of a lease that was handed over
    count = 0

    def open(self) -> None:
        if api == "blocking":
            self.client = leasehold.Client(url, namespace=namespace, call_timeout=call_timeout)
        else:
            self.client = aio.AsyncClient(url, namespace=namespace, call_timeout=call_timeout)

    def hold(self) -> None:
        self.count += 1
        self.lease = run(self.client.lock(f"held-{self.count}", ttl=60).acquire())

    def attempt(self) -> None:
        self.count += 1
        if (lease := run(self.client.lock(f"name-{self.count}", ttl=5).try_acquire())) is not None:
            run(lease.release())

    def wait(self) -> None:
        """Queue for a name that is held: the client listens for its wake-up."""
        self.count += 1
        run(self.client.lock("contended", ttl=5).acquire(wait=call_timeout / 2))

    def renew(self) -> None:
        run(self.lease.renew())

    def release(self) -> None:
        run(self.lease.release())

    def inspect(self) -> None:
        run(self.client.inspect())

    def hand_over(self) -> None:
        """While the server is honest, so that `take_over` can be attacked."""
        self.count += 1
        lock = self.client.lock(f"handed-{self.count}", ttl=60, require={"outlives"})
        self.text = run(run(lock.acquire(wait=0)).hand_over())

    def take_over(self) -> None:
        run(run(self.client.take_over(self.text)).release())

    def set_limit(self) -> None:
        self.count += 1
        run(self.client.set_limit(f"limited-{self.count}", 3))

    def break_lock(self) -> None:
        run(self.client.break_lock("contended", token=1))

    def deadlocks(self) -> None:
        run(self.client.deadlocks())

    def semaphore(self) -> None:
        self.count += 1
        if (lease := run(self.client.semaphore(f"pool-{self.count}", 2, ttl=5).try_acquire())) is not None:
            run(lease.release())

    def read(self) -> None:
        self.count += 1
        if (lease := run(self.client.rwlock(f"page-{self.count}").read(ttl=5).try_acquire())) is not None:
            run(lease.release())

    def ping(self) -> None:
        run(self.client.ping())

    def close(self) -> None:
        run(self.client.close())


commands = Commands()
for line in sys.stdin:
    command = json.loads(line)
    began, error = time.monotonic(), None
    try:
        getattr(commands, command)()
    except leasehold.LeaseholdError as raised:
        error = ["LeaseholdError", type(raised).__name__, str(raised)]
    except BaseException as raised:
        error = ["other", type(raised).__name__, str(raised)]
    report = {
        "seconds": time.monotonic() - began,
        "error": error,
        "peak": peak_memory(),
    }
    print(json.dumps(report), flush=True)
