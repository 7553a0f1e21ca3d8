"""The Redlock engine where one thing overtakes another: offers and releases, interrupts and answers, turns."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress

import pytest

from harness.rigs.redlock import RedlockRig
from harness.servers.redlock import RedlockNodes, lock_keys
from leasehold import Client, LeaseLost
from leasehold.core.timing import HEARTBEAT_INTERVAL
from leasehold.model import Busy
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.suite import rig_or_skip


@pytest.fixture
def nodes():
    rig_or_skip(RedlockRig)  # a skip where there is no Redis
    nodes = RedlockNodes()
    yield nodes
    nodes.close()


@pytest.fixture
def proxied_nodes(nodes):
    url, proxies = nodes.proxied()
    yield url, proxies
    for proxy in proxies:
        proxy.close()


def run_before_script(engine, script, action, monkeypatch) -> None:
    """Have something else happen just before an engine asks a script, once."""
    original_round, done = engine._broadcaster.run_round, []

    async def round_(requested_script, *args, **kwargs):
        if requested_script is script and not done:
            done.append(True)
            action()
        return await original_round(requested_script, *args, **kwargs)

    monkeypatch.setattr(engine._broadcaster, "run_round", round_)


# ------------------------------------------------------------------ interrupts


def test_answer_after_an_interrupt_is_not_used_for_another_claim(nodes, make_driver, monkeypatch) -> None:
    """Ctrl-C while the nodes that did not answer are given up: what they still say is about another claim, and name."""
    driver, other = make_driver(nodes.url), make_driver(nodes.url)
    driver.engine._proposals._lead = 1_000_000  # whenever they carry it out, they agree to the token proposed
    assert driver.release(driver.acquire(driver.claim("first")))  # connected
    other.acquire(other.claim("second"))
    nodes.pause(0, 1, 2)

    def interrupt(*_args: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(driver.engine._requests, "undo_attempt", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_sync(driver.engine.attempt(driver.claim("first"), driver.deadline(0.3)))
    nodes.resume()
    for node in driver.engine._nodes:
        node.on_answer()  # none of them rests
    assert isinstance(driver.attempt(driver.claim("second")), Busy)


# ---------------------------------------------------------- offers and releases


def test_rejoin_during_release_leaves_no_grant(nodes, wait_until, monkeypatch) -> None:
    """The release of another thread overtakes the offer to a node that forgot."""
    with Client(nodes.url) as client:
        lease = client.lock("job", ttl=60).acquire()
        engine, released = client._core._engine, []
        nodes.all[0].ask("FLUSHALL")
        run_before_script(engine, engine._scripts.rejoin, lambda: released.append(lease.release()), monkeypatch)
        with suppress(LeaseLost):
            lease.renew()
        assert released == [True]
        wait_until(lambda: nodes.remaining_keys() == [], 8)


def hold_back(proxy, script) -> list:
    """Keep what a connection sends from a request of the script on, until what is put into the list is called."""
    held, forward = [], proxy._forward

    def forward_unless_held(link, side) -> None:
        if side is link.client_side and not held and script.sha in side.recv(65_536, socket.MSG_PEEK):
            proxy._selector.unregister(side)
            held.append(lambda: proxy._selector.register(side, selectors.EVENT_READ, link))
        else:
            forward(link, side)

    proxy._forward = forward_unless_held
    return held


def claim_queued_on_all_nodes_free_on_most(nodes, driver, other):
    """Nodes that heard of the last release later than others still have the winner in line."""
    previous_claim = other.acquire(other.claim(ttl=2.0))
    claim = driver.claim(queue=True, ttl=60.0)
    assert isinstance(driver.attempt(claim), Busy)
    requests = other.engine._requests
    calls = {n: [requests.release(requests.name_keys("", "job"), previous_claim)] for n in range(1, len(nodes.all))}
    result = run_sync(
        other.engine._broadcaster.run_round(requests.scripts.release, calls, other.deadline(), 2.0, lambda _: False)
    )
    assert list(result.replies.values()) == [[1]] * 4
    return claim


def test_late_rejoin_after_release_leaves_no_grant(nodes, proxied_nodes, make_driver, wait_until) -> None:
    """The winner offers its part to a node that was late. The offer is on its way until all is over."""
    url, proxies = proxied_nodes
    driver, other = make_driver(url), make_driver(nodes.url)
    claim = claim_queued_on_all_nodes_free_on_most(nodes, driver, other)
    nodes.all[0].ask("SCRIPT", "LOAD", driver.engine._scripts.rejoin.text)
    held = hold_back(proxies[0], driver.engine._scripts.rejoin)
    claim = driver.acquire(claim)
    assert held
    assert driver.release(claim)
    wait_until(lambda: nodes.remaining_keys() == [], 10)  # also what the first holder had there, by its ttl
    before = nodes.all[0].calls()["evalsha"]
    held[0]()
    wait_until(lambda: nodes.all[0].calls()["evalsha"] > before)
    wait_until(lambda: nodes.remaining_keys() == [], 3)


# ------------------------------------------------------------ answers that are lost


def test_single_attempt_with_lost_answer_leaves_no_claim(nodes, proxied_nodes, make_driver, wait_until) -> None:
    """The node took it, and the connection broke: nobody knows, and the claim is answered by the others."""
    url, proxies = proxied_nodes
    driver, other = make_driver(url), make_driver(nodes.url)
    nodes.pause(0)
    other.acquire(other.claim(ttl=60.0))  # of the other four
    nodes.resume()
    wait_until(lambda: not lock_keys(nodes.all[0]))
    run_sync(driver.engine.ping(driver.deadline()))

    def cut(outward: bool, data: bytes) -> None:
        if not outward and data.startswith(b"*2"):
            proxies[0].reset()
            proxies[0]._target = ("127.0.0.1", 1)  # nobody there

    proxies[0].watch = cut
    assert isinstance(driver.attempt(driver.claim(ttl=60.0)), Busy)
    assert lock_keys(nodes.all[0])
    proxies[0].watch, proxies[0]._target = None, ("127.0.0.1", nodes.all[0].port)
    wait_until(lambda: not lock_keys(nodes.all[0]), HEARTBEAT_INTERVAL + 5)


def test_missed_releases_are_sent_compactly_after_long_downtime(nodes, wait_until) -> None:
    """What it missed is sent on every new connection until it answers: with the script in each, that took 120 MB."""
    with Client(nodes.url) as client:
        client.ping()
        nodes.all[0].kill()
        for _ in range(200):
            client.lock("job").acquire().release()
        node = client._core._engine._nodes[0]
        handshake, _, _ = node.handshake()
        assert len(node.missed_releases) >= 200
        assert len(handshake) < 20_000 + 400 * len(node.missed_releases)
        nodes.all[0].start()
        wait_until(lambda: not node.missed_releases, 10)


# -------------------------------------------------------------------------- turns


def test_majority_reservation_is_not_delayed_by_recheck_times(nodes, make_driver) -> None:
    """A majority gave it its turn. What the others say, and what was said before, is no reason to sleep on."""
    driver, other = make_driver(nodes.url), make_driver(nodes.url)
    other.acquire(other.claim())
    claim = driver.claim(queue=True)
    assert isinstance(driver.attempt(claim), Busy)
    subscriptions, waiter = driver.engine._subscriptions, driver.registry.waiting[claim.id_hash]
    now = driver.runtime.now()
    for number in range(3):
        subscriptions._schedule_majority_recheck(driver.registry, claim.id_hash, number, now + 20, now)
    for number in range(3):
        subscriptions.on_node_reservation(claim.id_hash, number)
    subscriptions._schedule_majority_recheck(driver.registry, claim.id_hash, 3, now + 20, now)
    assert waiter.recheck_at is not None
    assert waiter.recheck_at - now < 1
