"""Wake-ups in a cluster: a channel for each bucket, heard on the server that has the bucket.

Only there does a script know who listens. A client has a connection, and a thread, for each node that has a bucket of
its names. When a slot moves, its server ends the subscription and it is made anew where the slot went; when a node
fails, where the map has it next, which the listener itself finds out: its waiters have no reason to ask anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final
from weakref import ref

import hiredis

from leasehold.book import Book, every
from leasehold.engines.redis.cluster import Slots, slot_of
from leasehold.engines.redis.listener import Ear, Hearing, Listener
from leasehold.engines.redis.requests import keys
from leasehold.engines.redis.scripts import SHARDED
from leasehold.engines.redis.server import pack, says
from leasehold.engines.redis.settings import Unreached
from leasehold.runtime.base import Runtime
from leasehold.runtime.loopstream import LoopStream
from leasehold.runtime.streams import NUDGED, Address, Nudge, SocketStream

_SENT_ON: Final = 3  # times that a channel is sent on before its node takes a pause


class Channel(Hearing):
    """Of one bucket."""

    def __init__(self, tag: str, shards: Shards) -> None:
        super().__init__()
        self.tag, self.slot, self._shards = tag, slot_of(tag), shards
        self.node: Node | None = None  # that listens for it, or tries to
        self.sent_on = 0  # times in a row, from node to node
        self.ended = False  # by its server

    @property
    def failing(self) -> bool:
        return self.node is None or self.node.failing

    def start(self) -> None:
        if self.node is None:
            self._shards.place(self)

    def shut(self) -> None:
        if self.node is not None:
            self.node.shut()


class Shards:
    """All ears of a client."""

    def __init__(self, slots: Slots, runtime: Runtime, book: Book, patience: float) -> None:
        self.slots, self._runtime, self._book, self._patience = slots, runtime, ref(book), patience
        self._channels: dict[str, Channel] = {}
        self._nodes: dict[Address, Node] = {}

    def at(self, tag: str) -> Ear:
        return self._channels.get(tag) or self._channels.setdefault(tag, Channel(tag, self))

    def place(self, channel: Channel) -> None:
        """Have it listened for where the map says; nobody known: whoever asks next finds out."""
        owner, book = self.slots.owners[channel.slot], self._book()
        if owner is None or book is None:
            channel.node = None
            channel.wake()
            return
        node = self._nodes.get(owner)
        if node is None:
            node = self._nodes.setdefault(owner, Node(owner, self, self._runtime, book, self._patience))
        node.take(channel)

    def close(self) -> None:
        for _, node in every(self._nodes):
            node.close()

    def after_fork(self) -> None:
        for _, node in every(self._nodes):
            node.after_fork()
        self._nodes, self._channels = {}, {}


class Node(Listener):
    """One connection: all channels of one server."""

    def __init__(self, address: Address, shards: Shards, runtime: Runtime, book: Book, patience: float) -> None:
        self._address, self._shards = address, shards
        self._taken: dict[str, Channel] = {}  # by tag
        super().__init__(shards.slots.server(address), SHARDED, runtime, book, patience)

    def after_fork(self) -> None:
        super().after_fork()
        if self.nudge is not None:
            self.nudge.close()
        self._asked: deque[Channel] = deque()  # subscriptions on their way, in order
        self._new: deque[Channel] = deque()  # to be asked for
        self._fresh: set[str] = set()  # tags of those just confirmed
        self._back = False  # some of them after they had been ended here

    def take(self, channel: Channel) -> None:
        """From any thread."""
        with self._guard:
            channel.node = self
            self._taken[channel.tag] = channel
            self._new.append(channel)
            if not self._running:
                self.nudge = Nudge()
            self.start()
            nudge = self.nudge
        if nudge is not None:
            nudge.set()

    def close(self) -> None:
        super().close()
        if self.nudge is not None:
            self.nudge.set()

    # ------------------------------------------------------- on its thread

    def _run(self, ended: list[bool]) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        nudge, listen = self.nudge, super()._run(ended)

        async def run(runtime: Runtime) -> None:
            try:
                await listen(runtime)
            finally:
                if nudge is not None:
                    nudge.close()

        return run

    async def _open(self, runtime: Runtime) -> SocketStream | LoopStream:
        """First see what is still here; with nothing left its thread ends."""
        if self._shards.slots.doubted:
            await self._find(runtime)
        owners = self._shards.slots.owners
        for tag, channel in every(self._taken):
            if owners[channel.slot] != self._address:
                self._give_away(tag, channel)
        with self._guard:
            if not self._taken:
                self._ended.append(True)
                self._running = False
                raise Unreached("no name is here any more", engine="redis")
            self._asked.clear()
            self._new = deque(self._taken.values())
        try:
            return await super()._open(runtime)
        except Unreached:
            self._shards.slots.doubted = True
            raise

    def _give_away(self, tag: str, channel: Channel) -> None:
        del self._taken[tag]
        channel.on = False
        self._shards.place(channel)

    def _wishes(self, client: str) -> bytes:
        wishes = []
        while self._new:
            channel = self._new.popleft()
            if self._taken.get(channel.tag) is channel:
                self._asked.append(channel)
                wishes.append(pack("SSUBSCRIBE", f"{SHARDED.channel(channel.tag)}{client}"))
        return b"".join(wishes)

    async def _hear(self, said: Any, runtime: Runtime) -> None:
        if isinstance(said, hiredis.ReplyError) and self._asked:
            channel = self._asked.popleft()
            if not says(said, "MOVED"):
                raise self._server.refusal(said)
            self._shards.slots.moved(said, self._shards.slots.server(self._address))
            channel.sent_on += 1
            if channel.sent_on > _SENT_ON:
                raise Unreached(f"{self._server} sends on what was sent to it: {said}", engine="redis")
            self._give_away(channel.tag, channel)
        elif isinstance(said, list) and len(said) == 3 and said[0] == b"sunsubscribe":
            self._shards.slots.doubted = True
            tag = bytes(said[1] or b"").decode(errors="replace").partition(":")[2].rpartition(":c:")[0]
            if (gone := self._taken.get(tag)) is not None:
                gone.on, gone.ended = False, True
                self._new.append(gone)
        else:
            await super()._hear(said, runtime)
            if self._back and not self._asked:
                await self._see_whose(runtime)
        if said is NUDGED or self._new:
            self._ask_for_new(runtime)

    async def _find(self, runtime: Runtime) -> None:
        with suppress(Unreached):
            await self._shards.slots.find(runtime, runtime.now() + self._patience, self._address)

    async def _see_whose(self, runtime: Runtime) -> None:
        """It ended subscriptions and took them again: so does a primary that became a replica, where nobody counts
        them. It knows itself who has the slots now."""
        self._back = False
        await self._find(runtime)
        owners = self._shards.slots.owners
        if any(owners[channel.slot] != self._address for _, channel in every(self._taken)):
            raise Unreached(f"names have gone from {self._server}", engine="redis")

    def _ask_for_new(self, runtime: Runtime) -> None:
        if (book := self._book()) is not None and self._stream is not None and (wishes := self._wishes(book.client)):
            self._stream.send(wishes, runtime.now() + self._patience)

    def _subscribed(self, book: Book) -> None:
        self._heard, self._failing = True, False
        if self._asked:
            channel = self._asked.popleft()
            self._back |= channel.ended
            channel.on, channel.ended, channel.sent_on = True, False, 0
            channel.wake()
            self._fresh.add(channel.tag)
        if self._asked:
            return
        fresh, self._fresh = self._fresh, set()
        for mark, waiter in every(book.waiting):  # their turn may have come while nobody could tell them
            if keys(waiter.claim.namespace, waiter.claim.name)[0].partition(":")[2] in fresh:
                book.deliver("head", mark, 0.0, None)

    def _hung_up(self) -> None:
        for _, channel in every(self._taken):
            channel.on = False
            if self._failing:
                channel.wake()
