"""What a server's notifications may add to a client's memory."""

from leasehold.engines.registry import ClaimRegistry, make_unknown_claim
from leasehold.runtime.threads import Threads


def test_wakeups_for_unknown_claims_fill_no_memory() -> None:
    registry = ClaimRegistry(Threads(), "client")
    for number in range(20_000):
        id_hash = f"{number:032x}"
        registry.on_notification("reserved", id_hash, 0.0, make_unknown_claim("", "job", id_hash))
    assert len(registry.pending_releases) == 1_000
