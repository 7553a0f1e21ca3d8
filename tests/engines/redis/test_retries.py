"""What the executor does after each outcome of a request: return, retry, send it elsewhere, or raise. No server."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import hiredis
import pytest

from leasehold import ConfigError, Unavailable
from leasehold.engines.redis.executor import Executor, ScriptCall, Step, next_step
from leasehold.engines.redis.protocol import as_eval, encode_prefix
from leasehold.engines.redis.scripts import PubSubCommands, load
from leasehold.engines.redis.server import RedisEndpoint
from leasehold.engines.redis.server_settings import NotPermitted, Unreachable
from leasehold.runtime.base import maybe_await, run_sync
from leasehold.runtime.net.blocking import SocketAddress
from leasehold.runtime.threads import Threads

SCRIPT = load("attempt", PubSubCommands())


PACKED = encode_prefix(SCRIPT, 0) + b"$1\r\n0\r\n"


GRANTED = [7, 1_000_000, -1]


BROKEN, TIMED_OUT = ConnectionResetError("reset"), TimeoutError("no reply in time")


UNREACHABLE = Unreachable("cannot be reached", engine="redis")


NOSCRIPT, MOVED = hiredis.ReplyError("NOSCRIPT No matching script"), hiredis.ReplyError("MOVED 1 127.0.0.1:1")


READONLY, LOADING = hiredis.ReplyError("READONLY x"), hiredis.ReplyError("LOADING x")


OTHER = hiredis.ReplyError("OOM command not allowed")


def make_call(**fields: Any) -> ScriptCall:
    return ScriptCall("{:1}", SCRIPT, PACKED, 1e9)._replace(**fields)


PLAIN, WAITER, NO_REPEAT = make_call(), make_call(retry_until=lambda: 1e9), make_call(retries_left=0)


WITH_TEXT = make_call(packed=as_eval(SCRIPT, PACKED))


class ScriptedServer:
    """Stands for topology and connections. It answers each request with the next reply, or raises it. `replaced`: after
    this many requests, another server has replaced this one as primary."""

    names_can_move = True

    def __init__(self, replies: Iterable[Any], replaced: int = 1_000) -> None:
        self._replies, self._replaced_after = list(replies), replaced
        self.requests: list[bytes] = []
        self.server = RedisEndpoint(SocketAddress("127.0.0.1", 1))

    def connections(self, tag: str) -> ScriptedServer:
        return self

    def call(self, packed: bytes, deadline: float, compensation: object = None) -> Any:
        self.requests.append(packed)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception) and not isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply

    def is_replaced(self, connections: object) -> bool:
        return len(self.requests) == self._replaced_after

    def mark_stale(self, connections: object) -> None: ...

    async def redirect(self, *_: object) -> ScriptedServer:
        return self


async def send(server: ScriptedServer, path: str, **fields: Any) -> Any:
    executor, call = Executor(Threads(), server, 0), make_call(**fields)  # type: ignore[arg-type]
    if path == "execute":
        return await maybe_await(executor.execute(*call[:-1]))
    return (await executor.execute_with_retries(call)).reply


@pytest.fixture(params=["execute", "execute_with_retries"])
def path(request) -> str:
    return request.param


@pytest.mark.parametrize(
    ("call", "reply", "on_one_server", "if_names_can_move"),
    [
        (PLAIN, GRANTED, Step.RETURN, Step.RETURN),
        (PLAIN, 0, Step.RETURN, Step.RETURN),
        (PLAIN, NOSCRIPT, Step.SEND_TEXT, Step.SEND_TEXT),
        (WITH_TEXT, NOSCRIPT, Step.RAISE, Step.RAISE),
        (PLAIN, MOVED, Step.RAISE, Step.ELSEWHERE),
        (WAITER, READONLY, Step.RAISE, Step.ELSEWHERE),
        (PLAIN, UNREACHABLE, Step.RAISE, Step.ELSEWHERE),
        (WAITER, UNREACHABLE, Step.SAME_SERVER_LATER, Step.ELSEWHERE),
        (PLAIN, LOADING, Step.RAISE, Step.RAISE),
        (WAITER, LOADING, Step.SAME_SERVER_LATER, Step.SAME_SERVER_LATER),
        (WAITER, OTHER, Step.RAISE, Step.RAISE),
        (PLAIN, BROKEN, Step.REPEAT, Step.REPEAT),
        (PLAIN, hiredis.ProtocolError("?"), Step.REPEAT, Step.REPEAT),
        (NO_REPEAT, BROKEN, Step.RAISE, Step.RAISE),
        (WAITER, TIMED_OUT, Step.RAISE, Step.RAISE),
    ],
)
def test_outcome_decides_the_next_step(call, reply, on_one_server, if_names_can_move) -> None:
    assert next_step(call, reply, names_can_move=False) is on_one_server
    assert next_step(call, reply, names_can_move=True) is if_names_can_move


def test_broken_connection_is_followed_by_the_same_request(path) -> None:
    server = ScriptedServer([BROKEN, hiredis.ProtocolError("?"), GRANTED])
    assert run_sync(send(server, path)) == GRANTED
    assert server.requests == [PACKED] * 3


def test_request_is_repeated_three_times_at_most(path) -> None:
    server = ScriptedServer([BROKEN] * 4)
    with pytest.raises(Unavailable, match="did not answer: reset"):
        run_sync(send(server, path))
    assert len(server.requests) == 4


@pytest.mark.parametrize("replaced", [1, 1_000])
def test_timeout_is_never_repeated_even_on_a_replaced_server(path, replaced) -> None:
    """The compensation follows the attempt on its connection. Behind a repeated attempt it would end a live grant."""
    server = ScriptedServer([TIMED_OUT, GRANTED], replaced)
    with pytest.raises(Unavailable, match="no reply in time"):
        run_sync(send(server, path))
    assert len(server.requests) == 1


def test_reply_of_a_replaced_primary_does_not_count(path) -> None:
    server = ScriptedServer([[6, 1, -1], GRANTED], replaced=1)
    assert run_sync(send(server, path)) == GRANTED


@pytest.mark.parametrize("second", [Unreachable("gone", engine="redis"), NotPermitted("denied")])
def test_error_of_a_repeated_request_says_nothing_about_the_first(path, second) -> None:
    """`Unreachable` and `NotPermitted` would mean that no server executed the attempt: nothing to release."""
    server = ScriptedServer([BROKEN, second, second])
    server.names_can_move = False
    with pytest.raises(Unavailable) as caught:
        run_sync(send(server, path))
    assert type(caught.value) is Unavailable


def test_refused_request_keeps_its_error(path) -> None:
    with pytest.raises(ConfigError):
        run_sync(send(ScriptedServer([NotPermitted("denied")]), path))
    with pytest.raises(Unavailable, match="OOM"):
        run_sync(send(ScriptedServer([OTHER]), path))


def test_unknown_script_is_sent_as_text_once(path) -> None:
    server = ScriptedServer([NOSCRIPT, MOVED, GRANTED])
    assert run_sync(send(server, path)) == GRANTED
    assert server.requests == [PACKED, as_eval(SCRIPT, PACKED), as_eval(SCRIPT, PACKED)]
    with pytest.raises(Unavailable, match="NOSCRIPT"):
        run_sync(send(ScriptedServer([NOSCRIPT, NOSCRIPT]), path))


def test_batch_is_unconfirmed_when_any_round_trip_lacks_replicas() -> None:
    """If the server lacks a script, a batch takes two round trips, and replicas must confirm both."""
    noscript = hiredis.ReplyError("NOSCRIPT")
    round_trips = [[[-1, -1], noscript, 0], [[-1, -1], 1]]

    class Wire:
        server = SimpleNamespace(known_scripts={"renew"})

        def calls(self, *_):
            return round_trips.pop(0)

    class Topology:
        names_can_move = False
        known = Wire()

        def connections(self, tag):
            return self.known

        def is_replaced(self, connections):
            return False

    script = load("renew", PubSubCommands())
    batch = [ScriptCall("", script, packed, 1e9, confirm=True) for packed in (b"one", b"two")]
    results = run_sync(Executor(Threads(), Topology(), 1).execute_batch(batch))  # type: ignore[arg-type]
    assert results == [([-1, -1], False)] * 2
