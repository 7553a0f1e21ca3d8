"""The recipe of docs/how-to/rate-limits.md, between processes: atomic counters, no lock."""

import os
import socket
import subprocess
import sys

import pytest

from leasehold.testing.rig import Absent
from leasehold.testing.servers.process import Server, free_ports, program, scratch

pytest.importorskip("limits")

CHILD = """
import sys
from limits import RateLimitItemPerHour
from limits.storage import storage_from_string
from limits.strategies import MovingWindowRateLimiter

limiter = MovingWindowRateLimiter(storage_from_string(sys.argv[1]))
mails = RateLimitItemPerHour(100)
sys.stdin.readline()  # all begin at once
print(sum(limiter.hit(mails, "mail", "user-7") for _ in range(50)))
"""


class Redis(Server):
    package = "redis-server"

    def command(self):
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder, "--save", ""]
        return [program("redis-server", package=self.package), *where]

    def ready(self):
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
            link.sendall(b"PING\r\n")
            return link.recv(5) == b"+PONG"


def test_the_limit_and_not_one_more_is_let_through():
    try:
        server = Redis(scratch(), free_ports(1)[0]).start()
    except Absent as absent:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(absent))
    command = [sys.executable, "-c", CHILD, f"redis://127.0.0.1:{server.port}/0"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(8)]
    try:
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        passed = [int(child.communicate(timeout=60)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
        server.stop()
    assert sum(passed) == 100
