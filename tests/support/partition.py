"""Cut a leader off from the other two members of its cluster: `partition.py etcd`, or `partition.py zookeeper`.

The tests of both engines run this as root inside `unshare -n -m`, so nothing is left outside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import pytest

from harness.servers.hosts import EtcdMember, Host, ZookeeperMember, create_bridge
from harness.servers.process import poll
from leasehold import Client, Lease, LeaseholdError, Unavailable
from tests.support.paths import child_environment
from tests.support.timing import check_elapsed

TTL: Final = 4.0
ELECTION_TIMEOUT: Final = 40.0  # seconds that an election may take


def run(engine: str) -> None:
    """Called by a test. Skips the test if the machine does not allow network namespaces."""
    unshare = ["unshare", "-n", "-m"]
    if os.getuid() != 0 or subprocess.run([*unshare, "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace may be made here")
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "tests.support.partition", engine],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Member(Protocol):
    netns_host: Host

    @property
    def leads(self) -> bool: ...
    def launch(self) -> None: ...
    def kill(self) -> None: ...


KINDS: Final[dict[str, tuple[Callable[[Host, int], Member], str]]] = {
    "etcd": (EtcdMember, "etcd://{}"),
    "zookeeper": (ZookeeperMember, "zookeeper://{}/?session=" + str(TTL)),
}


def find_leader(members: Sequence[Member]) -> Member:
    leaders: list[Member] = []

    def has_one_leader() -> bool:
        leaders[:] = [member for member in members if is_leader(member)]
        return len(leaders) == 1

    poll(has_one_leader, ELECTION_TIMEOUT, lambda: "a leader")
    return leaders[0]


def is_leader(member: Member) -> bool:
    with suppress(OSError):  # not started yet
        return member.leads
    return False


# ------------------------------------------------------------------ the test


def main(engine: str) -> None:
    create_bridge()
    make, url = KINDS[engine]
    members = [make(Host(index), index) for index in range(3)]
    for member in members:
        member.launch()
    try:
        old_leader = find_leader(members)
        run_partition(old_leader, [member for member in members if member is not old_leader], url)
    finally:
        for member in members:
            member.kill()


def run_partition(old_leader: Member, other_members: list[Member], url: str) -> None:
    """The old leader and `minority` are cut off from the other members and `majority`."""
    addresses = ",".join(member.netns_host.address for member in other_members)
    with (
        Client(url.format(old_leader.netns_host.address), call_timeout=1.0) as minority,
        Client(url.format(addresses), call_timeout=ELECTION_TIMEOUT) as majority,
    ):
        minority_lease = minority.lock("job", ttl=TTL).acquire(wait=20)
        lost_at, leases, acquired_at = list[float](), list[Lease](), list[float]()

        def acquire_in_majority() -> None:
            leases.append(majority.lock("job", ttl=60).acquire(wait=3 * ELECTION_TIMEOUT))
            acquired_at.append(time.monotonic())

        threads = [
            threading.Thread(target=lambda: minority_lease.wait_lost(60) and lost_at.append(time.monotonic())),
            threading.Thread(target=acquire_in_majority),
        ]
        for thread in threads:
            thread.start()
        poll(lambda: len(majority.inspect("job")) == 2, 60, lambda: "the next claim is queued")
        old_leader.netns_host.partition_from([member.netns_host for member in other_members])
        assert_refused(minority, 3.0)
        for thread in threads:
            thread.join(3 * ELECTION_TIMEOUT)
        assert lost_at, "the holder in the minority never lost its lease"
        assert leases, "the client of the majority never acquired the lock"
        assert lost_at[0] <= acquired_at[0], "two clients trusted their leases at once"
        assert leases[0].token > minority_lease.token
        assert find_leader(other_members) is not old_leader
        assert_refused(minority, 1.0)
        old_leader.netns_host.partition_from([member.netns_host for member in other_members], "del")
        poll(lambda: is_reachable(minority), ELECTION_TIMEOUT, lambda: "the old leader is one of them again")
        assert minority.lock("job").try_acquire() is None
        leases[0].verify()
        assert leases[0].release()


def assert_refused(minority: Client, seconds: float) -> None:
    """For `seconds`, every attempt is refused within the deadline."""
    end = time.monotonic() + seconds
    while (asked_at := time.monotonic()) < end:
        try:
            granted = minority.lock("other").try_acquire()
        except Unavailable:
            check_elapsed(asked_at, 1.5, "not refused within the deadline")
        else:
            raise AssertionError(f"a minority granted {granted}")


def is_reachable(client: Client) -> bool:
    with suppress(LeaseholdError):
        client.ping()
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1])
