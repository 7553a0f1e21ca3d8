"""Ways in which somebody tried to break the Redlock engine, and what became of them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import threading
import time

import hiredis
import pytest

from leasehold import AsyncClient, Client, Unavailable, engines
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import mark
from leasehold.engines.redis.requests import spelled_out
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.runtime.base import step
from leasehold.runtime.loop import Loop
from leasehold.testing.redis_rig import ALWAYS
from leasehold.testing.redlock_rig import RedlockRig
from leasehold.testing.servers.redlock import Nodes, kept
from leasehold.testing.suite import made


@pytest.fixture
def nodes():
    made(RedlockRig)  # a skip where there is no Redis
    nodes = Nodes()
    yield nodes
    nodes.close()


def send(node, data: bytes) -> object:
    """Carried out on a connection of its own, as what comes late is."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as line:
        line.sendall(data)
        reader = hiredis.Reader()
        while (reply := reader.gets()) is False:
            reader.feed(line.recv(65_536))
    return reply


# ------------------------------------------------------------- what comes late


def test_a_give_back_that_comes_late_leaves_alone_what_was_asked_for_since(nodes, bare) -> None:
    """Else the holder would count nodes that have let go, and somebody else would get them."""
    seat, other = bare(nodes.url), bare(nodes.url)
    claim = seat.claim()
    packs = seat.engine._requests
    name = packs.name("", "job")
    early = seat.engine._numbers.next()
    late = spelled_out(packs.scripts.release, packs.give_back(name, claim, early))
    held = seat.takes(claim)
    for node in nodes.all:
        assert send(node, late) == 0
    assert isinstance(seat.renew(held), Alive)
    late = spelled_out(packs.scripts.release, packs.give_back(name, claim, seat.engine._numbers.next()))
    assert isinstance(seat.renew(held), Alive), "a renewal counts as asking, too"
    for node in nodes.all:
        assert send(node, late) == 0
    assert isinstance(other.attempt(other.claim()), Busy)


def test_a_grant_offered_again_too_late_is_refused(nodes, bare) -> None:
    """By the clock of the node: else a lease long over could come back to life, with its old token."""
    seat = bare(nodes.url)
    held = seat.takes(seat.claim())
    assert seat.release(held)
    packs = seat.engine._requests
    now = int(time.time() * 1e6)
    offer = packs.retake(packs.name("", "job"), held, seat.engine._numbers.next(), now - 1)
    for node in nodes.all:
        assert send(node, spelled_out(packs.scripts.retake, offer)) == 0
    assert nodes.left() == []


def test_an_offer_never_takes_a_node_from_a_holder(nodes, bare) -> None:
    seat, other = bare(nodes.url), bare(nodes.url)
    lost = seat.claim()._replace(token=17)
    held = other.takes(other.claim())
    packs = seat.engine._requests
    offer = packs.retake(packs.name("", "job"), lost, seat.engine._numbers.next())
    for node in nodes.all:
        assert send(node, spelled_out(packs.scripts.retake, offer)) == 0
    assert isinstance(other.renew(held), Alive)


def test_asked_again_a_claim_keeps_its_token_whatever_a_minority_forgot(nodes, bare) -> None:
    seat = bare(nodes.url)
    held = seat.takes(seat.claim())
    nodes.all[0].ask("FLUSHALL")
    nodes.all[1].ask("FLUSHALL")
    again = seat.attempt(held._replace(token=0))
    assert isinstance(again, Grant)
    assert again.token == held.token
    assert isinstance(seat.renew(held), Alive)
    nodes.all[2].ask("FLUSHALL")
    nodes.all[3].ask("FLUSHALL")
    assert isinstance(seat.renew(held), Gone) is False, "the two that forgot had been given their part again"


def test_a_token_of_before_renews_nothing(nodes, bare) -> None:
    seat = bare(nodes.url)
    held = seat.takes(seat.claim())
    for wrong in (-1, 1):
        assert isinstance(seat.renew(held._replace(token=held.token + wrong)), Gone)
    assert isinstance(seat.renew(held), Alive), "and does no harm"
    assert not seat.release(held._replace(id="")), "a stray one ends no grant"
    assert isinstance(seat.renew(held), Alive)


