"""Fixtures of the Redis tests. A test that breaks its server, or changes its settings, starts its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from harness.servers.proxy import Proxy
from harness.servers.redis import RedisServer


@pytest.fixture
def server(start_redis: Callable[..., RedisServer]) -> RedisServer:
    return start_redis()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()
