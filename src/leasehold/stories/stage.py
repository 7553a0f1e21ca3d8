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

_PATIENCE: Final = 60.0  # seconds for a process to say or do what it must, however busy the machine


Said: TypeAlias = dict[str, Any]
Teller: TypeAlias = Callable[[float, str, str], None]  # seconds since the half began, who (empty: nobody), what


class Strayed(LeaseholdError):
    """A process of the story ended, or said nothing, where it had a part to play."""


class Actor:
    """A process with a part to play. What it says are JSON lines; it is spoken to by lines."""

    def __init__(self, stage: Stage, who: str, process: subprocess.Popen[str]) -> None:
        self.who, self._stage, self._process = who, stage, process

    def hear(self, word: str) -> Said:
        """What it says, told on the timeline, up to the line of this kind."""
        return self._stage.hear([self], word)[0]

    def listen(self, word: str) -> Iterator[Said]:
        """All it says, up to the line of this kind."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: Said = {**json.loads(line), "who": self.who}
            yield said
            if said["word"] == word:
                return
        raise Strayed(f"{self.who} ended with {self._process.wait()} before it said {word!r}; -v shows why")

    def go(self) -> None:
        """Its cue. One that has gone needs none."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self._stage.tell(f"{self.who} is stopped: SIGSTOP, as a long pause of the machine would")

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._stage.tell(f"{self.who} goes on: SIGCONT")

    def crash(self) -> None:
        self._process.kill()
        self._process.wait(_PATIENCE)

    @property
    def ended(self) -> int | None:
        """With what it ended; None: it goes on."""
        return self._process.poll()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class Stage:
    def __init__(self, story: str, url: str | None, teller: Teller, *, size: int | None, loud: bool) -> None:
        """`url`: None plays on an engine of its own. `loud`: what processes say on stderr is shown."""
        self._story, self._url, self._teller, self._loud, self.size = story, url, teller, loud, size
        self.namespace = f"demo-{secrets.token_hex(4)}"  # beside whatever else lives on that engine
        self.embedded = url is None or url.startswith("sqlite:")
        self._actors: list[Actor] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="leasehold-demo-")
        self.folder = self._folder.name
        self.url = self._url or f"sqlite://{self.folder}/locks.db"
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self._actors:
            actor.end()
        self._folder.cleanup()

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def start(self, role: str, who: str, **facts: Any) -> Actor:
        told = {"url": self.url, "namespace": self.namespace, "folder": self.folder, "who": who, "parent": os.getpid()}
        told |= facts
        words = [sys.executable, "-m", "leasehold.stories.actor", self._story, role, json.dumps(told)]
        errors = None if self._loud else subprocess.DEVNULL
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        actor = Actor(self, who, process)
        self._actors.append(actor)
        return actor

    def hear(self, actors: Sequence[Actor], word: str) -> list[Said]:
        """What they say, told in order of time, each up to its line of this kind, which is given."""
        said = [list(actor.listen(word)) for actor in actors]
        self.tell_all([one for each in said for one in each])
        return [each[-1] for each in said]

    def tell_all(self, said: Sequence[Said]) -> None:
        """What several said, in order of time."""
        for one in sorted((one for one in said if one["text"]), key=lambda one: float(one["at"])):
            self.tell(one["text"], one["who"], at=one["at"])

    def tell(self, text: str, who: str = "", *, at: float | None = None) -> None:
        """A line of the timeline."""
        self._teller(max(0.0, (time.monotonic() if at is None else at) - self._began), who, text)
