"""Requests to Redlock nodes that arrive late or out of order, or not at all: votes are returned, and no claim stays."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress

import pytest

from harness.rigs.redis import AOF_ALWAYS
from harness.rigs.redlock import RedlockRig
from harness.servers.redlock import RedlockNodes, lock_keys
from leasehold import Client, LeaseLost, Unavailable, engines
from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.core.timing import HEARTBEAT_INTERVAL
from leasehold.engines.redis.protocol import as_eval
from leasehold.engines.registry import ClaimRegistry
from leasehold.model import Alive, Busy, Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.loop import Loop
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe, probe_harness, probe_redlock
from tests.support.paths import SUPPORT
from tests.support.redis_servers import send_raw
from tests.support.timing import check_elapsed


def run_before_script(engine, script, action, monkeypatch) -> None:
    """Run `action` once, just before the engine first calls `script`."""
    original_round, done = probe_redlock.broadcaster(engine).run_round, []

    async def round_(requested_script, *args, **kwargs):
        if requested_script is script and not done:
            done.append(True)
            action()
        return await original_round(requested_script, *args, **kwargs)

    monkeypatch.setattr(probe_redlock.broadcaster(engine), "run_round", round_)


def claim_queued_on_all_nodes_free_on_most(nodes, driver, other):
    """A claim that waits on all nodes after its predecessor was released on all nodes but the first."""
    previous_claim = other.acquire(other.claim(ttl=2.0))
    claim = driver.claim(queue=True, ttl=60.0)
    assert isinstance(driver.attempt(claim), Busy)
    requests = probe_redlock.requests(other.engine)
    calls = {n: [requests.release(requests.name_keys("", "job"), previous_claim)] for n in range(1, len(nodes.all))}
    result = run_sync(
        probe_redlock.broadcaster(other.engine).run_round(
            requests.scripts.release, calls, other.deadline(), 2.0, lambda _: False
        )
    )
    assert list(result.replies.values()) == [[1]] * 4
    return claim


# ---------------------------------------------------------- abandoned attempts


def test_abandoned_attempt_is_followed_by_its_release(nodes, make_driver, wait_until) -> None:
    """The engine itself sends the release: this test has no client and no watchdog to repeat it."""
    driver = make_driver(nodes.url)
    assert driver.release(driver.acquire(driver.claim()))  # loads the scripts
    before = nodes.all[0].calls()
    nodes.pause(0, 1, 2)
    with pytest.raises(Unavailable):
        run_sync(driver.engine.attempt(driver.claim(ttl=60.0), driver.deadline(0.3)))
    nodes.resume()
    wait_until(lambda: nodes.all[0].calls()["evalsha"] > before["evalsha"])
    wait_until(lambda: not any(lock_keys(node) for node in nodes.all[:3]))
    assert lock_keys(nodes.all[3]), "this node answered: its vote is for the caller to forget"


def test_abandoned_attempt_under_asyncio_is_followed_by_its_release(nodes, wait_until) -> None:
    async def main() -> None:
        runtime = Loop()
        registry = ClaimRegistry(runtime, "address")
        engine = engines.opener("redlock")(EngineConfig.parse(nodes.url, 5.0), runtime, registry)
        first, second = (
            Claim("", "job", claim_id, hash_id(claim_id), Holder("me"), 60.0) for claim_id in ("one", "two")
        )
        assert isinstance(await engine.attempt(first, runtime.now() + 60), Grant)  # loads the scripts
        assert await engine.release(first, runtime.now() + 60)
        before = nodes.all[0].calls()
        nodes.pause(0, 1, 2)
        with pytest.raises(Unavailable):
            await engine.attempt(second, runtime.now() + 0.3)
        nodes.resume()
        end = time.monotonic() + 40  # before its ttl is over
        while any(lock_keys(node) for node in nodes.all[:3]) or nodes.all[0].calls()["evalsha"] == before["evalsha"]:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        await engine.close()

    asyncio.run(main())


def test_single_attempt_with_lost_answer_leaves_no_claim(nodes, proxied_nodes, make_driver, wait_until) -> None:
    """One node votes for the claim, but its answer is lost. The other nodes answer that the name is busy."""
    url, proxies = proxied_nodes
    driver, other = make_driver(url), make_driver(nodes.url)
    nodes.pause(0)
    other.acquire(other.claim(ttl=60.0))  # on the other four
    nodes.resume()
    wait_until(lambda: not lock_keys(nodes.all[0]))
    run_sync(driver.engine.ping(driver.deadline()))

    def cut(outward: bool, data: bytes) -> None:
        if not outward and data.startswith(b"*2"):
            proxies[0].reset()
            proxies[0].target = ("127.0.0.1", 1)  # no server there

    proxies[0].watch = cut
    assert isinstance(driver.attempt(driver.claim(ttl=60.0)), Busy)
    assert lock_keys(nodes.all[0])
    proxies[0].watch, proxies[0].target = None, ("127.0.0.1", nodes.all[0].port)
    wait_until(lambda: not lock_keys(nodes.all[0]), HEARTBEAT_INTERVAL + 5)


def test_answer_after_an_interrupt_is_not_used_for_another_claim(nodes, make_driver, monkeypatch) -> None:
    """Ctrl-C while the engine undoes the attempt on silent nodes: their late answers belong to that claim and name."""
    driver, other = make_driver(nodes.url), make_driver(nodes.url)
    probe_redlock.use_lead(driver.engine, 1_000_000)  # so high that late nodes, too, answer with the proposed token
    assert driver.release(driver.acquire(driver.claim("first")))  # connects
    other.acquire(other.claim("second"))
    nodes.pause(0, 1, 2)

    def interrupt(*_args: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probe_redlock.requests(driver.engine), "undo_attempt", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_sync(driver.engine.attempt(driver.claim("first"), driver.deadline(0.3)))
    nodes.resume()
    for node in probe_redlock.nodes(driver.engine):
        node.on_answer()  # ends its back-off
    assert isinstance(driver.attempt(driver.claim("second")), Busy)


def test_late_undo_does_not_end_a_newer_grant(nodes, make_driver) -> None:
    """Otherwise the holder would count votes that its nodes had dropped, and another claim could get them."""
    driver, other = make_driver(nodes.url), make_driver(nodes.url)
    claim = driver.claim()
    requests = probe_redlock.requests(driver.engine)
    name = requests.name_keys("", "job")
    early = probe_redlock.proposals(driver.engine).next_number()
    late = as_eval(requests.scripts.release, requests.undo_attempt(name, claim, early))
    held = driver.acquire(claim)
    for node in nodes.all:
        assert send_raw(node, late) == 0
    assert isinstance(driver.renew(held), Alive)
    late = as_eval(
        requests.scripts.release,
        requests.undo_attempt(name, claim, probe_redlock.proposals(driver.engine).next_number()),
    )
    assert isinstance(driver.renew(held), Alive), "a renewal also outdates the undo of an older attempt"
    for node in nodes.all:
        assert send_raw(node, late) == 0
    assert isinstance(other.attempt(other.claim()), Busy)


def test_undo_of_another_client_does_not_end_a_repeated_grant(nodes, make_driver) -> None:
    """A server whose clock is fast answers late, and its caller has repeated the claim at another server."""
    fast, repeated, other = make_driver(nodes.url), make_driver(nodes.url), make_driver(nodes.url)
    claim, requests = fast.claim(), probe_redlock.requests(fast.engine)
    number = probe_redlock.proposals(fast.engine).next_number() + 3_600_000_000
    name = requests.name_keys("", "job")
    late_attempt = as_eval(requests.scripts.attempt, requests.attempt(name, claim, number, 0))
    late_undo = as_eval(requests.scripts.release, requests.undo_attempt(name, claim, number))
    send_raw(nodes.all[0], late_attempt)  # this node voted for the first request, the others for the second alone
    repeated.acquire(claim)
    for node in nodes.all:
        assert send_raw(node, late_undo) == 0
    assert isinstance(other.attempt(other.claim()), Busy)


def test_client_with_slow_clock_can_undo_after_one_with_fast_clock(nodes, make_driver) -> None:
    """A waiter moves to another server, gets too few votes there, and must return them."""
    holder, driver = make_driver(nodes.url), make_driver(nodes.url)
    held = holder.acquire(holder.claim(ttl=60.0))
    claim, requests = driver.claim(queue=True), probe_redlock.requests(driver.engine)
    fast = make_driver(nodes.url).engine
    number, name = probe_redlock.proposals(fast).next_number(), requests.name_keys("", "job")
    first = probe_redlock.requests(fast).attempt(name, claim, number + 3_600_000_000, number)
    for node in nodes.all:
        assert send_raw(node, as_eval(probe_redlock.scripts(fast).attempt, first))[0] == 0, "busy: it is queued"
    assert holder.release(held)
    second = as_eval(requests.scripts.attempt, requests.attempt(name, claim, number, number))
    undo = as_eval(requests.scripts.release, requests.undo_attempt(name, claim, number))
    for node in nodes.all:
        assert send_raw(node, second)[0] > 0, "it votes for the claim"
        assert send_raw(node, undo) == 1


# -------------------------------------------------------- rejoins and releases


def test_rejoin_after_its_deadline_is_refused(nodes, make_driver) -> None:
    """By the node's clock. Otherwise a released lease could come back with its old token."""
    driver = make_driver(nodes.url)
    held = driver.acquire(driver.claim())
    assert driver.release(held)
    requests = probe_redlock.requests(driver.engine)
    now = int(time.time() * 1e6)
    rejoin = requests.rejoin(
        requests.name_keys("", "job"), held, probe_redlock.proposals(driver.engine).next_number(), now - 1
    )
    for node in nodes.all:
        assert send_raw(node, as_eval(requests.scripts.rejoin, rejoin)) == 0
    assert nodes.remaining_keys() == []


