"""A leader cut off from the other two members, each on a host of its own: `partition.py etcd`, or `zookeeper`.

Run by the tests of both engines, as root, inside `unshare -n -m`: nothing of it is left outside. Hosts are network
namespaces on one bridge. Proxies would not do for ZooKeeper: its members tell each other where they are, and get round
them.
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

from leasehold import Client, Lease, LeaseholdError, Unavailable
from leasehold.testing.servers.etcd import Etcd
from leasehold.testing.servers.process import poll, scratch
from leasehold.testing.servers.zookeeper import Zookeeper

NET: Final = "10.77.0"
TTL: Final = 4.0
ELECTED: Final = 40.0  # seconds that an election may take


def run(engine: str) -> None:
    """From a test: in spaces of its own, or skipped where none may be made."""
    unshare = ["unshare", "-n", "-m"]
    if os.getuid() != 0 or subprocess.run([*unshare, "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace may be made here")
    done = subprocess.run([*unshare, sys.executable, __file__, engine], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------- hosts


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Host:
    """A network of its own, behind the bridge."""

    def __init__(self, place: int) -> None:
        self.address, self._space, plug = f"{NET}.{place + 2}", f"m{place}", f"p{place}"
        ip("netns", "add", self._space)
        ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        ip("link", "set", plug, "master", "bridge", "up")
        for words in (
            ["addr", "add", f"{self.address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            ip("-n", self._space, *words)

    def inside(self, words: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._space, *words]

    def part(self, others: Sequence[Host], verb: str = "add") -> None:
        """Silence both ways. `verb`: "del" ends it."""
        for other in others:
            ip("-n", self._space, "route", verb, "blackhole", f"{other.address}/32")
            ip("-n", other._space, "route", verb, "blackhole", f"{self.address}/32")


def bridge() -> None:
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge", "type", "bridge")
    ip("addr", "add", f"{NET}.1/24", "dev", "bridge")
    ip("link", "set", "bridge", "up")


# ------------------------------------------------------------------ members


class Member(Protocol):
    at: Host

    @property
    def leads(self) -> bool: ...
    def launch(self) -> None: ...
    def kill(self) -> None: ...


class EtcdMember(Etcd):
    def __init__(self, at: Host, place: int) -> None:
        super().__init__(scratch(), 2379, [2380] * 3, place)
        self.at, self.host = at, at.address

    def command(self) -> list[str]:
        words = list(super().command())
        names = ",".join(f"e{place}=http://{NET}.{place + 2}:2380" for place in range(3))
        words[words.index("--initial-cluster") + 1] = names
        words[words.index("--initial-cluster-token") + 1] = "partition"
        return self.at.inside(words)


class ZookeeperMember(Zookeeper):
    def __init__(self, at: Host, place: int) -> None:
        self.at, self.host = at, at.address
        view = {f"server.{each + 1}": f"{NET}.{each + 2}:2888:3888" for each in range(3)}
        limits = {"initLimit": 10, "syncLimit": 5, "standaloneEnabled": "false"}
        super().__init__(scratch(), 2181, {**limits, **view})
        self.name(place + 1)

    def command(self) -> list[str]:
        return self.at.inside(super().command())

    @property
    def leads(self) -> bool:
        return self.mode() == "leader"


KINDS: Final[dict[str, tuple[Callable[[Host, int], Member], str]]] = {
    "etcd": (EtcdMember, "etcd://{}"),
    "zookeeper": (ZookeeperMember, "zookeeper://{}/?session=" + str(TTL)),
}


def leader(among: Sequence[Member]) -> Member:
    found: list[Member] = []

    def one() -> bool:
        found[:] = [member for member in among if led(member)]
        return len(found) == 1

    poll(one, ELECTED, lambda: "a leader")
    return found[0]


def led(member: Member) -> bool:
    with suppress(OSError):  # not yet there
        return member.leads
    return False


# ----------------------------------------------------------------- the story


def main(engine: str) -> None:
    bridge()
    make, url = KINDS[engine]
    members = [make(Host(place), place) for place in range(3)]
    for member in members:
        member.launch()
    try:
        lonely = leader(members)
        cut_off(lonely, [member for member in members if member is not lonely], url)
    finally:
        for member in members:
            member.kill()


def cut_off(lonely: Member, rest: list[Member], url: str) -> None:
    """The old leader and its client stay together, apart from the other members and theirs."""
    many = ",".join(member.at.address for member in rest)
    with (
        Client(url.format(lonely.at.address), call_timeout=1.0) as minority,
        Client(url.format(many), call_timeout=ELECTED) as majority,
    ):
        held = minority.lock("job", ttl=TTL).acquire(wait=20)
        lost_at, leases, taken_at = list[float](), list[Lease](), list[float]()

        def follow() -> None:
            leases.append(majority.lock("job", ttl=60).acquire(wait=3 * ELECTED))
            taken_at.append(time.monotonic())

        threads = [
            threading.Thread(target=lambda: held.wait_lost(60) and lost_at.append(time.monotonic())),
            threading.Thread(target=follow),
        ]
        for thread in threads:
            thread.start()
        poll(lambda: len(majority.inspect("job")) == 2, 20, lambda: "the next stands in line")
        lonely.at.part([member.at for member in rest])
        refused(minority, 3.0)
        for thread in threads:
            thread.join(3 * ELECTED)
        assert lost_at, "the holder in the minority was never told"
        assert leases, "nobody followed"
        assert lost_at[0] <= taken_at[0], "two who both trust their lease"
        assert leases[0].token > held.token
        assert leader(rest) is not lonely
        refused(minority, 1.0)
        lonely.at.part([member.at for member in rest], "del")
        poll(lambda: answers(minority), ELECTED, lambda: "the old leader is one of them again")
        assert minority.lock("job").try_acquire() is None
        leases[0].verify()
        assert leases[0].release()


def refused(minority: Client, seconds: float) -> None:
    """For so long: within the deadline, and nothing is ever granted."""
    end = time.monotonic() + seconds
    while (asked := time.monotonic()) < end:
        try:
            granted = minority.lock("other").try_acquire()
        except Unavailable:
            assert time.monotonic() - asked < 1.5, "not refused within the deadline"
        else:
            raise AssertionError(f"a minority granted {granted}")


def answers(client: Client) -> bool:
    with suppress(LeaseholdError):
        client.ping()
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1])
