"""What a node's name and data say, and who may hold a name, given the names of all nodes in its queue. Pure.

    /lh1/<namespace>:<name>/<kind>-<mode>-<id hash>-<sequence>    l-x-3f...-0000000007, s3-x-..., l-r-...

The server numbers the nodes of a queue in the order of their creation, and a deleted node never comes back. Safety
follows: if a claim's own node is in a list and no node with a lower number conflicts with it, the claim holds the name
until its node is gone (E1). A list may be stale, but it is not older than the claim's own node in it: a lower number
that is missing there was created earlier, so its node is gone. The number only orders the queue. It is never a token,
because it starts again when the queue's parent node is created again.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Any, Final, NamedTuple

from leasehold.core.lock_state import describe_kind
from leasehold.core.names import FORMAT, decode, encode, engine_key
from leasehold.core.timing import WAITER_TTL
from leasehold.errors import ConfigError
from leasehold.model import Claim, Holder, Kind, Mode

ROOT: Final = f"/{FORMAT}"
TOKEN_BASE: Final = f"{ROOT}/base"  # added to every token; the nodes of names have a colon, so they cannot collide
TOKEN_BOUND: Final = 2**53  # every token is lower, so that every language can represent it exactly
_encode_json: Final = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would build an encoder each time
_NODE_NAME: Final = re.compile(r"(l|s[1-9][0-9]{0,9})-(x|r)-([0-9a-f]+)-([0-9]{10})")


class ClaimNode(NamedTuple):
    """One claim's node, parsed from its name."""

    sequence: int
    name: str
    kind: str  # "l", or "s" and the limit
    mode: str  # "x" or "r"
    id_hash: str

    @property
    def kind_and_limit(self) -> tuple[Kind, int]:
        return ("lock", 1) if self.kind == "l" else ("semaphore", int(self.kind[1:]))


def kind_code(claim: Claim) -> str:
    return "l" if claim.kind == "lock" else f"s{claim.limit}"


def name_prefix(claim: Claim) -> str:
    """The name of a claim's node without the sequence number, which the server appends."""
    return f"{kind_code(claim)}-{'r' if claim.mode == 'shared' else 'x'}-{claim.id_hash}-"


def parse_name(name: str) -> ClaimNode | None:
    match = _NODE_NAME.fullmatch(name)
    return ClaimNode(int(match[4]), name, match[1], match[2], match[3]) if match else None


def _sequence_digits(name: str) -> str:
    return name[-10:]


class NodeQueue:
    """The nodes of one name, ordered by sequence number. Nodes that are not ours are ignored.

    Each claim that joins or is woken reads the names of all claims in the queue, so only those are parsed that decide
    something.
    """

    __slots__ = ("_holder_count", "names")

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(filter(_NODE_NAME.fullmatch, names), key=_sequence_digits)
        self._holder_count = self._count_holders()

    def _count_holders(self) -> int:
        """How many nodes at the front hold the name, or will at their next attempt. The first node fixes the kind."""
        if not self.names:
            return 0
        first = self.node(0)
        if (first.kind, first.mode) == ("l", "x"):
            return 1
        same = "l-r-" if first.kind == "l" else f"{first.kind}-"
        limit = None if first.kind == "l" else first.kind_and_limit[1]
        return sum(1 for _ in takewhile(lambda name: name.startswith(same), islice(self.names, limit)))

    def node(self, index: int) -> ClaimNode:
        node = parse_name(self.names[index])
        assert node is not None  # noqa: S101  # for the type checker
        return node

    @property
    def holders(self) -> list[ClaimNode]:
        return [self.node(index) for index in range(self._holder_count)]

    def by_id_hash(self, id_hash: str) -> list[ClaimNode]:
        part = f"-{id_hash}-"
        return [self.node(index) for index, name in enumerate(self.names) if part in name]

    def index(self, name: str) -> int | None:
        index = bisect_left(self.names, _sequence_digits(name), key=_sequence_digits)
        return index if index < len(self.names) and self.names[index] == name else None

    def holds(self, index: int) -> bool:
        return index < self._holder_count

    def position(self, index: int) -> int:
        """How many waiters are ahead of the node at `index`."""
        return index - self._holder_count

    def describe_kind(self) -> str:
        """The kind of this queue, which its first node fixes."""
        return describe_kind(*self.node(0).kind_and_limit)

    def mismatches(self, index: int) -> bool:
        """Whether the node at `index` is of another kind than this queue."""
        return self.node(index).kind != self.node(0).kind

    def predecessor(self, index: int) -> ClaimNode:
        """The node whose end a waiter waits for: for a reader the last writer ahead, otherwise the node just ahead."""
        node = self.node(index)
        if node.kind == "l" and node.mode == "r":
            return next(earlier for earlier in map(self.node, reversed(range(index))) if earlier.mode == "x")
        return self.node(index - 1)


class NodeData(NamedTuple):
    """What a node's data say. `waits`: the claim was queued, and has not claimed the name since it became first."""

    ttl: float
    waits: bool
    holder: Holder | None

    @property
    def life(self) -> float:
        """How long the node may stay unwritten before another client may delete it."""
        return min(self.ttl, WAITER_TTL) if self.waits else self.ttl


def encode_data(holder: Holder, ttl: float, waits: bool) -> bytes:
    return _encode_json({"ttl": ttl, "waits": waits, "holder": holder}).encode()


def parse_data(data: bytes) -> NodeData:
    """A node with invalid data lives until its session ends."""
    try:
        fields: dict[str, Any] = json.loads(data)
        label, host, pid, purpose = fields["holder"]
        return NodeData(
            float(fields["ttl"]), bool(fields["waits"]), Holder(str(label), str(host), int(pid), str(purpose))
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return NodeData(float("inf"), False, None)


def parse_base(data: bytes) -> int:
    if not data.isdigit() or len(data) > 16:
        raise ConfigError(f"{TOKEN_BASE} must hold a number of at most 16 digits: every token depends on it")
    return int(data)


def name_of(namespace: str, node_name: str) -> str | None:
    """The name whose queue is below this child of the root. None: of another namespace, or not ours."""
    encoded_namespace, _, encoded_name = node_name.partition(":")
    if encoded_namespace != encode(namespace):
        return None
    try:
        name = decode(encoded_name)
    except ValueError:
        return None
    return name if name and engine_key(namespace, name) == node_name else None


def mode_of(node: ClaimNode) -> Mode:
    return "shared" if node.mode == "r" else "exclusive"
