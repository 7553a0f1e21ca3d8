"""The example of docs/how-to/rate-limits.md with several processes: atomic counters, no lock."""

import os
import socket
import subprocess
import sys

import pytest

from harness.servers.folders import scratch
from harness.servers.process import Server, free_ports, program
from leasehold.testing.conformance.rig import Absent

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
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder, "--save", ""]
        return [program("redis-server", package=self.package), *options]

    def ready(self):
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(5) == b"+PONG"


@pytest.mark.extended  # eight processes
def test_rate_limit_across_processes_admits_exactly_the_limit():
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
        admitted = [int(child.communicate(timeout=60)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
        server.stop()
    assert sum(admitted) == 100
