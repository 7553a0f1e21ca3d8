"""The Redlock engine when nodes send forged replies: a minority does no harm, and a majority is named as the cause."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, closing

import pytest

from harness.servers.hostile import HostileProxy, flood
from harness.servers.machine import hosts
from harness.servers.proxy import Proxy
from harness.servers.redlock import lock_keys
from leasehold import AsyncClient, Client, Unavailable


class ForgingProxy(Proxy):
    """Replaces the server's replies that consist of numbers."""

    def __init__(self, port: int, forge) -> None:
        self._forge = forge
        super().__init__(port)

    def _forward(self, link, side) -> None:
        data = side.recv(65_536, socket.MSG_PEEK)
        if side is link.client_side or not data.startswith((b"*2\r\n:", b":")):
            super()._forward(link, side)
        else:
            side.recv(65_536)
            link.client_side.sendall(self._forge(data))


@pytest.fixture
def forging_url(nodes):
    """A function that returns a URL through proxies, of which the first two forge replies."""
    proxies = []

    def make(forge) -> str:
        proxies.extend(
            [ForgingProxy(node.port, forge) if n < 2 else Proxy(node.port) for n, node in enumerate(nodes.all)]
        )
        return f"redlock://{hosts(proxies)}"

    yield make
    for proxy in proxies:
        proxy.close()


FORGERIES = {
    "one too many": lambda data: data + b":1\r\n",
    "twice": lambda data: data * 2,
    "nothing in it": lambda _: b"*0\r\n",
    "null": lambda _: b"*-1\r\n",
    "words": lambda _: b"*2\r\n+1\r\n+2\r\n",
    "huge": lambda _: b"*2\r\n:9223372036854775807\r\n:9223372036854775807\r\n",
    "negative": lambda _: b"*2\r\n:5\r\n:-9223372036854775807\r\n",
    "deep": lambda _: b"*1\r\n" * 7 + b":1\r\n",
    "an error inside": lambda _: b"*2\r\n-ERR no\r\n-ERR no\r\n",
    "an error": lambda _: b"-WRONGTYPE no\r\n",
    "in drips": lambda data: data[:3],
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_lock_works_when_two_of_five_nodes_forge_replies(nodes, forging_url, forge, wait_until) -> None:
    url = forging_url(forge)
    with Client(url, call_timeout=2) as client, Client(nodes.url) as other:
        tokens = []
        for _ in range(3):
            with client.lock("job", wait=5) as lease:
                assert other.lock("job").try_acquire() is None
                lease.renew()
                assert [held.token for held in client.inspect("job")] == [lease.token]
                tokens.append(lease.token)
            with other.lock("job", wait=5) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))

    async def main() -> None:
        async with AsyncClient(url, call_timeout=2) as client:
            for _ in range(3):
                async with client.lock("job", wait=20) as lease:
                    await lease.renew()
                    assert lease.token > tokens[-1]

    asyncio.run(main())
    wait_until(lambda: not any(lock_keys(node) for node in nodes.all[2:]))


def test_replies_without_a_request_are_named_as_the_cause(nodes) -> None:
    """More replies than the sign-in asked for were named by a text of Python: zip() argument 2 is longer."""
    with ExitStack() as exit_stack:
        proxies = [exit_stack.enter_context(closing(HostileProxy(node.port))) for node in nodes.all]
        for proxy in proxies:
            proxy.attack(flood("replies", b"*3\r\n:1\r\n:1\r\n:1\r\n"))
        client = exit_stack.enter_context(Client(f"redlock://{hosts(proxies)}", call_timeout=5))
        with pytest.raises(Unavailable, match="did not answer: the server sent a reply without a request"):
            client.ping()
