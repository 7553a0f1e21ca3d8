"""What a node's name and data say, and who may hold a name, given the names of all nodes in its line. Pure.

    /lh1/<namespace>:<name>/<kind>-<mode>-<mark>-<sequence>       l-x-3f...-0000000007, s3-x-..., l-r-...

The server numbers the nodes of a line as they come, and a node that is gone never comes back. Safety follows: whoever
has its own node in a list, and nothing in its way among the lower numbers, holds the name, and goes on doing so until
its node is gone (E1). A list may be old, but not older than the own node in it: a lower number missing there was
created before, so it is over. The number orders; it is never a token, for it begins anew with the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from leasehold.core.admission import described
from leasehold.core.names import FORMAT, decode, encode, key
from leasehold.core.timing import BEAT
from leasehold.errors import ConfigError
from leasehold.model import Claim, Holder, Kind, Mode

ROOT: Final = f"/{FORMAT}"
BASE: Final = f"{ROOT}/base"  # what is added to every token; no name's node is called so, they all have a colon
TOKENS: Final = 2**53  # every token is below: a number that every language can hold
_NAME: Final = re.compile(r"(l|s[1-9][0-9]{0,9})-(x|r)-([0-9a-f]+)-([0-9]{10})")


class Node(NamedTuple):
    """One claim's node, by its name."""

    number: int
    name: str
    kind: str  # "l", or "s" and the limit
    mode: str  # "x" or "r"
    mark: str

    @property
    def meant(self) -> tuple[Kind, int]:
        return ("lock", 1) if self.kind == "l" else ("semaphore", int(self.kind[1:]))


def kind_of(claim: Claim) -> str:
    return "l" if claim.kind == "lock" else f"s{claim.limit}"


def prefix(claim: Claim) -> str:
    """What the name of a claim's node begins with; the server adds the number."""
    return f"{kind_of(claim)}-{'r' if claim.mode == 'shared' else 'x'}-{claim.mark}-"


def parse(name: str) -> Node | None:
    found = _NAME.fullmatch(name)
    return Node(int(found[4]), name, found[1], found[2], found[3]) if found else None


class Line:
    """The nodes of one name by number. What is not a node of ours is not seen."""

    __slots__ = ("_holders", "nodes")

    def __init__(self, names: Iterable[str]) -> None:
        self.nodes = sorted(node for node in map(parse, names) if node)
        self._holders = self._count_holders()

    def _count_holders(self) -> int:
        """How many from the front hold the name, or may as soon as they look. The first fixes the kind."""
        if not self.nodes:
            return 0
        first = self.nodes[0]
        same = next((at for at, node in enumerate(self.nodes) if node.kind != first.kind), len(self.nodes))
        if first.kind != "l":
            return min(same, first.meant[1])
        if first.mode == "x":
            return 1
        return next((at for at, node in enumerate(self.nodes[:same]) if node.mode == "x"), same)

    @property
    def holders(self) -> list[Node]:
        return self.nodes[: self._holders]

    def by_mark(self, mark: str) -> list[Node]:
        return [node for node in self.nodes if node.mark == mark]

    def index(self, name: str) -> int | None:
        return next((at for at, node in enumerate(self.nodes) if node.name == name), None)

    def holds(self, at: int) -> bool:
        return at < self._holders

    def place(self, at: int) -> int:
        """How many wait before it."""
        return at - self._holders

    def mismatch(self, at: int) -> str | None:
        """What the line is a line for, when that is not what the node at this place means."""
        first = self.nodes[0]
        return None if first.kind == self.nodes[at].kind else described(*first.meant)

    def before(self, at: int) -> Node:
        """Whose end a waiter waits for: a reader the last writer before it, all others whoever is before them."""
        node = self.nodes[at]
        if node.kind == "l" and node.mode == "r":
            return next(each for each in reversed(self.nodes[:at]) if each.mode == "x")
        return self.nodes[at - 1]


class Told(NamedTuple):
    """What a node's data say. `waits`: it stood in line, and has not looked since its turn came."""

    ttl: float
    waits: bool
    holder: Holder | None

    @property
    def life(self) -> float:
        """How long it may leave its node untouched before somebody else ends it."""
        return min(self.ttl, BEAT) if self.waits else self.ttl


def written(holder: Holder, ttl: float, waits: bool) -> bytes:
    return json.dumps({"ttl": ttl, "waits": waits, "holder": holder}, separators=(",", ":")).encode()


def read(data: bytes) -> Told:
    """Whatever stands there: what cannot be read lives until its session ends."""
    try:
        said: dict[str, Any] = json.loads(data)
        label, host, pid, purpose = said["holder"]
        return Told(float(said["ttl"]), bool(said["waits"]), Holder(str(label), str(host), int(pid), str(purpose)))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Told(float("inf"), False, None)


def base_of(data: bytes) -> int:
    if not data.isdigit() or len(data) > 16:
        raise ConfigError(f"{BASE} must hold a number of at most 16 digits: without it no token can be made")
    return int(data)


def name_of(namespace: str, line: str) -> str | None:
    """The name that a node of the root is the line of; None: of another namespace, or nothing of ours."""
    space, _, rest = line.partition(":")
    if space != encode(namespace):
        return None
    try:
        name = decode(rest)
    except ValueError:
        return None
    return name if name and key(namespace, name) == line else None


def mode_of(node: Node) -> Mode:
    return "shared" if node.mode == "r" else "exclusive"