def test_rejoin_during_release_leaves_no_grant(nodes, wait_until, monkeypatch) -> None:
    """The release of another thread overtakes the rejoin to a node that lost its data."""
    with Client(nodes.url) as client:
        lease = client.lock("job", ttl=60).acquire()
        engine, released = probe.engine(client), []
        nodes.all[0].ask("FLUSHALL")
        run_before_script(
            engine, probe_redlock.scripts(engine).rejoin, lambda: released.append(lease.release()), monkeypatch
        )
        with suppress(LeaseLost):
            lease.renew()
        assert released == [True]
        wait_until(lambda: nodes.remaining_keys() == [])


def test_withdrawn_rejoin_leaves_the_vote_of_another_client(nodes, make_driver, monkeypatch) -> None:
    """The claim has moved: its caller repeated it at another lock server, and the first one drops its note of it."""
    first, second = make_driver(nodes.url), make_driver(nodes.url)
    held = first.acquire(first.claim(ttl=60.0))
    engine, registry = first.engine, first.registry
    registry.held[held.id_hash] = lambda: None
    nodes.all[0].ask("FLUSHALL")
    repeated = []
    run_before_script(
        engine, probe_redlock.scripts(engine).rejoin, lambda: registry.held.pop(held.id_hash), monkeypatch
    )
    run_before_script(
        engine, probe_redlock.scripts(engine).release, lambda: repeated.append(second.acquire(held)), monkeypatch
    )
    assert isinstance(first.renew(held), Alive)
    assert [claim.token for claim in repeated] == [held.token]
    assert all(lock_keys(node) for node in nodes.all)


