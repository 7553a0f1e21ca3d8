"""A server that was never reachable: the client raises at once and leaves no pending release. Host names that no name
server answers for: no call takes longer than its deadline."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from leasehold import AsyncClient, Client, Unavailable
from tests.support import probe
from tests.support.timing import check_elapsed, check_seconds

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


_NAMED = tuple(
    url.replace("127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "a.example:1,b.example:2,c.example:3")
    .replace("127.0.0.1:1,127.0.0.1:2", "a.example:1,b.example:2")
    .replace("127.0.0.1:1", "a.example:1")
    for url in _URLS
)


@pytest.fixture
def silent_name_server(monkeypatch):
    """No look-up of a name returns before the end of the test. Set at that end."""
    original, end = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host, *args, **kwargs):
        if not str(host).endswith(".example"):
            return original(host, *args, **kwargs)
        end.wait(120)
        raise socket.gaierror(socket.EAI_AGAIN, "the test is over")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    end.set()


def look_ups() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "leasehold-look-up"]


@pytest.mark.parametrize("url", _NAMED)
def test_silent_name_server_costs_calls_their_deadline(url: str, silent_name_server) -> None:
    before = len(look_ups())
    client = Client(url, call_timeout=1)
    for call in (client.lock("job").try_acquire, client.inspect, client.lock("job", wait=0.5).acquire):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            call()
        check_elapsed(began, 1 + 0.5)
    began = time.monotonic()
    client.close()
    check_elapsed(began, 1 + 0.5)
    assert len(look_ups()) - before <= 3, "one for each name, however many calls there were"


@pytest.mark.parametrize("url", _NAMED)
def test_silent_name_server_keeps_no_event_loop_from_ending(url: str, silent_name_server) -> None:
    async def main() -> None:
        async with AsyncClient(url, call_timeout=1) as client:
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    await client.lock("job").try_acquire()
                check_elapsed(began, 1 + 0.5)

    began = time.monotonic()
    asyncio.run(main())  # waits for the threads of the loop's executor
    check_elapsed(began, 2 * (1 + 0.5) + 1.5)


_REAL_LOOK_UPS = """
import socket, subprocess, sys, time
from leasehold import Client, Unavailable

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
for name, text in (("resolv.conf", "nameserver 127.0.0.1\\n"), ("nsswitch.conf", "hosts: files dns\\n")):
    with open(f"{sys.argv[1]}/{name}", "w") as file:
        file.write(text)
    subprocess.run(["mount", "--bind", file.name, f"/etc/{name}"], check=True)
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
for url in sys.argv[2:]:
    with Client(url, call_timeout=1) as client:
        for _ in range(2):  # the first call loads modules
            began = time.monotonic()
            try:
                client.lock("job").try_acquire()
            except Unavailable:
                seconds = time.monotonic() - began
        print(url, round(seconds, 2), flush=True)
"""


@pytest.mark.extended
def test_drivers_ask_no_silent_name_server_themselves(tmp_path) -> None:
    """libpq resolves names in C, where the test above cannot see it. So this one has a name server of its own."""
    unshare = ["unshare", "-m", "-n"]
    if os.getuid() != 0 or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root can give a process another name server")
    command = [*unshare, sys.executable, "-c", _REAL_LOOK_UPS, str(tmp_path), *_NAMED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seconds = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()}
    assert set(seconds) == set(_NAMED)
    check_seconds(max(seconds.values()), 1 + 0.5, str(seconds))
