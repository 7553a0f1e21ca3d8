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
from leasehold.core.party import COOLING, HELD, PASSED, RESERVED, WAITING
from leasehold.core.timing import BEAT, PROBE, RESERVATION

MICROS: Final = 1_000_000
_HERE: Final = Path(__file__).parent
_INCLUDE: Final = re.compile(r"^--@ (\S+)$", re.MULTILINE)
_CAPITALS: Final = re.compile(r"\b[A-Z]+\b")

_HEAD: Final = f"""\
local time = redis.call('TIME')
local now = time[1] * {MICROS} + time[2]
local ALONE = '\\150\\0\\0\\0\\160\\0\\156\\176'
"""

_WORDS: Final = {
    "BEAT": f"{BEAT * MICROS:.0f}",
    "KEPT": f"{3 * BEAT * MICROS:.0f}",  # all keys of a line, after it was last scanned or joined
    "RESERVATION": f"{RESERVATION * MICROS:.0f}",
    "PROBE": f"{PROBE * MICROS:.0f}",
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


class Publishing(NamedTuple):
    """How wake-ups travel: the server's verbs for it. A client has one channel for all names; in a cluster one for each
    bucket, where the keys of the bucket are: only there is it known who listens."""

    publish: str = "PUBLISH"
    numsub: str = "NUMSUB"
    subscribe: str = "SUBSCRIBE"
    by_bucket: bool = False

    def channel(self, tag: str) -> str:
        """Of the bucket with this tag; the client follows."""
        return f"{FORMAT}:{tag}:c:" if self.by_bucket else f"{FORMAT}:c:"


SHARDED: Final = Publishing("SPUBLISH", "SHARDNUMSUB", "SSUBSCRIBE", by_bucket=True)


class Script(NamedTuple):
    name: str
    text: bytes
    sha: bytes


@cache
def load(name: str, publishing: Publishing, folder: Path = _HERE) -> Script:
    return made(name, source(name, publishing, folder))


def made(name: str, text: str) -> Script:
    return Script(name, text.encode(), sha1(text.encode()).hexdigest().encode())  # noqa: S324  # the server's own choice


def source(name: str, publishing: Publishing, folder: Path = _HERE) -> str:
    """The whole text of a script: the shebang, which the server wants first, the head, and the verb."""
    first, _, rest = _read(folder / f"{name}.lua").partition("\n")
    words = {
        **_WORDS,
        "PUBLISH": f"'{publishing.publish}'",
        "NUMSUB": f"'{publishing.numsub}'",
        "CHANNEL": "KEYS[1] .. ':c:'" if publishing.by_bucket else f"'{publishing.channel('')}'",  # the counter's key
    }
    text = _INCLUDE.sub(lambda found: _part(found[1], folder), rest)
    return f"{first}\n{_HEAD}{_CAPITALS.sub(lambda found: words.get(found[0], found[0]), text)}"


def _part(file: str, folder: Path) -> str:
    own = folder / file
    return _read(own if own.exists() else _HERE / file)


@cache
def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")
