"""Programs that are ended by a signal: what they release, and how they exit."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

import leasehold
from leasehold import AsyncClient, Client, ConfigError

_BLOCKING = """
import sys, threading, leasehold
client = leasehold.Client(sys.argv[1], ttl=60)
client.release_on_signal()
kept = client.lock("kept").acquire()
with client.lock("block"):
    try:
        print("ready", flush=True)
        {body}
    finally:
        print("work ends", client.lock("block").locked(), flush=True)
"""

_ASYNCIO = """
import asyncio, sys, leasehold
async def other(client):
    async with client.lock("kept"):
        await asyncio.sleep(600)
async def main():
    async with leasehold.AsyncClient(sys.argv[1], ttl=60) as client:
        client.release_on_signal()
        task = asyncio.create_task(other(client))
        async with client.lock("block"):
            try:
                while not await client.lock("kept").locked():
                    await asyncio.sleep(0.01)
                print("ready", flush=True)
                await asyncio.sleep(600)
            finally:
                print("work ends", await client.lock("block").locked(), flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "script",
    [
        _BLOCKING.format(body="threading.Event().wait(600)"),
        _BLOCKING.format(body='leasehold.Client(sys.argv[1]).lock("taken").acquire()'),
        _ASYNCIO,
    ],
    ids=["blocking", "waiting", "asyncio"],
)
def test_sigterm_releases_all_leases_after_the_work(tmp_path, script, wait_until) -> None:
    url = f"sqlite://{tmp_path}/locks.db"
    with Client(url, ttl=60) as client, client.lock("taken"):
        child = subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert {"block", "kept"} <= {holding.name for holding in client.inspect()}
        if "taken" in script:
            wait_until(lambda: "waiting" in {holding.state for holding in client.inspect()}, 60)
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=60)
        assert (out, child.returncode) == ("work ends True\n", 128 + signal.SIGTERM)
        assert [holding.name for holding in client.inspect()] == ["taken"]


def test_signal_with_a_handler_is_refused(bench) -> None:
    client = bench.client()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(ConfigError, match="SIGTERM has a handler already"):
            client.release_on_signal()
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ConfigError, match=r"such as signal\.SIGTERM"):
        client.release_on_signal(4711)


def test_signal_handler_is_refused_outside_the_main_thread(bench) -> None:
    client, errors = bench.client(), []

    def call() -> None:
        try:
            client.release_on_signal()
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert "main thread" in errors[0]


def test_resign_nowait_ends_a_campaigned_term(bench, wait_until) -> None:
    election = bench.client().election("e", min_hold=0)
    assert not election.resign_nowait()
    term = election.campaign()
    assert election.resign_nowait()
    assert not term.held
    wait_until(lambda: election.leader() is None)
    assert not election.resign_nowait()


def test_event_loop_callback_ends_serve(url) -> None:
    async def main() -> list[str]:
        calls: list[str] = []
        async with AsyncClient(url) as client:
            election, loop = client.election("e"), asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGALRM, election.resign_nowait)

            def start(_term: leasehold.AsyncLease) -> None:
                calls.append("start")
                signal.raise_signal(signal.SIGALRM)

            try:
                await asyncio.wait_for(election.serve(start, lambda _term: calls.append("stop")), 60)
            finally:
                loop.remove_signal_handler(signal.SIGALRM)
        return calls

    assert asyncio.run(main()) == ["start", "stop"]
