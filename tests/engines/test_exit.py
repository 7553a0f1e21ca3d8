"""What a program leaves behind that exits in the middle of things: its queue entries are gone at once, its leases stay
until their ttl or session ends. Run with real processes, on every engine and with both APIs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from harness.rigs import with_own_server
from leasehold import Client, Holding
from leasehold.testing.conformance.rig import Rig, rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe
from tests.support.child_process import Child
from tests.support.paths import SUPPORT

ENGINES = ["sqlite", "postgresql", "redis", "mysql", "etcd", "zookeeper", "redlock", "http-memory"]
# How long an entry may stay. Without the withdrawal at exit it stays for 15 s, or as long as the session.
AT_ONCE = 8.0


# Every engine in the second tier: each test starts a process or two.
FIRST_TIER = ("sqlite", "redis", "zookeeper")


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in FIRST_TIER else pytest.mark.extended) for name in ENGINES]
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    found = rig_or_skip(with_own_server(rig_type(request.param)))
    yield found
    found.close()


@pytest.fixture(params=["blocking", "asyncio"])
def api(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def url(rig: Rig) -> Iterator[str]:
    path = rig.client_path()
    yield path.url
    path.close()


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, namespace=f"exit-{os.urandom(4).hex()}") as client:
        yield client


@pytest.fixture
def start(client: Client, url: str, api: str) -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def start(how: str) -> Child:
        namespace = probe.client_options(client).namespace
        child = Child(how, api, url, namespace, script=SUPPORT / "exit_child.py", stderr=subprocess.PIPE)
        started.append(child)
        return child

    yield start
    for child in started:
        child.close()
        child.process.stderr.close()


def holdings_of(client: Client, child: Child, state: str) -> list[Holding]:
    return [h for h in client.inspect() if h.holder.pid == child.process.pid and h.state == state]


def wait_gone(client: Client, child: Child) -> None:
    """Wait until the child has no queue entry. Engines without a queue keep none."""
    end = time.monotonic() + AT_ONCE
    while holdings_of(client, child, "waiting"):
        assert time.monotonic() < end, "the child left its queue entry behind"
        time.sleep(0.01)


def check_kept(client: Client, child: Child, token: int) -> None:
    """The child's own lease is untouched."""
    assert [(held.name, held.token) for held in holdings_of(client, child, "held")] == [("kept", token)]
    if probe.config(client).scheme != "sqlite":  # which frees the names of a process that has ended
        assert client.lock("kept").try_acquire() is None


def skip_without_queue(client: Client) -> None:
    if not client.traits.fair:
        pytest.skip("needs the trait fair: without a queue nothing is left behind")


@pytest.mark.parametrize("how", ["interrupted", "threadless"])
def test_interrupted_waiter_exits_and_leaves_only_its_leases(client: Client, start, how: str) -> None:
    skip_without_queue(client)
    job = client.lock("job").acquire()
    child = start(how)
    token = child.read_message()["token"]
    assert child.read_message() == "waiting"
    child.signal(signal.SIGINT)
    assert child.process.wait(30) != 0
    wait_gone(client, child)
    check_kept(client, child, token)
    job.release()
    client.lock("job").acquire(wait=AT_ONCE).release()


def test_waiter_ended_by_an_exception_leaves_no_queue_entry(client: Client, start) -> None:
    skip_without_queue(client)
    job = client.lock("job").acquire()
    child = start("raises")
    assert child.read_message() == "waiting"
    child.signal(signal.SIGINT)
    assert child.process.wait(30) == 3
    wait_gone(client, child)
    job.release()
    client.lock("job").acquire(wait=AT_ONCE).release()


def test_daemon_thread_that_waits_at_exit_leaves_no_queue_entry(client: Client, start) -> None:
    skip_without_queue(client)
    job = client.lock("job").acquire()
    child = start("daemon")
    token = child.read_message()["token"]
    assert child.read_message() == "waiting"
    child.send_newline()
    assert child.process.wait(30) == 0
    assert "Traceback" not in child.process.stderr.read()
    wait_gone(client, child)
    check_kept(client, child, token)
    job.release()
    client.lock("job").acquire(wait=AT_ONCE).release()


@pytest.mark.parametrize("api", ["asyncio"], indirect=True)
def test_task_abandoned_by_its_loop_leaves_no_queue_entry(client: Client, start) -> None:
    skip_without_queue(client)
    with client.lock("job"):
        child = start("abandoned")
        token = child.read_message()["token"]
        assert child.read_message() == "waiting"
        child.signal(signal.SIGINT)
        assert child.process.wait(30) != 0
        wait_gone(client, child)
        check_kept(client, child, token)


def test_exit_waits_only_briefly_for_a_silent_engine(rig: Rig, client: Client, start) -> None:
    """Half a second is promised. Unbounded, the exit would take as long as the release is retried: over a minute."""
    if not rig.can_pause:
        pytest.skip("needs a rig that can pause its engine")
    skip_without_queue(client)
    job = client.lock("job").acquire()
    child = start("interrupted")
    child.read_message()
    assert child.read_message() == "waiting"
    rig.pause()
    try:
        child.signal(signal.SIGINT)
        child.process.wait(30)
    finally:
        rig.resume()
        job.release()
