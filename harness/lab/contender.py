"""A contender: a process that acquires the lock again and again, and adds one to the account while it holds the lock.

python -m harness.lab.contender JSON, with the fields of `Task`. It prints one JSON line per event, with the time of the
machine, and ends when its standard input does. A line `long` there makes its next hold last three ttls.

It is as careless as a program can be: it writes to the account without asking whether it still holds the lock. A fence
at the account must refuse what it writes too late; `plain` contenders have no fence.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from leasehold import AsyncClient, Client, LeaseholdError, StaleToken
from leasehold.cli.run.parent_death import die_with_parent
from leasehold.fences import SQLFence
from leasehold.runtime.base import maybe_await, run_sync

NAME: Final = "account"
WAITS: Final = (0.0, 0.25, 1.5)  # in ttls
HOLDS: Final = (0.005, 0.02, 0.08)  # seconds
_POLL: Final = 0.005

SELECT: Final = "select v from account"
UPDATE: Final = "update account set v = ?"


@dataclass(frozen=True, slots=True)
class Task:
    url: str
    account: str  # the path of the account's database
    kind: Literal["blocking", "asyncio"]
    seed: int
    ttl: float
    call_timeout: float
    parent: int
    plain: bool = False
    crowd: int = 0  # if given: this many tasks acquire the lock once each, at the same moment

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def now() -> float:
    """The clock of every recorded event: the same in all processes, and never set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def report(what: str, *details: object, at: float | None = None, number: int | None = None) -> None:
    """`number`: of one of many tasks."""
    os.write(1, f"{json.dumps([now() if at is None else at, number, what, *details])}\n".encode())


class Account:
    """The protected resource, with a fence or without."""

    def __init__(self, task: Task) -> None:
        self._db = sqlite3.connect(task.account, timeout=60, isolation_level=None, check_same_thread=False)
        self._fence = None if task.plain else SQLFence(self._db, NAME)

    def read(self, lease: Any) -> int | None:
        report("reads", lease.token)
        try:
            rows = self._fence.read(lease, SELECT) if self._fence else self._db.execute(SELECT).fetchall()
        except StaleToken:
            report("refused")
            return None
        report("accepted")
        return int(rows[0][0])

    def write(self, lease: Any, before: int) -> None:
        report("writes", lease.token, before)
        try:
            if self._fence:
                self._fence.write(lease, UPDATE, (before + 1,))
            else:
                self._db.execute(UPDATE, (before + 1,))
        except StaleToken:
            report("refused")
        else:
            report("accepted")


class Orders:
    """What the lab asks for on standard input."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._long = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for _ in sys.stdin:
            self._long.set()
        self.ended.set()

    def take_long(self) -> bool:
        found = self._long.is_set()
        self._long.clear()
        return found


async def contend(client: Any, sleep: Callable[[float], Any], task: Task) -> None:
    """With both clients: with the blocking one this never suspends."""
    rng, account, orders = random.Random(task.seed), Account(task), Orders()
    while not orders.ended.is_set():
        long = orders.take_long()
        wait = 3 * task.ttl if long else rng.choice(WAITS) * task.ttl
        report("asks", wait)
        try:
            lease = await maybe_await(client.lock(NAME).acquire(wait=wait))
        except LeaseholdError as error:
            report("fails", type(error).__name__, getattr(error, "no_majority", False), str(error))
            await maybe_await(sleep(0.02))
            continue
        last_held_at = now()  # a lease that is lost by then was never trusted
        report("holds", lease.token, long, at=last_held_at)
        value = account.read(lease)
        end = now() + (3 * task.ttl if long else rng.choice(HOLDS))
        held = True
        while held and last_held_at < end and not orders.ended.is_set():
            await maybe_await(sleep(_POLL))
            asked_at = now()  # before the question: the process may be paused right after the answer
            if held := bool(lease.held):
                last_held_at = asked_at
        if value is not None:
            account.write(lease, value)
        # At the last instant at which the lease was certainly trusted: it may be lost since.
        report("ends", lease.token, None if held else str(lease.lost_reason), at=last_held_at)
        await maybe_await(lease.release())
        await maybe_await(sleep(rng.random() * 0.02))


async def contend_asyncio(task: Task) -> None:
    async with AsyncClient(task.url, ttl=task.ttl, call_timeout=task.call_timeout) as client:
        await contend(client, asyncio.sleep, task)


async def crowd(task: Task) -> None:
    """Many tasks on one client, each of which acquires the lock once."""
    async with AsyncClient(task.url, ttl=task.ttl, call_timeout=task.call_timeout) as client:

        async def acquire_once(number: int) -> None:
            report("asks", None, number=number)
            try:
                lease = await client.lock(NAME).acquire(wait=None)
            except LeaseholdError as error:
                report("fails", type(error).__name__, False, str(error), number=number)
                return
            report("holds", lease.token, False, number=number)
            report("ends", lease.token, None, number=number)
            await lease.release()

        await client.ping()
        report("ready")
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(*(acquire_once(number) for number in range(task.crowd)))


def main(task: Task) -> None:
    die_with_parent(task.parent)
    logging.disable(logging.CRITICAL)
    if task.crowd:
        asyncio.run(crowd(task))
    elif task.kind == "asyncio":
        asyncio.run(contend_asyncio(task))
    else:
        with Client(task.url, ttl=task.ttl, call_timeout=task.call_timeout) as client:
            run_sync(contend(client, time.sleep, task))


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
