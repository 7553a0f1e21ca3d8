"""Look up host names by a deadline. `getaddrinfo` has none: while no name server answers it blocks for ten seconds, or
for as long as the system's configuration says.

So a thread calls it, and callers wait for that thread until their deadline. Callers that look up the same name at the
same time share a thread: silent name servers cost one thread for each name, however many calls give up.

Of the addresses of a name, those to which no connection could be opened the last time come last. A call gives up a
silent address only with its deadline, so else the next call would begin with the same one again.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

from leasehold.runtime.base import Runtime

Target: TypeAlias = "tuple[int, Any]"  # a family, and an address that `connect` takes

_MAX_LOOK_UPS: Final = 100  # at a time: a hostile cluster can announce any number of names
_MAX_FAILED: Final = 1000  # addresses that are remembered


class LookUp:
    """A name that is being looked up."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._result: list[Target] | OSError | None = None  # None: no answer yet
        self._callbacks: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        return self._result is not None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call this once, on any thread. It must not raise."""
        with _state.mutex:
            if self._result is None:
                self._callbacks.append(callback)
                return
        callback()

    def targets(self, port: int) -> list[Target]:
        """Where to connect to. Raises OSError, also if there is no answer yet."""
        if self._result is None:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer to the name look-up in time")
        if isinstance(self._result, OSError):
            raise type(self._result)(*self._result.args)  # each caller adds its own traceback
        found = [(family, (address[0], port, *address[2:])) for family, address in self._result]
        return sorted(found, key=_failed.__contains__) if len(found) > 1 else found

    def run(self) -> None:
        try:
            result: list[Target] | OSError = _ask_system(self.host)
        except OSError as error:
            result = error.with_traceback(None)
        except Exception as error:  # such as that of an audit hook; without a result, all callers would wait for ever
            result = OSError(None, f"cannot be looked up: {type(error).__name__}")
        with _state.mutex:
            self._result = result
            if _state.under_way.get(self.host) is self:
                del _state.under_way[self.host]
        for callback in self._callbacks:
            callback()


# The order is that of the failures; any thread may change it, in atomic steps.
_failed: dict[Target, None] = {}


def note_connect(target: Target, succeeded: bool) -> None:
    """Whether a connection could be opened to this address."""
    if succeeded:
        _failed.pop(target, None)
        return
    _failed[target] = None
    if len(_failed) > _MAX_FAILED:
        with suppress(StopIteration, KeyError, RuntimeError):  # another thread changed it meanwhile
            del _failed[next(iter(_failed))]


class _State:
    def __init__(self) -> None:
        self.mutex = threading.RLock()  # a finaliser may interrupt a thread that holds it
        self.under_way: dict[str, LookUp] = {}


_state = _State()


def _after_fork_in_child() -> None:
    _state.__init__()  # type: ignore[misc]  # the threads are the parent's, and one may have held the mutex


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def start_look_up(host: str) -> LookUp:
    """Raises OSError if too many are under way."""
    look_up = LookUp(host)
    if _is_ip_address(host):
        look_up.run()
        return look_up
    try:
        with _state.mutex:
            if (found := _state.under_way.get(host)) is not None:
                return found
            if len(_state.under_way) >= _MAX_LOOK_UPS:
                raise socket.gaierror(socket.EAI_AGAIN, "too many host names are being looked up")
            _state.under_way[host] = look_up
        threading.Thread(target=look_up.run, name="leasehold-look-up", daemon=True).start()
    except RuntimeError:  # the interpreter exits, and this may be the watchdog's thread, which has releases to send
        look_up.run()
    except BaseException:  # interrupted: perhaps no thread will ever answer
        with _state.mutex:
            if _state.under_way.get(host) is look_up:
                del _state.under_way[host]
        raise
    return look_up


def resolve_blocking(host: str, port: int, seconds: float) -> list[Target]:
    """Where to connect to, in the order of preference of the system. Raises OSError."""
    look_up = start_look_up(host)
    done = threading.Lock()
    done.acquire()
    look_up.when_done(done.release)
    done.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX)))
    return look_up.targets(port)


def addresses_blocking(host: str, seconds: float) -> list[str]:
    """The IP addresses of a host. Raises OSError."""
    return _addresses(resolve_blocking(host, 0, seconds))


async def resolve(host: str, runtime: Runtime, deadline: float) -> list[str]:
    """The IP addresses of a host. Raises OSError."""
    look_up = start_look_up(host)
    signal = runtime.signal()
    look_up.when_done(signal.set)
    await signal.wait(deadline - runtime.now())
    return _addresses(look_up.targets(0))


def _addresses(targets: list[Target]) -> list[str]:
    return list(dict.fromkeys(str(address[0]) for _, address in targets))


def _ask_system(host: str) -> list[Target]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is empty or too long
        raise OSError(None, f"not a valid host name: {error}") from None
    return [(each[0], each[4]) for each in found]


def _is_ip_address(host: str) -> bool:
    """Whether the system needs no name server for it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):  # ValueError: it contains a NUL character
            socket.inet_pton(family, host)
            return True
    return False
