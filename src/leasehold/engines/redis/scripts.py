"""The scripts: one per verb, put together from the `.lua` files beside this one, and known to the server by their hash.

Before each stands a head: the server's clock, the durations of `core/timing.py`, the first bytes of a name that has one
holder and never had a line (the holder's mark follows), and how wake-ups are published, which is the topology's to say.
`--@ machine.lua` in a script is replaced by that file.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Final, NamedTuple

from leasehold.core.names import FORMAT
from leasehold.core.timing import BEAT, PROBE, RESERVATION

MICROS: Final = 1_000_000

_HEAD: Final = f"""\
local time = redis.call('TIME')
local now = time[1] * {MICROS} + time[2]
local BEAT, RESERVATION, PROBE = {BEAT * MICROS:.0f}, {RESERVATION * MICROS:.0f}, {PROBE * MICROS:.0f}
local ALONE = '\\150\\0\\0\\0\\160\\0\\156\\176'
"""


class Publishing(NamedTuple):
    """How wake-ups travel: the server's verbs for it. A client has one channel for all names."""

    publish: str = "PUBLISH"
    numsub: str = "NUMSUB"
    subscribe: str = "SUBSCRIBE"
    channel: str = f"{FORMAT}:c:"  # and the client


class Script(NamedTuple):
    name: str
    text: bytes
    sha: bytes


@cache
def load(name: str, publishing: Publishing) -> Script:
    return made(name, source(name, publishing))


def made(name: str, text: str) -> Script:
    return Script(name, text.encode(), sha1(text.encode()).hexdigest().encode())  # noqa: S324  # the server's own choice


def source(name: str, publishing: Publishing) -> str:
    """The whole text of a script: the shebang, which the server wants first, the head, and the verb."""
    first, _, rest = _read(f"{name}.lua").partition("\n")
    told = f"local PUBLISH, NUMSUB, CHANNEL = '{publishing.publish}', '{publishing.numsub}', '{publishing.channel}'\n"
    return f"{first}\n{_HEAD}{told}{rest.replace('--@ machine.lua', _read('machine.lua'))}"


@cache
def _read(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")
