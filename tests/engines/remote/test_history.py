"""Processes contend for one name while its lock servers are restarted and killed; a checker judges their history."""

from __future__ import annotations

import random
import time

import pytest

from harness.rigs.remote import HttpRedisRig, redis_behind
from harness.servers.lock_server import LockServer, url_of
from harness.servers.process import poll
from leasehold import Client
from leasehold.core.timing import WAITER_TTL
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.contention import check_history, read_events, start_children


def restart_in_turn(servers: list[LockServer], rng: random.Random, end: float) -> int:
    """End one server after the other, gracefully or not, and start it again. Returns the number of restarts."""
    restarts = 0
    while time.monotonic() < end:
        server = servers[restarts % len(servers)]
        next_at = time.monotonic() + 1.0
        server.kill() if rng.random() < 0.5 else server.stop()
        server.start()
        restarts += 1
        poll(lambda: time.monotonic() >= next_at, 60, lambda: "a second has passed")  # noqa: B023
    return restarts


def contend(child, seconds: float, seed: int, processes: int) -> None:
    rig_or_skip(HttpRedisRig)
    engine_url = f"redis://127.0.0.1:{redis_behind().port}"
    servers = [LockServer(engine_url).start() for _ in range(2)]
    try:
        children = start_children(child, url_of(*servers), seconds, seed, processes)
        restarts = restart_in_turn(servers, random.Random(seed), time.monotonic() + seconds)
        grants = check_history(read_events(children))
        assert grants > seconds
        with Client(engine_url) as client:
            poll(lambda: not client.inspect("hot"), 2 * WAITER_TTL + 5, lambda: "no claim is left")
        print(f"{grants} grants, {restarts} restarts, {processes} processes, {seconds} s")
    finally:
        for server in servers:
            server.kill()


@pytest.mark.extended
def test_history_is_valid_while_servers_are_restarted(child) -> None:
    contend(child, 8, seed=1, processes=4)


@pytest.mark.faults
def test_history_is_valid_over_ten_minutes_of_rolling_restarts(child) -> None:
    contend(child, 600, seed=2, processes=8)
