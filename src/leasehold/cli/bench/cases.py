"""How fast an engine is from here: what `leasehold bench` measures, in round trips of that same engine.

Everything goes through a blocking client as programs use it, in names of its own that are gone afterwards.
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
_BATCH: Final = 500  # as many as the watchdog renews at a time


@contextmanager
def cases(client: Client, held: int) -> Iterator[list[BenchCase]]:
    """The cases of one client, while `held` leases of its own are held beside them."""
    with ExitStack() as stack:
        leases = [stack.enter_context(client.lock(f"held {number}")) for number in range(held)]
        yield [
            BenchCase("one round trip (ping)", _repeat(client.ping)),
            BenchCase("acquire and release", _pair(client)),
            BenchCase("hand-off: acquire and release of two in turn", _contend(client, 2, ["relay"])),
            BenchCase(
                f"{THREADS} threads, each its own names", _contend(client, THREADS, [str(n) for n in range(1000)])
            ),
            BenchCase(f"renewal of one of {held} held", _renewals(client, leases)),
        ]


def _repeat(call: Callable[[], object]) -> Callable[[int], None]:
    def run(times: int) -> None:
        for _ in range(times):
            call()

    return run


def _pair(client: Client) -> Callable[[int], None]:
    lock = client.lock("pair")
    return _repeat(lambda: lock.acquire().release())


def _contend(client: Client, size: int, names: list[str]) -> Callable[[int], None]:
    """So many threads; each takes its share of the names in turn, or all the only one."""
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
    """As the watchdog does it: in batches."""
    core, size = client._core, min(_BATCH, len(leases))

    def run(times: int) -> None:
        for start in range(0, times, size):
            claims = [lease._claim_for_renewal() for lease in islice(leases, min(size, times - start))]
            run_sync(core.engine().renew(claims, core.deadline()))

    return run
