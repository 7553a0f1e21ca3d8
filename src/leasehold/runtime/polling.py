"""`select.poll`, also where it is missing: on Windows, and after the monkey-patching of eventlet, which leaves only
`select()`, because that lets other greenlets run."""

from __future__ import annotations

import select
from typing import Final, Protocol, TypeAlias

POLLIN: Final[int] = getattr(select, "POLLIN", 1)
POLLOUT: Final[int] = getattr(select, "POLLOUT", 4)

Pollable: TypeAlias = "int | HasFileno"


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Poll(Protocol):
    def register(self, fd: Pollable, eventmask: int = ..., /) -> None: ...

    def modify(self, fd: Pollable, eventmask: int, /) -> None: ...

    def unregister(self, fd: Pollable, /) -> None: ...

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]: ...


def new_poll() -> Poll:
    """Preferred to `select()`, which fails for descriptors above 1023."""
    return select.poll() if hasattr(select, "poll") else _PollBySelect()


class _PollBySelect:
    def __init__(self) -> None:
        self._events: dict[int, int] = {}

    def register(self, fd: Pollable, eventmask: int = POLLIN | POLLOUT, /) -> None:
        self._events[fd if isinstance(fd, int) else fd.fileno()] = eventmask

    modify = register

    def unregister(self, fd: Pollable, /) -> None:
        del self._events[fd if isinstance(fd, int) else fd.fileno()]

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        read = [fd for fd, events in self._events.items() if events & POLLIN]
        write = [fd for fd, events in self._events.items() if events & POLLOUT]
        seconds = None if timeout is None or timeout < 0 else timeout / 1000
        readable, writable, _ = select.select(read, write, [], seconds)
        found = dict.fromkeys(readable, POLLIN)
        for fd in writable:
            found[fd] = found.get(fd, 0) | POLLOUT
        return list(found.items())
