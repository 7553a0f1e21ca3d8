"""Discovery: queries several servers of which any can answer, sentinels or cluster nodes.

The client queries them one after the other, each on a short-lived connection and for at most its share of the time,
until enough have answered. A server that did not answer is queried last the next time.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Final, TypeVar

from leasehold.credentials import Password
from leasehold.engines.redis.server import CONNECTION_ERRORS, RedisEndpoint
from leasehold.engines.redis.server_settings import Unreachable
from leasehold.errors import ConfigError, LeaseholdError
from leasehold.runtime.base import Runtime, Signal, maybe_await
from leasehold.runtime.net.blocking import SocketAddress

T = TypeVar("T")

_MAX_NODE_SECONDS: Final = 1.0  # for one of them, however much time is left, unless it was slow the last time
_MAX_NODE_SHARE: Final = 0.6  # of the time left, for one that was slow


def announced_address(host: str, port: bytes | str | int) -> SocketAddress:
    """An address as a server announced it. Raises `ValueError` if it is not valid."""
    if not host or not host.isprintable() or len(host) > 253 or not 0 < int(port) < 65_536:
        raise ValueError("invalid address")
    return SocketAddress(host, int(port))


class DiscoveryNode(RedisEndpoint):
    """A sentinel or cluster node. Its settings need not be safe for locks."""

    handshake_commands: ClassVar = (("PING",),)

    def __init__(
        self,
        address: SocketAddress,
        tls: ssl.SSLContext | None,
        user: str = "",
        password: Password | None = None,
        *,
        title: str,
    ) -> None:
        super().__init__(address, tls, user, password)
        self._title = title
        self.failed_last_time = False
        self.last_seconds = 0.0  # that its last answer took, or that were too few when no server answered

    def __str__(self) -> str:
        return f"the {self._title} at {self.address}"

    def _check_handshake(self, replies: list[Any]) -> None:
        self._check_sign_in(replies)

    async def query(self, packed: bytes, count: int, runtime: Runtime, deadline: float) -> list[Any]:
        """The replies. Signs in with the same request, because a slow network allows for few round trips."""
        try:
            stream = await self._connect(runtime, deadline)
            try:
                sign_in = await self.sign_in(runtime, deadline)
                replies = list(await maybe_await(stream.calls(sign_in + packed, self._sign_in_count + count, deadline)))
            finally:
                stream.close()
        except (*CONNECTION_ERRORS, UnicodeError) as error:
            raise Unreachable(f"{self} cannot be reached: {self.describe_failure(error)}", engine="redis") from error
        self._check_sign_in(replies[: self._sign_in_count])
        return replies[self._sign_in_count :]


class QueryAnswers(list[T]):
    """The answers, and the errors of the other servers."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.config_error_count = 0  # of these errors, the ones that a retry cannot help

    def describe_errors(self) -> str:
        return "; ".join(self.errors)


class SingleFlight:
    """One task or thread does the work for all that need the result at the same time. One per engine instance."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._mutex = runtime, runtime.mutex()
        self._running = False
        self._waiters: list[Signal] = []

    async def run(self, work: Callable[[], Awaitable[object]], deadline: float) -> None:
        """Do the work, or wait while another caller does it. A caller that waited does not learn whether the work
        succeeded: it must check, and call again."""
        with self._mutex:
            is_runner, self._running = not self._running, True
            if not is_runner:
                self._waiters.append(signal := self._runtime.signal())
        if not is_runner:
            if not await signal.wait(deadline - self._runtime.now()):
                raise Unreachable("discovery of the servers timed out", engine="redis")
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
    """`request`: the bytes, and the number of replies. If `parse` raises, the reply does not count as an answer."""
    answers: QueryAnswers[T] = QueryAnswers()
    ordered = sorted(nodes, key=lambda node: node.failed_last_time)
    timed_out: dict[DiscoveryNode, float] = {}
    for count, node in enumerate(ordered):
        now = runtime.now()
        left = deadline - now
        share = left / (len(ordered) - count + 1)  # one share is left for the request itself
        seconds = max(min(share, _MAX_NODE_SECONDS), min(2 * node.last_seconds, left * _MAX_NODE_SHARE))
        try:
            answers.append(parse(node, await node.query(*request, runtime, now + seconds)))
        except LeaseholdError as error:
            node.failed_last_time = True
            answers.errors.append(str(error))
            answers.config_error_count += isinstance(error, ConfigError)
            if isinstance(error.__cause__, TimeoutError):
                timed_out[node] = seconds
            continue
        node.failed_last_time, node.last_seconds = False, runtime.now() - now
        if is_enough(answers):
            break
    if not answers:  # the network may be slow; if only some do not answer, these are down
        for node, seconds in timed_out.items():
            node.last_seconds = seconds
    return answers
