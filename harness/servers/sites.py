"""Three sites far from each other: network namespaces, and a router between them that delays every packet.

For root, inside `unshare -n -m`, so that nothing is left outside. The router is a process of its own, `python -m
harness.servers.sites`: it has an end of every site's link (a TUN device), keeps each packet for as long as it travels,
and drops the packets of a site that is cut off. So the opening of connections takes its time as well. The machine of
the caller reaches all sites without delay, even when they are cut off.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from typing import Final, NamedTuple

from harness.servers.hosts import SUBNET, Host, ip, isolate_mounts

NAMES: Final = ("us-east", "us-west", "eu-west")
DELAYS: Final = {  # seconds in each direction; a round trip takes twice as long
    frozenset({"us-east", "us-west"}): 0.04,
    frozenset({"us-east", "eu-west"}): 0.04,
    frozenset({"us-west", "eu-west"}): 0.08,
}
_HERE: Final = "here"  # the caller's machine
_LINKS: Final = (_HERE, *NAMES)  # the number of a link is also the last part of its address, less one
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET: Final = 65_536


class Site(Host):
    """A network namespace whose only link leads to the router."""

    def __init__(self, name: str) -> None:
        self.name = self._namespace = name
        self.address = f"{SUBNET}.{_LINKS.index(name) + 1}"
        ip("netns", "add", name)
        ip("link", "set", name, "netns", name)
        ip("-n", name, "link", "set", "lo", "up")
        _connect(name, self.address, "-n", name)


class Sites:
    """The sites and the router between them."""

    def __init__(self) -> None:
        isolate_mounts()
        ip("link", "set", "lo", "up")
        self._router = subprocess.Popen(
            [sys.executable, "-m", "harness.servers.sites"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._await_answer()  # all links exist
        _connect(_HERE, f"{SUBNET}.1")
        self.all = [Site(name) for name in NAMES]

    def cut(self, site: Site) -> None:
        """Drop everything between this site and the other two, and what is on its way."""
        self._order(site.name)

    def heal(self) -> None:
        self._order("")

    def close(self) -> None:
        """End the router; it ends by itself when this process does."""
        assert self._router.stdin is not None
        assert self._router.stdout is not None
        self._router.stdin.close()
        self._router.wait()
        self._router.stdout.close()

    def _order(self, text: str) -> None:
        assert self._router.stdin is not None
        self._router.stdin.write(f"{text}\n")
        self._router.stdin.flush()
        self._await_answer()

    def _await_answer(self) -> None:
        assert self._router.stdout is not None
        if not self._router.stdout.readline():
            raise RuntimeError("the router between the sites has ended")


def _connect(device: str, address: str, *namespace: str) -> None:
    ip(*namespace, "addr", "add", f"{address}/32", "dev", device)
    ip(*namespace, "link", "set", device, "up")
    ip(*namespace, "route", "add", f"{SUBNET}.0/24", "dev", device)


# ------------------------------------------------------------------ the router


class Packet(NamedTuple):
    due: float
    number: int
    source: int
    target: int
    data: bytes


class Router:
    """Links are known by their number in `_LINKS`."""

    def __init__(self) -> None:
        self._devices = [_open_tun(name) for name in _LINKS]
        self._delays = {
            (a, b): DELAYS.get(frozenset({_LINKS[a], _LINKS[b]}), 0.0)
            for pair in combinations(range(len(_LINKS)), 2)
            for a, b in (pair, pair[::-1])
        }
        self._cut = -1  # the link that is cut off from the other sites
        self._travelling: list[Packet] = []  # a heap
        self._count = 0

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for number, device in enumerate(self._devices):
            selector.register(device, selectors.EVENT_READ, number)
        selector.register(0, selectors.EVENT_READ)
        os.write(1, b"ready\n")
        while True:
            wait = max(0.0, self._travelling[0].due - time.monotonic()) if self._travelling else None
            for key, _ in selector.select(wait):
                if key.data is not None:
                    self._receive(key.data)
                elif order := os.read(0, 100):
                    self._cut = _LINKS.index(name) if (name := order.decode().strip()) else -1
                    os.write(1, b"done\n")
                else:
                    return
            self._deliver()

    def _receive(self, source: int) -> None:
        with suppress(BlockingIOError):
            while True:
                data = os.read(self._devices[source], _MAX_PACKET)
                target = data[19] - 1 if data[0] >> 4 == 4 else -1  # the last part of the IPv4 address it is sent to
                if (source, target) in self._delays:
                    self._count += 1
                    due = time.monotonic() + self._delays[source, target]
                    heapq.heappush(self._travelling, Packet(due, self._count, source, target, data))

    def _deliver(self) -> None:
        while self._travelling and self._travelling[0].due <= time.monotonic():
            packet = heapq.heappop(self._travelling)
            ends = packet.source, packet.target
            if self._cut not in ends or _LINKS.index(_HERE) in ends:
                with suppress(OSError):  # the site is gone
                    os.write(self._devices[packet.target], packet.data)


def _open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def can_make_sites() -> bool:
    """Whether this machine allows namespaces and TUN devices."""
    unshare: Sequence[str] = ("unshare", "-n", "-m", "ip", "tuntap", "add", "probe", "mode", "tun")
    return os.getuid() == 0 and subprocess.run(unshare, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    Router().run()
