"""A process that exits in the middle of things: what does it leave behind? It prints one JSON value per line.

exit_child.py interrupted API URL NAMESPACE    holds "kept" and waits for "job" until it is interrupted (SIGINT)
exit_child.py raises API URL NAMESPACE         waits for "job" until SIGINT, on which it calls sys.exit
exit_child.py daemon API URL NAMESPACE         holds "kept"; a daemon thread waits for "job" when it exits
exit_child.py abandoned API URL NAMESPACE      the event loop is left while a task waits for "job" (asyncio only)
exit_child.py threadless API URL NAMESPACE     as `interrupted`, but once it waits no further thread can be started
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time

from leasehold import AsyncClient, Client
from leasehold.runtime.threads import Threads

TTL = 60


def say(value) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def is_queued(holdings) -> bool:
    return any(holding.holder.pid == os.getpid() and holding.state == "waiting" for holding in holdings)


def report_when_queued(client: Client) -> None:
    """A thread's target. Its client is another one, so that it does not disturb the one under test."""
    while not is_queued(client.inspect("job", exact=True)):
        time.sleep(0.005)
    client.close()
    if how == "threadless":  # as in Python 3.12 and later once the main thread has ended
        Threads.start_thread = refuse_threads
    say("waiting")


def start_reporter(url: str, namespace: str) -> threading.Thread:
    thread = threading.Thread(target=report_when_queued, args=(Client(url, namespace=namespace),), daemon=True)
    thread.start()
    return thread


def refuse_threads(self, start, name) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


# --------------------------------------------------------------------- blocking


def blocking_interrupted(url: str, namespace: str) -> None:
    client = Client(url, namespace=namespace, ttl=TTL)
    say({"token": client_lease(client).token})
    start_reporter(url, namespace)
    client.lock("job").acquire()


def client_lease(client: Client):
    global kept  # not dropped when the stack is unwound: a dropped lease is released
    kept = client.lock("kept").acquire()
    return kept


def blocking_raises(url: str, namespace: str) -> None:
    client = Client(url, namespace=namespace, ttl=TTL)
    start_reporter(url, namespace)

    def on_signal(*_) -> None:
        sys.exit(3)

    signal.signal(signal.SIGINT, on_signal)
    client.lock("job").acquire()


def blocking_daemon(url: str, namespace: str) -> None:
    global client
    client = Client(url, namespace=namespace, ttl=TTL)
    say({"token": client_lease(client).token})
    reporter = start_reporter(url, namespace)
    threading.Thread(target=client.lock("job").acquire, daemon=True).start()
    reporter.join()
    sys.stdin.readline()


# ---------------------------------------------------------------------- asyncio


async def wait_for_job(url: str, namespace: str, keeps: bool = True) -> None:
    global client, kept
    client = AsyncClient(url, namespace=namespace, ttl=TTL)
    if keeps:
        kept = await client.lock("kept").acquire()
        say({"token": kept.token})
    start_reporter(url, namespace)
    await client.lock("job").acquire()


def asyncio_interrupted(url: str, namespace: str) -> None:
    asyncio.run(wait_for_job(url, namespace))


def asyncio_raises(url: str, namespace: str) -> None:
    async def main() -> None:
        waiting = asyncio.create_task(wait_for_job(url, namespace, keeps=False))
        interrupted = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
        await interrupted.wait()
        assert not waiting.done()
        sys.exit(3)

    asyncio.run(main())


def asyncio_daemon(url: str, namespace: str) -> None:
    threading.Thread(target=asyncio_interrupted, args=(url, namespace), daemon=True).start()
    sys.stdin.readline()


def asyncio_abandoned(url: str, namespace: str) -> None:
    """The loop is neither closed nor are its tasks cancelled."""
    global loop
    loop = asyncio.new_event_loop()
    loop.run_until_complete(wait_for_job(url, namespace))


if __name__ == "__main__":
    _, how, api, url, namespace = sys.argv
    globals()[f"{api}_{how.replace('threadless', 'interrupted')}"](url, namespace)
