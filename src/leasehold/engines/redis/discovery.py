"""Several servers of which any can say where things are: sentinels, or the nodes of a cluster.

They are asked one after the other, each on a connection of its own for the moment and for no longer than its share of
the time, until enough have answered. Whoever kept silent is asked last the next time.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Final, TypeVar

from leasehold.engines.redis.server import CONNECTION_ERRORS, RedisEndpoint, describe_error
from leasehold.engines.redis.server_settings import Unreachable
from leasehold.errors import ConfigError, LeaseholdError
from leasehold.runtime.base import Runtime, Signal, maybe_await
from leasehold.runtime.net.blocking import SocketAddress

T = TypeVar("T")

_MAX_NODE_SECONDS: Final = 1.0  # seconds that one of them may take, however much time there is


def announced_address(host: str, port: bytes | str | int) -> SocketAddress:
    """As a server named it: ValueError if that is none."""
    if not host or not host.isprintable() or len(host) > 253 or not 0 < int(port) < 65_536:
        raise ValueError("no place to connect to")
    return SocketAddress(host, int(port))


class DiscoveryNode(RedisEndpoint):
    """One of them. It need not be fit for locks."""

    handshake_commands: ClassVar = (("PING",),)

    def __init__(
        self, address: SocketAddress, tls: ssl.SSLContext | None, user: str = "", password: str = "", *, title: str
    ) -> None:
        super().__init__(address, tls, user, password)
        self._title = title
        self.failed_last_time = False  # the last time

    def __str__(self) -> str:
        return f"the {self._title} at {self.address}"

    def _check_handshake(self, replies: list[Any]) -> None:
        self._check_sign_in(replies)

    async def query(self, packed: bytes, count: int, runtime: Runtime, deadline: float) -> list[Any]:
        stream = await self.open(runtime, deadline)
        try:
            return list(await maybe_await(stream.calls(packed, count, deadline)))
        except CONNECTION_ERRORS as error:
            raise Unreachable(f"{self} did not answer: {describe_error(error)}", engine="redis") from error
        finally:
            stream.close()


class QueryAnswers(list[T]):
    """What they answered, and why the others did not."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.config_error_count = 0  # of those, such as no waiting mends

    def describe_errors(self) -> str:
        return "; ".join(self.errors)


class SingleFlight:
    """One asks for all who need the same answer at the same moment. Of one twin."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._mutex = runtime, runtime.mutex()
        self._running = False
        self._waiters: list[Signal] = []

    async def run(self, work: Callable[[], Awaitable[object]], deadline: float) -> None:
        """Do it, or wait for whoever is doing it. How that went is theirs to know: look, and ask again."""
        with self._mutex:
            is_runner, self._running = not self._running, True
            if not is_runner:
                self._waiters.append(signal := self._runtime.signal())
        if not is_runner:
            if not await signal.wait(deadline - self._runtime.now()):
                raise Unreachable("where names are was not found out in time", engine="redis")
            return
        try:
            await work()
        finally:
            with self._mutex:
                self._running, waiters, self._waiters = False, self._waiters, []
            for each in waiters:
                each.set()


async def query_in_turn(
    nodes: Iterable[DiscoveryNode],
    request: tuple[bytes, int],
    parse: Callable[[DiscoveryNode, list[Any]], T],
    is_enough: Callable[[list[T]], bool],
    runtime: Runtime,
    deadline: float,
) -> QueryAnswers[T]:
    """`request`: the bytes, and how many replies they get. `parse` may raise what makes an answer none."""
    answers: QueryAnswers[T] = QueryAnswers()
    ordered = sorted(nodes, key=lambda node: node.failed_last_time)
    for count, node in enumerate(ordered):
        now = runtime.now()
        share = (deadline - now) / (len(ordered) - count + 1)  # one is left for what comes after
        try:
            answers.append(parse(node, await node.query(*request, runtime, now + min(share, _MAX_NODE_SECONDS))))
        except LeaseholdError as error:
            node.failed_last_time = True
            answers.errors.append(str(error))
            answers.config_error_count += isinstance(error, ConfigError)
            continue
        node.failed_last_time = False
        if is_enough(answers):
            break
    return answers
