"""A terminal as a full screen: keys in, frames out. What it was before comes back, however the program ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

# The alternate screen, without a cursor, and without wrapping: a line that is too long for a new size moves no other.
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR = "\x1b[H", "\x1b[K"

_SEQUENCES: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1b[4~": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\b": "backspace",
}


def split_keys(text: str) -> list[str]:
    """The keys in what the terminal sent: names of special keys, else characters. Unknown sequences are left out."""
    keys = []
    while text:
        if text[0] == "\x1b" and len(text) > 1 and text[1] in "[O":
            length = next((end for end in range(2, len(text)) if "@" <= text[end] <= "~"), len(text) - 1) + 1
        else:
            length = 1
        part, text = text[:length], text[length:]
        if part in _SEQUENCES or part.isprintable():
            keys.append(_SEQUENCES.get(part, part))
    return keys


class Screen:
    """The terminal of stdin and stdout. From any thread `wake` ends a `wait`."""

    def __init__(self) -> None:
        self._input, self._output = sys.stdin.fileno(), sys.stdout
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._poll = select.poll()  # `select` fails for descriptors above 1023
        for descriptor in (self._input, self._reader):
            self._poll.register(descriptor, select.POLLIN)
        self._before: list[Any] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Take the terminal over. Signals that end the program raise, so that this is left."""
        self._before = termios.tcgetattr(self._input)
        handlers = {
            signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda *_: self.wake()),
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._stop),
        }
        try:
            self._enter()
            yield
        finally:
            self._leave()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for end in (self._reader, self._writer):
                os.close(end)

    def _enter(self) -> None:
        tty.setcbreak(self._input)
        self._write(_ENTER)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._write(_LEAVE)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._input, termios.TCSAFLUSH, self._before)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal as it was. `fg` continues here."""
        self._leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._enter()
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, so `wait` ends anyway; or the screen is closed
            os.write(self._writer, b".")

    def wait(self, seconds: float) -> list[str]:
        """Wait for keys, a wake-up or another size of the terminal. The keys, if any."""
        ready = {descriptor for descriptor, _ in self._poll.poll(seconds * 1000)}
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)
        if self._input not in ready:
            return []
        sent = os.read(self._input, 4096)
        if not sent:
            raise EOFError("the terminal is gone")
        return split_keys(sent.decode(errors="replace"))

    def size(self) -> os.terminal_size:
        return os.get_terminal_size(self._output.fileno())

    def draw(self, lines: Sequence[str]) -> None:
        """Each line is cleared before it is written: after its last column, clearing would remove that."""
        self._write(_HOME + "\r\n".join(_CLEAR + line for line in lines))

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()


def can_show(text: str) -> bool:
    """Whether stdout's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
