"""Stores of every kind, opened on real servers, in both runtimes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from leasehold import stores
from leasehold.config import EngineConfig
from leasehold.runtime.base import settle, step
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import Threads
from leasehold.testing.rig import Absent

KINDS = ["memory", "sqlite", "redis", "postgresql", "mysql"]


def load(name: str) -> ModuleType:
    """A file beside this one: tests are no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def server() -> Callable[[str], Any]:
    def started(kind: str) -> Any:
        try:
            return load("servers").server(kind)
        except Absent as absent:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"{kind}: {absent}")

    return started


@pytest.fixture
def url_of(server: Callable[[str], Any], tmp_path: Path) -> Callable[[str], str]:
    def url(kind: str) -> str:
        if kind == "memory":
            return f"memory://{tmp_path}"
        if kind == "sqlite":
            return f"sqlite://{tmp_path}/records.db"
        return str(server(kind).url())

    return url


@pytest.fixture
def database_of(url_of: Callable[[str], str], tmp_path: Path) -> Callable[[str], Any]:
    def made(kind: str) -> Any:
        return load("databases").Database(kind, "" if kind == "sqlite" else url_of(kind), tmp_path)

    return made


@pytest.fixture
def key() -> str:
    return f"test:{uuid.uuid4().hex}"


class Bench:
    """One store, asked in one runtime; every call is to be awaited, in blocking mode none suspends."""

    def __init__(self, url: str, mode: str, call_timeout: float = 5.0) -> None:
        self.mode = mode
        self.runtime = Threads() if mode == "blocking" else Loop()
        self.store = stores.opened(EngineConfig.parse(url, call_timeout), self.runtime, beside=False)
        self.seconds = call_timeout

    async def read(self, key: str) -> Any:
        return await settle(self.store.read(key, self.seconds))

    async def write(self, key: str, record: Any, was: str = "", keep: float | None = None) -> bool:
        return await settle(self.store.write(key, record, was, keep, self.seconds))

    def run(self, work: Awaitable[Any]) -> Any:
        return step(work) if self.mode == "blocking" else asyncio.run(work)  # type: ignore[arg-type]


@pytest.fixture(params=["blocking", "asyncio"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(url: str, mode: str = "blocking", call_timeout: float = 5.0) -> Bench:
        made.append(Bench(url, mode, call_timeout))
        return made[-1]

    yield make
    for one in made:
        one.store.close()
        one.runtime.close()


@pytest.fixture
def bench(kind: str, mode: str, url_of: Callable[[str], str], opened: Callable[..., Bench]) -> Bench:
    return opened(url_of(kind), mode)
