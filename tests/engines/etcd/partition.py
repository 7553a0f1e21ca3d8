"""A leader cut off from the other two, each in a network namespace of its own. Run by test_members.py, as root,
inside `unshare -n -m`: nothing of it is left outside.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from leasehold import Client, Unavailable
from leasehold.testing.servers.etcd import Etcd
from leasehold.testing.servers.process import poll, scratch

NET = "10.77.0"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Apart(Etcd):
    """A member with a network of its own, behind a bridge."""

    def __init__(self, place: int) -> None:
        super().__init__(scratch(), 2379, [2380] * 3, place)
        self.host, self.space, self.plug = f"{NET}.{place + 2}", f"m{place}", f"p{place}"
        ip("netns", "add", self.space)
        ip("link", "add", self.plug, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        ip("link", "set", self.plug, "master", "bridge", "up")
        for words in (
            ["addr", "add", f"{self.host}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            ip("-n", self.space, *words)

    def command(self) -> list[str]:
        words = list(super().command())
        names = ",".join(f"e{place}=http://{NET}.{place + 2}:2380" for place in range(3))
        words[words.index("--initial-cluster") + 1] = names
        words[words.index("--initial-cluster-token") + 1] = "partition"
        return ["ip", "netns", "exec", self.space, *words]


def main() -> None:
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge", "type", "bridge")
    ip("addr", "add", f"{NET}.1/24", "dev", "bridge")
    ip("link", "set", "bridge", "up")
    members = [Apart(place) for place in range(3)]
    for member in members:
        member.launch()
    hosts = [f"{member.host}:2379" for member in members]

    def leader(among: list[Apart]) -> Apart | None:
        return next((member for member in among if member.leads), None)

    poll(lambda: leader(members) is not None, 60, lambda: "a leader")
    old = leader(members)
    assert old is not None
    rest = [member for member in members if member is not old]
    with (
        Client(f"etcd://{old.host}:2379", call_timeout=1.0) as minority,
        Client("etcd://" + ",".join(hosts), call_timeout=8.0) as everywhere,
    ):
        held = minority.lock("job", ttl=4).acquire()
        # The old leader and its client stay together, apart from the other members.
        cut = [f"{member.host}/32" for member in rest]
        for host in cut:
            ip("-n", old.space, "route", "add", "blackhole", host)
        for member in rest:
            ip("-n", member.space, "route", "add", "blackhole", f"{old.host}/32")
        began = time.monotonic()
        while time.monotonic() - began < 3.0:
            asked = time.monotonic()
            try:
                granted = minority.lock("other").try_acquire()
            except Unavailable:
                assert time.monotonic() - asked < 1.5, "not refused within the deadline"
            else:
                assert time.monotonic() - began < 2.0, f"a minority granted {granted}"  # before it was cut off for good
                if granted is not None:
                    granted.release()
        poll(lambda: leader(rest) is not None, 30, lambda: "another leader")
        lost_at: list[float] = []
        watching = threading.Thread(target=lambda: held.wait_lost(30) and lost_at.append(time.monotonic()))
        watching.start()
        successor = everywhere.lock("job", ttl=10).acquire(wait=30)
        taken_at = time.monotonic()
        watching.join(30)
        assert lost_at, "the holder in the minority was never told"
        assert lost_at[0] <= taken_at, "two who both trust their lease"
        assert successor.token > held.token
        for host in cut:
            ip("-n", old.space, "route", "del", "blackhole", host)
        for member in rest:
            ip("-n", member.space, "route", "del", "blackhole", f"{old.host}/32")
        assert minority.lock("job").try_acquire() is None if _answers(minority) else True
        successor.verify()
        successor.release()
    for member in members:
        member.kill()


def _answers(client: Client) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            client.ping()
        except Unavailable:
            continue
        return True
    return False


if __name__ == "__main__":
    main()
    sys.exit(0)
