"""The scripts: one per verb, put together from `.lua` files, and known to the server by their hash.

Before each stands a head: the server's clock, and the first bytes of a name that has one holder and never had a line
(the holder's mark follows). `--@ machine.lua` in a script is replaced by that file: from the script's own folder, or
from this one. Words in capitals are replaced by what they mean: durations, states, keys, and how wake-ups are
published, which is the topology's to say. As variables they would be bound to each function of machine.lua on every
call, a quarter of what having those functions costs.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Final, NamedTuple

from leasehold.core.names import FORMAT
from leasehold.core.queue_entry import COOLING, HELD, PASSED, RESERVED, WAITING
from leasehold.core.timing import RESERVATION_PROBE, RESERVATION_TTL, WAITER_TTL

MICROS: Final = 1_000_000
_HERE: Final = Path(__file__).parent
_INCLUDE: Final = re.compile(r"^--@ (\S+)$", re.MULTILINE)
_PLACEHOLDER: Final = re.compile(r"\b[A-Z_]+\b")

_PREAMBLE: Final = f"""\
local time = redis.call('TIME')
local now = time[1] * {MICROS} + time[2]
local UNCONTENDED_PREFIX = '\\150\\0\\0\\0\\160\\0\\156\\176'
"""

_CONSTANTS: Final = {
    "WAITER_TTL": f"{WAITER_TTL * MICROS:.0f}",
    "QUEUE_TTL": f"{3 * WAITER_TTL * MICROS:.0f}",  # all keys of a line, after it was last scanned or joined
    "RESERVATION": f"{RESERVATION_TTL * MICROS:.0f}",
    "RESERVATION_PROBE": f"{RESERVATION_PROBE * MICROS:.0f}",
    "WAITING": str(WAITING),
    "RESERVED": str(RESERVED),
    "HELD": str(HELD),
    "COOLING": str(COOLING),
    "PASSED": str(PASSED),
    "COUNTER": "KEYS[1]",
    "NAME": "KEYS[2]",
    "QUEUE": "KEYS[3]",
    "WAITERS": "KEYS[4]",
}


class PubSubCommands(NamedTuple):
    """How wake-ups travel: the server's verbs for it. A client has one channel for all names; in a cluster one for each
    bucket, where the keys of the bucket are: only there is it known who listens."""

    publish: str = "PUBLISH"
    numsub: str = "NUMSUB"
    subscribe: str = "SUBSCRIBE"
    by_bucket: bool = False

    def channel_prefix(self, tag: str) -> str:
        """Of the bucket with this tag; the client follows."""
        return f"{FORMAT}:{tag}:c:" if self.by_bucket else f"{FORMAT}:c:"


SHARDED_PUBSUB: Final = PubSubCommands("SPUBLISH", "SHARDNUMSUB", "SSUBSCRIBE", by_bucket=True)


class Script(NamedTuple):
    name: str
    text: bytes
    sha: bytes


@cache
def load(name: str, pubsub_commands: PubSubCommands, folder: Path = _HERE) -> Script:
    return make_script(name, source(name, pubsub_commands, folder))


def make_script(name: str, text: str) -> Script:
    return Script(name, text.encode(), sha1(text.encode()).hexdigest().encode())  # noqa: S324  # the server's own choice


def source(name: str, pubsub_commands: PubSubCommands, folder: Path = _HERE) -> str:
    """The whole text of a script: the shebang, which the server wants first, the head, and the verb."""
    shebang, _, body = _read_file(folder / f"{name}.lua").partition("\n")
    constants = {
        **_CONSTANTS,
        "PUBLISH": f"'{pubsub_commands.publish}'",
        "NUMSUB": f"'{pubsub_commands.numsub}'",
        "CHANNEL": "KEYS[1] .. ':c:'"
        if pubsub_commands.by_bucket
        else f"'{pubsub_commands.channel_prefix('')}'",  # the counter's key
    }
    text = _INCLUDE.sub(lambda match: _read_included(match[1], folder), body)
    return f"{shebang}\n{_PREAMBLE}{_PLACEHOLDER.sub(lambda match: constants.get(match[0], match[0]), text)}"


def _read_included(file: str, folder: Path) -> str:
    own_file = folder / file
    return _read_file(own_file if own_file.exists() else _HERE / file)


@cache
def _read_file(file: Path) -> str:
    return file.read_text(encoding="utf-8")
