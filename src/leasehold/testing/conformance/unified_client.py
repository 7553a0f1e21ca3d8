"""The blocking and the asyncio client behind one interface, for code that is written once and runs on both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypeAlias, Unpack

from leasehold.aio import AsyncClient, AsyncElection, AsyncLease, AsyncLeases, AsyncLock, AsyncMultiLock
from leasehold.blocking import Client, Election, Lease, Leases, Lock, MultiLock
from leasehold.config import UNSET, LockArguments, Unset
from leasehold.core.deadlocks import Deadlock
from leasehold.model import Holding, Term, Traits
from leasehold.runtime.base import maybe_await, run_sync

AnyLock: TypeAlias = Lock | AsyncLock
AnyLease: TypeAlias = Lease | AsyncLease
AnyMultiLock: TypeAlias = MultiLock | AsyncMultiLock
AnyLeases: TypeAlias = Leases | AsyncLeases
AnyElection: TypeAlias = Election | AsyncElection

DEFAULT_WAIT: Final = 30.0


def _with_default_wait(options: LockArguments) -> LockArguments:
    return {"wait": DEFAULT_WAIT, **options}


async def _result_of(value: object) -> Any:
    """The result of a blocking method, or of its asyncio twin, which must be awaited."""
    return await maybe_await(value)


@asynccontextmanager
async def _entered(block: AnyLock | AnyMultiLock) -> AsyncIterator[Any]:
    if isinstance(block, (Lock, MultiLock)):
        with block as held:
            yield held
    else:
        async with block as held:
            yield held


class UnifiedClient:
    """A client whose calls are all awaited; in blocking mode none of them suspends."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    @property
    def traits(self) -> Traits:
        return self.client.traits

    # By default these wait for a limited time, not for ever: a case must end even if the engine is wrong.

    def lock(self, name: str = "job", **options: Unpack[LockArguments]) -> AnyLock:
        return self.client.lock(name, **_with_default_wait(options))

    def read(self, name: str, **options: Unpack[LockArguments]) -> AnyLock:
        return self.client.rwlock(name).read(**_with_default_wait(options))

    def write(self, name: str, **options: Unpack[LockArguments]) -> AnyLock:
        return self.client.rwlock(name).write(**_with_default_wait(options))

    def semaphore(self, name: str, limit: int, **options: Unpack[LockArguments]) -> AnyLock:
        return self.client.semaphore(name, limit, **_with_default_wait(options))

    def multilock(self, names: Iterable[str], **options: Unpack[LockArguments]) -> AnyMultiLock:
        return self.client.multilock(names, **_with_default_wait(options))

    def any_of(self, names: Iterable[str], **options: Unpack[LockArguments]) -> AnyLock:
        return self.client.any_of(names, **_with_default_wait(options))

    def election(self, name: str, **options: Unpack[LockArguments]) -> AnyElection:
        return self.client.election(name, **_with_default_wait(options))

    def now(self) -> float:
        """The client's own clock."""
        return self.client._core.runtime.now()

    async def acquire(self, name: str = "job", **options: Unpack[LockArguments]) -> AnyLease:
        return await self.acquire_lock(self.lock(name, **options))

    async def acquire_lock(self, lock: AnyLock, wait: float | Unset | None = UNSET) -> AnyLease:
        lease: AnyLease = await _result_of(lock.acquire(wait=wait))
        return lease

    async def try_acquire(self, lock: AnyLock) -> AnyLease | None:
        lease: AnyLease | None = await _result_of(lock.try_acquire())
        return lease

    def hold(self, lock: AnyLock) -> AbstractAsyncContextManager[AnyLease]:
        """Hold the lock for the body, by `with` or `async with`."""
        return _entered(lock)

    def hold_all(self, multilock: AnyMultiLock) -> AbstractAsyncContextManager[AnyLeases]:
        """The same for a multilock."""
        return _entered(multilock)

    async def campaign(self, election: AnyElection) -> AnyLease:
        term: AnyLease = await _result_of(election.campaign())
        return term

    async def resign(self, election: AnyElection) -> bool:
        return bool(await _result_of(election.resign()))

    async def leader(self, election: AnyElection) -> Term | None:
        term: Term | None = await _result_of(election.leader())
        return term

    async def observe(self, election: AnyElection, seconds: float) -> list[Term]:
        """Every term that an observer sees within `seconds`."""
        if isinstance(election, Election):
            return list(election.observe(seconds=seconds))
        return [term async for term in election.observe(seconds=seconds)]

    async def deadlocks(self) -> list[Deadlock]:
        found: list[Deadlock] = await _result_of(self.client.deadlocks())
        return found

    async def locked(self, lock: AnyLock) -> bool:
        return bool(await _result_of(lock.locked()))

    async def release(self, lease: AnyLease) -> bool:
        return bool(await _result_of(lease.release()))

    async def renew(self, lease: AnyLease, ttl: float | None = None) -> None:
        if isinstance(lease, Lease):
            lease.renew(ttl)
        else:
            await lease.renew(ttl)

    async def ensure(self, lease: AnyLease, seconds: float) -> None:
        if isinstance(lease, Lease):
            lease.ensure(seconds)
        else:
            await lease.ensure(seconds)

    async def hand_over(self, lease: AnyLease) -> str:
        return str(await _result_of(lease.hand_over()))

    async def take_over(self, text: str) -> AnyLease:
        lease: AnyLease = await _result_of(self.client.take_over(text))
        return lease

    async def inspect(self, prefix: str = "", exact: bool = False) -> list[Holding]:
        found: list[Holding] = await _result_of(self.client.inspect(prefix, exact))
        return found

    async def break_lock(self, name: str, token: int) -> bool:
        return bool(await _result_of(self.client.break_lock(name, token=token)))

    async def set_limit(self, name: str, limit: int | None) -> None:
        await _result_of(self.client.set_limit(name, limit))

    async def once(self, key: str, work: Callable[[], Coroutine[Any, Any, object]], **options: Any) -> Any:
        """Run a coroutine function once for a key; in blocking mode on the caller's thread."""
        if isinstance(self.client, Client):
            return self.client.once(key, lambda: run_sync(work()), wait=DEFAULT_WAIT, **options)
        return await self.client.once(key, work, wait=DEFAULT_WAIT, **options)

    async def ping(self) -> float:
        return float(await _result_of(self.client.ping()))

    async def close(self) -> None:
        if isinstance(self.client, Client):
            self.client.close()
        else:
            await self.client.close()