def test_a_poisoned_counter_of_one_node_does_not_use_up_the_tokens(nodes) -> None:
    with Client(nodes.url) as client:
        with client.lock("job") as lease:
            first = lease.token
        (counter,) = [key for key in nodes.all[0].ask("KEYS", "lh1:*") if key.endswith(b"}")]
        nodes.all[0].ask("SET", counter, 2**53 - 10)
        for _ in range(5):
            with client.lock("job") as lease:
                assert first < lease.token < 2**52
                first = lease.token


def test_an_attempt_given_up_is_followed_by_its_release_on_the_same_connection(nodes, bare, until) -> None:
    """Nobody is there to repeat it: no recipe, no watchdog."""
    seat = bare(nodes.url)
    assert seat.release(seat.takes(seat.claim()))  # the scripts are known
    before = nodes.all[0].calls()
    nodes.pause(0, 1, 2)
    with pytest.raises(Unavailable):
        step(seat.engine.attempt(seat.claim(ttl=60.0), seat.by(0.3)))
    nodes.resume()
    until(lambda: nodes.all[0].calls()["evalsha"] > before["evalsha"])
    until(lambda: not any(kept(node) for node in nodes.all[:3]), 5)
    assert kept(nodes.all[3]), "it answered, and is for the recipe to forget"


def test_the_same_in_a_loop(nodes, until) -> None:
    async def main() -> None:
        runtime = Loop()
        book = Book(runtime, "address")
        seat = engines.opener("redlock")(EngineConfig.parse(nodes.url, 5.0), runtime, book)
        first, second = (Claim("", "job", each, mark(each), Holder("me"), 60.0) for each in ("one", "two"))
        assert isinstance(await seat.attempt(first, runtime.now() + 5), Grant)  # the scripts are known
        assert await seat.release(first, runtime.now() + 5)
        before = nodes.all[0].calls()
        nodes.pause(0, 1, 2)
        with pytest.raises(Unavailable):
            await seat.attempt(second, runtime.now() + 0.3)
        nodes.resume()
        end = time.monotonic() + 5
        while any(kept(node) for node in nodes.all[:3]) or nodes.all[0].calls()["evalsha"] == before["evalsha"]:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        await seat.close()

    asyncio.run(main())


def test_a_node_that_was_down_hears_of_the_release_when_it_is_back(until) -> None:
    """It kept its part on disk. Nobody asks it for anything else meanwhile."""
    made(RedlockRig)
    logged = Nodes(*ALWAYS, count=3)
    try:
        with Client(logged.url) as client:
            lease = client.lock("job", ttl=600).acquire()
            until(lambda: kept(logged.all[0]))
            logged.all[0].kill()
            assert lease.release()
            logged.all[0].start()
            until(lambda: logged.left() == [], 15)
    finally:
        logged.close()


# ------------------------------------------------------------------ the line


def test_a_turn_given_by_too_few_is_looked_after_soon(nodes, until) -> None:
    """When several came at once, nodes may give the turn to different ones: none has a majority, and all would wait."""
    with Client(nodes.url) as holder, Client(nodes.url) as other:
        lease = holder.lock("job", ttl=60).acquire()
        waiting = threading.Thread(target=lambda: other.lock("job", wait=60).acquire().release())
        waiting.start()
        until(lambda: sum(h.state == "waiting" for h in holder.inspect()) == 1)
        book = other._desk.book
        (waiter,) = book.waiting
        (key,) = [each for each in kept(nodes.all[1]) if each.endswith(b":job")]
        engine, asked = other._desk._engine, []
        attempt = engine.attempt

        def counted(claim, deadline):
            asked.append(time.monotonic())
            return attempt(claim, deadline)

        engine.attempt = counted
        until(lambda: asked, 20)  # it looks around, and not again for 5 s
        nodes.all[0].ask("PUBLISH", f"lh1:c:{book.client}", b"go 0 " + key + b" " + bytes.fromhex(waiter))
        until(lambda: len(asked) > 1, 20)
        assert asked[1] - asked[0] < 3
        lease.release()
        waiting.join(20)


