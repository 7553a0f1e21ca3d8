"""The pytest plugin: fixtures for testing code that uses locks, without a server and without waiting.

    def test_the_report_stops_when_its_lock_is_lost(leasehold_client, leasehold_clock):
        with pytest.raises(leasehold.LeaseLost):
            with leasehold_client.lock("report") as lease:
                leasehold_clock.advance(3600)        # an hour; the watchdog keeps renewing
                assert lease.held
                expire(lease)                        # from leasehold.testing import expire

    leasehold_client         a `Client` on a memory engine private to this test
    leasehold_async_client   an `AsyncClient` on the same engine; works with any plugin that runs async tests
    leasehold_clock          the clock of both, of the engine and of the watchdogs: see `Clock`
    leasehold_once           `leasehold_once(name, fn)` runs `fn` once per test run, in one worker of pytest-xdist

pytest loads this in every run where Leasehold is installed, so everything else is imported when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import pytest

if TYPE_CHECKING:
    from leasehold import AsyncClient, Client
    from leasehold.engines.base import Opener
    from leasehold.testing.clock import Clock

T = TypeVar("T")

_ONCE_TTL: Final = 15.0  # seconds after which another worker takes over from one that is stopped


class RunOnce(Protocol):
    """What the fixture `leasehold_once` gives."""

    def __call__(self, name: str, fn: Callable[..., T], /, *args: Any) -> T: ...


def pytest_configure(config: pytest.Config) -> None:
    # Set by `conformance_tests` on cases that wait for real seconds; many projects treat unknown marks as errors.
    config.addinivalue_line("markers", "faults: long runs, such as Leasehold conformance cases that wait in real time")


@pytest.fixture
def leasehold_clock() -> Clock:
    """A clock that stands still until `leasehold_clock.advance(seconds)`; see `leasehold.testing.Clock`."""
    from leasehold.testing.clock import Clock

    return Clock()


@pytest.fixture
def _leasehold_engine(leasehold_clock: Clock) -> Opener:
    from leasehold.config import EngineConfig
    from leasehold.engines import memory
    from leasehold.engines.registry import ClaimRegistry
    from leasehold.runtime.base import Runtime
    from leasehold.testing.clock import ClockThreads

    server = memory.MemoryServer(ClockThreads(leasehold_clock))

    def open_(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> memory.MemoryEngine:
        registry.shared["memory_server"] = server  # where the engine and `expire` look for it
        return memory.open(config, runtime, registry)

    return open_


@pytest.fixture
def leasehold_client(leasehold_clock: Clock, _leasehold_engine: Opener) -> Iterator[Client]:
    """A blocking client on a memory engine private to this test; closed, its leases released, when the test ends."""
    from leasehold import Client
    from leasehold.testing.clock import ClockThreads

    with Client("memory://", engine=_leasehold_engine, runtime=ClockThreads(leasehold_clock)) as client:
        yield client


@pytest.fixture
def leasehold_async_client(leasehold_clock: Clock, _leasehold_engine: Opener) -> Iterator[AsyncClient]:
    """An asyncio client on the same engine as `leasehold_client`. Not a coroutine fixture, so it works with any async
    plugin. It belongs to the loop that uses it first, and is closed when the test ends, even if that loop is closed."""
    from leasehold import AsyncClient
    from leasehold.runtime.base import run_sync
    from leasehold.testing.clock import ClockLoop

    runtime = ClockLoop(leasehold_clock)
    client = AsyncClient("memory://", engine=_leasehold_engine, runtime=runtime)
    yield client
    runtime.ended = True
    run_sync(client._core.close())


@pytest.fixture(scope="session")
def leasehold_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunOnce]:
    """Run something once per test run, however many workers of pytest-xdist there are.

    `leasehold_once(name, fn, *args)` calls `fn(*args)` in the worker that comes first; the others wait. All get its
    result, through JSON. If `fn` raises, so do the calls in the other workers, with `RunFailed`. If the worker is
    killed meanwhile, another one runs `fn` again. The workers must be on one machine.
    """
    from urllib.parse import quote

    from leasehold import Client

    folder, run = tmp_path_factory.getbasetemp(), ""
    if worker := getattr(request.config, "workerinput", None):
        folder, run = folder.parent, worker["testrunuid"]  # a folder of all workers, perhaps of several runs
    with Client(f"sqlite://{quote(str(folder))}/leasehold-once.db", ttl=_ONCE_TTL) as client:

        def run_once(name: str, fn: Callable[..., T], /, *args: Any) -> T:
            return client.once(f"{run}:{name}", fn, *args, on_failure="keep")

        yield run_once
