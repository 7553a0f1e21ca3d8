"""Sends one request to all nodes at once, and collects their answers.

In blocking mode a call uses a group of connections, one to each node, which no other call uses meanwhile. Under asyncio
all tasks share one connection to each node. In both, the caller's own thread or task sends to all nodes before it waits
for any answer.

A round ends when all nodes have answered. Once the answers decide the result, the caller waits for the other nodes only
for a straggler timeout, which is short compared with the ttl; until then, until the deadline. A node that has not
answered by then gets the `compensation` after its request, and the client skips it for a while.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import hiredis

from leasehold.engines.redis.connections import SharedConnection
from leasehold.engines.redis.protocol import as_eval
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import is_error_reply
from leasehold.engines.redlock.node import RedlockNode, ignore_reply, new_reader
from leasehold.engines.redlock.quorum import majority
from leasehold.errors import ConfigError, LeaseholdError, Mismatch, Unavailable
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.fanout_blocking import (
    AnswersByServer,
    ConnectionGroup,
    FanoutRequests,
    WaitPolicy,
    accept_answer,
)
from leasehold.runtime.net.fanout_event_loop import gather_answers

T = TypeVar("T")

_MAX_IDLE: Final = 64  # unused connection groups that are kept
_STRAGGLER_TIMEOUT: Final = (0.05, 0.5)  # seconds to wait for a node whose answer is not needed: least and most
_STRAGGLER_TTL_SHARE: Final = 0.1  # of the ttl
_COMPENSATION_GRACE: Final = 0.5  # seconds a connection lives after the deadline, for the compensation
_NO_NODES: Final[Mapping[int, Sequence[bytes]]] = {}


class RoundResult(NamedTuple):
    """The replies by node index, and the errors of the other nodes."""

    replies: dict[int, list[Any]]
    errors: dict[int, Exception]
    repeated: Sequence[int] = ()  # the nodes that were sent the request again, after their connection broke

    def decode_first(self, decode: Callable[[Any], T]) -> dict[int, T]:
        """The first reply of each node, decoded."""
        return self._decode({index: replies[0] for index, replies in self.replies.items()}, decode)

    def decode_all(self, decode: Callable[[list[Any]], T]) -> dict[int, T]:
        """All replies of each node, decoded."""
        return self._decode(dict(self.replies), decode)

    def _decode(self, raw_replies: dict[int, Any], decode: Callable[[Any], T]) -> dict[int, T]:
        """A node whose reply cannot be decoded counts as one that did not answer."""
        decoded: dict[int, T] = {}
        for index, reply in raw_replies.items():
            try:
                decoded[index] = decode(reply)
            except LeaseholdError as error:
                # The frames of its traceback hold the replies of all nodes and refer to this object: they would stay
                # until the next garbage collection.
                self.errors[index] = error.with_traceback(None)
                del self.replies[index]
        return decoded


Packed: TypeAlias = Sequence[bytes]
Decided: TypeAlias = Callable[[Mapping[int, list[Any]]], bool]


class Fanout(Protocol):
    """How requests reach the nodes."""

    async def request_all(self, requests: FanoutRequests, count: int, policy: WaitPolicy) -> AnswersByServer: ...

    def post(self, index: int, packed: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        """Send after all requests in flight, without waiting. False: not possible here."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


