"""A process of its own for the history of a redlock: takes one name again and again; says one JSON a line.

redlock_child.py URL NAME SECONDS SEED KIND     KIND: blocking or asyncio
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
from leasehold.runtime.base import settle, step

OPTIONS = {"ttl": 1.5, "call_timeout": 1.0}

logging.disable(logging.CRITICAL)


def say(*what) -> None:
    os.write(1, f"{json.dumps([now(), *what])}\n".encode())


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def work(client: Any, sleep: Callable[[float], Any], name: str, end: float, chance: random.Random) -> None:
    """Of either face: the blocking one suspends nowhere."""
    while now() < end:
        say("asks")
        try:
            lease = await settle(client.lock(name).acquire(wait=chance.choice([0, 0.5, 3])))
        except LeaseholdError as error:
            say("fails", type(error).__name__)
            continue
        say("holds", lease.token)
        end_of_work, trusted = now() + chance.random() * 0.05, now()
        while lease.held and now() < end_of_work:
            trusted = now()
            await settle(sleep(0.001))
        say(*(("ends", lease.token) if lease.held else ("lost", lease.token, trusted)))
        await settle(lease.release())
        await settle(sleep(chance.random() * 0.01))


async def in_a_loop(url: str, *how: Any) -> None:
    async with AsyncClient(url, **OPTIONS) as client:
        await work(client, asyncio.sleep, *how)


if __name__ == "__main__":
    url, name, seconds, seed, kind = sys.argv[1:]
    how = name, now() + float(seconds), random.Random(int(seed))
    if kind == "blocking":
        with Client(url, **OPTIONS) as client:
            step(work(client, time.sleep, *how))
    else:
        asyncio.run(in_a_loop(url, *how))
