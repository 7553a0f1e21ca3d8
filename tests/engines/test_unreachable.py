"""A server that was never reachable: the client raises at once and leaves no pending release."""

from __future__ import annotations

import asyncio

import pytest

from leasehold import AsyncClient, Client, Unavailable
from tests.support import probe

_URLS = (
    "redis://127.0.0.1:1",
    "redis+sentinel://127.0.0.1:1/main",
    "redis+cluster://127.0.0.1:1",
    "redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3",
    "etcd://127.0.0.1:1",
    "zookeeper://127.0.0.1:1",
    "postgresql://user@127.0.0.1:1/locks",
    "mysql://user@127.0.0.1:1/locks",
    "http://127.0.0.1:1,127.0.0.1:2",
)


@pytest.mark.parametrize("url", _URLS)
def test_unreachable_server_leaves_no_pending_release(url: str) -> None:
    with Client(url, call_timeout=1) as client:
        with pytest.raises(Unavailable):
            client.lock("job", wait=5).acquire()
        assert not probe.pending_releases(client), (
            "close() would retry the release until its deadline, on a server that never answered"
        )

    async def main() -> None:
        async with AsyncClient(url, call_timeout=1) as client:
            with pytest.raises(Unavailable):
                await client.lock("job", wait=5).acquire()
            assert not probe.pending_releases(client)

    asyncio.run(main())
