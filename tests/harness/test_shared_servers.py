"""Servers that the workers of a run share, with real processes: a controller, its workers, and a Redis server."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from harness.rigs.redis import single_server
from harness.servers.process import poll
from harness.servers.redis import RedisServer
from leasehold.testing.conformance.rig import Absent
from tests.support.paths import child_environment

CONTROLLER = """
import sys
from harness.servers.shared import serve_workers
serve_workers()
WORKERS
print("ready", flush=True)
sys.stdin.read()
"""
WORKER = """
import sys
from harness.rigs.redis import single_server
(server,) = single_server()
print(server.pid, server.running, server.ask("PING"), flush=True)
sys.stdin.read()
"""


class Run:
    """A controller with two workers. Their input ends with the test."""

    def __init__(self) -> None:
        start = f"WORKER = {WORKER!r}\nimport subprocess\n" + 2 * (
            "worker = subprocess.Popen([sys.executable, '-c', WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
            "print(worker.pid, worker.stdout.readline().decode().strip(), flush=True)\n"
        )
        self.controller = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER.replace("WORKERS", start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        assert self.controller.stdout is not None
        lines = [self.controller.stdout.readline().split() for _ in range(2)]
        self.workers = [int(worker) for worker, *_ in lines]
        self.servers = [int(server) for _, server, *_ in lines]
        self.answers = [answer for _, _, *answer in lines]

    def end(self) -> None:
        for pid in self.workers:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.controller.kill()
        self.controller.communicate()


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def run() -> Iterator[Run]:
    try:
        RedisServer()
    except Absent as absent:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(absent))
    run = Run()
    yield run
    run.end()


def test_workers_of_a_run_share_one_server(run: Run) -> None:
    assert run.servers[0] == run.servers[1]
    assert run.answers == [["True", "b'PONG'"]] * 2


def test_shared_server_outlives_a_killed_worker(run: Run) -> None:
    os.kill(run.workers[0], signal.SIGKILL)
    poll(lambda: not is_alive(run.workers[0]), 30, lambda: "the worker has ended")
    assert is_alive(run.servers[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_shared_server_ends_with_its_controller(run: Run, number: signal.Signals) -> None:
    run.controller.send_signal(number)
    run.controller.wait(30)
    poll(lambda: not is_alive(run.servers[0]), 30, lambda: "the server has ended")


def shared_elsewhere() -> RedisServer:
    """A server as a worker sees the controller's."""
    server = object.__new__(RedisServer)
    server.__dict__.update(single_server.own()[0].__getstate__())
    return server


@pytest.mark.parametrize("break_", [RedisServer.kill, RedisServer.pause, RedisServer.restart, RedisServer.stop])
def test_worker_cannot_break_a_shared_server(break_: Callable[[RedisServer], None]) -> None:
    with pytest.raises(RuntimeError, match="shared by all workers"):
        break_(shared_elsewhere())
    assert single_server.own()[0].ask("PING") == b"PONG"
