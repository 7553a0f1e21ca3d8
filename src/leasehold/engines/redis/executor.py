"""Runs scripts: retries, redirects, confirmation by replicas.

One loop, `Executor.execute_with_retries`, decides after each sending what to do next. A request was answered, was
refused, or may have been executed (`SendOutcome`). `next_step` is this table:

| outcome     | because                          | next step                                                        |
|-------------|----------------------------------|------------------------------------------------------------------|
| ANSWERED    |                                  | return the reply                                                 |
| NOT_APPLIED | the server lacks the script      | send the script's text, on the same server                       |
| NOT_APPLIED | another server has the name      | send it there, if names can move, until the deadline             |
| NOT_APPLIED | no server was reached            | the same; with one server, and for a waiter: retry there later   |
| NOT_APPLIED | the server loads its data        | for a waiter: retry there later, until its `wait` is over        |
| NOT_APPLIED | any other refusal                | raise: a script that failed halfway is never retried             |
| UNKNOWN     | the connection broke             | repeat it where the name is now, at most three times             |
| UNKNOWN     | no reply came by the deadline    | raise `Unavailable`                                              |

- A repeated request finds what the first one did by the claim's id hash (E2, E6). The compensation of an attempt is
  sent only on the connection that carried it, and only if the attempt is not repeated: `BlockingPool._drop`.
- After a repetition every error is a plain `Unavailable`: it says nothing about the first request.
- A reply from a server that has been replaced as primary does not count: the outcome is UNKNOWN.
- With `min_replicas`, a grant or renewal counts once that many replicas have it. WAIT covers only the writes of its own
  connection, so it is sent on the same one, and no other request uses that meanwhile. WAIT is sent after the reply: the
  compensation of an attempt would otherwise queue behind WAIT, and be lost with the connection.

Driver errors become ours (E9) in three places: error replies and failures to connect in `server.py`, failures of
discovery in `discovery.py`, and requests without a reply in this module.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeAlias

import hiredis

from leasehold.engines.redis.connections import Compensation, Connections
from leasehold.engines.redis.protocol import as_eval
from leasehold.engines.redis.scripts import Script
from leasehold.engines.redis.server import CONNECTION_ERRORS, describe_error, encode_command, is_error_reply
from leasehold.engines.redis.server_settings import NotPermitted, Unreachable
from leasehold.engines.redis.topology import WRONG_SERVER_ERRORS, Rejected, Topology, pause_before_retry
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime, maybe_await

_WAIT_SHARE: Final = 0.8  # of the time left: the reply to WAIT must arrive before the deadline too
_MAX_RETRIES: Final = 3  # after broken connections; more than one: a newly promoted server closes its connections again

# The reply to a repeated release that found no grant: the request sent before may have ended it.
REPEATED_RELEASE: Final = None


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
    reply: Any  # inside this module also the error that came instead of a reply
    confirmed: bool = True  # enough replicas have the write


class SendOutcome(Enum):
    """What became of a request that was sent once."""

    ANSWERED = auto()
    NOT_APPLIED = auto()  # refused by the server, or no server was reached
    UNKNOWN = auto()  # executed or not: no reply came, or only one that does not count

    @classmethod
    def of(cls, reply: Any) -> SendOutcome:
        """By the reply, or the error that came instead."""
        if isinstance(reply, CONNECTION_ERRORS):
            return cls.UNKNOWN
        return cls.NOT_APPLIED if isinstance(reply, (hiredis.ReplyError, Unreachable)) else cls.ANSWERED


class Step(Enum):
    """What to do next with a request: see the table at the top."""

    RETURN = auto()
    SEND_TEXT = auto()
    ELSEWHERE = auto()
    SAME_SERVER_LATER = auto()
    REPEAT = auto()
    RAISE = auto()


def next_step(call: ScriptCall, reply: Any, names_can_move: bool) -> Step:
    """The table at the top. `reply`: or the error that came instead."""
    outcome = SendOutcome.of(reply)
    if outcome is SendOutcome.ANSWERED:
        return Step.RETURN
    if outcome is SendOutcome.UNKNOWN:
        return Step.RAISE if isinstance(reply, TimeoutError) or not call.retries_left else Step.REPEAT
    if is_error_reply(reply, "NOSCRIPT") and as_eval(call.script, call.packed) != call.packed:
        return Step.SEND_TEXT
    unreachable, is_waiter = isinstance(reply, Unreachable), call.retry_until is not None
    if names_can_move and (unreachable or is_error_reply(reply, WRONG_SERVER_ERRORS)):
        return Step.ELSEWHERE
    return Step.SAME_SERVER_LATER if is_waiter and (unreachable or is_error_reply(reply, "LOADING")) else Step.RAISE


def _retry_deadline(call: ScriptCall) -> float:
    """Of a waiter: the end of its `wait`, which `close()` of the client brings forward."""
    return 0.0 if call.retry_until is None else min(call.deadline, call.retry_until())


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
        connections, reply = topology.connections(tag), None
        if connections is not None:
            try:
                reply = connections.call(packed, deadline, compensation)
            except CONNECTION_ERRORS as error:
                reply = error
            answered = reply.__class__ is list or reply.__class__ is int
            if answered and not (topology.names_can_move and topology.is_replaced(connections)):
                return reply
        return self._finish(
            (tag, script, packed, deadline, compensation, retries_left, retry_until), connections, reply
        )

    async def _finish(self, call_fields: tuple[Any, ...], connections: Connections | None, reply: Any) -> Any:
        """What is left of `execute`: to await the reply, and to retry."""
        if connections is None:
            return (await self.execute_with_retries(ScriptCall(*call_fields))).reply
        try:
            if hasattr(reply, "__await__"):  # like `maybe_await`, but without one more coroutine
                reply = await reply
            if not isinstance(reply, CONNECTION_ERRORS):  # a timeout must not become a broken connection
                self._check_not_replaced(connections)
        except (*CONNECTION_ERRORS, Unreachable) as error:
            reply = error
        if reply.__class__ is list or reply.__class__ is int:  # answered, found out cheaply
            return reply
        return (await self.execute_with_retries(ScriptCall(*call_fields), connections, ScriptResult(reply))).reply

    async def execute_with_retries(
        self, call: ScriptCall, connections: Connections | None = None, result: ScriptResult | None = None
    ) -> ScriptResult:
        """Send the request until a step of the table returns or raises. `result`: of a first sending, there."""
        tries, earlier_error, may_be_executed = 0, None, False
        try:
            while True:
                if result is None:
                    connections, result = await self._find_and_send(call)
                step, error = next_step(call, result.reply, self._topology.names_can_move), result.reply
                if step is Step.RETURN:
                    unsure = may_be_executed and call.script.name == "release" and not error
                    return ScriptResult(REPEATED_RELEASE) if unsure else result
                if SendOutcome.of(error) is SendOutcome.UNKNOWN:
                    self._rediscover_later(connections)
                if step is Step.REPEAT:
                    call, may_be_executed = call._replace(retries_left=call.retries_left - 1), True
                    tries, earlier_error, result = 0, None, None
                    continue
                if step is Step.SEND_TEXT:  # puts the error right, so a later one must not name it
                    call, error = call._replace(packed=as_eval(call.script, call.packed)), None
                elif step is Step.ELSEWHERE:
                    connections = await self._find_other_server(call, connections, error, tries)
                elif step is Step.RAISE or not await pause_before_retry(self._runtime, tries, _retry_deadline(call)):
                    raise self._final_error(connections, error, earlier_error)
                tries, earlier_error = tries + 1, error
                assert connections is not None  # noqa: S101  # for the type checker
                result = await self._send(call, connections)
        except LeaseholdError as final_error:
            if may_be_executed:
                raise Unavailable(str(final_error), engine="redis") from final_error
            raise

    async def _find_and_send(self, call: ScriptCall) -> tuple[Connections | None, ScriptResult]:
        """The server that has the name, and the result there. Without one, the request was not executed."""
        connections = self._topology.connections(call.tag)
        no_server = Unreachable("no cluster node currently serves this hash slot", engine="redis")
        if connections is None:
            try:
                await self._topology.find(call.deadline)
            except Unreachable as error:
                if call.retry_until is None:
                    raise
                no_server = error
            connections = self._topology.connections(call.tag)
        return connections, ScriptResult(no_server) if connections is None else await self._send(call, connections)

    async def _find_other_server(
        self, call: ScriptCall, connections: Connections | None, error: Exception, tries: int
    ) -> Connections:
        # If no server is known, discovery for a waiter ends when its `wait` is over, even before the deadline.
        is_waiter = call.retry_until is not None
        deadline = _retry_deadline(call) if connections is None and is_waiter else call.deadline
        return await self._topology.redirect(call.tag, Rejected(error, connections), tries, deadline)

    async def _send(self, call: ScriptCall, connections: Connections) -> ScriptResult:
        """The result of sending it once; without a reply, the error."""
        try:
            if call.confirm:
                replies, confirmed = await self._round_trip(
                    connections, [call.packed], call.deadline, True, call.compensation
                )
                return ScriptResult(replies[0], confirmed)
            reply = await maybe_await(connections.call(call.packed, call.deadline, call.compensation))
            self._check_not_replaced(connections)
            return ScriptResult(reply)
        except (*CONNECTION_ERRORS, Unreachable) as error:
            return ScriptResult(error)

    def _final_error(
        self, connections: Connections | None, error: Exception, earlier_error: Exception | None
    ) -> LeaseholdError:
        if isinstance(error, LeaseholdError):
            return error
        assert connections is not None  # noqa: S101  # it sent this reply, or none
        if isinstance(error, CONNECTION_ERRORS):
            final_error: LeaseholdError = self._no_answer_error(connections, error, earlier_error)
        else:
            final_error = self._map_error(connections, error)
        final_error.__cause__ = error
        return final_error

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
            return await self.execute_with_retries(call)
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
            assert connections is not None  # noqa: S101  # for the type checker
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
        script, confirm, known_scripts = calls[0].script, calls[0].confirm, connections.server.known_scripts
        packed = [call.packed for call in calls]
        if script.name not in known_scripts:  # a promoted replica knows no script: the text saves a round trip
            packed[0] = as_eval(script, packed[0])
        replies, confirmed = await self._send_with_retry(connections, packed, deadline, confirm)
        known_scripts.add(script.name)
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
            self._rediscover_later(connections)
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
            self._rediscover_later(connections)
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
        # None: the replies are errors or busy, so there was nothing to confirm.
        return ScriptResult(replies, count is None or (isinstance(count, int) and count >= self.min_replicas))

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

    def _rediscover_later(self, connections: Connections | None) -> None:
        """This server did not answer: unless it is the only one, the next call discovers where its names are now."""
        if connections is not None and self._topology.names_can_move:
            self._topology.mark_stale(connections)

    def _map_error(self, connections: Connections, error: Exception) -> LeaseholdError:
        if is_error_reply(error, WRONG_SERVER_ERRORS):
            self._topology.mark_stale(connections)
        if is_error_reply(error, ("MOVED", "ASK ")) and not self._topology.names_can_move:
            return NotPermitted(
                f"{connections.server} is a node of a Redis cluster and does not serve this name: use the URL "
                "redis+cluster:// with the same hosts"
            )
        return error if isinstance(error, LeaseholdError) else connections.server.map_error(error)
