"""The nodes of a redlock: Redis servers that know nothing of one another, to be hurt one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from leasehold.engines.redis.requests import named
from leasehold.testing.servers.machine import hosts
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.redis import RedisServer

COUNT: Final = 5


class Nodes:
    def __init__(self, *options: str, count: int = COUNT, false_clock: bool = False, password: str = "") -> None:
        self.all = [RedisServer(*options, false_clock=false_clock, password=password) for _ in range(count)]
        for node in self.all:
            node.launch()
        for node in self.all:
            node.await_ready()

    @property
    def url(self) -> str:
        return "redlock://" + ",".join(f"127.0.0.1:{node.port}" for node in self.all)

    def proxied(self) -> tuple[str, list[Proxy]]:
        """A way to them that can be hurt."""
        proxies = [Proxy(node.port) for node in self.all]
        return f"redlock://{hosts(proxies)}", proxies

    def pause(self, *which: int) -> None:
        for number in which:
            self.all[number].pause()

    def resume(self) -> None:
        for node in self.all:
            node.resume()

    def left(self) -> list[bytes]:
        """What is kept of names on nodes that run, the counters of their buckets apart."""
        return [key for node in self.all if node.running for key in kept(node)]

    def close(self) -> None:
        for node in self.all:
            node.kill()


def kept(node: RedisServer) -> Sequence[bytes]:
    return [key for key in node.ask("KEYS", "*") if named(key.decode()) or key.count(b":") > 2]
