"""The cases of `leasehold bench`, all compared with one round trip to the same engine.

Every case uses a blocking client, as programs do, with its own names, which are free again afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Final

from leasehold.blocking import Client, Lease
from leasehold.cli.bench.measurement import BenchCase
from leasehold.runtime.base import run_sync

THREADS: Final = 8
_BATCH: Final = 500  # as many as the watchdog renews in one batch


@contextmanager
def cases(client: Client, held: int, prefix: str = "") -> Iterator[list[BenchCase]]:
    """The cases of one client, which also holds `held` other leases meanwhile. `prefix`: of all names."""
    with ExitStack() as stack:
        leases = [stack.enter_context(client.lock(f"{prefix}held {number}")) for number in range(held)]
        yield [
            BenchCase("one round trip (ping)", _repeat(client.ping)),
            BenchCase("acquire and release", _pair(client, f"{prefix}pair")),
            BenchCase("hand-off: two threads take turns on one name", _contend(client, 2, [f"{prefix}relay"])),
            BenchCase(
                f"{THREADS} threads, each on its own names",
                _contend(client, THREADS, [f"{prefix}{n}" for n in range(1000)]),
            ),
            BenchCase(f"renewal of one of {held} held leases", _renewals(client, leases)),
        ]


def _repeat(call: Callable[[], object]) -> Callable[[int], None]:
    def run(times: int) -> None:
        for _ in range(times):
            call()

    return run


def _pair(client: Client, name: str) -> Callable[[int], None]:
    lock = client.lock(name)
    return _repeat(lambda: lock.acquire().release())


def _contend(client: Client, size: int, names: list[str]) -> Callable[[int], None]:
    """`size` threads acquire in turn their share of the names; if there are too few names, all of them."""
    locks = [[client.lock(name) for name in names[number::size] or names] for number in range(size)]

    def run(times: int) -> None:
        failed: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for iteration in range(number, times, size):
                    with locks[number][iteration // size % len(locks[number])]:
                        pass
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in failed:
            raise error

    return run


def _renewals(client: Client, leases: list[Lease]) -> Callable[[int], None]:
    """Renew in batches, as the watchdog does."""
    core, size = client._core, min(_BATCH, len(leases))

    def run(times: int) -> None:
        for start in range(0, times, size):
            claims = [lease._claim_for_renewal() for lease in islice(leases, min(size, times - start))]
            run_sync(core.engine().renew(claims, core.deadline()))

    return run
