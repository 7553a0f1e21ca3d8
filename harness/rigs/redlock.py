"""The rigs of the Redlock engine: five real servers, started once per run or process, and a proxy for each of
them on every client machine.

`redlock` has servers with default settings, in real time. Those of `redlock-aof` write every command to an append-only
file, so that a minority may be lost and restarted. If the package faketime is installed, their clocks can be advanced.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from harness.rigs.redis import AOF_ALWAYS, RedisMachine, namespace_keys
from harness.servers.redis import CAN_FAKE_CLOCK, RedisServer
from harness.servers.redlock import COUNT, RedlockNodes
from harness.servers.shared import shared
from leasehold.runtime.threads import boot_clock
from leasehold.testing.conformance.rig import ClientPath, Rig


@shared
def five_nodes() -> tuple[RedisServer, ...]:
    return tuple(RedlockNodes().all)


@cache
def five_nodes_with_aof() -> tuple[RedisServer, ...]:
    return tuple(RedlockNodes(*AOF_ALWAYS, fake_clock=CAN_FAKE_CLOCK).all)


class RedlockRig(Rig):
    scheme = "redlock"
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    can_cut = can_pause = can_kill = can_count = can_restart = True

    own_server: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.nodes = self.shared_nodes()

    @classmethod
    def shared_nodes(cls) -> tuple[RedisServer, ...]:
        return five_nodes(own=cls.own_server)

    def client_path(self) -> ClientPath:
        return RedisMachine(self.nodes, scheme="redlock")

    def pause(self) -> None:
        for node in self.nodes:
            node.pause()

    def resume(self) -> None:
        for node in self.nodes:
            node.resume()

    def restart(self) -> None:
        for node in self.nodes:
            node.restart()

    def residue(self, namespace: str) -> int:
        return sum(len(namespace_keys(node, namespace)) for node in self.nodes)


class RedlockAofRig(RedlockRig):
    """Every grant is on disk before it is answered. The clocks of servers and machines are advanced together."""

    main_rig = RedlockRig
    ttl: ClassVar[float] = 10.0 if CAN_FAKE_CLOCK else 2.0
    can_advance_clock = CAN_FAKE_CLOCK
    can_lose_minority = True

    @classmethod
    def shared_nodes(cls) -> tuple[RedisServer, ...]:
        return five_nodes_with_aof()

    def clock(self) -> float:
        return boot_clock() + (self.nodes[0].clock_offset if CAN_FAKE_CLOCK else 0.0)

    def advance_clock(self, seconds: float) -> None:
        for node in self.nodes:
            node.set_clock(node.clock_offset + seconds)
        for _, machine in self._client_paths:
            assert isinstance(machine, RedisMachine)
            machine.wake_sleepers()

    def lose_minority(self) -> None:
        for node in self.nodes[: COUNT // 2]:
            node.kill()

    def restart_lost_members(self) -> None:
        for node in self.nodes:
            if not node.running:
                node.start()

    def restore_all(self) -> None:
        self.restart_lost_members()
        super().restore_all()