@pytest.mark.parametrize("crowd", [5])
def test_a_crowd_behind_networks_that_jitter(nodes, crowd) -> None:
    """Each message to each node is late by up to 8 ms, so that votes are split again and again."""
    inside, tokens, ways = [], [], [nodes.proxied() for _ in range(crowd)]
    chance = random.Random(7)

    def late(_outward: bool, _data: bytes) -> None:
        time.sleep(chance.random() * 0.008)

    for _, proxies in ways:
        for proxy in proxies:
            proxy.watch = late

    def work(url: str) -> None:
        with Client(url, ttl=20) as client:
            for _ in range(4):
                with client.lock("hot", wait=60) as lease:
                    inside.append(lease)
                    assert inside == [lease]
                    tokens.append(lease.token)
                    time.sleep(0.002)
                    inside.remove(lease)

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(url,)) for url, _ in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    took = time.monotonic() - began
    for _, proxies in ways:
        for proxy in proxies:
            proxy.close()
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 4 * crowd
    assert took < 30, f"{took / len(tokens):.2f} s for each: nobody waits for reservations to lapse"


def test_a_free_minority_does_not_keep_waiters_busy(nodes, until) -> None:
    """A node restarted empty offers turns that come to nothing while the others are held."""
    with Client(nodes.url) as holder, Client(nodes.url) as other:
        lease = holder.lock("job", ttl=600).acquire()  # no renewal comes by meanwhile
        waiting = threading.Thread(target=lambda: other.lock("job", wait=60).acquire().release())
        waiting.start()
        until(lambda: sum(h.state == "waiting" for h in holder.inspect()) == 1)
        nodes.all[0].ask("FLUSHALL")
        before, began = nodes.all[1].calls()["evalsha"], time.monotonic()
        (waiter,) = other._desk.book.waiting
        other._desk.book.deliver("head", waiter, 0.0, None)  # it looks now, and finds that node free
        until(lambda: time.monotonic() > began + 3)
        assert nodes.all[1].calls()["evalsha"] - before < 12
        lease.release()
        waiting.join(20)
        assert not waiting.is_alive()
    until(lambda: nodes.left() == [], 10)


# ----------------------------------------------------- what is given up leaks nothing


def test_calls_that_fail_leak_neither_descriptors_nor_threads(nodes, until) -> None:
    with Client(nodes.url, call_timeout=0.3) as client:
        client.lock("job").acquire().release()
        nodes.all[0].kill()
        nodes.all[1].kill()
        nodes.pause(2)
        with pytest.raises(Unavailable):
            client.lock("job").acquire(wait=0)
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(12):
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=0)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= files + 6
        assert threading.active_count() <= threads + 2, "one that tells, one that listens: none for each call"
        nodes.resume()


def test_a_loop_that_gave_up_leaves_no_task_and_no_word(nodes, caplog) -> None:
    async def main() -> None:
        async with AsyncClient(nodes.url, call_timeout=0.3) as client:
            await client.ping()
            nodes.all[0].kill()
            nodes.pause(1, 2)
            for _ in range(4):
                with pytest.raises(Unavailable):
                    await client.lock("job").acquire(wait=0)
            tasks = [asyncio.create_task(client.lock("job").acquire(wait=5)) for _ in range(20)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            nodes.resume()
            end = time.monotonic() + 5
            while len(asyncio.all_tasks()) > 1:
                assert time.monotonic() < end, asyncio.all_tasks()
                await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main(), debug=True)
    assert "never retrieved" not in caplog.text
    assert "was destroyed" not in caplog.text


def test_a_lease_renewed_while_nodes_forget_leaves_nothing_when_released(nodes, until) -> None:
    """A node is offered its part again in the middle of releases."""
    over = threading.Event()

    def forget() -> None:
        chance = random.Random(3)
        while not over.is_set():
            chance.choice(nodes.all[:2]).ask("FLUSHALL")

    def work(client: Client, number: int) -> None:
        for _ in range(20):
            with client.lock(f"name-{number}", ttl=60, wait=30) as lease:
                lease.renew()

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    with Client(nodes.url) as client:
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        over.set()
        forgetting.join(10)
        until(lambda: nodes.left() == [], 10)


def test_a_client_killed_in_the_middle_leaves_what_lapses_and_no_more(nodes, child, until) -> None:
    from pathlib import Path

    crowd = [
        child(nodes.url, "hot", 30, seed, "blocking", script=Path(__file__).with_name("redlock_child.py"))
        for seed in range(3)
    ]
    for one in crowd:
        one.hear()
    until(lambda: any(kept(node) for node in nodes.all))
    for one in crowd:
        one.kill()
    with Client(nodes.url) as client:
        began = time.monotonic()
        with client.lock("hot", wait=20):
            assert time.monotonic() - began < 8  # its ttl of 1.5 s, and turns of the dead that are passed over
