"""The health probe on real nodes: a majority decides."""

import pytest

from tests.support.health import RUNTIMES, probe, probe_silent, settings_found


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_redlock_is_up_while_a_majority_answers(start_nodes, runtime):
    nodes = start_nodes()
    health = probe(nodes.url, runtime=runtime)
    assert (health.engine, health.up, health.voting, health.reachable, health.error) == ("redlock", True, 3, 3, None)
    assert [settings_found(member) for member in health.members] == [{"appendonly": "no"}] * 3
    nodes.pause(0)
    health = probe_silent(nodes.url, runtime, others_answer=True)
    assert (health.up, health.reachable, [member.up for member in health.members]) == (True, 2, [False, True, True])
    nodes.pause(1)
    health = probe_silent(nodes.url, runtime, others_answer=True)
    assert (health.up, health.reachable) == (False, 1)
    assert "only 1 of 3 nodes can vote" in health.error


def test_replica_in_place_of_a_node_cannot_vote(start_nodes, wait_until):
    nodes = start_nodes()
    nodes.all[2].ask("REPLICAOF", "127.0.0.1", nodes.all[0].port)
    wait_until(lambda: probe(nodes.url).reachable == 2, every=0.1)
