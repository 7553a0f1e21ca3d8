"""Which slot of a semaphore a holder gets. Pure: the caller writes the decision into the queue's parent node by
compare-and-set.

The data of the parent node say which claim was given each slot last, and with which token. A slot is free once that
claim's node is gone. Tokens must rise per slot (E3), but holders do not choose their slots in the order of their
tokens. So a holder that has k earlier holders without a slot leaves them the k free slots with the lowest last tokens.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple, TypeAlias

from leasehold.engines.zookeeper.nodes import NodeQueue

SlotGrant: TypeAlias = "tuple[str, int]"  # the id hash of the claim, and the zxid that created the claim's node
_UNUSED: Final[SlotGrant] = ("", 0)


class SlotChoice(NamedTuple):
    slot: int
    data: bytes | None  # to be written; None: the claim has this slot already


def choose(data: bytes, queue: NodeQueue, id_hash: str, created_zxid: int, limit: int) -> SlotChoice:
    """The slot of a holder. `data` must not be newer than `queue`: only then is a claim missing in `queue` gone."""
    assigned = parse_slots(data)
    for slot, (holder_hash, _) in enumerate(assigned):
        if holder_hash == id_hash:
            return SlotChoice(slot, None)
    chosen = {holder_hash for holder_hash, _ in assigned}
    holders = [node.id_hash for node in queue.holders]
    yet_to_choose = sum(holder_hash not in chosen for holder_hash in holders[: holders.index(id_hash)])
    free = [slot for slot, (holder_hash, _) in enumerate(assigned) if holder_hash not in holders]
    free += range(len(assigned), min(limit, len(assigned) + yet_to_choose + 1))
    assigned += [_UNUSED] * (max(free) + 1 - len(assigned))
    candidates = sorted(free, key=lambda each: assigned[each][1])[yet_to_choose:]
    # Earlier holders left slots in the same way, so a candidate with a lower token exists. The default is only for
    # data that were not written by us.
    slot = min((each for each in candidates if assigned[each][1] < created_zxid), default=candidates[0])
    assigned[slot] = (id_hash, created_zxid)
    return SlotChoice(slot, json.dumps(assigned, separators=(",", ":")).encode())


def parse_slots(data: bytes) -> list[SlotGrant]:
    """Invalid data, or data that give two slots to one claim, count as empty."""
    try:
        assigned = [(str(holder_hash), int(created_zxid)) for holder_hash, created_zxid in json.loads(data or b"[]")]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return []
    holder_hashes = [holder_hash for holder_hash, _ in assigned if holder_hash]
    return assigned if len(holder_hashes) == len(set(holder_hashes)) else []
