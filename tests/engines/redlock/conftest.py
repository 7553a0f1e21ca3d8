"""Fixtures of the Redlock tests: nodes for one test alone, so that it may break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.rigs.redlock import RedlockRig
from harness.servers.proxy import Proxy
from harness.servers.redlock import RedlockNodes
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.node_proxy import NodeProxy


@pytest.fixture
def start_nodes() -> Iterator[Callable[..., RedlockNodes]]:
    rig_or_skip(RedlockRig)  # skips if Redis is not installed
    started: list[RedlockNodes] = []

    def run(*options: str, **kwargs: Any) -> RedlockNodes:
        started.append(RedlockNodes(*options, **{"count": 3, **kwargs}))
        return started[-1]

    yield run
    for nodes in started:
        nodes.close()


@pytest.fixture
def nodes() -> Iterator[RedlockNodes]:
    """Five nodes."""
    rig_or_skip(RedlockRig)
    nodes = RedlockNodes()
    yield nodes
    nodes.close()


@pytest.fixture
def proxied_nodes(nodes: RedlockNodes) -> Iterator[tuple[str, list[Proxy]]]:
    """A URL that leads through proxies, and the proxy of each node."""
    url, proxies = nodes.proxied()
    yield url, proxies
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def proxied_node(nodes: RedlockNodes) -> Iterator[tuple[str, NodeProxy]]:
    """A URL that leads to the first node through a proxy, and the proxy."""
    proxy = NodeProxy(nodes.all[0].port)
    yield nodes.url.replace(f":{nodes.all[0].port}", f":{proxy.port}"), proxy
    proxy.close()
