"""A service over the memory engine, without HTTP: its requests as calls and tasks, by its own clock."""

import asyncio
import contextlib

from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.engines.remote.wire import Wakeup
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import boot_clock
from leasehold.server.routes import LongPoll
from leasehold.server.service import Service

CLIENT = ("anyone", "client-1")
OTHER = ("anyone", "client-2")


class GatedEngine:
    """The engine of a service. A verb in `gates` begins, and gets its answer when the test opens the gate. `real` is
    the engine behind it."""

    def __init__(self, engine):
        self.real, self.gates, self.calls, self.cancelled = engine, {}, [], []

    def __getattr__(self, name):
        verb = getattr(self.real, name)
        if name not in ("attempt", "release", "renew", "decline", "ping"):
            return verb

        async def gated(*args):
            self.calls.append(name)
            try:
                answer = await verb(*args)
                if (gate := self.gates.get(name)) is not None:
                    await gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            if isinstance(answer, list | Grant | Busy | bool | type(None)):
                return answer
            raise answer

        return gated


class Clock:
    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return boot_clock() + self.ahead


@contextlib.asynccontextmanager
async def serving(call_timeout=60.0):
    clock = Clock()
    service = Service(EngineConfig.parse("memory://", call_timeout), Loop(clock))
    service.engine, service.clock = GatedEngine(service.engine), clock
    await service.start()
    service.engine.calls.clear()  # the ping of the start
    try:
        yield service
    finally:
        service.engine.gates.clear()
        await service.stop()


def claim_of(who, name="orders/42", **fields):
    claim_id = f"id-of-{who}".ljust(20, "-")
    return Claim("", name, claim_id, hash_id(claim_id), Holder(who), fields.pop("ttl", 600.0))._replace(**fields)


def acquire(service, who, wait=0.0, caller_made_id=True, poll=None):
    """A request of this caller, as a task."""
    poll = poll or LongPoll(claim_of(who), caller_made_id, lambda _first: contextlib.nullcontext())
    task = asyncio.ensure_future(service.acquire(poll, wait, float("inf")))
    task.poll = poll
    return task


def attempt(service, who, client=CLIENT, queue=True):
    return service.attempt(claim_of(who, queue=queue), client, deadline(service))


def release(service, who):
    return service.release(claim_of(who), deadline(service))


def deadline(service):
    return service.runtime.now() + 60


async def found(service, name="orders/42"):
    """Holder and state of every claim on the name, in order."""
    return [(h.holder.label, h.state) for h in await service.engine.real.inspect("", name, True, deadline(service))]


async def until(condition):
    while not (value := await condition() if asyncio.iscoroutinefunction(condition) else condition()):
        await asyncio.sleep(0.002)
    return value


async def queued(service, *who):
    """Return when these wait in this order."""

    async def as_expected():
        return [label for label, state in await found(service) if state == "waiting"] == list(who)

    await until(as_expected)


async def until_wakeup(stream):
    while True:
        for notification in await stream.take(60):
            if isinstance(notification, Wakeup):
                return notification.id_hash
