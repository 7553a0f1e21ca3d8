"""Where a story is played: a folder of its own, an engine, the processes, and the timeline told on the terminal."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from leasehold.errors import LeaseholdError

_TIMEOUT: Final = 60.0  # seconds for a process to say or do what it must, however busy the machine


WorkerMessage: TypeAlias = dict[str, Any]
TimelinePrinter: TypeAlias = Callable[
    [float, str, str], None
]  # seconds since the half began, who (empty: nobody), what


class DemoFailed(LeaseholdError):
    """A process of the story ended, or said nothing, where it had a part to play."""


class WorkerProcess:
    """A process with a part to play. What it says are JSON lines; it is spoken to by lines."""

    def __init__(self, runner: DemoRunner, who: str, process: subprocess.Popen[str]) -> None:
        self.who, self._runner, self._process = who, runner, process

    def wait_for(self, event: str) -> WorkerMessage:
        """What it says, told on the timeline, up to the line of this kind."""
        return self._runner.wait_for_all([self], event)[0]

    def messages_until(self, event: str) -> Iterator[WorkerMessage]:
        """All it says, up to the line of this kind."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message: WorkerMessage = {**json.loads(line), "who": self.who}
            yield message
            if message["event"] == event:
                return
        raise DemoFailed(f"{self.who} ended with {self._process.wait()} before it said {event!r}; -v shows why")

    def send_go(self) -> None:
        """Its cue. One that has gone needs none."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self._runner.log(f"{self.who} is stopped: SIGSTOP, as a long pause of the machine would")

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._runner.log(f"{self.who} goes on: SIGCONT")

    def crash(self) -> None:
        self._process.kill()
        self._process.wait(_TIMEOUT)

    @property
    def ended(self) -> int | None:
        """With what it ended; None: it goes on."""
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
        """`url`: None plays on an engine of its own. `verbose`: what processes say on stderr is shown."""
        self._demo_name, self._url, self._printer, self._verbose, self.size = demo_name, url, printer, verbose, size
        self.namespace = f"demo-{secrets.token_hex(4)}"  # beside whatever else lives on that engine
        self.embedded = url is None or url.startswith("sqlite:")
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="leasehold-demo-")
        self.folder = self._folder.name
        self.url = self._url or f"sqlite://{self.folder}/locks.db"
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

    def start(self, role: str, who: str, **facts: Any) -> WorkerProcess:
        all_facts = {
            "url": self.url,
            "namespace": self.namespace,
            "folder": self.folder,
            "who": who,
            "parent": os.getpid(),
        }
        all_facts |= facts
        argv = [sys.executable, "-m", "leasehold.cli.demo.worker", self._demo_name, role, json.dumps(all_facts)]
        errors = None if self._verbose else subprocess.DEVNULL
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        worker = WorkerProcess(self, who, process)
        self._workers.append(worker)
        return worker

    def wait_for_all(self, workers: Sequence[WorkerProcess], event: str) -> list[WorkerMessage]:
        """What they say, told in order of time, each up to its line of this kind, which is given."""
        by_worker = [list(worker.messages_until(event)) for worker in workers]
        self.log_messages([message for messages in by_worker for message in messages])
        return [messages[-1] for messages in by_worker]

    def log_messages(self, messages: Sequence[WorkerMessage]) -> None:
        """What several said, in order of time."""
        for message in sorted(
            (message for message in messages if message["text"]), key=lambda message: float(message["at"])
        ):
            self.log(message["text"], message["who"], at=message["at"])

    def log(self, text: str, who: str = "", *, at: float | None = None) -> None:
        """A line of the timeline."""
        self._printer(max(0.0, (time.monotonic() if at is None else at) - self._began), who, text)
