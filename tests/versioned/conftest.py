"""Values in real servers, in both faces: one way to ask them all."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from leasehold import versioned
from leasehold.testing import etcd_rig, zookeeper_rig
from leasehold.testing.rig import Absent


class Awaited:
    """An asyncio value behind plain calls: a loop of its own in a thread of its own."""

    def __init__(self, value: Any) -> None:
        self._value, self._loop = value, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(getattr(self._value, verb)(*args, **more), self._loop).result(60)

        return call

    def close(self) -> None:
        self._value._runtime.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def keeper() -> Iterator[KazooClient]:
    client = KazooClient(f"127.0.0.1:{present(zookeeper_rig.alone).port}")
    client.start()
    yield client
    client.stop()
    client.close()


def present(server: Callable[[], Any]) -> Any:
    try:
        return server()
    except Absent as absent:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(absent))


@pytest.fixture
def gateway() -> str:
    return f"http://127.0.0.1:{present(etcd_rig.alone).members[0].port}"


@pytest.fixture(params=["etcd", "zookeeper"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["blocking", "asyncio"])
def make(kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Makes values at one place."""
    where = request.getfixturevalue("gateway" if kind == "etcd" else "keeper")
    path, awaited = f"/test/{uuid.uuid4().hex}", request.param == "asyncio"
    name = {"etcd": "EtcdKey", "zookeeper": "ZooKeeperNode"}[kind]
    made: list[Awaited] = []

    def one() -> Any:
        if not awaited:
            return getattr(versioned, name)(where, path)
        made.append(Awaited(getattr(versioned, f"Async{name}")(where, path)))
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.fixture
def value(make: Callable[[], Any]) -> Any:
    return make()


@pytest.fixture
def other(make: Callable[[], Any]) -> Any:
    """The same, in other hands."""
    return make()
