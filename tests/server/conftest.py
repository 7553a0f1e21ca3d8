"""Servers that several tests share: one per engine, each test with names of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.support.running_server import RunningServer, running

_NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server over each engine."""
    if request.param == "redis":
        from harness.rigs.redis import single_server

        url = f"redis://127.0.0.1:{single_server()[0].port}"
    else:
        url = {"memory": "memory://", "sqlite": f"sqlite://{tmp_path_factory.mktemp('locks')}/locks.db"}[request.param]
    with running(url=url) as server:
        server.url = url
        yield server


@pytest.fixture(scope="module")
def memory_server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"orders/{next(_NUMBERS)}-{id(object())}"


@pytest.fixture
def new_id() -> Callable[[], str]:
    return lambda: f"test-{next(_NUMBERS):020}"
