"""The rigs of the Redlock engine: five real servers, started once per process, and a proxy to each for every machine.

`redlock` are servers as they come, in real time. Those of `redlock-aof` have a log of every commit, so that a minority
may be lost and come back; where the package faketime is installed they travel in time.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from leasehold.runtime.threads import boot_clock
from leasehold.testing.redis_rig import ALWAYS, RedisMachine, kept
from leasehold.testing.rig import Machine, Rig
from leasehold.testing.servers.redis import CLOCKS, RedisServer
from leasehold.testing.servers.redlock import COUNT, Nodes


@cache
def five() -> tuple[RedisServer, ...]:
    return tuple(Nodes().all)


@cache
def five_with_log() -> tuple[RedisServer, ...]:
    return tuple(Nodes(*ALWAYS, false_clock=CLOCKS).all)


class RedlockRig(Rig):
    scheme = "redlock"
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    can_cut = can_pause = can_kill = can_count = can_restart = True

    def __init__(self) -> None:
        super().__init__()
        self.nodes = self.started()

    @classmethod
    def started(cls) -> tuple[RedisServer, ...]:
        return five()

    def machine(self) -> Machine:
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
        return sum(len(kept(node, namespace)) for node in self.nodes)


class RedlockAofRig(RedlockRig):
    """What they say they have granted, they have on disk. Their clocks and those of the machines move as one."""

    beside = RedlockRig
    ttl: ClassVar[float] = 10.0 if CLOCKS else 2.0
    can_travel = CLOCKS
    can_lose_minority = True

    @classmethod
    def started(cls) -> tuple[RedisServer, ...]:
        return five_with_log()

    def clock(self) -> float:
        return boot_clock() + (self.nodes[0].ahead if CLOCKS else 0.0)

    def travel(self, seconds: float) -> None:
        for node in self.nodes:
            node.set_clock(node.ahead + seconds)
        for _, machine in self._machines:
            assert isinstance(machine, RedisMachine)
            machine.stir()

    def lose_minority(self) -> None:
        for node in self.nodes[: COUNT // 2]:
            node.kill()

    def regain(self) -> None:
        for node in self.nodes:
            if not node.running:
                node.start()

    def heal(self) -> None:
        self.regain()
        super().heal()
