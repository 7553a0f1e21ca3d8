"""Values on real servers, in both APIs, with one interface for all."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from harness.rigs import etcd, zookeeper
from leasehold import versioned
from leasehold.testing.conformance.rig import Absent


class BlockingWrapper:
    """Blocking calls to an asyncio value, which runs on its own loop in its own thread."""

    def __init__(self, value: Any) -> None:
        self._value, self._loop = value, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(getattr(self._value, verb)(*args, **kwargs), self._loop).result(60)

        return call

    def close(self) -> None:
        self._value._runtime.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def zookeeper_client() -> Iterator[KazooClient]:
    client = KazooClient(f"127.0.0.1:{start_or_skip(zookeeper.shared_server).port}")
    client.start()
    yield client
    client.stop()
    client.close()


def start_or_skip(start: Callable[[], Any]) -> Any:
    try:
        return start()
    except Absent as absent:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(absent))


@pytest.fixture
def etcd_url() -> str:
    return f"http://127.0.0.1:{start_or_skip(etcd.single_member_cluster).members[0].port}"


@pytest.fixture(params=["etcd", "zookeeper"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["blocking", "asyncio"])
def make(kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """A function that creates values for the same key."""
    server = request.getfixturevalue("etcd_url" if kind == "etcd" else "zookeeper_client")
    path, is_async = f"/test/{uuid.uuid4().hex}", request.param == "asyncio"
    name = {"etcd": "EtcdKey", "zookeeper": "ZooKeeperNode"}[kind]
    wrappers: list[BlockingWrapper] = []

    def make_value() -> Any:
        if not is_async:
            return getattr(versioned, name)(server, path)
        wrappers.append(BlockingWrapper(getattr(versioned, f"Async{name}")(server, path)))
        return wrappers[-1]

    yield make_value
    for wrapper in wrappers:
        wrapper.close()


@pytest.fixture
def value(make: Callable[[], Any]) -> Any:
    return make()


@pytest.fixture
def other(make: Callable[[], Any]) -> Any:
    """The same value, used by another client."""
    return make()
