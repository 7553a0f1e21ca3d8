"""Three sites in network namespaces: packets travel for as long as they are told to, and a cut drops them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.servers.sites import DELAYS, Site, Sites, can_make_sites
from tests.support.paths import child_environment

# Asks for a connection at a port where no server listens: the answer, or the lack of one, takes a round trip.
CONNECT = """
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 9), float(sys.argv[2]))
except TimeoutError:
    print("silence")
except ConnectionRefusedError:
    print(time.monotonic() - began)
"""


@pytest.mark.extended
def test_sites_are_as_far_apart_as_told_and_can_be_cut_off():
    if not can_make_sites():
        pytest.skip("needs root, namespaces and TUN devices")
    command = ["unshare", "-n", "-m", sys.executable, "-m", "tests.harness.test_sites"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def connect(source: Site, target: Site, seconds: float = 60.0) -> str:
    command = source.netns_command([sys.executable, "-S", "-c", CONNECT, target.address, str(seconds)])
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    sites = Sites()
    try:
        east, west, europe = sites.all
        for source, target in ((east, west), (west, europe)):
            assert float(connect(source, target)) >= 2 * DELAYS[frozenset({source.name, target.name})]
        sites.cut(west)
        assert connect(west, europe, 1.0) == connect(east, west, 1.0) == "silence"
        assert float(connect(europe, east)) > 0
        sites.heal()
        assert float(connect(west, europe)) > 0
    finally:
        sites.close()


if __name__ == "__main__":
    main()
