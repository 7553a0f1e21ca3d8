"""How an engine joins the conformance suite: a rig opens it, connects clients to it, and injects faults.

An engine author writes one subclass of `Rig`, and one of `ClientPath` if single clients can be cut off from the engine
(for a server: a proxy per client). A rig declares what it can do; cases that need an ability it does not declare are
skipped with the name of that ability. Every case gets a new rig and its own namespace. A rig that needs a server starts
it once per process and keeps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import ClassVar, Final, Literal, TypeAlias, TypedDict, TypeVar, Unpack, cast

from leasehold import engines
from leasehold.aio import AsyncClient
from leasehold.blocking import Client
from leasehold.engines.base import Opener
from leasehold.events import Hook
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import Threads, boot_clock
from leasehold.testing.faulty import Faults, faulty

RuntimeName: TypeAlias = Literal["blocking", "asyncio"]
RUNTIMES: Final[tuple[RuntimeName, ...]] = ("blocking", "asyncio")

R = TypeVar("R", bound="type[Rig]")


class Absent(Exception):
    """Software that this rig needs is not installed. Raised by a rig's constructor: a skip, or a failure in CI."""


class ClientArguments(TypedDict, total=False):
    """The arguments of `Client` and `AsyncClient`, except those that the rig decides."""

    namespace: str
    holder: str | None
    ttl: float
    call_timeout: float
    on_event: Hook | None


class ClientPath:
    """One client's own path to the engine, so that it alone can be cut off."""

    def __init__(self, url: str, opener: Opener | None = None) -> None:
        self.url = url
        self.opener = opener or engines.opener(url.partition("://")[0])

    def cut(self) -> None:
        """From now on nothing reaches the engine on this path and nothing comes back, wake-ups included. Silently:
        calls notice at their deadline, and to the engine the client still looks reachable."""
        raise NotImplementedError

    def restore(self) -> None:
        """Undo `cut`. Lost messages stay lost."""
        raise NotImplementedError

    def kill_session(self) -> None:
        """Drop the session or the connections, the one for wake-ups first: the engine knows that it cannot notify this
        client. The client notices when it next uses them, and reconnects."""
        raise NotImplementedError

    def close(self) -> None:
        """Close proxies and similar resources. Clients are closed before."""


class Rig(ABC):
    """The engine for one case."""

    scheme: ClassVar[str]
    ttl: ClassVar[float] = 2.0  # for cases in which it expires; long compared to the engine's own delays
    main_rig: ClassVar[type[Rig] | None] = None  # for a further setup of the same engine: its main rig
    short_call: ClassVar[float] = 0.2  # a call_timeout for cases in which it passes; long compared to a round trip

    # What a case may require by name: `@case(rig={"cut"})`.
    can_cut: ClassVar[bool] = False  # and restore
    can_pause: ClassVar[bool] = False  # and resume
    can_kill: ClassVar[bool] = False  # kill_session()
    can_advance_clock: ClassVar[bool] = False
    can_count: ClassVar[bool] = False  # residue()
    can_restart: ClassVar[bool] = False
    can_lose_minority: ClassVar[bool] = False  # and restart_lost_members

    def __init__(self) -> None:
        self._client_paths: list[tuple[object, ClientPath]] = []

    # ----------------------------------------- what an engine author writes

    @abstractmethod
    def client_path(self) -> ClientPath:
        """A new path to the engine, for one client."""

    def clock(self) -> float:
        """The clock of every client. A rig with `can_advance_clock` moves it."""
        return boot_clock()

    def pause(self) -> None:
        """The whole engine stops answering (SIGSTOP). Requests sent meanwhile may be carried out after `resume`."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def advance_clock(self, seconds: float) -> None:
        """Advance the clocks of the engine and of all clients at once."""
        raise NotImplementedError

    def residue(self, namespace: str) -> int:
        """How many items (keys, rows, nodes) the engine keeps for this namespace, whether or not `inspect` shows them,
        except for a fixed number of token counters."""
        raise NotImplementedError

    def restart(self) -> None:
        """Kill the engine without warning and start it again on its data."""
        raise NotImplementedError

    def lose_minority(self) -> None:
        """Kill as many members as the engine promises to survive."""
        raise NotImplementedError

    def restart_lost_members(self) -> None:
        """Restart the lost members."""
        raise NotImplementedError

    # ------------------------------------------------------- what cases use

    @classmethod
    def can(cls, ability: str) -> bool:
        return bool(getattr(cls, f"can_{ability}"))

    def runtime(self, name: RuntimeName) -> Threads | Loop:
        return Threads(self.clock) if name == "blocking" else Loop(self.clock)

    def join(self, who: object, path: ClientPath) -> None:
        """Remember which client or driver uses this path, for `cut(who)`, `restore(who)` and `kill_session(who)`."""
        self._client_paths.append((who, path))

    def client(self, faults: Faults | None = None, **arguments: Unpack[ClientArguments]) -> Client:
        """A blocking client with a path of its own, through `faults` if any."""
        path, runtime = self.client_path(), Threads(self.clock)
        client = Client(path.url, engine=_opener(path, faults), runtime=runtime, **arguments)
        self.join(client, path)
        return client

    def async_client(self, faults: Faults | None = None, **arguments: Unpack[ClientArguments]) -> AsyncClient:
        """An asyncio client with a path of its own, through `faults` if any."""
        path, runtime = self.client_path(), Loop(self.clock)
        client = AsyncClient(path.url, engine=_opener(path, faults), runtime=runtime, **arguments)
        self.join(client, path)
        return client

    def cut(self, who: object) -> None:
        self._path_of(who).cut()

    def restore(self, who: object) -> None:
        self._path_of(who).restore()

    def kill_session(self, who: object) -> None:
        self._path_of(who).kill_session()

    def _path_of(self, who: object) -> ClientPath:
        return next(path for owner, path in self._client_paths if owner is who)

    def restore_all(self) -> None:
        """Undo the faults that a case has left."""
        if self.can_pause:
            self.resume()
        if self.can_cut:
            for _, path in self._client_paths:
                path.restore()

    def close(self) -> None:
        """Release the resources of this rig. A server shared by rigs stays up."""
        for _, path in self._client_paths:
            path.close()


def _opener(path: ClientPath, faults: Faults | None) -> Opener:
    return path.opener if faults is None else faulty(path.opener, faults)


# By name, because an engine may have several rigs: one server, a cluster. A string is imported on first use, so that a
# rig loads its driver only when it is used.
RIGS: Final[dict[str, str | type[Rig]]] = {
    "memory": "leasehold.testing.conformance.memory_rig:MemoryRig",
}


def rig_type(name: str) -> type[Rig]:
    """The rig with this name."""
    rig = RIGS[name]
    if isinstance(rig, str):
        module, _, attribute = rig.partition(":")
        rig = cast("type[Rig]", getattr(import_module(module), attribute))
    return rig


def register(name: str) -> Callable[[R], R]:
    """Class decorator: register a rig under a name for `conformance_tests(name)` and the meta-test."""

    def enter(rig: R) -> R:
        RIGS[name] = rig
        return rig

    return enter
