"""The Redlock engine when messages are late or out of order: rejoins and releases, answers, reservations."""

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
    rig_or_skip(RedlockRig)  # skips if Redis is not installed
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
    """Run `action` once, just before the engine first calls `script`."""
    original_round, done = engine._broadcaster.run_round, []

    async def round_(requested_script, *args, **kwargs):
        if requested_script is script and not done:
            done.append(True)
            action()
        return await original_round(requested_script, *args, **kwargs)

    monkeypatch.setattr(engine._broadcaster, "run_round", round_)


# ------------------------------------------------------------------ interrupts


def test_answer_after_an_interrupt_is_not_used_for_another_claim(nodes, make_driver, monkeypatch) -> None:
    """Ctrl-C while the engine undoes the attempt on silent nodes: their late answers belong to that claim and name."""
    driver, other = make_driver(nodes.url), make_driver(nodes.url)
    driver.engine._proposals._lead = 1_000_000  # so high that late nodes, too, answer with the proposed token
    assert driver.release(driver.acquire(driver.claim("first")))  # connects
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
        node.on_answer()  # ends its back-off
    assert isinstance(driver.attempt(driver.claim("second")), Busy)


# --------------------------------------------------------- rejoins and releases


def test_rejoin_during_release_leaves_no_grant(nodes, wait_until, monkeypatch) -> None:
    """The release of another thread overtakes the rejoin to a node that lost its data."""
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
    """Hold back requests from the first call of `script` on. Calling the item of the returned list forwards them."""
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
    """A claim that waits on all nodes after its predecessor was released on all nodes but the first."""
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
    """The new holder sends a rejoin to the node that was late. The rejoin arrives only after the release."""
    url, proxies = proxied_nodes
    driver, other = make_driver(url), make_driver(nodes.url)
    claim = claim_queued_on_all_nodes_free_on_most(nodes, driver, other)
    nodes.all[0].ask("SCRIPT", "LOAD", driver.engine._scripts.rejoin.text)
    held = hold_back(proxies[0], driver.engine._scripts.rejoin)
    claim = driver.acquire(claim)
    assert held
    assert driver.release(claim)
    wait_until(lambda: nodes.remaining_keys() == [], 10)  # the previous holder's last vote has expired, too
    before = nodes.all[0].calls()["evalsha"]
    held[0]()
    wait_until(lambda: nodes.all[0].calls()["evalsha"] > before)
    wait_until(lambda: nodes.remaining_keys() == [], 3)


# --------------------------------------------------- lost answers, missed releases


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
            proxies[0]._target = ("127.0.0.1", 1)  # no server there

    proxies[0].watch = cut
    assert isinstance(driver.attempt(driver.claim(ttl=60.0)), Busy)
    assert lock_keys(nodes.all[0])
    proxies[0].watch, proxies[0]._target = None, ("127.0.0.1", nodes.all[0].port)
    wait_until(lambda: not lock_keys(nodes.all[0]), HEARTBEAT_INTERVAL + 5)


def test_missed_releases_are_sent_compactly_after_long_downtime(nodes, wait_until) -> None:
    """Each new connection sends all missed releases until the node answers: with the script in each, 120 MB."""
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


# ------------------------------------------------------------------- reservations


def test_majority_reservation_is_not_delayed_by_recheck_times(nodes, make_driver) -> None:
    """A majority reserved the name for the waiter. Later re-check times of other nodes must not delay its attempt."""
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
