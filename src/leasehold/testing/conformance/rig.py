"""How an engine joins the conformance suite: a rig makes it, gives machines onto it, and hurts it on demand.

An engine author writes one subclass of `Rig`, and one of `ClientPath` where clients can be parted from the engine one
by one (a proxy per client, for a server). What a rig cannot do it does not declare, and the cases that need it are
skipped with the name of that ability. Rigs are made anew for every case: one that needs a server starts it once per
process and keeps it, each case has a namespace of its own."""

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
    """What this rig needs is not installed here. Raised by a rig's constructor: a skip, or in CI a failure."""


class ClientArguments(TypedDict, total=False):
    """What `Client` and `AsyncClient` take, but for what the rig decides."""

    namespace: str
    holder: str | None
    ttl: float
    call_timeout: float
    on_event: Hook | None


class ClientPath:
    """One client's own way to the engine, so that it can be hurt alone."""

    def __init__(self, url: str, opener: Opener | None = None) -> None:
        self.url = url
        self.opener = opener or engines.opener(url.partition("://")[0])

    def cut(self) -> None:
        """From now on nothing of this machine reaches the engine and nothing comes back, wake-ups included. Silent:
        calls find out at their deadline, and to the engine the client looks as reachable as before."""
        raise NotImplementedError

    def restore(self) -> None:
        """Undo `cut`. What was lost stays lost."""
        raise NotImplementedError

    def kill_session(self) -> None:
        """Drop the session, or the connections, wake-ups first: the engine knows that it cannot tell this client
        anything. The client finds out when it next uses them, and connects anew."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of proxies and the like; clients are closed by then."""


class Rig(ABC):
    """One engine for one case."""

    scheme: ClassVar[str]
    ttl: ClassVar[float] = 2.0  # what cases use that let it pass; long against the engine's own delays
    main_rig: ClassVar[type[Rig] | None] = None  # the main rig of an engine that this one runs in yet another way
    short_call: ClassVar[float] = 0.2  # a call_timeout for cases that let it pass; long against an answer

    # What a case may ask for by name: `@case(rig={"cut"})`.
    can_cut: ClassVar[bool] = False  # and mend
    can_pause: ClassVar[bool] = False  # and resume
    can_kill: ClassVar[bool] = False  # kill_session
    can_advance_clock: ClassVar[bool] = False
    can_count: ClassVar[bool] = False  # residue
    can_restart: ClassVar[bool] = False
    can_lose_minority: ClassVar[bool] = False  # and regain

    def __init__(self) -> None:
        self._machines: list[tuple[object, ClientPath]] = []

    # ------------------------------------------------- what an author writes

    @abstractmethod
    def client_path(self) -> ClientPath:
        """A new machine onto the engine."""

    def clock(self) -> float:
        """The clock of every machine. A rig that travels moves it."""
        return boot_clock()

    def pause(self) -> None:
        """The whole engine falls silent (SIGSTOP). Requests sent meanwhile may be carried out after `resume`."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def advance_clock(self, seconds: float) -> None:
        """Move the clocks of the engine and of all machines at once."""
        raise NotImplementedError

    def residue(self, namespace: str) -> int:
        """How many things (keys, rows, nodes) the engine keeps for this namespace, whether or not `inspect` shows
        them; the fixed number of token counters apart."""
        raise NotImplementedError

    def restart(self) -> None:
        """Kill the engine without warning and start it again on its data."""
        raise NotImplementedError

    def lose_minority(self) -> None:
        """Kill as many members as the engine claims to survive."""
        raise NotImplementedError

    def restart_lost_members(self) -> None:
        """Start the lost members again."""
        raise NotImplementedError

    # ------------------------------------------------------- what cases use

    @classmethod
    def can(cls, ability: str) -> bool:
        return bool(getattr(cls, f"can_{ability}"))

    def runtime(self, name: RuntimeName) -> Threads | Loop:
        return Threads(self.clock) if name == "blocking" else Loop(self.clock)

    def join(self, who: object, machine: ClientPath) -> None:
        """Remember whose machine this is, for `cut(who)` and its like."""
        self._machines.append((who, machine))

    def client(self, faults: Faults | None = None, **arguments: Unpack[ClientArguments]) -> Client:
        """A blocking client on a machine of its own, through `faults` if any."""
        machine, runtime = self.client_path(), Threads(self.clock)
        client = Client(machine.url, engine=_opener(machine, faults), runtime=runtime, **arguments)
        self.join(client, machine)
        return client

    def async_client(self, faults: Faults | None = None, **arguments: Unpack[ClientArguments]) -> AsyncClient:
        """Its asyncio twin."""
        machine, runtime = self.client_path(), Loop(self.clock)
        client = AsyncClient(machine.url, engine=_opener(machine, faults), runtime=runtime, **arguments)
        self.join(client, machine)
        return client

    def cut(self, who: object) -> None:
        self._machine_of(who).cut()

    def restore(self, who: object) -> None:
        self._machine_of(who).restore()

    def kill_session(self, who: object) -> None:
        self._machine_of(who).kill_session()

    def _machine_of(self, who: object) -> ClientPath:
        return next(machine for owner, machine in self._machines if owner is who)

    def restore_all(self) -> None:
        """Undo whatever a case did and left so."""
        if self.can_pause:
            self.resume()
        if self.can_cut:
            for _, machine in self._machines:
                machine.restore()

    def close(self) -> None:
        """Give back what this rig took. A server shared by rigs stays up."""
        for _, machine in self._machines:
            machine.close()


def _opener(machine: ClientPath, faults: Faults | None) -> Opener:
    return machine.opener if faults is None else faulty(machine.opener, faults)


# By name, because an engine may have several: as one server, as a cluster. A text is imported on first use, so that no
# rig loads a driver nobody asked for.
RIGS: Final[dict[str, str | type[Rig]]] = {
    "memory": "leasehold.testing.conformance.memory_rig:MemoryRig",
}


def rig_type(name: str) -> type[Rig]:
    """The rig of that name."""
    rig = RIGS[name]
    if isinstance(rig, str):
        module, _, attribute = rig.partition(":")
        rig = cast("type[Rig]", getattr(import_module(module), attribute))
    return rig


def register(name: str) -> Callable[[R], R]:
    """Class decorator: make a rig known to `conformance(name)` and to the meta-test."""

    def enter(rig: R) -> R:
        RIGS[name] = rig
        return rig

    return enter
