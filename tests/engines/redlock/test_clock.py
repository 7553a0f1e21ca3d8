"""The Redlock engine on nodes whose clocks are wrong or jump."""

from __future__ import annotations

import threading
import time

import pytest

from harness.rigs.redlock import RedlockRig
from harness.servers.redis import CAN_FAKE_CLOCK
from harness.servers.redlock import RedlockNodes
from leasehold import Client, LeaseLost
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_redlock


@pytest.fixture
def nodes_with_fake_clock():
    rig_or_skip(RedlockRig)
    if not CAN_FAKE_CLOCK:
        pytest.skip("no false clocks: apt-get install faketime")
    nodes = RedlockNodes(fake_clock=True)
    yield nodes
    nodes.close()


@pytest.mark.parametrize("seconds", [60, -3600, 40 * 86_400])
def test_one_node_with_wrong_clock_does_not_affect_locks(nodes_with_fake_clock, seconds) -> None:
    with Client(nodes_with_fake_clock.url) as client, Client(nodes_with_fake_clock.url) as other:
        with client.lock("job") as lease:
            tokens = [lease.token]
        nodes_with_fake_clock.all[2].set_clock(seconds)
        for _ in range(10):
            with client.lock("job", wait=20) as lease:
                assert other.lock("job").try_acquire() is None
                lease.renew()
                tokens.append(lease.token)
            with other.lock("job", wait=20) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))
        assert tokens[-1] < (time.time() + 86_400) * 1e6, "a clock far ahead does not use up the tokens"


def test_one_node_with_wrong_clock_does_not_set_tickets(nodes_with_fake_clock, wait_until) -> None:
    """Otherwise a client that saw this node's queue would propose tickets a year ahead from then on. Each other node
    would clamp them to its own clock, so that one claim had different tickets."""
    nodes_with_fake_clock.all[2].set_clock(365 * 86_400)
    with Client(nodes_with_fake_clock.url) as holder, Client(nodes_with_fake_clock.url) as other:
        lease = holder.lock("job", ttl=60).acquire()
        waiter_thread = threading.Thread(target=lambda: other.lock("job", wait=60).acquire().release())
        waiter_thread.start()
        wait_until(lambda: sum(h.state == "waiting" for h in holder.inspect()) == 1)
        assert other.lock("job").try_acquire() is None  # and sees the queue
        lease.release()
        waiter_thread.join(60)
        for client in (holder, other):
            assert probe_redlock.proposals(client).assign_ticket("next") < (time.time() + 1) * 1e6


def test_client_clock_moves_tokens_at_most_a_minute_ahead(nodes_with_fake_clock, make_driver) -> None:
    """A node that lost its data restarts from its own clock, and would stay below tokens that are far ahead."""
    driver = make_driver(nodes_with_fake_clock.url)
    probe_redlock.use_wall_clock(driver.engine, lambda: time.time() + 3600)
    for _ in range(3):
        held = driver.acquire(driver.claim())
        assert held.token < (time.time() + 61) * 1e6
        assert driver.release(held)


def test_clock_jump_of_a_minority_ends_no_lease(nodes_with_fake_clock) -> None:
    with Client(nodes_with_fake_clock.url) as client, Client(nodes_with_fake_clock.url) as other:
        lease = client.lock("job", ttl=30).acquire()
        nodes_with_fake_clock.all[0].set_clock(60)
        nodes_with_fake_clock.all[1].set_clock(60)
        assert other.lock("job").try_acquire() is None, "two of five nodes are no majority for another claim"
        lease.renew()
        assert lease.release()


def test_clock_jump_of_a_majority_expires_lease_and_token_rises(nodes_with_fake_clock) -> None:
    with Client(nodes_with_fake_clock.url) as client, Client(nodes_with_fake_clock.url) as other:
        lease = client.lock("job", ttl=30).acquire()
        for node in nodes_with_fake_clock.all[:3]:
            node.set_clock(60)
        theirs = other.lock("job").acquire(wait=20)
        assert theirs.token > lease.token
        with pytest.raises(LeaseLost):
            lease.renew()