class Broadcaster:
    """Runs the rounds of one engine instance."""

    def __init__(self, nodes: Sequence[RedlockNode], runtime: Runtime) -> None:
        self.nodes, self._runtime, self.quorum = nodes, runtime, majority(len(nodes))
        self.fanout: Fanout = BlockingFanout(nodes, runtime) if runtime.blocking else AsyncFanout(nodes, runtime)

    async def run_round(
        self,
        script: Script | None,
        packed: Packed | Mapping[int, Packed],
        deadline: float,
        ttl: float,
        decided: Decided,
        compensation: Callable[[], bytes] = bytes,
    ) -> RoundResult:
        """Send the same calls to all nodes, or to each node in the mapping its own. All are calls of one script, and
        each node gets the same number of them."""
        now = self._runtime.now()
        calls, backed_off = (packed, _NO_NODES) if isinstance(packed, Mapping) else self._choose_nodes(now, packed)
        straggler_deadline = now + min(
            max(ttl * _STRAGGLER_TTL_SHARE, _STRAGGLER_TIMEOUT[0]), _STRAGGLER_TIMEOUT[1], (deadline - now) / 2
        )
        repeated: list[int] = []
        correction = accept_answer if script is None else partial(_add_script_text, script, {**calls, **backed_off})
        requests = FanoutRequests(
            _join_calls(calls), _join_calls(backed_off), compensation, correction, on_repeat=repeated.append
        )
        policy = WaitPolicy(straggler_deadline, deadline, lambda answers: decided(_valid_replies(answers)))
        count = max(map(len, (*calls.values(), *backed_off.values())), default=0)
        answers = await self.fanout.request_all(requests, count, policy)
        errors: dict[int, Exception] = {}
        replies: dict[int, list[Any]] = {}
        for index in range(len(self.nodes)):
            answer = answers.get(index)
            if isinstance(answer, list):
                self._record_replies(index, answer, replies, errors)
            else:
                errors[index] = self._record_failure(index, answer)
        return RoundResult(replies, errors, repeated)

    def _choose_nodes(self, now: float, packed: Packed) -> tuple[dict[int, Packed], dict[int, Packed]]:
        """The nodes to ask, and those in backoff. When a node's backoff is over, one call tries it first."""
        available, backed_off = {}, {}
        for index, node in enumerate(self.nodes):
            if node.backoff_until <= now:
                available[index] = packed
                if node.backoff_until:
                    node.backoff_until = now + _STRAGGLER_TIMEOUT[1]
            else:
                backed_off[index] = packed
        return available, backed_off

    def _record_replies(
        self, index: int, node_replies: list[Any], replies: dict[int, list[Any]], errors: dict[int, Exception]
    ) -> None:
        node = self.nodes[index]
        node.on_answer()
        for reply in node_replies:
            if isinstance(reply, hiredis.ReplyError):
                errors[index] = node.map_error(reply)
                return
        replies[index] = node_replies

    def _record_failure(self, index: int, failure: Exception | None) -> Exception:
        node = self.nodes[index]
        if failure is None:
            return Unavailable(f"{node} was skipped: it did not answer recently", engine="redlock")
        node.on_failure(self._runtime.now(), self._runtime.random())
        if isinstance(failure, LeaseholdError):
            if isinstance(failure, ConfigError) and not node.accepted_once:
                raise failure  # never usable: a configuration error, even if the other nodes answered
            return failure
        error = Unavailable(f"{node} did not answer: {node.describe_failure(failure)}", engine="redlock")
        error.__cause__ = failure
        return error

    def no_majority_error(self, result: RoundResult, what: str) -> LeaseholdError:
        """The error of a round without a majority; its text has each node's error."""
        summary = f"{len(result.replies)} of {len(self.nodes)} nodes answered, {self.quorum} are needed"
        reasons = "; ".join(str(error) for _, error in sorted(result.errors.items()))
        if sum(isinstance(error, ConfigError) for error in result.errors.values()) >= self.quorum:
            return ConfigError(f"{what}: {summary}: {reasons}")
        mismatches = [error for error in result.errors.values() if isinstance(error, Mismatch)]
        if len(mismatches) >= self.quorum:
            return mismatches[0]
        return Unavailable(f"{what}: {summary}: {reasons}", engine="redlock", no_majority=bool(result.replies))

    def close(self) -> None:
        self.fanout.close()

    def after_fork(self) -> None:
        self.fanout.after_fork()


def _join_calls(packed: Mapping[int, Packed]) -> dict[int, bytes]:
    return {
        index: node_calls[0] if len(node_calls) == 1 else b"".join(node_calls) for index, node_calls in packed.items()
    }


def _valid_replies(answers: AnswersByServer) -> dict[int, list[Any]]:
    """The answers without exceptions and error replies."""
    return {
        index: answer
        for index, answer in answers.items()
        if answer.__class__ is list and answer[0].__class__ is not hiredis.ReplyError
    }


def _add_script_text(
    script: Script, calls: Mapping[int, Packed], index: int, request: bytes, answer: Any
) -> bytes | None:
    """The same request with the script's text, if the node does not know the script. It is sent while the caller still
    waits for the other nodes, because their answers may be needed too."""
    if answer.__class__ is not list or not is_error_reply(answer[0], "NOSCRIPT"):
        return None
    first_call, *other_calls = calls[index]
    corrected = b"".join([as_eval(script, first_call), *other_calls])
    return None if request == corrected else corrected  # a node that refuses even this fails


