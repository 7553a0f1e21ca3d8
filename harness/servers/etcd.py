"""An etcd cluster on loopback: one member or three, each a process."""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.request
from collections.abc import Sequence
from typing import Any, ClassVar

from harness.servers.folders import scratch
from harness.servers.process import Server, free_ports, poll, program


class Etcd(Server):
    """One member. `peers`: the peer ports of all members of its cluster, with its own at `index`."""

    package: ClassVar[str] = "etcd-server"
    host: str = "127.0.0.1"

    def __init__(self, folder: str, port: int, peers: Sequence[int], index: int = 0, *options: str) -> None:
        super().__init__(folder, port)
        self.peers, self.index, self.options = list(peers), index, options
        self.data = os.path.join(folder, "data")
        self.clock_ahead = 0  # seconds, from the next start on; of the clocks that count, the only ones etcd uses
        self._program = program("etcd", package=self.package)

    def command(self) -> Sequence[str]:
        client, peer = f"http://{self.host}:{self.port}", f"http://{self.host}:{self.peers[self.index]}"
        names = ",".join(f"e{index}=http://127.0.0.1:{port}" for index, port in enumerate(self.peers))
        defaults = {
            "--name": f"e{self.index}",
            "--data-dir": self.data,
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": names,
            "--initial-cluster-token": f"t{self.peers[0]}",
            "--heartbeat-interval": "100",
            "--election-timeout": "1000",
            "--logger": "zap",
        }
        given = dict(zip(self.options[::2], self.options[1::2], strict=True))
        ahead = ["--monotonic", str(self.clock_ahead), "--boottime", str(self.clock_ahead)]
        prefix = ["unshare", "-T", *ahead, "--fork", "--kill-child", "--"] if self.clock_ahead else []
        return [*prefix, self._program, *(argument for pair in {**defaults, **given}.items() for argument in pair)]

    def ready(self) -> bool:
        """Whether it is healthy, which needs a leader."""
        return '"true"' in self.get("/health")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=2) as answer:
            return str(answer.read().decode())

    def ask(self, path: str, **body: object) -> dict[str, Any]:
        """A call of etcd's own JSON gateway, independent of our gRPC client, to check that one."""
        request = urllib.request.Request(f"http://{self.host}:{self.port}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
        return found

    def keys(self, prefix: str) -> dict[str, int]:
        """All keys with a prefix, and the lease of each."""
        return {key: int(kv.get("lease", 0)) for key, kv in self._range(prefix).items()}

    def values(self, prefix: str) -> dict[str, bytes]:
        """All keys with a prefix, and the value of each."""
        return {key: base64.b64decode(kv.get("value", "")) for key, kv in self._range(prefix).items()}

    def _range(self, prefix: str) -> dict[str, dict[str, str]]:
        begin, end = prefix.encode(), (prefix[:-1] + chr(ord(prefix[-1]) + 1)).encode()
        found = self.ask("kv/range", key=encode_base64(begin), range_end=encode_base64(end))
        return {base64.b64decode(kv["key"]).decode(): kv for kv in found.get("kvs", [])}

    def put(self, key: str, value: str) -> None:
        self.ask("kv/put", key=encode_base64(key.encode()), value=encode_base64(value.encode()))

    def delete(self, key: str) -> None:
        self.ask("kv/deleterange", key=encode_base64(key.encode()))

    def leases(self) -> set[int]:
        return {int(each["ID"]) for each in self.ask("lease/leases").get("leases", [])}

    def granted_ttl(self, lease: int) -> int:
        """The ttl that a lease was created with."""
        return int(self.ask("lease/timetolive", ID=str(lease))["grantedTTL"])

    def revoke(self, lease: int) -> None:
        self.ask("lease/revoke", ID=lease)

    def compact(self) -> None:
        """Compact the whole history."""
        self.ask("kv/compaction", revision=self.ask("kv/range", key=encode_base64(b"x"))["header"]["revision"])

    @property
    def leads(self) -> bool:
        status = self.ask("maintenance/status")
        return bool(status.get("leader") == status["header"]["member_id"])


class Counters:
    """What a member's own metrics counted since this object was made."""

    def __init__(self, member: Etcd) -> None:
        self._member = member
        self._baseline = self._read()

    def _read(self) -> dict[str, float]:
        text = self._member.get("/metrics")
        found = re.findall(r'^grpc_server_(started|msg_received)_total\{.*grpc_method="(\w+)".*\} (\S+)$', text, re.M)
        counted = {f"{what} {method}": float(value) for what, method, value in found}
        events = re.search(r"^etcd_debugging_mvcc_events_total (\S+)$", text, re.M)
        return {**counted, "events": float(events[1]) if events else 0.0}

    def changes(self) -> dict[str, float]:
        now = self._read()
        return {
            name: now[name] - self._baseline.get(name, 0.0) for name in now if now[name] != self._baseline.get(name)
        }

    def calls(self) -> float:
        """Calls without the two kinds of streams."""
        streams = ("started LeaseKeepAlive", "started Watch")
        return sum(n for name, n in self.changes().items() if name.startswith("started") and name not in streams)

    def keep_alives(self) -> float:
        return self.changes().get("msg_received LeaseKeepAlive", 0.0)

    def events(self) -> float:
        return self.changes().get("events", 0.0)


class Cluster:
    """Members of one cluster."""

    def __init__(self, size: int, *options: str) -> None:
        ports = free_ports(2 * size)
        self.members = [Etcd(scratch(), ports[index], ports[size:], index, *options) for index in range(size)]

    def start(self) -> Cluster:
        """Start all members that do not run, on their existing data."""
        for member in self.members:
            member.resume()
            if not member.running:
                member.launch()
        for member in self.members:
            member.await_ready()
        return self

    def leader(self) -> Etcd:
        found: list[Etcd] = []

        def has_one_leader() -> bool:
            found[:] = [member for member in self.members if member.running and member.leads]
            return len(found) == 1

        poll(has_one_leader, 60, lambda: "the cluster has one leader")
        return found[0]

    def followers(self) -> list[Etcd]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{member.port}" for member in self.members)


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
