"""The values of `lock_state.py`: queue entries, notifications to clients, and the context of a verb.

`lock_state.py` decides over these; an engine that keeps its queue in a table or on a server reads and writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from leasehold.model import Holder, HoldingState, Mode

WAITING: Final = 0
RESERVED: Final = 1
HELD: Final = 2
COOLING: Final = 3  # its claim has ended, but it occupies the name for a while
PASSED: Final = 4

STATES: Final[tuple[HoldingState, ...]] = ("waiting", "reserved", "held", "cooling", "passed over")


class Notification(NamedTuple):
    """One message to one client: `reserved` for this claim, `recheck` in `seconds`, or `broken`."""

    client: str
    kind: Literal["reserved", "recheck", "broken"]
    id_hash: str
    seconds: float = 0.0


class TokenCounter:
    """The fencing tokens of a bucket of names: each is higher than the one before and not below `floor`, a clock."""

    __slots__ = ("last",)

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def next(self, floor: int) -> int:
        self.last = token = floor if floor > self.last else self.last + 1
        return token


def never_dead(_client: str) -> bool:
    """For engines that cannot prove that a process has ended: its grants end with their ttl."""
    return False


class Context:
    """The environment in which a verb runs."""

    __slots__ = ("dead", "issue_token", "now", "reachable")

    def __init__(
        self,
        now: float,
        issue_token: Callable[[], int],
        reachable: Callable[[str], bool],
        dead: Callable[[str], bool] = never_dead,
    ) -> None:
        self.now = now  # the engine's clock, which ends leases
        self.issue_token = issue_token  # the next token
        self.reachable = reachable  # False: this client cannot be notified
        self.dead = dead  # True: the engine has proof that the process of this client has ended


class QueueEntry:
    """One claim of a name. Its grant, reservation or cooling ends at `expires_at`; its position in the queue is lost at
    `heartbeat_expires_at` (E7)."""

    __slots__ = (
        "client", "delay", "expires_at", "heartbeat_expires_at", "holder", "id_hash", "min_hold", "mode",
        "process_bound", "since", "slot", "state", "ticket", "token",
    )  # fmt: skip

    def __init__(
        self,
        id_hash: str,
        client: str,
        holder: Holder,
        mode: Mode,
        delay: float,
        ticket: int,
        since: float,
        heartbeat_expires_at: float,
        state: int = PASSED,
        expires_at: float = 0.0,
        token: int = 0,
        slot: int | None = None,
        min_hold: float = 0.0,
        process_bound: bool = False,
    ) -> None:
        self.id_hash, self.client, self.holder, self.mode = id_hash, client, holder, mode
        self.delay, self.min_hold, self.process_bound = delay, min_hold, process_bound
        self.ticket, self.since, self.heartbeat_expires_at = ticket, since, heartbeat_expires_at
        self.state, self.expires_at, self.token, self.slot = state, expires_at, token, slot
