"""`redis+cluster://`: many servers, each with some of the slots that names fall into.

The bucket of a name is its hash tag, so all its keys are in one slot, and every verb is still one script on one server.
Which server has a slot is read from any node (`CLUSTER SLOTS`), and corrected by what servers say (MOVED). While a slot
moves, a server refuses a script that does not find all its keys (ASK, TRYAGAIN), and no script of ours ever does: see
`Requests.name`. It is asked again until its deadline: nobody decides about a name of which only a part is there (E1).
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from leasehold.engines.redis.doors import Door, Together, ask_around, place
from leasehold.engines.redis.scripts import SHARDED
from leasehold.engines.redis.server import Server, pack, says
from leasehold.engines.redis.settings import Refused, Unreached
from leasehold.engines.redis.several import Places
from leasehold.engines.redis.topology import Rejected, found_again, wire_to
from leasehold.engines.redis.wire import Wire
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.runtime.streams import Address

_SLOTS: Final = 16_384
_REQUEST: Final = (pack("CLUSTER", "INFO") + pack("CLUSTER", "SLOTS"), 2)
_HOPS: Final = 3  # redirections that are followed without a pause
_STALE: Final = 1.0  # seconds after which one that has moved is a reason to read the whole map


def slot_of(tag: str) -> int:
    """Of a hash tag, with its braces."""
    return crc_hqx(tag[1:-1].encode(), 0) % _SLOTS


class Map(NamedTuple):
    """As one node sees it. A higher epoch is later; one that is not well has lost sight of the others."""

    well: bool
    epoch: int
    owners: list[Address | None]


class Slots:
    """Which server has which slot, as far as this client knows. Shared by its twins and its listeners."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._servers: dict[Address, Server] = {}
        self._doors: dict[Address, Door] = {}
        self._epoch = 0
        self.owners: list[Address | None] = [None] * _SLOTS
        self.doubted = True  # some node is to be asked before that is used
        self.found_at = 0.0

    def server(self, address: Address) -> Server:
        """Always the same for an address."""
        return self._servers.get(address) or self._servers.setdefault(address, self._places.serve(address))

    async def find(self, runtime: Runtime, deadline: float, first: Address | None = None) -> None:
        """Read the map anew from the first node that is well. Raises Unreached with what each of them said."""
        known = [self._door(address) for address in dict.fromkeys(self.owners) if address is not None]
        start = int(runtime.fraction() * len(known))  # clients do not all ask the same
        ring = [*known[start:], *known[:start], *self._places.doors]
        if first is not None:
            ring.insert(0, self._door(first))
        doors = {door.address: door for door in ring}.values()
        found = await ask_around(doors, _REQUEST, self._read, self._good, runtime, deadline)
        if not found:
            text = f"no node of the Redis cluster says where names are: {found.why()}"
            raise Refused(text) if found.refusals == len(doors) else Unreached(text, engine="redis")
        best = max(found, key=lambda each: each[:2])
        self._epoch, self.owners, self.doubted, self.found_at = best.epoch, best.owners, False, runtime.now()

    def moved(self, error: Exception, server: Server) -> Address:
        """Note what a MOVED says, by this server: without a host it means another port of its own."""
        try:
            _, slot, where = str(error).split()[:3]
            host, _, port = where.rpartition(":")
            address = place(host.strip("[]") or server.address.host, port)
            number = range(_SLOTS)[int(slot)]
        except (ValueError, IndexError) as bad:
            raise Unreached(f"the cluster answered {str(error)[:80]!r}, which leads nowhere", engine="redis") from bad
        self.owners[number] = address
        return address

    def _good(self, found: list[Map]) -> bool:
        return found[-1].well and found[-1].epoch >= self._epoch

    def _door(self, address: Address) -> Door:
        return self._doors.get(address) or self._doors.setdefault(address, self._places.door(address))

    def _read(self, door: Door, replies: list[Any]) -> Map:
        info, slots = replies
        for reply in replies:
            if says(reply, "ERR This instance has cluster support disabled"):
                raise ConfigError(f"{door} is not part of a cluster: for a server alone the URL begins with redis://")
            if isinstance(reply, Exception):
                raise door.refusal(reply)
        owners: list[Address | None] = [None] * _SLOTS
        try:
            lines = info.decode().split("\r\n")
            facts = {name: value for name, _, value in (line.partition(":") for line in lines)}
            for first, last, (host, port, *_), *_ in slots:
                name = host.decode() if host else ""
                address = place(name if name not in ("", "?") else door.address.host, port)
                owners[first : last + 1] = [address] * (last + 1 - first)
            if len(owners) != _SLOTS:
                raise ValueError("a slot out of range")
            return Map(facts["cluster_state"] == "ok", int(facts["cluster_current_epoch"]), owners)
        except (TypeError, ValueError, KeyError, AttributeError) as bad:
            raise Unreached(f"{door} answered what no node of a cluster answers", engine="redis") from bad


class Cluster:
    """The topology."""

    publishing = SHARDED
    follows = True
    survives: Literal["nothing"] = "nothing"  # a replica that is promoted need not have the last grant

    def __init__(self, slots: Slots, runtime: Runtime) -> None:
        self._slots, self._runtime, self._together = slots, runtime, Together(runtime)
        self._wires: dict[Address, Wire] = {}

    def wire(self, tag: str) -> Wire | None:
        if self._slots.doubted:
            return None
        owner = self._slots.owners[slot_of(tag)]
        if owner is None:
            return None
        return self._wires.get(owner) or self._to(owner)

    def _to(self, address: Address) -> Wire:
        return self._wires.setdefault(address, wire_to(self._slots.server(address), self._runtime))

    async def find(self, deadline: float) -> None:
        await self._together.ask(lambda: self._slots.find(self._runtime, deadline), deadline)

    async def wires(self, deadline: float) -> Iterable[Wire]:
        while self._slots.doubted:  # another may have asked for this one, in vain
            await self.find(deadline)
        return [self._to(address) for address in dict.fromkeys(self._slots.owners) if address is not None]

    async def elsewhere(self, tag: str, rejected: Rejected, turn: int, deadline: float) -> Wire | None:
        error, slots = rejected.error, self._slots
        if not rejected.follows:
            return None
        if rejected.wire is None or not says(error, "MOVED") or turn >= _HOPS:
            return await found_again(self, self._runtime, tag, rejected, turn, deadline)
        if self._runtime.now() > slots.found_at + _STALE:  # it may not be the only slot that has moved
            with suppress(Unreached):
                await self.find(deadline)
        return self._to(slots.moved(error, rejected.wire.server))  # not every node knows it yet

    def doubt(self, wire: Wire) -> None:
        self._slots.doubted = True

    def replaced(self, wire: Wire) -> bool:
        return False  # a node knows which slots it has

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()

    def after_fork(self) -> None:
        self._together = Together(self._runtime)
        for wire in self._wires.values():
            wire.after_fork()
