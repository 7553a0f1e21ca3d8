"""A script's reply, or an error of ours: the one place where what a wire raises, or a server refuses, is mapped (E9).

- A server that does not know a script, or forgot it, is sent its text.
- A connection that broke in the middle is replaced and the request repeated: scripts find what they did before by the
  claim's mark (E2, E6). A request that was not answered by its deadline is not repeated: it is unknown.
- A request that was certainly not carried out, because the server said so or was never reached, is asked elsewhere if
  the topology knows where that is, until its deadline.
- Whoever stands in line outlasts a restart, also of the only server: it is asked again, until the deadline, or until
  its `wait_command` is over.
- An answer of a server that another has taken over from meanwhile is none: it is asked again there.
- With `min_replicas`, a grant or renewal counts once so many replicas have it. WAIT knows only the writes of its own
  connection, so it goes down the same one, and nobody else uses that meanwhile. It follows the answer: a release sent
  behind an attempt that was given up would stand behind a WAIT too, and go with the connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import hiredis

from leasehold.engines.redis.connections import Compensation, Connections
from leasehold.engines.redis.protocol import as_eval
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import CONNECTION_ERRORS, describe_error, encode_command, is_error_reply
from leasehold.engines.redis.server_settings import Unreachable
from leasehold.engines.redis.topology import WRONG_SERVER_ERRORS, Rejected, Topology, pause_before_retry
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime, maybe_await

_WAIT_SHARE: Final = 0.8  # of the time left: the answer to WAIT must arrive in time too
_MAX_RETRIES: Final = 3  # of a request whose connection broke: a server that has just been promoted hangs up once more


# Until when it is worth asking a server again that cannot be reached; None: it is not.
RetryUntil: TypeAlias = Callable[[], float] | None


class ScriptCall(NamedTuple):
    """A request on its way."""

    tag: str  # of the bucket it is about
    script: Script
    packed: bytes
    deadline: float
    compensation: Compensation = None
    retries_left: int = _MAX_RETRIES  # 0: repeated, it would not get the same answer
    retry_until: RetryUntil = None
    confirm: bool = False


class ScriptResult(NamedTuple):
    reply: Any
    confirmed: bool = True  # enough replicas have what it wrote


class Executor:
    """Of one engine."""

    def __init__(self, runtime: Runtime, topology: Topology, min_replicas: int) -> None:
        self._runtime, self._topology, self.min_replicas = runtime, topology, min_replicas

    def execute(
        self,
        tag: str,
        script: Script,
        packed: bytes,
        deadline: float,
        compensation: Compensation = None,
        retries_left: int = _MAX_RETRIES,
        retry_until: RetryUntil = None,
    ) -> Any | Awaitable[Any]:
        """The reply to one script: at once if a blocking call is all it took, else to be awaited."""
        topology = self._topology
        connections = topology.connections(tag)
        if connections is not None:
            try:
                reply = connections.call(packed, deadline, compensation)
            except CONNECTION_ERRORS as error:
                return self._reply_after_disconnect(
                    error,
                    connections,
                    ScriptCall(tag, script, packed, deadline, compensation, retries_left, retry_until),
                )
            answered = reply.__class__ is list or reply.__class__ is int
            if answered and not (topology.names_can_move and topology.is_replaced(connections)):
                return reply
        call_fields = (
            tag,
            script,
            packed,
            deadline,
            compensation,
            retries_left,
            retry_until,
        )  # for whoever has to ask once more
        return (
            self._find_and_execute(ScriptCall(*call_fields))
            if connections is None
            else self._await_reply(reply, connections, call_fields)
        )

    async def _await_reply(self, reply: Any, connections: Connections, call_fields: tuple[Any, ...]) -> Any:
        try:
            if hasattr(reply, "__await__"):  # as `maybe_await` does, without a coroutine more
                reply = await reply
            self._check_not_replaced(connections)
        except CONNECTION_ERRORS as error:
            return await self._reply_after_disconnect(error, connections, ScriptCall(*call_fields))
        except Unreachable as error:
            return (await self._execute_until_deadline(ScriptCall(*call_fields), connections, error)).reply
        if not isinstance(reply, hiredis.ReplyError):
            return reply
        return (await self._execute_until_deadline(ScriptCall(*call_fields), connections, reply)).reply

    async def _find_and_execute(self, call: ScriptCall) -> Any:
        return (await self.execute_confirmed(call)).reply

    async def execute_confirmed(self, call: ScriptCall) -> ScriptResult:
        """The same, and whether enough replicas have it, if that is asked for."""
        connections, discovery_error = self._topology.connections(call.tag), None
        if connections is None:
            try:
                await self._topology.find(call.deadline)
            except Unreachable as error:
                if call.retry_until is None:
                    raise
                discovery_error = error
            connections = self._topology.connections(call.tag)
        return await self._execute_until_deadline(call, connections, discovery_error if connections is None else None)

    async def _execute_until_deadline(
        self, call: ScriptCall, connections: Connections | None, error: Exception | None = None
    ) -> ScriptResult:
        """Ask there; or, if `error` says that this was no use, where the name is by now: until the deadline."""
        if connections is None and error is None:
            error = Unreachable("no server has this part of the names just now", engine="redis")
        tries = 0
        while True:
            if error is not None:
                call, connections = await self._choose_retry(call, connections, error, tries)
                tries += 1
            assert connections is not None
            try:
                result = await self._send(call, connections)
            except CONNECTION_ERRORS as broken:
                return await self._retry_after_disconnect(broken, connections, call, error)
            except Unreachable as unreachable:
                error = unreachable
                continue
            if not isinstance(result.reply, hiredis.ReplyError):
                return result
            error = result.reply

    async def _choose_retry(
        self, call: ScriptCall, connections: Connections | None, error: Exception, tries: int
    ) -> tuple[ScriptCall, Connections]:
        """What to ask, and where, of a request that was not carried out."""
        if connections is not None and is_error_reply(error, "NOSCRIPT"):
            text = as_eval(call.script, call.packed)
            if text != call.packed:
                return call._replace(packed=text), connections
        rejected = Rejected(error, connections)
        retry_deadline = 0.0 if call.retry_until is None else min(call.deadline, call.retry_until())
        no_server_known = connections is None and call.retry_until is not None  # nobody is there who could be followed
        target = await self._topology.redirect(
            call.tag, rejected, tries, retry_deadline if no_server_known else call.deadline
        )
        if target is not None:
            return call, target
        not_executed = isinstance(error, Unreachable) or is_error_reply(error, "LOADING")  # it was not carried out
        if connections is not None and not_executed and await pause_before_retry(self._runtime, tries, retry_deadline):
            return call, connections
        raise rejected.map_error() if connections is None else self._map_error(connections, error)

    async def _send(self, call: ScriptCall, connections: Connections) -> ScriptResult:
        if not call.confirm:
            reply = await maybe_await(connections.call(call.packed, call.deadline, call.compensation))
            self._check_not_replaced(connections)
            return ScriptResult(reply)
        replies, confirmed = await self._round_trip(connections, [call.packed], call.deadline, True, call.compensation)
        return ScriptResult(replies[0], confirmed)

    async def _reply_after_disconnect(self, error: Exception, connections: Connections, call: ScriptCall) -> Any:
        return (await self._retry_after_disconnect(error, connections, call)).reply

    async def _retry_after_disconnect(
        self, error: Exception, connections: Connections, call: ScriptCall, earlier_error: Exception | None = None
    ) -> ScriptResult:
        """What became of the request is not known. `earlier_error`: why it was not carried out elsewhere."""
        self._connection_lost(connections)
        if isinstance(error, TimeoutError) or not call.retries_left:
            raise self._no_answer_error(connections, error, earlier_error) from error
        try:
            return await self.execute_confirmed(call._replace(retries_left=call.retries_left - 1))
        except LeaseholdError as retry_error:  # of the new connection: it says nothing about the first request
            raise Unavailable(str(retry_error), engine="redis") from retry_error

    # --------------------------------------------------------------- batches

    async def execute_batch(self, calls: Sequence[ScriptCall]) -> list[ScriptResult | LeaseholdError]:
        """The answers to many calls of one script: one trip for all that one server has."""
        results: list[ScriptResult | LeaseholdError] = [ScriptResult(None)] * len(calls)
        rejected = await self._execute_per_server(calls, range(len(calls)), results)
        if len(rejected) > 1:  # perhaps all of them have moved: the first finds out where to
            first, *rest = rejected
            results[first] = await self._execute_single(calls[first])
            rejected = await self._execute_per_server(calls, rest, results)
        for count, index in enumerate(rejected):
            if self._runtime.now() >= calls[index].deadline:
                results[index] = Unavailable("no time was left to ask", engine="redis")
                continue
            share = self._share_deadline(calls[index].deadline, len(rejected) - count)
            results[index] = await self._execute_single(calls[index]._replace(deadline=share))
        return results

    async def _execute_single(self, call: ScriptCall) -> ScriptResult | LeaseholdError:
        try:
            return await self.execute_confirmed(call)
        except LeaseholdError as error:
            return error

    async def _execute_per_server(
        self, calls: Sequence[ScriptCall], indexes: Sequence[int], results: list[ScriptResult | LeaseholdError]
    ) -> list[int]:
        """Ask each server once, and none for longer than its share of the time. Returns what belongs elsewhere."""
        by_server: dict[Connections | None, list[int]] = {}
        for index in indexes:
            by_server.setdefault(self._topology.connections(calls[index].tag), []).append(index)
        names_can_move, rejected = self._topology.names_can_move, by_server.pop(None, [])
        for count, (connections, server_indexes) in enumerate(by_server.items()):
            assert connections is not None
            try:
                batch = [calls[index] for index in server_indexes]
                replies, confirmed = await self._send_batch(
                    connections, batch, self._share_deadline(batch[0].deadline, len(by_server) - count)
                )
            except LeaseholdError as error:
                if names_can_move and isinstance(error, Unreachable):
                    rejected += server_indexes
                    continue
                replies, confirmed = [error] * len(server_indexes), True
            for index, reply in zip(server_indexes, replies, strict=True):
                if names_can_move and is_error_reply(reply, WRONG_SERVER_ERRORS):
                    rejected.append(index)
                elif isinstance(reply, hiredis.ReplyError):
                    results[index] = self._map_error(connections, reply)
                else:
                    results[index] = reply if isinstance(reply, LeaseholdError) else ScriptResult(reply, confirmed)
        return rejected

    async def _send_batch(self, connections: Connections, calls: Sequence[ScriptCall], deadline: float) -> ScriptResult:
        script, confirm = calls[0].script, calls[0].confirm
        replies, confirmed = await self._send_with_retry(
            connections, [call.packed for call in calls], deadline, confirm
        )
        unknown = [n for n, reply in enumerate(replies) if is_error_reply(reply, "NOSCRIPT")]
        if unknown:
            first, *rest = [calls[n].packed for n in unknown]
            retried_replies, retried_confirmed = await self._send_with_retry(
                connections, [as_eval(script, first), *rest], deadline, confirm
            )
            confirmed = confirmed and retried_confirmed
            for n, reply in zip(unknown, retried_replies, strict=True):
                replies[n] = reply
        return ScriptResult(replies, confirmed)

    async def _send_with_retry(
        self, connections: Connections, packed: Sequence[bytes], deadline: float, confirm: bool
    ) -> ScriptResult:
        try:
            return await self._round_trip(connections, packed, deadline, confirm)
        except CONNECTION_ERRORS as error:
            self._connection_lost(connections)
            if isinstance(error, TimeoutError):
                raise self._no_answer_error(connections, error) from error
            if self._topology.names_can_move:  # batches may be asked again anywhere
                raise Unreachable(f"{connections.server} hung up: {describe_error(error)}", engine="redis") from error
        try:
            return await self._round_trip(connections, packed, deadline, confirm)
        except CONNECTION_ERRORS as error:
            raise self._no_answer_error(connections, error) from error
        except LeaseholdError as retry_error:
            raise Unavailable(str(retry_error), engine="redis") from retry_error

    async def send_to(self, connections: Connections, packed: bytes, deadline: float) -> Any:
        """The reply of one server, wherever names are."""
        try:
            replies, _ = await self._send_with_retry(connections, [packed], deadline, confirm=False)
        except Unreachable:
            self._connection_lost(connections)
            raise
        if isinstance(replies[0], hiredis.ReplyError):
            raise self._map_error(connections, replies[0])
        return replies[0]

    # ------------------------------------------------------------ one trip

    async def _round_trip(
        self,
        connections: Connections,
        packed: Sequence[bytes],
        deadline: float,
        confirm: bool,
        compensation: Compensation = None,
    ) -> ScriptResult:
        confirm = confirm and self.min_replicas > 0
        requests, wait_command = b"".join(packed), b""
        if confirm:
            share = (deadline - self._runtime.now()) * _WAIT_SHARE
            wait_command = encode_command("WAIT", self.min_replicas, max(1, int(share * 1000)))
        replies = list(
            await maybe_await(connections.calls(requests, len(packed), deadline, wait_command, compensation))
        )
        self._check_not_replaced(connections)
        if not confirm:
            return ScriptResult(replies)
        count = replies.pop()
        if isinstance(count, hiredis.ReplyError) and not any(
            isinstance(reply, hiredis.ReplyError) for reply in replies
        ):
            error = connections.server.map_error(count)
            # What was asked is done: nobody may take this for a refusal of it.
            raise ConfigError(str(error)) if isinstance(error, ConfigError) else error
        return ScriptResult(replies, isinstance(count, int) and count >= self.min_replicas)

    def _check_not_replaced(self, connections: Connections) -> None:
        """Raise unless what this server answered counts. It does not know that it was replaced; this client does."""
        if self._topology.is_replaced(connections):
            raise ConnectionAbortedError("another has taken over from it")

    def _share_deadline(self, deadline: float, count: int) -> float:
        now = self._runtime.now()
        return now + (deadline - now) / count

    def _no_answer_error(
        self, connections: Connections, error: Exception, earlier_error: Exception | None = None
    ) -> Unavailable:
        suffix = "" if earlier_error is None else f"; before that: {earlier_error}"
        return Unavailable(f"{connections.server} did not answer: {describe_error(error)}{suffix}", engine="redis")

    def _connection_lost(self, connections: Connections) -> None:
        if self._topology.names_can_move:
            self._topology.mark_stale(connections)

    def _map_error(self, connections: Connections, error: Exception) -> LeaseholdError:
        if is_error_reply(error, WRONG_SERVER_ERRORS):
            self._topology.mark_stale(connections)
        return error if isinstance(error, LeaseholdError) else connections.server.map_error(error)
