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

from leasehold import AsyncClient, Client, LeaseholdError

logging.disable(logging.CRITICAL)


def say(*what) -> None:
    os.write(1, f"{json.dumps([now(), *what])}\n".encode())


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def blocking(url: str, name: str, end: float, chance: random.Random) -> None:
    with Client(url, ttl=1.5, call_timeout=1.0) as client:
        while now() < end:
            say("asks")
            try:
                lease = client.lock(name).acquire(wait=chance.choice([0, 0.5, 3]))
            except LeaseholdError as error:
                say("fails", type(error).__name__)
                continue
            say("holds", lease.token)
            end_of_work, trusted = now() + chance.random() * 0.05, now()
            while lease.held and now() < end_of_work:
                trusted = now()
                time.sleep(0.001)
            say(*(("ends", lease.token) if lease.held else ("lost", lease.token, trusted)))
            lease.release()
            time.sleep(chance.random() * 0.01)


async def in_a_loop(url: str, name: str, end: float, chance: random.Random) -> None:
    async with AsyncClient(url, ttl=1.5, call_timeout=1.0) as client:
        while now() < end:
            say("asks")
            try:
                lease = await client.lock(name).acquire(wait=chance.choice([0, 0.5, 3]))
            except LeaseholdError as error:
                say("fails", type(error).__name__)
                continue
            say("holds", lease.token)
            end_of_work, trusted = now() + chance.random() * 0.05, now()
            while lease.held and now() < end_of_work:
                trusted = now()
                await asyncio.sleep(0.001)
            say(*(("ends", lease.token) if lease.held else ("lost", lease.token, trusted)))
            await lease.release()
            await asyncio.sleep(chance.random() * 0.01)


if __name__ == "__main__":
    url, name, seconds, seed, kind = sys.argv[1:]
    until, chance = now() + float(seconds), random.Random(int(seed))
    if kind == "blocking":
        blocking(url, name, until, chance)
    else:
        asyncio.run(in_a_loop(url, name, until, chance))
