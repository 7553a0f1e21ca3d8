"""Simulated programs that use locks. They know nothing of the simulation: they use `AsyncClient` as anybody would."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

from leasehold.aio import AsyncClient, AsyncLock
from leasehold.errors import LeaseLost, Mismatch, NotAcquired, Unavailable
from leasehold.runtime.simulated import Process, Task
from leasehold.testing.history import Op
from leasehold.testing.network import Server
from leasehold.testing.witness import Belief, Complain, Wish, Witness


class Program:
    """One process with one client and a few workers, each of which works through wishes until told to stop."""

    def __init__(
        self,
        name: str,
        server: Server,
        witness: Witness,
        complain: Complain,
        wishes: Callable[[random.Random], Wish],
        *,
        workers: int,
        call_timeout: float,
        cancels: float,
        idle: float,
        ttls: Sequence[float],
    ) -> None:
        world = server.world
        self.name, self.stopping = name, False
        self.process = Process(world, name)
        self.client = AsyncClient(engine=server.opener(), runtime=self.process, holder=name, call_timeout=call_timeout)
        for ttl in ttls:  # built when the program starts, as they are for real: the watchdog knows what to be ready for
            self.client.lock("index", ttl=ttl)
        self._witness, self._complain, self._wishes, self._cancels = witness, complain, wishes, cancels
        self._idle = idle
        self.workers = [self._hire(f"{name}/{number}") for number in range(workers)]

    def _hire(self, who: str) -> Task:
        return self.process.spawn(self._work(who, random.Random(self.process.world.random.getrandbits(64))), who)

    async def _work(self, who: str, chance: random.Random) -> None:
        while not self.stopping:
            await self.process.sleep(chance.expovariate(1 / self._idle))
            # Each operation is a task of its own, so that a cancellation hits whatever it awaits and no more.
            task = self.process.spawn(self._operate(who, self._wishes(chance), chance), who)
            task.cancel_at = chance.randint(1, 9) if chance.random() < self._cancels else None
            await task.ended()

    async def _operate(self, who: str, wish: Wish, chance: random.Random) -> None:
        lock, op = self._lock(wish), self._witness.asks(who, wish)
        try:
            if wish.style == "with":
                await self._by_with(who, lock, op, wish, chance)
            else:
                await self._by_hand(who, lock, op, wish, chance)
        except NotAcquired:
            op.fail("busy") if wish.wait == 0 else op.unknown("waited out")
        except Mismatch:
            op.fail("mismatch")
        except Unavailable:
            op.unknown("unavailable")
        except asyncio.CancelledError:
            op.unknown("cancelled")

    def _lock(self, wish: Wish) -> AsyncLock:
        options = {name: getattr(wish, name) for name in ("ttl", "wait", "min_hold", "max_hold", "delay")}
        if wish.shape == "semaphore":
            return self.client.semaphore(wish.name, wish.limit, **options)
        if wish.shape == "lock":
            return self.client.lock(wish.name, **options)
        both = self.client.rwlock(wish.name)
        return both.read(**options) if wish.shape == "read" else both.write(**options)

    async def _by_with(self, who: str, lock: AsyncLock, op: Op, wish: Wish, chance: random.Random) -> None:
        belief, held = None, True
        try:
            async with lock as lease:
                belief = self._witness.believes(op, who, self.process, lease)
                try:
                    await self._body(belief, wish, chance)
                finally:
                    held = lease.held
                    if not self.process.dead:
                        self._witness.releases(belief).unknown("with")
            if not held:
                self._complain("quiet", f"{who} left its `with` on {wish.name} without a word of the loss")
        except LeaseLost:
            if held:
                self._complain("false alarm", f"{who} was told that {wish.name} is lost while it was held")
        except (asyncio.CancelledError, Unavailable):
            if belief is None:
                raise
        finally:
            if belief is not None:
                self._witness.lets_go(belief)

    async def _by_hand(self, who: str, lock: AsyncLock, op: Op, wish: Wish, chance: random.Random) -> None:
        lease = await lock.try_acquire() if wish.style == "try" else await lock.acquire()
        if lease is None:
            op.fail("busy")
            return
        belief = self._witness.believes(op, who, self.process, lease)
        with suppress(
            LeaseLost, Unavailable, asyncio.CancelledError
        ):  # whatever ends the work, the lease is given back
            await self._body(belief, wish, chance)
        await self._give_back(belief)

    async def _give_back(self, belief: Belief) -> None:
        release, known = self._witness.releases(belief), False
        try:
            release.ok(await belief.lease.release())
            known = True
        except asyncio.CancelledError:
            pass
        finally:
            if not known and not self.process.dead:
                release.unknown("cancelled")
            self._witness.lets_go(belief)

    async def _body(self, belief: Belief, wish: Wish, chance: random.Random) -> None:
        process, lease = self.process, belief.lease
        end = process.now() + wish.work
        while (left := end - process.now()) > 0 and lease.held:
            await process.sleep(min(left, chance.uniform(0.05, 1.0)))
            if wish.renews and chance.random() < 0.5:
                await self._renew(belief, chance.choice([None, wish.ttl, wish.ttl / 2]))

    async def _renew(self, belief: Belief, ttl: float | None) -> None:
        lease = belief.lease
        op = self._witness.history.invoke(belief.who, "renew", lease.name, token=lease.token)
        belief.short |= ttl is not None and ttl < lease.ttl
        try:
            await lease.renew(ttl)
        except LeaseLost:
            op.ok(False)
            raise
        except (Unavailable, asyncio.CancelledError):
            op.unknown("unavailable")
            raise
        op.ok()

    async def close(self) -> None:
        await self.client.close()
