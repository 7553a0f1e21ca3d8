"""What ten thousand held leases cost their client: the CPU time of renewing them, as a share of one core.

`python -m bench renewals`. The watchdog renews in batches, each lease about three times per ttl. Measured over a whole
ttl, after each lease was renewed once, on engines that are quick to fill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from bench.cases import Aim, Aims, Notes, Part
from bench.server_setups import SETUPS
from leasehold import Client

HELD: Final = 10_000
TTL: Final = 30.0
ENGINES: Final = ("redis",)


def parts(_rounds: int) -> Iterator[Part]:
    """Takes one ttl per engine, whatever the number of rounds: there is nothing to compare."""
    lines, shares = [], {}
    for engine in ENGINES:
        with SETUPS[engine]() as url:
            shares[engine] = share(url)
            lines.append(f"{engine}: {shares[engine]:.2%} of a core")
    yield Notes(f"{HELD:,} held leases, ttl {TTL:.0f} s: CPU time of the client (aim on Redis: at most 2 %)", lines)
    what = f"Redis: CPU of {HELD:,} held leases, in per cent of a core"
    yield Aims("renewals: aims", [Aim(what, shares["redis"] * 100, 2.0, unit=" %")])


def share(url: str) -> float:
    with Client(url, ttl=TTL) as client:
        leases = [client.lock(f"held/{number}").acquire() for number in range(HELD)]
        time.sleep(TTL / 2)
        began, used = time.monotonic(), time.process_time()
        time.sleep(TTL)
        found = (time.process_time() - used) / (time.monotonic() - began)
        assert all(lease.held for lease in leases)
        for lease in leases:
            lease.release()
    return found
