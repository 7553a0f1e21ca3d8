"""The store behind the memory engine: nothing left behind, tokens that outlive clients, many threads at once."""

from __future__ import annotations

import threading

from leasehold import Client
from leasehold.engines.memory import Store
from leasehold.model import Claim, Grant, Holder
from leasehold.runtime.threads import Threads


def claim(name: str, who: str, ttl: float = 10.0) -> Claim:
    return Claim("", name, f"secret {who}", who, Holder(who), ttl)


def test_lapsed_names_nobody_asks_about_are_swept() -> None:
    now = [0.0]
    store = Store(Threads(lambda: now[0]))
    for number in range(1000):
        store.attempt(claim(f"old{number}", "a"), "c")
    now[0] = 20.0
    for number in range(600):
        store.attempt(claim(f"new{number}", "a"), "c")
        store.release(claim(f"new{number}", "a"))
    assert not store.lines


def test_the_live_are_not_swept() -> None:
    store = Store(Threads())
    for number in range(50):
        store.attempt(claim(f"n{number}", "a"), "c")
    assert len(store.lines) == 50


def test_a_refused_first_claim_leaves_nothing() -> None:
    store = Store(Threads())
    store.attempt(claim("n", "a"), "c")
    store.release(claim("n", "a"))
    assert not store.lines
    assert store.release(claim("n", "a")) is False


def test_tokens_rise_though_every_client_is_closed_and_the_wall_clock_goes_back() -> None:
    tokens = []
    for _ in range(3):
        with Client("memory://tokens") as client:
            tokens.append(client.lock("a").call(lambda lease: lease.token))
    assert tokens == sorted(set(tokens))
    runtime = Threads()
    walls = iter([5.0, 3.0, 4.0])
    runtime.wall = lambda: next(walls)
    store = Store(runtime)
    got = []
    for who in "abc":
        reply = store.attempt(claim("n", who), "c")
        assert isinstance(reply, Grant)
        got.append(reply.token)
        store.release(claim("n", who))
    assert got == [5_000_000, 5_000_001, 5_000_002]


def test_many_threads_on_one_store_never_hold_together() -> None:
    store, errors, inside = Store(Threads()), [], [0]

    def work(who: str) -> None:
        for _ in range(300):
            if isinstance(store.attempt(claim("n", who), who), Grant):
                inside[0] += 1
                if inside[0] != 1:
                    errors.append(who)
                inside[0] -= 1
                store.release(claim("n", who))

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not store.lines
