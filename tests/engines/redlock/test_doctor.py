"""`leasehold doctor` on real Redlock nodes."""

import pytest

from tests.support.doctor import examine, unsafe


def test_server_that_is_named_twice_is_a_danger(start_nodes):
    nodes = start_nodes()
    first, second, _ = (node.port for node in nodes.all)
    found = examine(f"redlock://127.0.0.1:{first},127.0.0.1:{second},localhost:{second}")
    assert "the same Redis server" in " ".join(each.found for each in found if each.severity == "danger")


@pytest.mark.extended  # a probe gives each node a third of 5 s
def test_durable_nodes_on_machines_of_their_own_have_nothing_unsafe(start_nodes):
    hosts = [f"127.0.0.{number}" for number in (1, 2, 3)]
    nodes = start_nodes("--appendonly", "yes", "--appendfsync", "always", "--bind", *hosts)
    addresses = (f"{host}:{node.port}" for host, node in zip(hosts, nodes.all, strict=True))
    assert unsafe(f"redlock://{','.join(addresses)}") == {}


@pytest.mark.extended
def test_node_that_is_down_leaves_no_spare_one(start_nodes):
    nodes = start_nodes()
    nodes.all[2].kill()
    found = unsafe(nodes.url)
    assert f"127.0.0.1:{nodes.all[2].port} is down" in found["members"]
    assert "2 of 3" in found["quorum"]
