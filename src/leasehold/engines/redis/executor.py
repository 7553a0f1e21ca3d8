"""Runs scripts: retries, redirects, confirmation by replicas.

- If a server does not know a script, the executor sends its text.
- If a connection breaks during a request, the executor repeats the request on a new one: the script finds what it did
  before by the claim's id hash (E2, E6). A request without a reply by its deadline is not repeated: its outcome is
  unknown.
- If a request was certainly not executed, because the server said so or was never reached, the executor sends it
  elsewhere, if the topology knows where, until the deadline.
- A waiter survives a restart, even of the only server: its attempt is retried until the deadline, or until its `wait`
  is over.
- A reply from a server that has been replaced as primary does not count: the request is sent to the new primary.
- With `min_replicas`, a grant or renewal counts once that many replicas have it. WAIT covers only the writes of its own
  connection, so it is sent on the same one, and no other request uses that meanwhile. WAIT is sent after the reply: the
  compensation of an attempt would otherwise queue behind WAIT, and be lost with the connection.

Driver errors become ours (E9) in three places: error replies and failures to connect in `server.py`, failures of
discovery in `discovery.py`, and requests without a reply in this module.
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

_WAIT_SHARE: Final = 0.8  # of the time left: the reply to WAIT must arrive before the deadline too
_MAX_RETRIES: Final = 3  # after broken connections; more than one: a newly promoted server closes its connections again


# Until when to retry if the server cannot be reached; None: do not retry.
RetryUntil: TypeAlias = Callable[[], float] | None


class ScriptCall(NamedTuple):
    """One request, and how to retry it."""

    tag: str  # of its bucket
    script: Script
    packed: bytes
    deadline: float
    compensation: Compensation = None
    retries_left: int = _MAX_RETRIES  # 0: a repeated request would not get the same reply
    retry_until: RetryUntil = None
    confirm: bool = False


class ScriptResult(NamedTuple):
    reply: Any
    confirmed: bool = True  # enough replicas have the write


class Executor:
    """Runs the scripts of one engine instance."""

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
        """The reply to one script: returned directly if one blocking call was enough, else an awaitable."""
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
        call_fields = (tag, script, packed, deadline, compensation, retries_left, retry_until)  # for a retry
        return (
            self._find_and_execute(ScriptCall(*call_fields))
            if connections is None
            else self._await_reply(reply, connections, call_fields)
        )

    async def _await_reply(self, reply: Any, connections: Connections, call_fields: tuple[Any, ...]) -> Any:
        try:
            if hasattr(reply, "__await__"):  # like `maybe_await`, but without one more coroutine
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
        """The reply to one script, and whether enough replicas have its write, if `call.confirm`."""
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
        """Send the request there, or elsewhere if `error` says that it was not executed there; until the deadline."""
        if connections is None and error is None:
            error = Unreachable("no cluster node currently serves this hash slot", engine="redis")
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
        """What to send, and where, after a request that was not executed. Raises the error if a retry is no use."""
        if connections is not None and is_error_reply(error, "NOSCRIPT"):
            text = as_eval(call.script, call.packed)
            if text != call.packed:
                return call._replace(packed=text), connections
        rejected = Rejected(error, connections)
        retry_deadline = 0.0 if call.retry_until is None else min(call.deadline, call.retry_until())
        # If no server is known, discovery for a waiter ends when its `wait` is over, even before the deadline.
        no_server_known = connections is None and call.retry_until is not None
        target = await self._topology.redirect(
            call.tag, rejected, tries, retry_deadline if no_server_known else call.deadline
        )
        if target is not None:
            return call, target
        not_executed = isinstance(error, Unreachable) or is_error_reply(error, "LOADING")
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
        """Repeat a request whose outcome is unknown. `earlier_error`: why another server did not execute it before."""
        self._connection_lost(connections)
        if isinstance(error, TimeoutError) or not call.retries_left:
            raise self._no_answer_error(connections, error, earlier_error) from error
        try:
            return await self.execute_confirmed(call._replace(retries_left=call.retries_left - 1))
        except LeaseholdError as retry_error:  # says nothing about the first request
            raise Unavailable(str(retry_error), engine="redis") from retry_error

    # --------------------------------------------------------------- batches

    async def execute_batch(self, calls: Sequence[ScriptCall]) -> list[ScriptResult | LeaseholdError]:
        """The results of many calls of one script, in one round trip per server."""
        results: list[ScriptResult | LeaseholdError] = [ScriptResult(None)] * len(calls)
        rejected = await self._execute_per_server(calls, range(len(calls)), results)
        if len(rejected) > 1:  # perhaps all have moved: the first one discovers where
            first, *rest = rejected
            results[first] = await self._execute_single(calls[first])
            rejected = await self._execute_per_server(calls, rest, results)
        for count, index in enumerate(rejected):
            if self._runtime.now() >= calls[index].deadline:
                results[index] = Unavailable("the deadline passed before the request was sent", engine="redis")
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
        """Send each server its calls once, with an equal share of the time. Returns the calls that belong elsewhere."""
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
            if self._topology.names_can_move:  # a batch may be repeated anywhere
                raise Unreachable(
                    f"{connections.server} closed the connection: {describe_error(error)}", engine="redis"
                ) from error
        try:
            return await self._round_trip(connections, packed, deadline, confirm)
        except CONNECTION_ERRORS as error:
            raise self._no_answer_error(connections, error) from error
        except LeaseholdError as retry_error:
            raise Unavailable(str(retry_error), engine="redis") from retry_error

    async def send_to(self, connections: Connections, packed: bytes, deadline: float) -> Any:
        """The reply of this very server, without redirects."""
        try:
            replies, _ = await self._send_with_retry(connections, [packed], deadline, confirm=False)
        except Unreachable:
            self._connection_lost(connections)
            raise
        if isinstance(replies[0], hiredis.ReplyError):
            raise self._map_error(connections, replies[0])
        return replies[0]

    # ------------------------------------------------------ one round trip

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
            # The script was executed: this error must not look like a refusal of the script (NotPermitted).
            raise ConfigError(str(error)) if isinstance(error, ConfigError) else error
        return ScriptResult(replies, isinstance(count, int) and count >= self.min_replicas)

    def _check_not_replaced(self, connections: Connections) -> None:
        """Raise if this server was replaced. It may not know that yet, so its reply does not count."""
        if self._topology.is_replaced(connections):
            raise ConnectionAbortedError("another server has replaced it as primary")

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
