"""Several servers of which any can say where things are: sentinels, or the nodes of a cluster.

They are asked one after the other, each on a connection of its own for the moment and for no longer than its share of
the time, until enough have answered. Whoever kept silent is asked last the next time.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Final, TypeVar

from leasehold.engines.redis.server import BROKEN, Server, described
from leasehold.engines.redis.settings import Unreached
from leasehold.errors import ConfigError, LeaseholdError
from leasehold.runtime.base import Runtime, Signal, settle
from leasehold.runtime.streams import Address

T = TypeVar("T")

_LONGEST: Final = 1.0  # seconds that one of them may take, however much time there is


def place(host: str, port: bytes | str | int) -> Address:
    """As a server named it: ValueError if that is none."""
    if not host or not host.isprintable() or len(host) > 253 or not 0 < int(port) < 65_536:
        raise ValueError("no place to connect to")
    return Address(host, int(port))


class Door(Server):
    """One of them. It need not be fit for locks."""

    asks: ClassVar = (("PING",),)

    def __init__(
        self, address: Address, tls: ssl.SSLContext | None, user: str = "", password: str = "", *, title: str
    ) -> None:
        super().__init__(address, tls, user, password)
        self._title = title
        self.silent = False  # the last time

    def __str__(self) -> str:
        return f"the {self._title} at {self.address}"

    def _meet(self, replies: list[Any]) -> None:
        self._signed_in(replies)

    async def ask(self, packed: bytes, count: int, runtime: Runtime, deadline: float) -> list[Any]:
        stream = await self.open(runtime, deadline)
        try:
            return list(await settle(stream.calls(packed, count, deadline)))
        except BROKEN as error:
            raise Unreached(f"{self} did not answer: {described(error)}", engine="redis") from error
        finally:
            stream.close()


class Around(list[T]):
    """What they answered, and why the others did not."""

    def __init__(self) -> None:
        super().__init__()
        self.silence: list[str] = []
        self.refusals = 0  # of those, such as no waiting mends

    def why(self) -> str:
        return "; ".join(self.silence)


class Together:
    """One asks for all who need the same answer at the same moment. Of one twin."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._guard = runtime, runtime.guard()
        self._busy = False
        self._waiting: list[Signal] = []

    async def ask(self, work: Callable[[], Awaitable[object]], deadline: float) -> None:
        """Do it, or wait for whoever is doing it. How that went is theirs to know: look, and ask again."""
        with self._guard:
            mine, self._busy = not self._busy, True
            if not mine:
                self._waiting.append(signal := self._runtime.signal())
        if not mine:
            if not await signal.wait(deadline - self._runtime.now()):
                raise Unreached("where names are was not found out in time", engine="redis")
            return
        try:
            await work()
        finally:
            with self._guard:
                self._busy, waiting, self._waiting = False, self._waiting, []
            for each in waiting:
                each.set()


async def ask_around(
    doors: Iterable[Door],
    request: tuple[bytes, int],
    read: Callable[[Door, list[Any]], T],
    enough: Callable[[list[T]], bool],
    runtime: Runtime,
    deadline: float,
) -> Around[T]:
    """`request`: the bytes, and how many replies they get. `read` may raise what makes an answer none."""
    found: Around[T] = Around()
    waiting = sorted(doors, key=lambda door: door.silent)
    for count, door in enumerate(waiting):
        now = runtime.now()
        share = (deadline - now) / (len(waiting) - count + 1)  # one is left for what comes after
        try:
            found.append(read(door, await door.ask(*request, runtime, now + min(share, _LONGEST))))
        except LeaseholdError as error:
            door.silent = True
            found.silence.append(str(error))
            found.refusals += isinstance(error, ConfigError)
            continue
        door.silent = False
        if enough(found):
            break
    return found