class BlockingFanout:
    """For the blocking runtime. Used by many threads: each access to the list is one atomic step."""

    def __init__(self, nodes: Sequence[RedlockNode], runtime: Runtime) -> None:
        self._nodes, self._runtime = nodes, runtime
        self._idle: list[ConnectionGroup] = []
        self._connection_groups: dict[int, ConnectionGroup] = {}  # also those in use, for `after_fork`
        self._closed = False

    async def request_all(self, requests: FanoutRequests, count: int, policy: WaitPolicy) -> AnswersByServer:
        try:
            connections = self._idle.pop()
        except IndexError:
            connections = ConnectionGroup(self._nodes, new_reader(self._nodes), self._runtime.now)
            self._connection_groups[id(connections)] = connections
        try:
            answers = connections.request_all(requests, count, policy)
        except BaseException:  # a late reply must never be taken for the reply to another call
            self._drop(connections)
            raise
        if len(self._idle) < _MAX_IDLE and not self._closed:  # connections without an answer are closed already
            self._idle.append(connections)
        else:
            self._drop(connections)
        return answers

    def _drop(self, connections: ConnectionGroup) -> None:
        self._connection_groups.pop(id(connections), None)
        connections.close()

    def post(self, index: int, packed: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        return False  # a call that was given up sent its `compensation` and closed its connection

    def close(self) -> None:
        self._closed = True
        while self._idle:
            try:
                connections = self._idle.pop()
            except IndexError:  # another thread was faster
                return
            self._drop(connections)

    def after_fork(self) -> None:
        groups, self._connection_groups, self._idle = list(self._connection_groups.values()), {}, []
        for connections in groups:
            connections.after_fork()


class AsyncFanout:
    """For the asyncio runtime."""

    def __init__(self, nodes: Sequence[RedlockNode], runtime: Runtime) -> None:
        self._now = runtime.now
        self._connections = [SharedConnection(node, runtime) for node in nodes]

    async def request_all(self, requests: FanoutRequests, count: int, policy: WaitPolicy) -> AnswersByServer:
        answers = await self._gather(requests, count, policy)
        all_requests = {**requests.first, **requests.later}
        broken = [
            n for n, answer in answers.items() if isinstance(answer, OSError) and not isinstance(answer, TimeoutError)
        ]
        if broken:  # repeat the request once, on a new connection
            for index in broken:
                requests.on_repeat(index)
            answered = {index: answer for index, answer in answers.items() if index not in broken}
            retries = FanoutRequests({index: all_requests[index] for index in broken}, correction=requests.correction)
            answers = answered | await self._gather(retries, count, policy.combined_with(answered))
        if compensation := b"" if TimeoutError not in map(type, answers.values()) else requests.compensation():
            for index, answer in answers.items():
                if isinstance(answer, TimeoutError):
                    self._connections[index].post(compensation, policy.deadline + _COMPENSATION_GRACE, ignore_reply)
        return answers

    async def _gather(self, requests: FanoutRequests, count: int, policy: WaitPolicy) -> AnswersByServer:
        if count == 1:
            wrapped_policy = policy._replace(decided=lambda answers: policy.decided(_wrap_in_lists(answers)))
            wrapped_requests = requests._replace(
                correction=lambda n, request, answer: requests.correction(n, request, _wrap_in_lists({n: answer})[n])
            )
            send = partial(self._send_one, policy.deadline + _COMPENSATION_GRACE)
            return _wrap_in_lists(await gather_answers(send, wrapped_requests, wrapped_policy, self._now))
        return await gather_answers(
            partial(self._send_pipeline, policy.deadline + _COMPENSATION_GRACE, count), requests, policy, self._now
        )

    def _send_one(self, deadline: float, index: int, data: bytes) -> Awaitable[Any]:
        return self._connections[index].call(data, deadline)

    def _send_pipeline(self, deadline: float, count: int, index: int, data: bytes) -> Awaitable[Any]:
        return self._connections[index].calls(data, count, deadline, follow_up=b"")

    def post(self, index: int, packed: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        return self._connections[index].post(packed, deadline, done)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def after_fork(self) -> None:
        for connection in self._connections:
            connection.after_fork()


def _wrap_in_lists(answers: AnswersByServer) -> AnswersByServer:
    return {
        n: answer if isinstance(answer, Exception) and not isinstance(answer, hiredis.ReplyError) else [answer]
        for n, answer in answers.items()
    }