@pytest.mark.parametrize("undo", [False, True])
def test_lock_server_does_not_undo_a_rejoin_without_an_answer(
    nodes, make_driver, wait_until, monkeypatch, undo
) -> None:
    """Another server may have counted the node's vote since, for a renewal."""
    driver = make_driver(nodes.url)
    held = driver.acquire(driver.claim(ttl=60.0))
    registry, engine = driver.registry, driver.engine
    registry.undo_unanswered, registry.held[held.id_hash] = undo, lambda: None
    nodes.all[0].ask("FLUSHALL")
    nodes.all[0].ask("SCRIPT", "LOAD", probe_redlock.scripts(engine).rejoin.text)
    before = []
    run_before_script(
        engine,
        probe_redlock.scripts(engine).rejoin,
        lambda: (before.append(nodes.all[0].calls()), nodes.pause(0)),
        monkeypatch,
    )
    assert isinstance(driver.renew(held), Alive)
    nodes.resume()

    def executed(command: str) -> int:
        return nodes.all[0].calls().get(command, 0) - before[0].get(command, 0)

    wait_until(lambda: executed("evalsha") == 1)
    if undo:
        wait_until(lambda: executed("eval") == 1)
    else:
        nodes.all[0].ask("PING")  # what was sent behind the rejoin has been executed, too
        assert executed("eval") == 0


