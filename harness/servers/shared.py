"""Servers that all processes of one test run share: one for each engine, whatever the number of workers.

`@shared` makes a function that starts a server one that returns the server of the run. If the run has workers, its
controller starts the server when the first worker asks for it, and so the server lives as long as the run, whatever
happens to a worker. A process without a controller starts its own.

Tests on a shared server keep to their own namespace, schema or prefix. A test that pauses, kills or configures a
server, or counts what it does, takes the one of its process instead: `function.own()`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Final, Generic, TypeVar

from harness.servers.folders import scratch

S = TypeVar("S")

_ADDRESS: Final = "LEASEHOLD_TEST_SERVERS"  # the environment variable that tells workers where their controller listens
_controller: _Controller | None = None


class shared(Generic[S]):  # a decorator
    """`@shared` on a function without arguments that starts a server, at the top level of a module."""

    def __init__(self, start: Callable[[], S]) -> None:
        self.__doc__ = start.__doc__
        self._name = f"{start.__module__}:{start.__qualname__}"
        self._mutex = threading.Lock()
        self._start = cache(start)
        self._ask = cache(lambda address: _ask(address, self._name))

    def __call__(self, *, own: bool = False) -> S:
        """The server of the run. `own`: the one of this process, which its tests may break."""
        address = None if own or _controller is not None else os.environ.get(_ADDRESS)
        with self._mutex:
            return self._start() if address is None else self._ask(address)

    def own(self) -> S:
        return self(own=True)


class _Controller:
    """Starts servers for the workers of a run, each when it is first asked for."""

    def __init__(self) -> None:
        self.address = os.path.join(scratch(), "controller")
        self._listener = Listener(self.address, "AF_UNIX")
        threading.Thread(target=self._serve, name="shared-servers", daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _answer(self, connection: Connection) -> None:
        with connection:
            module, _, function = connection.recv().partition(":")
            try:
                answer = getattr(import_module(module), function)()
            except Exception as error:  # for the worker to raise
                answer = error
            with suppress(OSError):  # the worker was killed meanwhile
                connection.send(answer)


def serve_workers() -> None:
    """Make this process the controller: processes that it starts from now on share its servers."""
    global _controller
    _controller = _Controller()
    atexit.register(_controller.close)
    os.environ[_ADDRESS] = _controller.address


def _ask(address: str, name: str) -> Any:
    with Client(address, "AF_UNIX") as connection:
        connection.send(name)
        answer = connection.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer
