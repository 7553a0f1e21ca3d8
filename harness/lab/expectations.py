"""What is promised for each setup under each fault: the table of the lab, as data.

S  no two holders, no falling token, no stale write accepted at the fence.
V  two holders are possible for a while, and the engine's guarantees page says so, in the words quoted here. Tokens
   still rise, and the fence still refuses the older holder.

U, a contender that cannot reach the servers is refused in time and granted nothing, is checked in every run. `within`:
seconds from the fault, or from its end, until the next holder; 30 s where no number is promised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from harness.lab.faults import FAULTS
from harness.lab.setups import SETUPS

MAX_GAP: Final = 30.0
TTL: Final = 2.0


class Expectation(NamedTuple):
    overlaps: str = ""  # why two holders are possible: a sentence of the guarantees page
    within: float = MAX_GAP

    @property
    def letter(self) -> str:
        return "V" if self.overlaps else "S"


class NotApplicable(NamedTuple):
    why: str


Cell = Expectation | NotApplicable

S: Final = Expectation()


def within(seconds: float) -> Expectation:
    return Expectation(within=seconds)


def V(quote: str) -> Expectation:
    return Expectation(quote)


_FILE: Final = NotApplicable("there is no server between the contenders and the file")
_NO_LOG: Final = NotApplicable("it writes nothing to the disk")
_ONE: Final = NotApplicable("one server has no minority")
_ONE_SITE: Final = NotApplicable("it decides at one site")
_SAME: Final = NotApplicable("covered by the main setup of this engine")
_ETCD_CLOCK: Final = NotApplicable("no clock that can step decides anything, and none can be set for a Go program")

_REDIS_RESTART: Final = V(
    "**That a restart keeps a grant**, unless the AOF is synced with every write: see the settings below."
)
_REDIS_FAILOVER: Final = V(
    "Replication is asynchronous: if the promoted replica does not have the last write, two clients may hold the name."
)
_REDIS_SPLIT: Final = V(
    "A client cut off with it may be granted a name there while another client is granted it at the new primary."
)
_REDIS_CLOCK: Final = V("a forward jump expires leases early, even leases that their holders still trust")
_SQL_CLOCK: Final = V("A step forward expires them early, and two clients may hold the name")
_REDLOCK_CLOCK: Final = V(
    "If the clocks of a majority jump ahead, or run faster than drift allows (1 %), a second holder may be admitted "
    "while the first still trusts its lease."
)
_REDLOCK_DATA: Final = V("A node restarted without its data has forgotten its vote.")
_SERVER_CLOCK: Final = V("where two clients of the engine may hold a name, two clients of the server may, too")

_CLOCKS: Final[dict[str, Cell]] = {
    "sqlite": NotApplicable("the clock of the file counts from the start of the machine, and cannot be set"),
    "redis": _REDIS_CLOCK,
    "redis-aof": _SAME,
    "sentinel": _REDIS_CLOCK,
    "sentinel-confirmed": _SAME,
    "redlock": _REDLOCK_CLOCK,
    "redlock-empty": _SAME,
    "etcd": _ETCD_CLOCK,
    "postgresql": _SQL_CLOCK,
    "mysql": _SQL_CLOCK,
    "server": _SERVER_CLOCK,
}


def row(default: Cell, **others: Cell) -> dict[str, Cell]:
    """The cells of one fault: `default`, but for the setups that are named, with `_` for `-`."""
    named = {name.replace("_", "-"): cell for name, cell in others.items()}
    assert named.keys() <= SETUPS.keys(), named.keys() - SETUPS.keys()
    return {name: named.get(name, default) for name in SETUPS}


TABLE: Final[dict[str, dict[str, Cell]]] = {
    "client-kill": row(
        within(TTL + 0.5), zookeeper=within(TTL + 1.0), etcd=within(TTL + 1.0), redis_aof=_SAME, redlock_empty=_SAME
    ),
    "client-pause": row(S, redis_aof=_SAME, redlock_empty=_SAME),
    "client-cut": row(S, sqlite=_FILE, redis_aof=_SAME, redlock_empty=_SAME),
    "server-kill": row(S, sqlite=_FILE, redis=_REDIS_RESTART, sentinel=_REDIS_FAILOVER, redlock_empty=_REDLOCK_DATA),
    "server-pause": row(S, sqlite=_FILE, sentinel=_REDIS_FAILOVER, redis_aof=_SAME, redlock_empty=_SAME),
    "all-restart": row(S, sqlite=_FILE, redis=_REDIS_RESTART, sentinel=_REDIS_RESTART, redlock_empty=_REDLOCK_DATA),
    "partition": row(S, sqlite=_FILE, sentinel=_REDIS_SPLIT, redis_aof=_SAME, redlock_empty=_SAME),
    "site-cut": row(_ONE_SITE, redlock=S, zookeeper=S, etcd=S),
    "lost-answers": row(S, sqlite=_FILE, redis_aof=_SAME, redlock_empty=_SAME),
    "slow-network": row(S, sqlite=_FILE, redis_aof=_SAME, redlock_empty=_SAME),
    "jitter": row(S, sqlite=_FILE, redis_aof=_SAME, redlock_empty=_SAME),
    "clock-forward": row(S) | _CLOCKS,
    "clock-back": row(S) | _CLOCKS,
    "clocks-apart": row(_ONE, redlock=S, zookeeper=S, etcd=S),
    "disk-full": row(S, redis=_NO_LOG, sentinel=_NO_LOG, redlock_empty=_NO_LOG),
    "crowd": row(S, redis_aof=_SAME, redlock_empty=_SAME),
}

assert TABLE.keys() == FAULTS.keys()


def cells() -> list[tuple[str, str, Expectation]]:
    """Setup, fault and expectation of all cells that apply."""
    found = []
    for fault, setups in TABLE.items():
        for setup, cell in setups.items():
            if isinstance(cell, Expectation):
                found.append((setup, fault, cell))
    return found


def of_all(setup: str, faults: Sequence[str]) -> Expectation:
    """What is promised of a run with all these faults. Raises `ValueError` where one does not apply."""
    found: list[Expectation] = []
    for fault in faults:
        cell = TABLE[fault][setup]
        if isinstance(cell, NotApplicable):
            raise ValueError(f"{fault} does not apply: {cell.why}")
        found.append(cell)
    return Expectation(next((each.overlaps for each in found if each.overlaps), ""), max(each.within for each in found))
