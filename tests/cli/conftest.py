"""The program as a shell runs it: in its own process, on a database of this test."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import PROGRAM, run_program

SECONDS = 60.0  # how long a test waits for what must happen, even on a slow machine


def poll_until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Poll with a deadline; returns what was found."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.01)
    return found


class Shell:
    """Runs `leasehold ...` with one environment; at the end of the test it ends what it started."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("LEASEHOLD", "PYTEST"))}
        self.environment = {**inherited, "LEASEHOLD_URL": url, "COLUMNS": "100", "TERM": "xterm", "HOME": str(folder)}
        self.environment["PYTHONWARNINGS"] = "error"  # warnings would end up on stderr, which the tests compare
        self._started: list[subprocess.Popen[Any]] = []
        self._terminals: list[Terminal] = []

    def __call__(
        self, *arguments: str, stdin: str = "", seconds: float = SECONDS, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return run_program(arguments, self.folder, {**self.environment, **environment}, stdin, seconds)

    def sh(self, line: str, before: str = ":") -> subprocess.CompletedProcess[str]:
        """`leasehold LINE` through /bin/sh, for its redirections; after the command `before`."""
        return subprocess.run(
            ["/bin/sh", "-c", f"{before}; {shlex.join(PROGRAM)} {line}"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *arguments: str, **settings: Any) -> subprocess.Popen[str]:
        """Start it in the background."""
        settings = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
        process = subprocess.Popen([*PROGRAM, *arguments], text=True, cwd=self.folder, env=self.environment, **settings)
        self._started.append(process)
        return process

    def hold(self, name: str, *options: str) -> subprocess.Popen[str]:
        """A process that holds `name` until its stdin is closed, or the test ends."""
        holder = self.start("run", *options, name, "--", "sh", "-c", "echo held; exec cat")
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        return holder

    def json(self, *arguments: str) -> Any:
        done = self("-o", "json", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def terminal(self, *arguments: str, program: list[str] | None = None) -> Terminal:
        terminal = Terminal(program or [*PROGRAM, *arguments], self.folder, self.environment)
        self._terminals.append(terminal)
        return terminal

    def end(self) -> None:
        for process in self._started:
            with suppress(OSError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for terminal in self._terminals:
            terminal.end()


class Terminal:
    """A process with its own terminal, and the user in front of it."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(folder)
                os.execvpe(command[0], command, environment)
            finally:
                os._exit(1)
        self.seen = ""
        self.status: int | None = None

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def read(self, expected: str, seconds: float = SECONDS) -> None:
        """Read until the screen has shown `expected`."""
        end = time.monotonic() + seconds
        while expected not in self.seen:
            remaining = end - time.monotonic()
            assert remaining > 0, f"no {expected!r} on the screen:\n{self.seen}"
            assert self._read_chunk(remaining), f"it ended without {expected!r}:\n{self.seen}"

    def _read_chunk(self, seconds: float) -> bool:
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux, at end of file
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def wait(self, seconds: float = SECONDS) -> int:
        """Its exit code, once everything it wrote has been read."""
        end = time.monotonic() + seconds
        while self._read_chunk(0.05):
            assert time.monotonic() < end, f"it does not end:\n{self.seen}"
            if self._ended():
                break
        poll_until(self._ended, seconds)
        while select.select([self.fd], [], [], 0)[0] and self._read_chunk(0):
            pass
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)

    def _ended(self) -> bool:
        if self.status is None:
            ended_pid, status = os.waitpid(self.pid, os.WNOHANG)
            if ended_pid:
                self.status = status
        return self.status is not None

    def end(self) -> None:
        if not self._ended():
            os.kill(self.pid, signal.SIGKILL)
            poll_until(self._ended)
        os.close(self.fd)


@pytest.fixture(autouse=True)
def default_signal_handlers() -> Iterator[None]:
    """A test run in the background of a script ignores SIGINT and SIGQUIT, and would pass that on."""
    names = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    handlers = [signal.getsignal(signum) for signum in names]
    for signum, handler in zip(names, handlers, strict=True):
        if handler is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    yield
    for signum, handler in zip(names, handlers, strict=True):
        signal.signal(signum, handler)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/locks.db"


@pytest.fixture
def shell(tmp_path: Path, url: str) -> Iterator[Shell]:
    shell = Shell(tmp_path, url)
    yield shell
    shell.end()


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return poll_until


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if sys.platform == "linux":
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    return alive


@pytest.fixture
def planted_modules(tmp_path, monkeypatch) -> Path:
    """The working directory has a package of our name, which creates this file when it is imported."""
    folder, trace = tmp_path / "public", tmp_path / "imported"
    (folder / "leasehold").mkdir(parents=True)
    (folder / "leasehold" / "__init__.py").write_text(f"open({str(trace)!r}, 'w')")
    monkeypatch.chdir(folder)
    return trace
