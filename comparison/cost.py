"""What an update costs with an approach, relative to the same update of the same account without a lock.

One process, no contention, no fault, connections open. Updates of both kinds alternate, and the fast ones of each are
compared: those that no other program on the machine disturbed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Final

from comparison.approaches import APPROACHES, Approach, Idempotent, NoRowLock
from comparison.server_setups import SETUPS

_UPDATES: Final = 200  # of each kind


class DifferentRequests(Idempotent):
    """Each update is a new request: a repeated one is refused, and costs less."""

    request = None


def measure_cost(approach: str, setup_name: str) -> float:
    if APPROACHES[approach] is Approach:
        return 1.0  # by definition
    with (
        tempfile.TemporaryDirectory(prefix="lh-comparison-") as folder,
        SETUPS[setup_name](f"{folder}/ledger") as setup,
    ):
        base = NoRowLock if approach == "row-lock" else Approach
        chosen = DifferentRequests if approach == "idempotent" else APPROACHES[approach]
        unlocked, updater = base(setup.urls, setup.account_db), chosen(setup.urls, setup.account_db)
        try:
            seconds = [(_update(unlocked), _update(updater)) for _ in range(_UPDATES)]
        finally:
            unlocked.close()
            updater.close()
    plain, own = (statistics.quantiles(kind, n=10)[0] for kind in zip(*seconds, strict=True))
    return own / plain


def _update(updater: Approach) -> float:
    """How long one update took, in seconds."""
    began = time.perf_counter()
    value = updater.acquire_and_read()
    assert updater.write(value + 1)
    updater.release()
    return time.perf_counter() - began
