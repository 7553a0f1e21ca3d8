"""`leasehold doctor` on real Redlock nodes."""

from tests.support.doctor import examine


def test_server_that_is_named_twice_is_a_danger(start_nodes):
    nodes = start_nodes()
    first, second, _ = (node.port for node in nodes.all)
    found = examine(f"redlock://127.0.0.1:{first},127.0.0.1:{second},localhost:{second}")
    assert "the same Redis server" in " ".join(each.found for each in found if each.severity == "danger")
