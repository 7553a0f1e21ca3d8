"""The health probe on real servers: with and without `mntr`, without a quorum, and paused."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.rigs.zookeeper import ZookeeperRig
from harness.servers.folders import scratch
from harness.servers.process import free_ports
from harness.servers.zookeeper import Zookeeper, four_letter_command
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.health import RUNTIMES, probe, probe_silent, storage_of


@contextmanager
def own_server(whitelist: str) -> Iterator[Zookeeper]:
    rig_or_skip(ZookeeperRig)  # skips if ZooKeeper is not installed
    server = Zookeeper(scratch(), free_ports(1)[0], {"4lw.commands.whitelist": whitelist})
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_probe_of_one_server_reads_srvr_and_mntr(server, url, runtime):
    health = probe(url, runtime=runtime)
    assert (health.engine, health.up, health.has_leader, health.error) == ("zookeeper", True, True, None)
    assert (health.voting, health.reachable) == (1, 1)
    (member,) = health.members
    assert (member.member, member.role, member.notes) == (f"127.0.0.1:{server.port}", "standalone", ())
    assert f"Zookeeper version: {member.version}" in four_letter_command(server.port, "srvr")
    assert member.version.replace(".", "").isdecimal()  # without the commit that it was built from
    assert storage_of(member, "database").used > 0
    assert storage_of(member, "database").used_ratio is None
    assert member.disk_seconds >= 0
    assert member.round_trip > 0
    assert (member.clock_offset, member.memory, member.evictions) == (None, None, None)
    assert (member.anonymous, member.certificate_left) == (True, None)


@pytest.mark.parametrize(
    ("user", "options", "anonymous"),
    [("", "", True), ("app:secret@", "", False), ("app:secret@", "?acl=world:anyone:cdrwa", True)],
)
def test_nodes_that_everybody_may_change_are_seen(server, root, user, options, anonymous):
    (member,) = probe(f"zookeeper://{user}127.0.0.1:{server.port}{root}{options}").members
    assert member.anonymous is anonymous


def test_probe_opens_no_session(server, url):
    before = (
        server.counter("num_alive_connections"),
        four_letter_command(server.port, "srvr").partition("Zxid: ")[2][:20],
    )
    probe(url)
    after = (
        server.counter("num_alive_connections"),
        four_letter_command(server.port, "srvr").partition("Zxid: ")[2][:20],
    )
    assert after == before


def test_server_without_mntr_says_so_and_omits_its_fields():
    with own_server("srvr") as server:
        server.start()
        health = probe(f"zookeeper://127.0.0.1:{server.port}")
        (member,) = health.members
        assert (health.up, member.role) == (True, "standalone")
        assert member.notes == ("mntr is not in 4lw.commands.whitelist",)
        assert (member.storage, member.unapplied_entries) == ((), None)
        assert member.version


@pytest.mark.extended
def test_ensemble_shows_members_and_its_lost_quorum(three_servers, url_of, wait_until):
    url = url_of(*three_servers.members)
    wait_until(lambda: (found := probe(url)).voting == found.reachable == 3, every=0.2)
    health = probe(url)
    assert health.up
    assert sorted(member.role for member in health.members) == ["follower", "follower", "leader"]
    three_servers.follower().kill()
    wait_until(lambda: (found := probe(url)).up and (found.voting, found.reachable) == (3, 2), every=0.2)
    three_servers.leader().kill()
    wait_until(lambda: not probe(url).up, every=0.2)
    health = probe(url)
    assert (health.has_leader, health.voting, health.reachable) == (False, None, None)
    assert "no quorum" in health.error


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_paused_server_is_down_by_the_deadline(runtime):
    with own_server("*") as server:
        server.start()
        server.pause()
        health = probe_silent(f"zookeeper://user:hunter2-secret@127.0.0.1:{server.port}", runtime)
        assert (health.up, health.has_leader, health.members[0].up) == (False, None, False)
        assert health.members[0].member == f"127.0.0.1:{server.port}"
        assert "hunter2" not in repr(health)
