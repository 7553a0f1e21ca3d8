"""Runs a demo: its temporary directory, its engine, its processes and its timeline."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from leasehold.errors import LeaseholdError, Unavailable

FACTS_VARIABLE: Final = "LEASEHOLD_DEMO_FACTS"
_TIMEOUT: Final = 60.0  # seconds for a process to end, however busy the machine
_LOCKS: Final = "locks.db"  # the file of the demo's own engine
FAILED: Final = "failed"  # the event of a process that an error of Leasehold has ended


WorkerMessage: TypeAlias = dict[str, Any]
# Called with the seconds since this half began, the worker (empty: the demo itself), and the text.
TimelinePrinter: TypeAlias = Callable[[float, str, str], None]


class DemoFailed(LeaseholdError):
    """A process of the demo failed or ended when it was still needed."""


class WorkerProcess:
    """A process with a role. It reports by JSON lines on stdout, and continues when it reads a line from stdin."""

    def __init__(self, runner: DemoRunner, who: str, process: subprocess.Popen[str]) -> None:
        self.who, self._runner, self._process = who, runner, process

    def wait_for(self, event: str) -> WorkerMessage:
        """Print its messages on the timeline up to the first one of this event, and return that one."""
        return self._runner.wait_for_all([self], event)[0]

    def messages_until(self, event: str) -> Iterator[WorkerMessage]:
        """Its messages, up to the first one of this event."""
        assert self._process.stdout is not None  # noqa: S101  # for the type checker
        for line in self._process.stdout:
            message: WorkerMessage = {**json.loads(line), "who": self.who}
            if message["event"] == FAILED:
                kind = Unavailable if message["unavailable"] else DemoFailed
                raise kind(f"process {self.who} of the demo failed: {message['reason']}")
            yield message
            if message["event"] == event:
                return
        raise DemoFailed(
            f"process {self.who} exited with {self._process.wait()} before reporting {event!r}; -v shows its errors"
        )

    def send_go(self) -> None:
        """Let it continue. Does nothing if it has ended."""
        assert self._process.stdin is not None  # noqa: S101  # for the type checker
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def pause(self) -> None:
        """Stop it, but not inside a transaction, which would keep the SQLite file locked for all processes."""
        self._process.send_signal(signal.SIGSTOP)
        while self._runner.locks_are_in_a_transaction():
            self._process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
            self._process.send_signal(signal.SIGSTOP)
        self._runner.log(f"{self.who} is paused by SIGSTOP, as by a long garbage collection or a suspended machine")

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._runner.log(f"{self.who} is resumed by SIGCONT")

    def crash(self) -> None:
        self._process.kill()
        self._process.wait(_TIMEOUT)

    @property
    def ended(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_TIMEOUT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class DemoRunner:
    def __init__(
        self, demo_name: str, url: str | None, printer: TimelinePrinter, *, size: int | None, verbose: bool
    ) -> None:
        """`url`: None means a SQLite engine of its own. `verbose`: show what the processes print to stderr."""
        self._demo_name, self._url, self._printer, self._verbose, self.size = demo_name, url, printer, verbose, size
        self.namespace = f"demo-{secrets.token_hex(4)}"  # apart from everything else on that engine
        self.password = secrets.token_hex(16)  # of the servers that the demo starts
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="leasehold-demo-")
        self.folder = self._folder.name
        self.own_url = f"sqlite://{self.path(_LOCKS)}"
        self.url = self.own_url if self._url is None else self._url
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()
        self._folder.cleanup()

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def locks_are_in_a_transaction(self) -> bool:
        """Whether a process keeps the demo's own SQLite file locked for longer than a transaction takes."""
        if self.url != self.own_url:
            return False
        connection = sqlite3.connect(self.path(_LOCKS), timeout=0.5, isolation_level=None)
        try:
            connection.execute("begin immediate")
        except sqlite3.OperationalError:
            return True
        finally:
            connection.close()
        return False

    def start(self, role: str, who: str, **facts: Any) -> WorkerProcess:
        all_facts = {
            "url": self.url,
            "namespace": self.namespace,
            "folder": self.folder,
            "who": who,
            "parent": os.getpid(),
        }
        all_facts |= facts
        # -P: without it, Python would take modules from the working directory, where other users may have put some.
        argv = [sys.executable, "-P", "-m", "leasehold.cli.demo.worker", self._demo_name, role]
        environment = os.environ | {FACTS_VARIABLE: json.dumps(all_facts)}  # not in argv: `ps` would show the URL
        errors = None if self._verbose else subprocess.DEVNULL
        process = subprocess.Popen(  # noqa: S603  # this interpreter, with fixed arguments
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=environment,
        )
        worker = WorkerProcess(self, who, process)
        self._workers.append(worker)
        return worker

    def wait_for_all(self, workers: Sequence[WorkerProcess], event: str) -> list[WorkerMessage]:
        """Print the messages of all, sorted by time, each up to its first one of this event. Return those."""
        by_worker = [list(worker.messages_until(event)) for worker in workers]
        self.log_messages([message for messages in by_worker for message in messages])
        return [messages[-1] for messages in by_worker]

    def log_messages(self, messages: Sequence[WorkerMessage]) -> None:
        """Print messages of several processes, sorted by time."""
        for message in sorted(
            (message for message in messages if message["text"]), key=lambda message: float(message["at"])
        ):
            self.log(message["text"], message["who"], at=message["at"])

    def log(self, text: str, who: str = "", *, at: float | None = None) -> None:
        """Print a line of the timeline."""
        self._printer(max(0.0, (time.monotonic() if at is None else at) - self._began), who, text)
