"""The server behind the memory engine: it leaves nothing behind, its tokens outlive clients, threads may share it."""

from __future__ import annotations

import threading

from leasehold import Client
from leasehold.engines.memory import MemoryServer
from leasehold.model import Claim, Grant, Holder
from leasehold.runtime.threads import Threads
from tests.support.health import probe


def claim(name: str, who: str, ttl: float = 10.0) -> Claim:
    return Claim("", name, f"secret {who}", who, Holder(who), ttl)


def test_expired_names_are_swept_by_claims_on_other_names() -> None:
    now = [0.0]
    server = MemoryServer(Threads(lambda: now[0]))
    for number in range(1000):
        server.attempt(claim(f"old{number}", "a"), "c")
    now[0] = 20.0
    for number in range(600):
        server.attempt(claim(f"new{number}", "a"), "c")
        server.release(claim(f"new{number}", "a"))
    assert not server.lock_states


def test_held_names_are_not_swept() -> None:
    server = MemoryServer(Threads())
    for number in range(50):
        server.attempt(claim(f"n{number}", "a"), "c")
    assert len(server.lock_states) == 50


def test_released_name_leaves_nothing() -> None:
    server = MemoryServer(Threads())
    server.attempt(claim("n", "a"), "c")
    server.release(claim("n", "a"))
    assert not server.lock_states
    assert server.release(claim("n", "a")) is False


def test_tokens_rise_after_clients_close_and_the_wall_clock_goes_back() -> None:
    tokens = []
    for _ in range(3):
        with Client("memory://tokens") as client:
            tokens.append(client.lock("a").call(lambda lease: lease.token))
    assert tokens == sorted(set(tokens))
    runtime = Threads()
    walls = iter([5.0, 3.0, 4.0])
    runtime.wall = lambda: next(walls)
    server = MemoryServer(runtime)
    got = []
    for who in "abc":
        reply = server.attempt(claim("n", who), "c")
        assert isinstance(reply, Grant)
        got.append(reply.token)
        server.release(claim("n", who))
    assert got == [5_000_000, 5_000_001, 5_000_002]


def test_threads_on_one_memory_server_never_hold_together() -> None:
    server, errors, inside = MemoryServer(Threads()), [], [0]

    def work(who: str) -> None:
        for _ in range(300):
            if isinstance(server.attempt(claim("n", who), who), Grant):
                inside[0] += 1
                if inside[0] != 1:
                    errors.append(who)
                inside[0] -= 1
                server.release(claim("n", who))

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not server.lock_states


def test_health_of_memory_is_always_up() -> None:
    health = probe("memory://")
    assert (health.engine, health.up, health.has_leader) == ("memory", True, True)
