"""A client machine that reaches the servers of an engine through its own proxies, one for each server."""

from __future__ import annotations

from collections.abc import Sequence

from harness.servers.process import Server
from harness.servers.proxy import Proxy
from leasehold.engines.base import Opener
from leasehold.testing.conformance.rig import ClientPath


class ProxiedMachine(ClientPath):
    def __init__(self, url: str, proxies: Sequence[Proxy], opener: Opener | None = None) -> None:
        super().__init__(url, opener)
        self.proxies = list(proxies)

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.cut()

    def restore(self) -> None:
        for proxy in self.proxies:
            proxy.restore()

    def kill_session(self) -> None:
        for proxy in self.proxies:
            proxy.reset()

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()


def hosts(listeners: Sequence[Proxy | Server]) -> str:
    """The addresses of these proxies or servers as in a URL: `host:port,host:port`."""
    return ",".join(f"127.0.0.1:{each.port}" for each in listeners)
