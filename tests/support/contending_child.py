"""A child process for history tests: acquires one name repeatedly and prints one JSON event per line.

contending_child.py URL NAME SECONDS SEED KIND     KIND: blocking or asyncio
"""

import asyncio
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from leasehold import AsyncClient, Client, LeaseholdError
from leasehold.runtime.base import maybe_await, run_sync

OPTIONS = {"ttl": 1.5, "call_timeout": 1.0}

logging.disable(logging.CRITICAL)


def say(*fields) -> None:
    os.write(1, f"{json.dumps([now(), *fields])}\n".encode())


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def work(client: Any, sleep: Callable[[float], Any], name: str, end: float, rng: random.Random) -> None:
    """Works with both clients: with the blocking one it never suspends."""
    while now() < end:
        say("asks")
        try:
            lease = await maybe_await(client.lock(name).acquire(wait=rng.choice([0, 0.5, 3])))
        except LeaseholdError as error:
            say("fails", type(error).__name__)
            continue
        say("holds", lease.token)
        end_of_work, last_held_at = now() + rng.random() * 0.05, now()
        while lease.held and now() < end_of_work:
            last_held_at = now()
            await maybe_await(sleep(0.001))
        say(*(("ends", lease.token) if lease.held else ("lost", lease.token, last_held_at)))
        await maybe_await(lease.release())
        await maybe_await(sleep(rng.random() * 0.01))


async def run_asyncio(url: str, *work_arguments: Any) -> None:
    async with AsyncClient(url, **OPTIONS) as client:
        await work(client, asyncio.sleep, *work_arguments)


if __name__ == "__main__":
    url, name, seconds, seed, kind = sys.argv[1:]
    work_arguments = name, now() + float(seconds), random.Random(int(seed))
    if kind == "blocking":
        with Client(url, **OPTIONS) as client:
            run_sync(work(client, time.sleep, *work_arguments))
    else:
        asyncio.run(run_asyncio(url, *work_arguments))
