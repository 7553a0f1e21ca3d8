"""Simulated programs that use locks. They know nothing about the simulation: they use the public `AsyncClient`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

from harness import probe
from harness.simulator.client_oracle import AddFinding, ClientOracle, HeldLease, Request, RequestOps
from leasehold.aio import AsyncClient, AsyncLock
from leasehold.client import lease_document
from leasehold.core.queue_entry import HELD
from leasehold.errors import ConfigError, LeaseLost, Mismatch, NotAcquired, Unavailable
from leasehold.model import Claim
from leasehold.runtime.simulated import Process, Task
from leasehold.testing.network import SimulatedServer


class Program:
    """One process with one client and a few workers. Each worker performs requests until the program is stopping."""

    def __init__(
        self,
        name: str,
        server: SimulatedServer,
        client_oracle: ClientOracle,
        add_finding: AddFinding,
        next_request: Callable[[random.Random], Request],
        *,
        workers: int,
        call_timeout: float,
        cancel_chance: float,
        idle: float,
        ttls: Sequence[float],
        clock_rates: Sequence[float],
        drift: float,
        programs: Sequence[Program],
    ) -> None:
        world = server.world
        self.name, self.stopping, self._server = name, False, server
        self.process = Process(world, name, rate=world.random.choice(clock_rates) if clock_rates else None)
        self.client = AsyncClient(
            engine=server.opener(), runtime=self.process, holder=name, call_timeout=call_timeout, drift=drift
        )
        for ttl in ttls:  # built early, as in real programs, so that the watchdog knows which ttls to expect
            self.client.lock("index", ttl=ttl)
        self._client_oracle, self._add_finding, self._next_request, self._cancel_chance = (
            client_oracle,
            add_finding,
            next_request,
            cancel_chance,
        )
        self._idle, self._programs = idle, programs
        self.takers: list[Task] = []  # work under leases that others have handed over
        self.workers = [self._start_worker(f"{name}/{number}") for number in range(workers)]

    def _start_worker(self, worker: str) -> Task:
        return self.process.spawn(
            self._work(worker, random.Random(self.process.simulator.random.getrandbits(64))), worker
        )

    async def _work(self, worker: str, rng: random.Random) -> None:
        while not self.stopping:
            await self.process.sleep(rng.expovariate(1 / self._idle))
            # Each operation is a task of its own, so that a cancellation only hits what that operation awaits.
            task = self.process.spawn(self._operate(worker, self._next_request(rng), rng), worker)
            task.cancel_at = rng.randint(1, 9) if rng.random() < self._cancel_chance else None
            await task.join()

    async def _operate(self, worker: str, request: Request, rng: random.Random) -> None:
        lock, op = self._lock(request), self._client_oracle.record_request(worker, request)
        try:
            if request.style == "with":
                await self._by_with(worker, lock, op, request, rng)
            else:
                await self._by_hand(worker, lock, op, request, rng)
        except NotAcquired:
            op.fail("busy") if request.wait == 0 else op.unknown("waited out")
        except Mismatch:
            op.fail("mismatch")
        except Unavailable:
            op.unknown("unavailable")
        except asyncio.CancelledError:
            op.unknown("cancelled")

    def _lock(self, request: Request) -> AsyncLock:
        options = {name: getattr(request, name) for name in ("ttl", "wait", "min_hold", "max_hold", "delay", "strict")}
        if request.hands_over:
            options["require"] = {"outlives"}
        if request.others:
            return self.client.any_of([request.name, *request.others], **options)
        if request.shape == "semaphore":
            return self.client.semaphore(request.name, request.limit, **options)
        if request.shape == "lock":
            return self.client.lock(request.name, **options)
        rwlock = self.client.rwlock(request.name)
        return rwlock.read(**options) if request.shape == "read" else rwlock.write(**options)

    async def _by_with(
        self, worker: str, lock: AsyncLock, op: RequestOps, request: Request, rng: random.Random
    ) -> None:
        held_lease, held = None, True
        try:
            async with lock as lease:
                held_lease = self._client_oracle.record_grant(op, worker, self.process, lease)
                try:
                    await self._body(held_lease, request, rng)
                finally:
                    held = lease.held
                    if not self.process.dead:
                        self._client_oracle.record_release(held_lease).unknown("with")
            if not held:
                self._add_finding(
                    "loss not raised", f"{worker} lost {request.name}, and its `with` did not raise LeaseLost"
                )
        except LeaseLost:
            # Leaving may also raise because of the engine's answer to the release. Then the release ended no grant.
            if held and held_lease is not None and self._was_alive(probe.claim(held_lease.lease)):
                self._add_finding("false alarm", f"{worker} got LeaseLost for {request.name} while it was held")
        except (asyncio.CancelledError, Unavailable):
            if held_lease is None:
                raise
        finally:
            if held_lease is not None:
                self._client_oracle.forget(held_lease)

    def _was_alive(self, claim: Claim) -> bool:
        """Whether the server still has this grant, or had it when the release arrived."""
        lock_state = self._server.memory.lock_states.get((claim.namespace, claim.name))
        entry = lock_state and lock_state.entries.get(claim.id_hash)
        return claim.id_hash in self._client_oracle.ended_by_release or bool(entry and entry.state == HELD)

    async def _by_hand(
        self, worker: str, lock: AsyncLock, op: RequestOps, request: Request, rng: random.Random
    ) -> None:
        lease = await lock.try_acquire() if request.style == "try" else await lock.acquire()
        if lease is None:
            op.fail("busy")
            return
        held_lease = self._client_oracle.record_grant(op, worker, self.process, lease)
        # However the work ends, the lease is released.
        with suppress(LeaseLost, Unavailable, asyncio.CancelledError):
            await self._body(held_lease, request, rng)
            if request.hands_over and lease.held:
                await self._hand_over(held_lease, request, rng)
                return
        await self._release(held_lease)

    async def _hand_over(self, held_lease: HeldLease, request: Request, rng: random.Random) -> None:
        """Two programs get the text, at the same time or one after the other; this one may be the first of them."""
        oracle, lease = self._client_oracle, held_lease.lease
        text = await lease.hand_over()
        oracle.record_handed_over(held_lease, [claim.id_hash for claim in lease_document.load(text).claims()])
        for _ in range(2):
            program = rng.choice([program for program in self._programs if not program.process.dead])
            taker = program.process.spawn(program._take_over(text, request, rng.random()), "take over")
            program.takers.append(taker)
            if rng.random() < 0.3:
                await taker.join()

    async def _take_over(self, text: str, request: Request, chance: float) -> None:
        await self.process.sleep(chance * request.ttl / 2)
        try:
            lease = await self.client.take_over(text)
        except (LeaseLost, Unavailable, ConfigError):  # ConfigError: this client has it already, or was closed
            return
        taken = self._client_oracle.record_taken_over(self.name, self.process, lease)
        await self.process.sleep(chance * request.ttl)
        await lease.release()
        self._client_oracle.forget(taken)

    async def _release(self, held_lease: HeldLease) -> None:
        release, answered = self._client_oracle.record_release(held_lease), False
        try:
            release.ok(await held_lease.lease.release())
            answered = True
        except asyncio.CancelledError:
            pass
        finally:
            if not answered and not self.process.dead:
                release.unknown("cancelled")
            self._client_oracle.forget(held_lease)

    async def _body(self, held_lease: HeldLease, request: Request, rng: random.Random) -> None:
        process, lease = self.process, held_lease.lease
        end = process.now() + request.work
        while (left := end - process.now()) > 0 and lease.held:
            await process.sleep(min(left, rng.uniform(0.05, 1.0)))
            if request.renews and rng.random() < 0.5:
                await self._renew(held_lease, rng.choice([None, request.ttl, request.ttl / 2]))
            elif request.ensures:
                await self._ensure(held_lease, request.ttl * rng.choice([0.3, 0.9, 1.0]))

    async def _renew(self, held_lease: HeldLease, ttl: float | None) -> None:
        lease = held_lease.lease
        op = self._client_oracle.history.invoke(held_lease.worker, "renew", lease.name, token=lease.token)
        held_lease.short_lived |= ttl is not None and ttl < lease.ttl
        held_lease.ensured_until = 0.0
        try:
            await lease.renew(ttl)
        except LeaseLost:
            op.ok(False)
            raise
        except (Unavailable, asyncio.CancelledError):
            op.unknown("unavailable")
            raise
        op.ok()

    async def _ensure(self, held_lease: HeldLease, seconds: float) -> None:
        with suppress(ConfigError):  # its max_hold ends it earlier
            await held_lease.lease.ensure(seconds)
            self._client_oracle.record_ensured(held_lease, seconds)

    async def close(self) -> None:
        await self.client.close()
