"""Fixtures of the remote engine's tests: scripted servers, and an engine on its own in both runtimes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from harness.rigs.remote import HttpRedisRig, redis_behind
from harness.servers.lock_server import LockServer
from leasehold import AsyncClient, Client
from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.engines import remote
from leasehold.engines.registry import ClaimRegistry
from leasehold.model import Claim, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import Threads
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe, probe_remote
from tests.support.program import PROGRAM, ForkedProgram
from tests.support.scripted_server import ScriptedServer

C = TypeVar("C", Client, AsyncClient)


@pytest.fixture
def start_server() -> Iterator[Callable[..., ScriptedServer]]:
    started: list[ScriptedServer] = []

    def start(*args: Any) -> ScriptedServer:
        started.append(ScriptedServer(*args))
        return started[-1]

    yield start
    for server in started:
        server.close()


class RemoteDriver:
    """The verbs of one engine instance, without client or watchdog, in either runtime."""

    def __init__(self, mode: str) -> None:
        self._runner = None if mode == "blocking" else asyncio.Runner()
        self.runtime = Threads() if self._runner is None else Loop()
        self.engine: Any = None

    def open(self, *servers: Any, at: int = 0, call_timeout: float = 100.0) -> RemoteDriver:
        """A client of these servers that keeps to the one with the index `at`. Its stream may be silent for
        `call_timeout`, and longer than any test: scripted servers send no beats."""
        self.registry = ClaimRegistry(self.runtime, f"{at:08x}{self.runtime.random_bytes(4).hex()}")
        url = "http://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
        self.engine = remote.open(EngineConfig.parse(url, call_timeout), self.runtime, self.registry)
        self.servers = self.registry.shared["remote"].servers
        self.listener = self.registry.shared["remote"].listener
        return self

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return run_sync(coroutine) if self._runner is None else self._runner.run(coroutine)

    def claim(self, name: str = "job", **fields: Any) -> Claim:
        secret = self.runtime.random_bytes(16).hex()
        return Claim("", name, secret, hash_id(secret), Holder("bare"), 30.0)._replace(**fields)

    def attempt(self, claim: Claim, seconds: float = 20.0) -> Any:
        return self.run(self.engine.attempt(claim, self.runtime.now() + seconds))

    def release(self, claim: Claim, seconds: float = 20.0) -> Any:
        return self.run(self.engine.release(claim, self.runtime.now() + seconds))

    def renew(self, *claims: Claim, seconds: float = 20.0) -> Any:
        return self.run(self.engine.renew(claims, self.runtime.now() + seconds))

    def break_(self, seconds: float = 20.0) -> Any:
        return self.run(self.engine.break_("", "job", 7, self.runtime.now() + seconds))

    def ping(self, seconds: float = 20.0) -> Any:
        return self.run(self.engine.ping(self.runtime.now() + seconds))

    def close(self) -> None:
        if self.engine is not None:
            self.run(self.engine.close())
        if self._runner is not None:
            self._runner.close()


@pytest.fixture(params=["blocking", "asyncio"])
def driver(request: pytest.FixtureRequest) -> Iterator[RemoteDriver]:
    driver = RemoteDriver(request.param)
    yield driver
    driver.close()


# Real servers


class _ForkedLockServer(LockServer):
    """From a process that has imported it: an interpreter needs a third of a second. Those of the rigs are started as
    users do."""

    def _spawn(self) -> None:
        arguments = self.command()[len(PROGRAM) :]
        with open(self.log, "ab") as log:
            self._process = ForkedProgram(arguments, {**os.environ, **self.environment()}, log.fileno())


@pytest.fixture
def start_lock_server() -> Iterator[Callable[..., LockServer]]:
    """Start `leasehold serve` for this test alone, so that it may break it."""
    started: list[LockServer] = []

    def start(url: str = "memory://", *arguments: str, **kwargs: Any) -> LockServer:
        started.append(_ForkedLockServer(url, *arguments, **kwargs).start())
        return started[-1]

    yield start
    for server in started:
        server.resume()
        server.kill()


@pytest.fixture
def redis_url() -> str:
    rig_or_skip(HttpRedisRig)  # skips if Redis is not installed
    return f"redis://127.0.0.1:{redis_behind().port}"


@pytest.fixture
def pair_of_servers(start_lock_server: Callable[..., LockServer], redis_url: str) -> list[LockServer]:
    """Two lock servers over one Redis."""
    return [start_lock_server(redis_url) for _ in range(2)]


def make_client(kind: type[C], servers: Sequence[Any], at: int, **options: Any) -> C:
    """A client of these servers (or proxies) that keeps to the one with the index `at`."""
    url = "http://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
    client = kind(url, **options)
    probe_remote.use_server(probe.engine_state(client)["remote"].servers, at)
    return client


@pytest.fixture
def client_at() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(servers: Sequence[Any], at: int = 0, **options: Any) -> Client:
        clients.append(make_client(Client, servers, at, **{"namespace": uuid4().hex, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
