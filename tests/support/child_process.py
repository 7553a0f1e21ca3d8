"""Child processes for engine tests; a thread reads each child's output."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.paths import SUPPORT

CHILD = SUPPORT / "lock_child.py"


class Child:
    def __init__(self, *args: object, script: Path = CHILD, **popen_options: Any) -> None:
        command = [sys.executable, str(script), *map(str, args)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, **popen_options
        )
        self._messages: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._messages.put(line)
        self._messages.put("")

    def read_message(self, seconds: float = 60.0) -> Any:
        """Return the child's next message."""
        line = self._messages.get(timeout=seconds)
        assert line, f"the child ended with {self.process.wait(10)}"
        return json.loads(line)

    def read_all_messages(self) -> list[Any]:
        """Return all messages until the child ended, without a last line that a kill cut short."""
        lines = list(iter(lambda: self._messages.get(timeout=60), ""))
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def send_newline(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._reader.join(60)  # the reader ends at the end of the pipe, which must stay open until then
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
