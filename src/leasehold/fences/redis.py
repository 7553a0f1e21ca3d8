"""Redis values and commands: mark and commands are one script, so nothing comes between.

The mark is a key of its own, in the same slot of a cluster, without a ttl. It is as durable as the rest of the data:
an eviction policy that takes keys without a ttl (`allkeys-*`), or a fail-over that loses writes, can lose it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from leasehold.errors import ConfigError
from leasehold.fences.rules import Pass, Shown, check_resource, place_of, refuse, to_read, to_write
from leasehold.runtime.base import settle, step

Word: TypeAlias = str | bytes | int | float

# KEYS: the mark, and what the fence stands at. ARGV: token, 1 for a shared lease, then each command: how many words,
# and the words. Replies 0 and the mark for a stale token (nothing was done), else 1 and the answers in order.
# Atomic as every script is; but a command that fails does not undo those before it.
SCRIPT: Final = """
local mark = redis.call('get', KEYS[1]) or '0'
if not string.find(mark, '^%d+$') then return redis.error_reply('ERR ' .. KEYS[1] .. ' holds no mark of a fence') end
local seen, token = tonumber(mark), tonumber(ARGV[1])
if token < seen then return {0, string.format('%.0f', seen)} end
if token > seen and ARGV[2] == '0' then redis.call('set', KEYS[1], ARGV[1]) end
local answers, at = {1}, 3
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  answers[#answers + 1] = redis.call(unpack(ARGV, at + 1, at + words))
  at = at + 1 + words
end
return answers
"""


class _Base:
    def __init__(self, client: Any, key: str, *, mark: str | None = None) -> None:
        """`client`: of redis-py, for one server, Sentinel or a cluster. `mark`: the key that keeps it, if not ours."""
        self.key = self.resource = check_resource(key)
        self._client = client
        self._mark = place_of(mark, mark_key(key) if mark is None else "", key)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key}>"

    async def _run(self, lease: Shown, shown: Pass, *commands: Sequence[Word]) -> list[Any]:
        mark = self._mark if shown.slot is None else f"{self._mark}:{shown.slot}"
        words: list[Word] = [shown.token, int(shown.shared)]
        for command in commands:
            words += [len(command), *command]
        found = await settle(self._client.eval(SCRIPT, 2, mark, self.key, *words))
        if not isinstance(found, list):
            raise ConfigError("a fence needs a client that answers, not a pipeline: use calls() for several commands")
        done, *answers = found
        if not done:
            refuse(lease, shown, int(answers[0]), self.resource)
        return answers

    async def _read(self, lease: Shown) -> Any:
        return (await self._run(lease, to_read(lease), ("GET", self.key)))[0]

    async def _write(self, lease: Shown, value: Word, options: Sequence[Word]) -> None:
        await self._run(lease, to_write(lease), ("SET", self.key, value, *options))

    async def _call(self, lease: Shown, commands: Sequence[Sequence[Word]]) -> list[Any]:
        return await self._run(lease, to_write(lease), *commands)


class RedisFence(_Base):
    """The value at `key`, or whatever commands touch in its slot, for blocking clients of redis-py."""

    def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do."""
        step(self._call(lease, ()))

    def read(self, lease: Shown) -> Any:
        """GET, to decide a write by: older holders write no more."""
        return step(self._read(lease))

    def write(self, lease: Shown, value: Word, *options: Word) -> None:
        """SET, with options of that command: `"EX", 60`."""
        step(self._write(lease, value, options))

    def call(self, lease: Shown, *command: Word) -> Any:
        """Any one command: `call(lease, "HINCRBY", "{stock}", "teapot", -1)`. In a cluster: of the same slot."""
        return step(self._call(lease, [command]))[0]

    def calls(self, lease: Shown, *commands: Sequence[Word]) -> list[Any]:
        """Several commands in one step. One that fails does not undo those before it."""
        return step(self._call(lease, commands))


class AsyncRedisFence(_Base):
    """As `RedisFence`, for clients of `redis.asyncio`."""

    async def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do."""
        await self._call(lease, ())

    async def read(self, lease: Shown) -> Any:
        """GET, to decide a write by: older holders write no more."""
        return await self._read(lease)

    async def write(self, lease: Shown, value: Word, *options: Word) -> None:
        """SET, with options of that command: `"EX", 60`."""
        await self._write(lease, value, options)

    async def call(self, lease: Shown, *command: Word) -> Any:
        """Any one command: `call(lease, "HINCRBY", "{stock}", "teapot", -1)`. In a cluster: of the same slot."""
        return (await self._call(lease, [command]))[0]

    async def calls(self, lease: Shown, *commands: Sequence[Word]) -> list[Any]:
        """Several commands in one step. One that fails does not undo those before it."""
        return await self._call(lease, commands)


def mark_key(key: str) -> str:
    """A key that is certain to hash to the same slot: by the tag that `key` has, or by `key` as the tag."""
    _, brace, rest = key.partition("{")
    tag = rest.partition("}")[0] if brace and "}" in rest else ""
    if tag:
        return f"{key}:fence"
    if "}" in key:
        raise ConfigError(f"{key!r} cannot be made a hash tag: pass mark=, a key of the same slot")
    return f"{{{key}}}:fence"