def test_late_rejoin_after_release_leaves_no_grant(nodes, proxied_nodes, make_driver, wait_until) -> None:
    """The new holder sends a rejoin to the node that was late. The rejoin arrives only after the release."""
    url, proxies = proxied_nodes
    driver, other = make_driver(url), make_driver(nodes.url)
    claim = claim_queued_on_all_nodes_free_on_most(nodes, driver, other)
    nodes.all[0].ask("SCRIPT", "LOAD", probe_redlock.scripts(driver.engine).rejoin.text)
    held = probe_harness.hold_back(proxies[0], probe_redlock.scripts(driver.engine).rejoin.sha)
    claim = driver.acquire(claim)
    assert held
    assert driver.release(claim)
    wait_until(lambda: nodes.remaining_keys() == [])  # the previous holder's last vote has expired, too
    before = nodes.all[0].calls()["evalsha"]
    held[0]()
    wait_until(lambda: nodes.all[0].calls()["evalsha"] > before)
    wait_until(lambda: nodes.remaining_keys() == [])


# ------------------------------------------------------------- missed releases


def test_node_that_was_down_receives_the_release_after_restart(wait_until) -> None:
    """The node kept its vote on disk, and no other call reaches it meanwhile."""
    rig_or_skip(RedlockRig)
    durable_nodes = RedlockNodes(*AOF_ALWAYS, count=3)
    try:
        with Client(durable_nodes.url) as client:
            lease = client.lock("job", ttl=600).acquire()
            wait_until(lambda: lock_keys(durable_nodes.all[0]))
            durable_nodes.all[0].kill()
            assert lease.release()
            durable_nodes.all[0].start()
            wait_until(lambda: durable_nodes.remaining_keys() == [], 60)
    finally:
        durable_nodes.close()


def test_missed_releases_are_sent_compactly_after_long_downtime(nodes, wait_until) -> None:
    """Each new connection sends all missed releases until the node answers: with the script in each, 120 MB."""
    with Client(nodes.url) as client:
        client.ping()
        nodes.all[0].kill()
        for _ in range(200):
            client.lock("job").acquire().release()
        node = probe_redlock.nodes(client)[0]
        handshake, _, _ = node.handshake()
        assert len(node.missed_releases) >= 200
        assert len(handshake) < 20_000 + 400 * len(node.missed_releases)
        nodes.all[0].start()
        wait_until(lambda: not node.missed_releases)


def test_released_lease_leaves_no_keys_while_nodes_lose_data(nodes, wait_until) -> None:
    """Rejoins to the nodes that lost data overlap with releases."""
    stopped = threading.Event()

    def flush_nodes() -> None:
        rng = random.Random(3)
        while not stopped.is_set():
            rng.choice(nodes.all[:2]).ask("FLUSHALL")

    def work(client: Client, number: int) -> None:
        for _ in range(20):
            with client.lock(f"name-{number}", ttl=60, wait=30) as lease:
                lease.renew()

    flush_thread = threading.Thread(target=flush_nodes)
    flush_thread.start()
    with Client(nodes.url) as client:
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stopped.set()
        flush_thread.join(60)
        wait_until(lambda: nodes.remaining_keys() == [])


def test_killed_clients_leave_only_claims_that_expire(nodes, child, wait_until) -> None:

    processes = [
        child(nodes.url, "hot", 30, seed, "blocking", script=SUPPORT / "contending_child.py") for seed in range(3)
    ]
    for process in processes:
        process.read_message()
    wait_until(lambda: any(lock_keys(node) for node in nodes.all))
    for process in processes:
        process.kill()
    with Client(nodes.url) as client:
        began = time.monotonic()
        with client.lock("hot", wait=20):
            check_elapsed(began, 8)  # the ttl of 1.5 s, and reservations of killed waiters that expire
