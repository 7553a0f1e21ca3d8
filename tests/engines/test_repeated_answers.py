"""A server, or a proxy before it, that sends an answer twice: the second is never taken for that to the next request.

Both are true answers, so only their number shows that something is wrong. A grant taken for the answer to the next
attempt would be a second holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import pytest

from harness.servers.hostile import ENGINES
from leasehold import AsyncClient, Client, Lease, Unavailable
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.repeating_proxy import RepeatingProxy

TIMEOUT = 3.0  # seconds of a call


class Case(NamedTuple):
    proxies: list[RepeatingProxy]
    url: str  # through the proxies
    holder: Client  # beside them

    def repeat(self) -> None:
        for proxy in self.proxies:
            proxy.repeat()

    def send_twice(self, twice: bool) -> None:
        for proxy in self.proxies:
            proxy.twice_at_once = twice


@pytest.fixture(params=ENGINES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    rig = rig_or_skip(rig_type(request.param))
    with ExitStack() as exit_stack:
        exit_stack.callback(rig.close)
        machine: Any = rig.client_path()
        exit_stack.callback(machine.close)
        proxies, url = [], machine.url
        for proxy in machine.proxies:
            proxies.append(RepeatingProxy(proxy.port))
            exit_stack.callback(proxies[-1].close)
            url = url.replace(f":{proxy.port}", f":{proxies[-1].port}")
        yield Case(proxies, url, exit_stack.enter_context(rig.client()))


def test_answer_repeated_later_grants_nothing(case) -> None:
    with Client(case.url, call_timeout=TIMEOUT) as client, case.holder.lock("held", ttl=60):
        for number in range(3):
            lease = client.lock(f"free-{number}", ttl=60).acquire()
            case.repeat()
            assert client.lock("held").try_acquire() is None
            case.repeat()
            lease.renew()
            case.repeat()
            assert lease.release()


def test_answer_repeated_later_grants_nothing_to_a_task(case) -> None:
    """The loop has no time to read what came: no await is between."""

    async def main() -> None:
        async with AsyncClient(case.url, call_timeout=TIMEOUT) as client:
            for number in range(3):
                lease = await client.lock(f"free-{number}", ttl=60).acquire()
                case.repeat()
                assert await client.lock("held").try_acquire() is None
                case.repeat()
                await lease.renew()
                case.repeat()
                assert await lease.release()

    with case.holder.lock("held", ttl=60):
        asyncio.run(main())


def test_answer_sent_twice_at_once_grants_nothing(case) -> None:
    leases: list[Lease | None] = []
    with Client(case.url, call_timeout=TIMEOUT) as client, case.holder.lock("held", ttl=60):
        client.lock("warm", ttl=60).acquire().release()
        for number in range(3):
            case.send_twice(True)
            with suppress(Unavailable):  # each new connection has such an answer, too
                leases.append(client.lock(f"free-{number}", ttl=60).try_acquire())
            case.send_twice(False)
            assert client.lock("held").try_acquire() is None
        for lease in filter(None, leases):
            lease.release()
