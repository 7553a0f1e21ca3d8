"""The Redlock engine on nodes whose clocks are wrong, or step."""

from __future__ import annotations

import threading
import time

import pytest

from leasehold import Client, LeaseLost
from leasehold.testing.redlock_rig import RedlockRig
from leasehold.testing.servers.redis import CLOCKS
from leasehold.testing.servers.redlock import Nodes
from leasehold.testing.suite import made


@pytest.fixture
def clocked():
    made(RedlockRig)
    if not CLOCKS:
        pytest.skip("no false clocks: apt-get install faketime")
    nodes = Nodes(false_clock=True)
    yield nodes
    nodes.close()


@pytest.mark.parametrize("seconds", [60, -3600, 40 * 86_400])
def test_one_node_with_a_wrong_clock_is_no_matter(clocked, seconds) -> None:
    with Client(clocked.url) as client, Client(clocked.url) as other:
        with client.lock("job") as lease:
            tokens = [lease.token]
        clocked.all[2].set_clock(seconds)
        for _ in range(10):
            with client.lock("job", wait=5) as lease:
                assert other.lock("job").try_acquire() is None
                lease.renew()
                tokens.append(lease.token)
            with other.lock("job", wait=5) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))
        assert tokens[-1] < (time.time() + 86_400) * 1e6, "one that is far ahead does not use up the tokens"


def test_one_node_with_a_wrong_clock_does_not_make_the_tickets(clocked, until) -> None:
    """Else all who saw its line once would say ever after that they came a year later than they did, and each of the
    other nodes would make of that what its own clock allows: no two of them the same."""
    clocked.all[2].set_clock(365 * 86_400)
    with Client(clocked.url) as holder, Client(clocked.url) as other:
        lease = holder.lock("job", ttl=60).acquire()
        waiting = threading.Thread(target=lambda: other.lock("job", wait=60).acquire().release())
        waiting.start()
        until(lambda: sum(h.state == "waiting" for h in holder.inspect()) == 1)
        assert other.lock("job").try_acquire() is None  # and sees the line
        lease.release()
        waiting.join(20)
        for client in (holder, other):
            assert client._desk._engine._numbers.ticket("next") < (time.time() + 1) * 1e6


def test_a_clients_clock_takes_tokens_a_minute_ahead_at_most(clocked, bare) -> None:
    """From where a node that forgets could not go on."""
    seat = bare(clocked.url)
    seat.engine._numbers._wall = lambda: time.time() + 3600
    for _ in range(3):
        held = seat.takes(seat.claim())
        assert held.token < (time.time() + 61) * 1e6
        assert seat.release(held)


def test_a_jump_of_one_nodes_clock_ends_no_lease(clocked) -> None:
    with Client(clocked.url) as client, Client(clocked.url) as other:
        lease = client.lock("job", ttl=30).acquire()
        clocked.all[0].set_clock(60)
        clocked.all[1].set_clock(60)
        assert other.lock("job").try_acquire() is None, "two of five let go: not enough for another"
        lease.renew()
        assert lease.release()


def test_a_jump_of_a_majority_ends_leases_early_and_the_token_tells(clocked) -> None:
    with Client(clocked.url) as client, Client(clocked.url) as other:
        lease = client.lock("job", ttl=30).acquire()
        for node in clocked.all[:3]:
            node.set_clock(60)
        theirs = other.lock("job").acquire(wait=5)
        assert theirs.token > lease.token
        with pytest.raises(LeaseLost):
            lease.renew()
