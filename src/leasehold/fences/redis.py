"""A fence for Redis values and commands: one script checks the token and runs the commands, so it is atomic.

The highest token is kept in a key of its own, in the same cluster slot, without a ttl. It is as durable as the rest of
the data: it is lost if the eviction policy removes keys without a ttl (`allkeys-*`) or a failover loses writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from leasehold.errors import ConfigError
from leasehold.fences.rules import (
    LeaseLike,
    TokenInfo,
    check_resource,
    choose_token_key,
    raise_stale,
    token_for_read,
    token_for_write,
)
from leasehold.runtime.base import maybe_await, run_sync

CommandArgument: TypeAlias = str | bytes | int | float

# KEYS: the key of the highest token, and the fenced key. ARGV: token, 1 for a shared lease (else 0), then each command:
# its number of arguments and the arguments. Replies 0 and the highest token if the token is stale (nothing was done),
# else 1 and the replies in order. Atomic like every script, but a command that fails does not undo earlier ones.
SCRIPT: Final = """
local stored = redis.call('get', KEYS[1]) or '0'
if not string.find(stored, '^%d+$') or tonumber(stored) >= 2^53 then
  return redis.error_reply('ERR ' .. KEYS[1] .. ' holds no fence token')
end
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
    def __init__(self, client: Any, key: str, *, token_key: str | None = None) -> None:
        """`client`: a redis-py client for one server, Sentinel or a cluster. `token_key`: the key where the highest
        token is kept; by default `KEY:fence` or `{KEY}:fence`, in the same slot."""
        self.key = self.resource = check_resource(key)
        self._client = client
        self._token_key = choose_token_key(
            "token_key", token_key, default_token_key(key) if token_key is None else "", key
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key}>"

    async def _run(self, lease: LeaseLike, token_info: TokenInfo, *commands: Sequence[CommandArgument]) -> list[Any]:
        token_key = self._token_key if token_info.slot is None else f"{self._token_key}:{token_info.slot}"
        arguments: list[CommandArgument] = [token_info.token, int(token_info.shared)]
        for command in commands:
            arguments += [len(command), *command]
        reply = await maybe_await(self._client.eval(SCRIPT, 2, token_key, self.key, *arguments))
        if not isinstance(reply, list):
            raise ConfigError("a fence cannot use a pipeline: pass a client, and use calls() for several commands")
        accepted, *replies = reply
        if not accepted:
            raise_stale(lease, token_info, int(replies[0]), self.resource, "redis")
        return replies

    async def _read(self, lease: LeaseLike) -> Any:
        return (await self._run(lease, token_for_read(lease), ("GET", self.key)))[0]

    async def _write(self, lease: LeaseLike, value: CommandArgument, options: Sequence[CommandArgument]) -> None:
        await self._run(lease, token_for_write(lease), ("SET", self.key, value, *options))

    async def _call(self, lease: LeaseLike, commands: Sequence[Sequence[CommandArgument]]) -> list[Any]:
        return await self._run(lease, token_for_write(lease), *commands)


class RedisFence(_BaseRedisFence):
    """Fences the value at `key`, or any commands on keys in the same slot, for blocking redis-py clients."""

    def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token. All methods raise `StaleToken`."""
        run_sync(self._call(lease, ()))

    def read(self, lease: LeaseLike) -> Any:
        """GET, to base a write on. Older holders are refused from now on."""
        return run_sync(self._read(lease))

    def write(self, lease: LeaseLike, value: CommandArgument, *options: CommandArgument) -> None:
        """SET, with its options, such as `"EX", 60`."""
        run_sync(self._write(lease, value, options))

    def call(self, lease: LeaseLike, *command: CommandArgument) -> Any:
        """Any one command: `call(lease, "HINCRBY", "{stock}", "teapot", -1)`. In a cluster, keys of one slot."""
        return run_sync(self._call(lease, [command]))[0]

    def calls(self, lease: LeaseLike, *commands: Sequence[CommandArgument]) -> list[Any]:
        """Several commands in one atomic step. A command that fails does not undo earlier ones."""
        return run_sync(self._call(lease, commands))


class AsyncRedisFence(_BaseRedisFence):
    """Like `RedisFence`, for clients of `redis.asyncio`."""

    async def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token. All methods raise `StaleToken`."""
        await self._call(lease, ())

    async def read(self, lease: LeaseLike) -> Any:
        """GET, to base a write on. Older holders are refused from now on."""
        return await self._read(lease)

    async def write(self, lease: LeaseLike, value: CommandArgument, *options: CommandArgument) -> None:
        """SET, with its options, such as `"EX", 60`."""
        await self._write(lease, value, options)

    async def call(self, lease: LeaseLike, *command: CommandArgument) -> Any:
        """Any one command: `call(lease, "HINCRBY", "{stock}", "teapot", -1)`. In a cluster, keys of one slot."""
        return (await self._call(lease, [command]))[0]

    async def calls(self, lease: LeaseLike, *commands: Sequence[CommandArgument]) -> list[Any]:
        """Several commands in one atomic step. A command that fails does not undo earlier ones."""
        return await self._call(lease, commands)


def default_token_key(key: str) -> str:
    """A key that hashes to the same slot: it has the hash tag of `key`, or `key` itself as its tag."""
    _, brace, after_brace = key.partition("{")
    tag = after_brace.partition("}")[0] if brace and "}" in after_brace else ""
    if tag:
        return f"{key}:fence"
    if "}" in key:
        raise ConfigError(f"{key!r} cannot be used as a hash tag: pass token_key=KEY, a key in the same slot")
    return f"{{{key}}}:fence"
