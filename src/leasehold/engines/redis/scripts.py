"""The scripts: one per verb, assembled from `.lua` files. The server knows them by their hash.

Each script starts with a preamble: the server's clock, and the first bytes of a name that has one holder and never had
a queue (the holder's id hash follows). `--@ lock_state.lua` in a script is replaced by that file, from the script's own
folder or from this one: so the scripts of Redlock, in a folder of their own, share what is the same. Words in capitals
are replaced by constants: durations, states, keys, and the topology's pub/sub commands. As variables, Lua would bind
them to each function of lock_state.lua on every call, which is a quarter of the cost of these functions.
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
    "QUEUE_TTL": f"{3 * WAITER_TTL * MICROS:.0f}",  # life of a queue's keys after its last scan or join
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
    """The server's commands for wake-ups. A client has one channel for all names. In a cluster it has one per bucket,
    on the node that has the bucket's keys: only that node knows the channel's subscribers."""

    publish: str = "PUBLISH"
    numsub: str = "NUMSUB"
    subscribe: str = "SUBSCRIBE"
    by_bucket: bool = False

    def channel_prefix(self, tag: str) -> str:
        """The channel of the bucket with this tag, without the client id at its end."""
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
    return Script(name, text.encode(), sha1(text.encode(), usedforsecurity=False).hexdigest().encode())


def source(name: str, pubsub_commands: PubSubCommands, folder: Path = _HERE) -> str:
    """The text of a script: the shebang, which must come first, the preamble, and the verb."""
    shebang, _, body = _read_file(folder / f"{name}.lua").partition("\n")
    constants = {
        **_CONSTANTS,
        "PUBLISH": f"'{pubsub_commands.publish}'",
        "NUMSUB": f"'{pubsub_commands.numsub}'",
        # KEYS[1] is the counter's key, which carries the bucket's tag.
        "CHANNEL": "KEYS[1] .. ':c:'" if pubsub_commands.by_bucket else f"'{pubsub_commands.channel_prefix('')}'",
    }
    text = _INCLUDE.sub(lambda match: _read_included(match[1], folder), body)
    return f"{shebang}\n{_PREAMBLE}{_PLACEHOLDER.sub(lambda match: constants.get(match[0], match[0]), text)}"


def _read_included(file: str, folder: Path) -> str:
    own_file = folder / file
    return _read_file(own_file if own_file.exists() else _HERE / file)


@cache
def _read_file(file: Path) -> str:
    return file.read_text(encoding="utf-8")
