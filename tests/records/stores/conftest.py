"""Stores of every kind, opened on real servers, in both runtimes."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from harness.rigs import zookeeper
from leasehold import AsyncClient, Client
from leasehold.records import stores
from leasehold.runtime.base import maybe_await, run_sync
from leasehold.testing.conformance.rig import Absent
from tests.support import probe, record_databases, record_servers

# Stores on servers, and of these the ones whose records survive a restart of the server.
PERSISTENT = ["redis", "etcd", "zookeeper", "postgresql", "mysql"]
ENGINE_STORES = ["redis", "redis+sentinel", "redis+cluster", "etcd", "zookeeper"]  # on the connections of an engine
SERVERS = [*PERSISTENT, "redis+sentinel", "redis+cluster"]
KINDS = ["memory", "sqlite", *SERVERS]
SECOND_TIER = {"redis+sentinel", "redis+cluster"}  # the same store on other connections of the engine


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = getattr(item, "callspec", None)
        if (
            params
            and item.nodeid.startswith("tests/records/stores/")
            and SECOND_TIER & set(map(str, params.params.values()))
        ):
            item.add_marker(pytest.mark.extended)


@pytest.fixture
def server() -> Callable[[str], Any]:
    def start_or_skip(kind: str) -> Any:
        try:
            return record_servers.server(kind)
        except Absent as absent:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"{kind}: {absent}")

    return start_or_skip


@pytest.fixture
def url_of(server: Callable[[str], Any], tmp_path: Path) -> Callable[[str], str]:
    def url(kind: str) -> str:
        if kind == "memory":
            return f"memory://{tmp_path}"
        if kind == "sqlite":
            return f"sqlite://{tmp_path}/records.db"
        server(kind)
        return record_servers.url(kind)

    return url


@pytest.fixture
def database_of(url_of: Callable[[str], str], tmp_path: Path) -> Callable[[str], Any]:
    def make(kind: str) -> Any:
        return record_databases.Database(kind, "" if kind == "sqlite" else url_of(kind), tmp_path)

    return make


@pytest.fixture
def key() -> str:
    return f"test:{uuid.uuid4().hex}"


class StoreRunner:
    """One store in one runtime. Every call is awaited; in blocking mode none suspends."""

    def __init__(self, url: str, mode: str, call_timeout: float) -> None:
        self.mode, self.seconds = mode, call_timeout
        self.client = (Client if mode == "blocking" else AsyncClient)("memory://", call_timeout=call_timeout)
        self.runtime = probe.runtime(self.client)
        self.store: Any = stores.open_store(self.client, url)

    async def read(self, key: str) -> Any:
        return await maybe_await(self.store.read(key, self.seconds))

    async def write(self, key: str, record: Any, expected_version: str = "", keep: float | None = None) -> bool:
        return await maybe_await(self.store.write(key, record, expected_version, keep, self.seconds))

    def close(self) -> None:
        self.run(self._close())

    async def _close(self) -> None:
        await maybe_await(self.store.close())
        await maybe_await(self.client.close())

    def run(self, coroutine: Awaitable[Any]) -> Any:
        return run_sync(coroutine) if self.mode == "blocking" else asyncio.run(coroutine)  # type: ignore[arg-type]


@pytest.fixture(params=["blocking", "asyncio"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_runner() -> Iterator[Callable[..., StoreRunner]]:
    runners: list[StoreRunner] = []

    def make(url: str, mode: str = "blocking", call_timeout: float = 60.0) -> StoreRunner:
        runners.append(StoreRunner(url, mode, call_timeout))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def runner(kind: str, mode: str, url_of: Callable[[str], str], open_runner: Callable[..., StoreRunner]) -> StoreRunner:
    return open_runner(url_of(kind), mode)


@pytest.fixture
def kazoo() -> Iterator[KazooClient]:
    client = KazooClient(f"127.0.0.1:{zookeeper.shared_server.own().port}")
    client.start()
    yield client
    client.stop()
    client.close()
