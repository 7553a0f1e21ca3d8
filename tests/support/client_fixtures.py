"""Fixtures for tests of clients: a manual clock, and clients that use it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import leasehold
from leasehold import Client
from leasehold.config import EngineConfig
from leasehold.engines.base import Engine, Opener
from leasehold.engines.memory import InProcessTransport, MemoryEngine, MemoryServer
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.errors import Unavailable
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.base import Runtime
from leasehold.runtime.threads import Threads
from tests.support import probe


def poll_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll with a deadline."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.002)


class ManualClock:
    """Stands still until a test advances it, which also wakes the watchdogs registered here."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.wake_callbacks: list[Callable[[float], None]] = []

    def __call__(self) -> float:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at += seconds
        for wake in self.wake_callbacks:
            wake(-1.0)


class BreakableTransport(InProcessTransport):
    """A transport that does not answer while `silent` is set."""

    silent = False
    calls = 0

    def call(self, verb: str, args: tuple[object, ...], deadline: float) -> object:
        self.calls += 1
        if self.silent:
            raise Unavailable("silence")
        return super().call(verb, args, deadline)

    def post(self, verb: str, args: tuple[object, ...]) -> bool:
        return False if self.silent else super().post(verb, args)


class Bench:
    """One memory server, any number of blocking clients, and one manual clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = MemoryServer(Threads(self.clock))
        self.transport = BreakableTransport(self.server)
        self.clients: list[Client] = []

    def open(self, _config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> Engine:
        return MemoryEngine(runtime, registry, self.transport)

    def client(self, **options: object) -> Client:
        opener: Opener = self.open
        client = Client(engine=opener, runtime=Threads(self.clock), **options)  # type: ignore[arg-type]
        self.clock.wake_callbacks.append(probe.watchdog(client).wake_by)
        self.clients.append(client)
        return client

    def held_names(self) -> list[str]:
        """The names that are held or cooling."""
        return sorted(name for (_, name), lock_state in snapshot_items(self.server.lock_states) if lock_state.holders)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    vars(bench.transport).clear()  # undo a test's patches: with a clock that stands still, close() could wait for ever
    bench.transport.server = bench.server
    for client in bench.clients:
        client.close()


@pytest.fixture
def url() -> str:
    """The URL of a memory engine that all clients of one test share, on the real clock."""
    return f"memory://shared-{os.urandom(4).hex()}"


@pytest.fixture
def wait_until() -> Callable[..., None]:
    return poll_until


class SettableWallClock(Threads):
    """A runtime whose wall clock is set by the test."""

    def __init__(self, at: float = 600.0) -> None:
        super().__init__()
        self.at = at
        self.wall = lambda: self.at


@pytest.fixture
def add_client():
    """Adds clients of one engine and one store, each with its own wall clock."""
    clients, store = [], MemoryStore(Threads())

    def add(at: float = 600.0):
        runtime = SettableWallClock(at)
        clients.append(Client("memory://fleet", engine=None, runtime=runtime, namespace=f"{id(store)}"))
        return clients[-1], runtime, store

    yield add
    for client in clients:
        client.close()


def run_script_in_process(script: str, seconds: float = 60.0) -> str:
    """Run a script that may hang in a process of its own; return its stdout, or the end of its stderr."""
    bounded_script = f"import faulthandler; faulthandler.dump_traceback_later({seconds - 5}, exit=True)\n{script}"
    completed = subprocess.run([sys.executable, "-c", bounded_script], capture_output=True, text=True, timeout=seconds)
    return completed.stdout.strip() or completed.stderr[-1500:]


def call_in_new_thread(fn: Callable[[], object]) -> object:
    """Return what `fn` returned or raised on a new thread, after that thread has ended."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(fn())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome, "the thread did not end within 60 s"
    return outcome[0]


@pytest.fixture
def run_script() -> Callable[..., Any]:
    return run_script_in_process


@pytest.fixture
def in_new_thread() -> Callable[..., Any]:
    return call_in_new_thread


@pytest.fixture
def run_clock() -> Iterator[Callable[[Bench], None]]:
    """Lets the manual clock follow the real clock until the test ends, however long it takes."""
    ended, threads = threading.Event(), list[threading.Thread]()

    def follow(bench: Bench) -> None:
        def run() -> None:
            while not ended.wait(0.02):
                bench.clock.at += 0.02

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()

    yield follow
    ended.set()
    for thread in threads:
        thread.join(60)


class CountingFunction:
    """A function that counts its runs."""

    def __init__(self, *results: object) -> None:
        self.results, self.runs = list(results), 0

    def __call__(self) -> object:
        self.runs += 1
        result = self.results[min(self.runs, len(self.results)) - 1]
        if isinstance(result, BaseException):
            raise result
        return result


@pytest.fixture
def counting_function() -> type[CountingFunction]:
    return CountingFunction


class InterruptedSet(set[str]):
    """Ctrl-C arrives as soon as an element was added."""

    def add(self, element: str) -> None:
        super().add(element)
        raise KeyboardInterrupt


class CtrlCTracer:
    """Raises KeyboardInterrupt at the nth point: each call and return in the package, and each line of the given files.

    Other files are not interrupted at each line: Python itself handles signals at calls, and never between the return
    of `__enter__` and the body of its `with`.
    """

    def __init__(self, number: int, *files: str) -> None:
        self.remaining, self._files, self._package_directory = number, files, os.path.dirname(leasehold.__file__)

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self._package_directory) or frame.f_code.co_name in ("__exit__", "__del__"):
            return None
        self._count()
        frame.f_trace_lines = file.endswith(self._files)
        return self._trace_inside

    def _trace_inside(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event != "exception" and (frame.f_code.co_name, event) != ("__enter__", "return"):  # not interruptible
            self._count()
        return self._trace_inside

    def _count(self) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise KeyboardInterrupt


def run_interrupted(number: int, work: Callable[[], object], *files: str) -> bool:
    """Whether the interrupt was raised before `work` ended."""
    previous = sys.gettrace()
    sys.settrace(CtrlCTracer(number, *files))
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


@pytest.fixture
def ctrl_c() -> Callable[..., bool]:
    return run_interrupted
