"""The nodes of a Redlock: independent Redis servers, each of which can fail on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from harness.servers.machine import hosts
from harness.servers.proxy import Proxy
from harness.servers.redis import RedisServer
from leasehold.engines.redis.protocol import parse_key

COUNT: Final = 5


class RedlockNodes:
    def __init__(self, *options: str, count: int = COUNT, fake_clock: bool = False, password: str = "") -> None:
        self.all = [RedisServer(*options, fake_clock=fake_clock, password=password) for _ in range(count)]
        for node in self.all:
            node.launch()
        for node in self.all:
            node.await_ready()

    @property
    def url(self) -> str:
        return "redlock://" + ",".join(f"127.0.0.1:{node.port}" for node in self.all)

    def proxied(self) -> tuple[str, list[Proxy]]:
        """The URL of new proxies in front of the nodes, and the proxies."""
        proxies = [Proxy(node.port) for node in self.all]
        return f"redlock://{hosts(proxies)}", proxies

    def pause(self, *which: int) -> None:
        for number in which:
            self.all[number].pause()

    def resume(self) -> None:
        for node in self.all:
            node.resume()

    def remaining_keys(self) -> list[bytes]:
        """The keys of locks on running nodes, without the counters of their buckets."""
        return [key for node in self.all if node.running for key in lock_keys(node)]

    def close(self) -> None:
        for node in self.all:
            node.kill()


def lock_keys(node: RedisServer) -> Sequence[bytes]:
    return [key for key in node.ask("KEYS", "*") if parse_key(key.decode()) or key.count(b":") > 2]
