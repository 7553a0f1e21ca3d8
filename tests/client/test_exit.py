"""What a client does when the interpreter exits, without the exit. `tests/engines/test_exit.py` has real processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from leasehold import Client
from tests.support import probe


@pytest.fixture
def exiting(wait_until):
    """Runs what the exit handler does for one client."""

    def run(client: Client) -> None:
        probe.core(client).withdraw_claims()
        wait_until(probe.core(client).has_withdrawn)

    return run


def test_exit_releases_waiters_and_keeps_leases(exiting, wait_until) -> None:
    with Client("memory://") as client:
        lease = client.lock("a").acquire()

        def wait() -> None:
            with pytest.raises(SystemExit):
                client.lock("a").acquire()

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: len(client.inspect()) == 2)
        exiting(client)
        assert [(found.state, found.token) for found in client.inspect()] == [("held", lease.token)]
        lease.renew()
        assert lease.release()
        wait_until(lambda: not thread.is_alive())
        assert client.inspect() == []


def test_exit_refuses_new_attempts_of_daemon_threads(exiting) -> None:
    with Client("memory://") as client, ThreadPoolExecutor() as daemon_thread:
        exiting(client)
        with pytest.raises(SystemExit):
            daemon_thread.submit(client.lock("a").acquire).result(60)
        assert client.inspect() == []


def test_daemon_thread_sends_no_attempt_while_the_interpreter_exits(bench, exiting) -> None:
    exiting(client := bench.client())
    calls = bench.transport.calls
    with ThreadPoolExecutor() as daemon_thread, pytest.raises(SystemExit):
        daemon_thread.submit(client.lock("a").acquire).result(20)
    assert bench.transport.calls == calls


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no thread in exit handlers")
@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_exit_handlers_of_the_program_may_still_lock(scheme, tmp_path) -> None:
    """Those registered before the import of Leasehold run after its own exit handler."""
    program = """
import atexit, sys
@atexit.register
def clean_up():
    with client.lock("a", ttl=600) as lease:
        lease.renew()
    print(client.inspect())
from leasehold import Client
client = Client(sys.argv[1])
client.ping()
"""
    url = "memory://" if scheme == "memory" else f"sqlite://{tmp_path}/locks.db"
    done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_grant_that_arrives_at_exit_is_given_back(exiting, monkeypatch, wait_until) -> None:
    """The attempt of a daemon thread was in flight: its lease is neither returned nor left behind."""
    with Client("memory://") as client:
        engine = probe.engine(client)
        original = engine.attempt

        async def attempt(claim, deadline):
            reply = await original(claim, deadline)
            exiting(client)
            return reply

        monkeypatch.setattr(engine, "attempt", attempt)
        with ThreadPoolExecutor() as daemon_thread, pytest.raises(SystemExit):
            daemon_thread.submit(client.lock("a").acquire).result(60)
        wait_until(lambda: client.inspect() == [])
