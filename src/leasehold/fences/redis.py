"""Redis values and commands: mark and commands are one script, so nothing comes between.

The mark is a key of its own, in the same slot of a cluster, without a ttl. It is as durable as the rest of the data:
an eviction policy that takes keys without a ttl (`allkeys-*`), or a fail-over that loses writes, can lose it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from leasehold.errors import ConfigError
from leasehold.fences.rules import (
    Pass,
    Shown,
    check_resource,
    choose_token_key,
    raise_stale,
    token_for_read,
    token_for_write,
)
from leasehold.runtime.base import maybe_await, run_sync

CommandArgument: TypeAlias = str | bytes | int | float

# KEYS: the mark, and what the fence stands at. ARGV: token, 1 for a shared lease, then each command: how many words,
# and the words. Replies 0 and the mark for a stale token (nothing was done), else 1 and the answers in order.
# Atomic as every script is; but a command that fails does not undo those before it.
SCRIPT: Final = """
local stored = redis.call('get', KEYS[1]) or '0'
if not string.find(stored, '^%d+$') then return redis.error_reply('ERR ' .. KEYS[1] .. ' holds no mark of a fence') end
local highest_token, token = tonumber(stored), tonumber(ARGV[1])
if token < highest_token then return {0, string.format('%.0f', highest_token)} end
if token > highest_token and ARGV[2] == '0' then redis.call('set', KEYS[1], ARGV[1]) end
local answers, at = {1}, 3
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  answers[#answers + 1] = redis.call(unpack(ARGV, at + 1, at + count))
  at = at + 1 + count
end
return answers
"""


class _BaseRedisFence:
    def __init__(self, client: Any, key: str, *, mark: str | None = None) -> None:
        """`client`: of redis-py, for one server, Sentinel or a cluster. `mark`: the key that keeps it, if not ours."""
        self.key = self.resource = check_resource(key)
        self._client = client
        self._token_key = choose_token_key(mark, default_token_key(key) if mark is None else "", key)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key}>"

    async def _run(self, lease: Shown, token_info: Pass, *commands: Sequence[CommandArgument]) -> list[Any]:
        token_key = self._token_key if token_info.slot is None else f"{self._token_key}:{token_info.slot}"
        arguments: list[CommandArgument] = [token_info.token, int(token_info.shared)]
        for command in commands:
            arguments += [len(command), *command]
        reply = await maybe_await(self._client.eval(SCRIPT, 2, token_key, self.key, *arguments))
        if not isinstance(reply, list):
            raise ConfigError("a fence needs a client that answers, not a pipeline: use calls() for several commands")
        accepted, *replies = reply
        if not accepted:
            raise_stale(lease, token_info, int(replies[0]), self.resource)
        return replies

    async def _read(self, lease: Shown) -> Any:
        return (await self._run(lease, token_for_read(lease), ("GET", self.key)))[0]

    async def _write(self, lease: Shown, value: CommandArgument, options: Sequence[CommandArgument]) -> None:
        await self._run(lease, token_for_write(lease), ("SET", self.key, value, *options))

    async def _call(self, lease: Shown, commands: Sequence[Sequence[CommandArgument]]) -> list[Any]:
        return await self._run(lease, token_for_write(lease), *commands)


class RedisFence(_BaseRedisFence):
    """The value at `key`, or whatever commands touch in its slot, for blocking clients of redis-py."""

    def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do."""
        run_sync(self._call(lease, ()))

    def read(self, lease: Shown) -> Any:
        """GET, to decide a write by: older holders write no more."""
        return run_sync(self._read(lease))

    def write(self, lease: Shown, value: CommandArgument, *options: CommandArgument) -> None:
        """SET, with options of that command: `"EX", 60`."""
        run_sync(self._write(lease, value, options))

    def call(self, lease: Shown, *command: CommandArgument) -> Any:
        """Any one command: `call(lease, "HINCRBY", "{stock}", "teapot", -1)`. In a cluster: of the same slot."""
        return run_sync(self._call(lease, [command]))[0]

    def calls(self, lease: Shown, *commands: Sequence[CommandArgument]) -> list[Any]:
        """Several commands in one step. One that fails does not undo those before it."""
        return run_sync(self._call(lease, commands))


class AsyncRedisFence(_BaseRedisFence):
    """As `RedisFence`, for clients of `redis.asyncio`."""

    async def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do."""
        await self._call(lease, ())

    async def read(self, lease: Shown) -> Any:
        """GET, to decide a write by: older holders write no more."""
        return await self._read(lease)

    async def write(self, lease: Shown, value: CommandArgument, *options: CommandArgument) -> None:
        """SET, with options of that command: `"EX", 60`."""
        await self._write(lease, value, options)

    async def call(self, lease: Shown, *command: CommandArgument) -> Any:
        """Any one command: `call(lease, "HINCRBY", "{stock}", "teapot", -1)`. In a cluster: of the same slot."""
        return (await self._call(lease, [command]))[0]

    async def calls(self, lease: Shown, *commands: Sequence[CommandArgument]) -> list[Any]:
        """Several commands in one step. One that fails does not undo those before it."""
        return await self._call(lease, commands)


def default_token_key(key: str) -> str:
    """A key that is certain to hash to the same slot: by the tag that `key` has, or by `key` as the tag."""
    _, brace, after_brace = key.partition("{")
    tag = after_brace.partition("}")[0] if brace and "}" in after_brace else ""
    if tag:
        return f"{key}:fence"
    if "}" in key:
        raise ConfigError(f"{key!r} cannot be made a hash tag: pass mark=, a key of the same slot")
    return f"{{{key}}}:fence"
