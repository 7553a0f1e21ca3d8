"""One server as a plain process: it runs on loopback in a folder of its own, and ends with the process that started it.
shared.py passes servers on to other processes, which can use a server but not break it.

A server is killed by its pid, even if the tests themselves are killed: the kernel kills a child when the thread that
started it ends (PR_SET_PDEATHSIG). So one thread, which lives as long as the process, starts all servers.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from glob import glob
from typing import ClassVar, Final, TypeVar

from harness.servers.folders import remove_fake_clock
from leasehold.testing.conformance.rig import Absent

S = TypeVar("S", bound="Server")

_POLL: Final = 0.02
_LOG_TAIL: Final = 2_000  # bytes of a log to show
_PORTS: Final = range(10_000, 32_000)  # below the ephemeral ports, so that no outgoing connection takes one


def free_ports(count: int) -> list[int]:
    """Unused ports, reserved while this process lives: a server may be down for a while and must keep its port."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_PORTS)
        if port not in found and reserve(port) and _unused(port):
            found.append(port)
    return found


def reserve(port: int) -> bool:
    """Reserve a port among all processes that use this module; False if another has it. The reservation is an abstract
    unix socket name, which disappears with the process."""
    if sys.platform != "linux":
        return True
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0leasehold-port-{port}")
    except OSError:
        name.close()
        return False
    name.detach()  # never closed
    return True


def _unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def program(name: str, *, package: str, folders: Sequence[str] = ()) -> str:
    """The path of a program. Raises `Absent` with the package to install. Servers are often not on the PATH."""
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    if found := shutil.which(name, path=path):
        return found
    raise Absent(f"{name} is not installed: run apt-get install {package}")


def poll(what: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    """Wait until `what` returns true; an OSError counts as false. `why` describes the condition in the error."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError, subprocess.SubprocessError):
            if what():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"timed out after {seconds:.0f} s while waiting until {why()}")
        time.sleep(_POLL)


class Server(ABC):
    """A server that can be killed, paused and started again on its data."""

    package: ClassVar[str]  # the Debian package
    start_timeout: ClassVar[float] = 60.0  # seconds to be ready, even on a busy machine
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, folder: str, port: int) -> None:
        self.folder, self.port = folder, port
        self.log = os.path.join(folder, "log")
        self._process: subprocess.Popen[bytes] | None = None
        self._pid_elsewhere: int | None = None  # of a server that another process has started
        self._paused_pids: list[int] = []

    def __getstate__(self) -> dict[str, object]:
        """For another process, which must leave the server as it is."""
        return {**self.__dict__, "_process": None, "_pid_elsewhere": self.pid}

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The command line, the same at every start."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the server accepts requests. May raise OSError if not yet."""

    def environment(self) -> Mapping[str, str]:
        """Variables to add to the environment, such as for a fake clock."""
        return {}

    def user(self) -> str | None:
        """The user to run as when the tests run as root; None: the user of the tests."""
        return None

    @property
    def pid(self) -> int:
        if self._pid_elsewhere is not None:
            return self._pid_elsewhere
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        if self._pid_elsewhere is not None:
            return os.path.exists(f"/proc/{self._pid_elsewhere}")
        return self._process is not None and self._process.poll() is None

    def start(self: S) -> S:
        """Start the server on its existing data, and wait until it is ready."""
        self.launch()
        self.await_ready()
        return self

    def launch(self) -> None:
        """Start without waiting: a cluster member is not ready before the others run."""
        self._refuse_if_shared()
        _starter().submit(self._spawn).result()
        atexit.register(self.kill)

    def await_ready(self) -> None:
        poll(self._check_ready, self.start_timeout, self.describe)

    def stop(self) -> None:
        """Stop the server gracefully; kill it after 10 s."""
        self._refuse_if_shared()
        if not self.running:
            return
        self.resume()
        assert self._process is not None
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL the server and its children. Returns when it has ended."""
        self._refuse_if_shared()
        atexit.unregister(self.kill)
        if self._process is None:
            return
        pids = [self.pid, *descendants(self.pid)] if self.running else []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for pid in pids:
            remove_fake_clock(pid)
        self._paused_pids.clear()

    def restart(self) -> None:
        """Kill the server without warning, and start it again on its data."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP the server and its children: clients get no more answers. Returns when every thread has stopped,
        because a running one may still answer for a moment."""
        self._refuse_if_shared()
        if self._paused_pids or not self.running:
            return
        self._paused_pids = [self.pid, *descendants(self.pid)]
        for pid in self._paused_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        poll(lambda: not any(map(_is_running, self._paused_pids)), 10, lambda: f"{type(self).__name__} has stopped")

    @property
    def paused(self) -> bool:
        return bool(self._paused_pids)

    def resume(self) -> None:
        paused_pids, self._paused_pids = self._paused_pids, []
        for pid in paused_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _refuse_if_shared(self) -> None:
        if self._pid_elsewhere is not None:
            raise RuntimeError(
                f"this {type(self).__name__} is shared by all workers of the run: a test that breaks its server needs "
                "the one of its process (harness/servers/shared.py)"
            )

    def log_tail(self) -> str:
        """The end of the server's log."""
        with open(self.log, "rb") as log:
            log.seek(max(0, os.path.getsize(self.log) - _LOG_TAIL))
            return log.read().decode(errors="replace")

    def _check_ready(self) -> bool:
        if not self.running:
            raise RuntimeError(f"the process ended before {self.describe()}")
        return self.ready()

    def describe(self) -> str:
        """For an error: what was expected, and the end of the log."""
        return f"{type(self).__name__} on port {self.port} was ready; the end of its log:\n{self.log_tail()}"

    def _spawn(self) -> None:
        prefix = ["setpriv", "--pdeathsig", "KILL"]
        user = self.user() if os.getuid() == 0 else None
        if user:
            prefix += ["--reuid", user, "--regid", user, "--init-groups"]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*prefix, "--", *self.command()],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment()},
                start_new_session=True,
            )


@cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "leasehold-servers")


def _is_running(pid: int) -> bool:
    """Whether any thread of a process is neither stopped nor dead."""
    for thread in os.listdir(f"/proc/{pid}/task") if os.path.isdir(f"/proc/{pid}") else ():
        with suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] not in "TtZX":
                return True
    return False


def descendants(pid: int) -> list[int]:
    """All children of a process, whichever of its threads has started them, and their children."""
    found: list[int] = []
    for children in glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(children) as listed:
            for child in map(int, listed.read().split()):
                found += [child, *descendants(child)]
    return found
