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
from functools import lru_cache
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
_MAX_CACHED_LENGTH: Final = 100  # other programs may have made nodes with names of a megabyte
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
    return _parse(name) if len(name) <= _MAX_CACHED_LENGTH else _parse.__wrapped__(name)


# Each claim that joins or is woken reads the names of all that wait, and most of them were read before.
@lru_cache(maxsize=16_384)
def _parse(name: str) -> ClaimNode | None:
    match = _NODE_NAME.fullmatch(name)
    return ClaimNode(int(match[4]), name, match[1], match[2], match[3]) if match else None


class NodeQueue:
    """The nodes of one name, ordered by sequence number. Nodes that are not ours are ignored."""

    __slots__ = ("_holder_count", "nodes")

    def __init__(self, names: Iterable[str]) -> None:
        self.nodes = sorted(node for node in map(parse_name, names) if node)
        self._holder_count = self._count_holders()

    def _count_holders(self) -> int:
        """How many nodes at the front hold the name, or will at their next attempt. The first node fixes the kind."""
        if not self.nodes:
            return 0
        first = self.nodes[0]
        if (first.kind, first.mode) == ("l", "x"):
            return 1
        same_kind_end = next(
            (index for index, node in enumerate(self.nodes) if node.kind != first.kind), len(self.nodes)
        )
        if first.kind != "l":
            return min(same_kind_end, first.kind_and_limit[1])
        return next((index for index, node in enumerate(self.nodes[:same_kind_end]) if node.mode == "x"), same_kind_end)

    @property
    def holders(self) -> list[ClaimNode]:
        return self.nodes[: self._holder_count]

    def by_id_hash(self, id_hash: str) -> list[ClaimNode]:
        return [node for node in self.nodes if node.id_hash == id_hash]

    def index(self, name: str) -> int | None:
        if (node := parse_name(name)) is None:
            return None
        index = bisect_left(self.nodes, node)
        return index if index < len(self.nodes) and self.nodes[index] == node else None

    def holds(self, index: int) -> bool:
        return index < self._holder_count

    def position(self, index: int) -> int:
        """How many waiters are ahead of the node at `index`."""
        return index - self._holder_count

    def describe_kind(self) -> str:
        """The kind of this queue, which its first node fixes."""
        return describe_kind(*self.nodes[0].kind_and_limit)

    def mismatches(self, index: int) -> bool:
        """Whether the node at `index` is of another kind than this queue."""
        return self.nodes[index].kind != self.nodes[0].kind

    def predecessor(self, index: int) -> ClaimNode:
        """The node whose end a waiter waits for: for a reader the last writer ahead, otherwise the node just ahead."""
        node = self.nodes[index]
        if node.kind == "l" and node.mode == "r":
            return next(earlier for earlier in reversed(self.nodes[:index]) if earlier.mode == "x")
        return self.nodes[index - 1]


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
