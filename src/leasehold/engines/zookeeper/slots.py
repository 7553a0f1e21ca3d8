"""Which permit of a semaphore a holder has. Pure: the decision is written into the line's own node by compare and set.

The data of a semaphore's parent say who was given which slot last, and by which token. A slot is free once that claim's
node is gone. Tokens must rise per slot (E3), but those who hold do not come to choose in the order of their tokens: so
whoever has k others before it that have yet to choose leaves them the k free slots with the lowest last tokens.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple, TypeAlias

from leasehold.engines.zookeeper.nodes import Line

Given: TypeAlias = "tuple[str, int]"  # the mark it was given to, and by which transaction that claim came
_NOBODY: Final[Given] = ("", 0)


class Choice(NamedTuple):
    slot: int
    data: bytes | None  # to be written; None: chosen before


def choose(data: bytes, line: Line, mark: str, born: int, limit: int) -> Choice:
    """The slot of a holder. `data` must not be newer than `line`: then a mark not in line is one that is gone."""
    given = read(data)
    for slot, (owner, _) in enumerate(given):
        if owner == mark:
            return Choice(slot, None)
    chosen = {owner for owner, _ in given}
    holders = [node.mark for node in line.holders]
    yet_to_choose = sum(owner not in chosen for owner in holders[: holders.index(mark)])
    free = [slot for slot, (owner, _) in enumerate(given) if owner not in holders]
    free += range(len(given), min(limit, len(given) + yet_to_choose + 1))
    given += [_NOBODY] * (max(free) + 1 - len(given))
    left = sorted(free, key=lambda each: given[each][1])[yet_to_choose:]
    # There is a free one below: those before it were left theirs, too. Numbers to come are not of our making.
    slot = min((each for each in left if given[each][1] < born), default=left[0])
    given[slot] = (mark, born)
    return Choice(slot, json.dumps(given, separators=(",", ":")).encode())


def read(data: bytes) -> list[Given]:
    """Whatever stands there: what cannot be read, or gives two slots to one claim, says nothing."""
    try:
        given = [(str(owner), int(born)) for owner, born in json.loads(data or b"[]")]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return []
    owners = [owner for owner, _ in given if owner]
    return given if len(owners) == len(set(owners)) else []
