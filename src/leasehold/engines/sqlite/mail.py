"""Wake-ups between the processes of a machine: a unix datagram to the client whose turn it is.

Each client binds one socket in a folder beside the file; its name is the client's address in the rows. Whether a client
can be told is asked inside the transaction that decides (`reachable`): nobody listens behind a dead process's socket,
so it is passed over at once. What there is to tell is sent after COMMIT (`send`), and never waited for long.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from struct import pack
from typing import Any, Final, Literal, cast
from weakref import ref

from leasehold.book import Book, every
from leasehold.core.party import Word
from leasehold.core.timing import BEAT
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Guard, Runtime

_log = logging.getLogger("leasehold.sqlite")

_LONGEST: Final = 100  # of a socket's path, in bytes; 103 on macOS, 107 on Linux
_FULL_WAIT: Final = 20_000  # microseconds: a socket takes ten messages before its client has to read them
_STALE: Final = 60.0  # a socket is bound a moment after its file appears: leave young ones alone
_GONE: Final = (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTSOCK, errno.ENOTDIR)


class Mail:
    """A client's mailbox, and its way to the others'. Shared by both twins."""

    def __init__(self, path: str, runtime: Runtime, book: Book) -> None:
        self._folder = f"{os.path.realpath(path)}-mail"  # one folder for all, whatever links lead to the file
        self.file = path
        self._runtime, self._book = runtime, ref(book)
        self._guard: Guard = runtime.guard()  # of the box
        self._out_guard: Guard = runtime.guard()
        self._box: socket.socket | None = None
        self._out: tuple[socket.socket, socket.socket] | None = None  # to ask, and to send
        self._folder_fd = -1
        self._round = 0
        self._deaf = False
        self.address = ""  # empty: cannot be told anything

    def ready(self, runtime: Runtime) -> str:
        """This client's address, after seeing that mail still reaches it."""
        if not self.reachable(self.address):
            self._bind(runtime)
        return self.address

    def reachable(self, address: str) -> bool:
        """Does anybody listen there? Never sends, never waits."""
        if not address:
            return False
        try:
            self._ways()[0].connect(self._short(address))
        except OSError as error:
            return error.errno not in _GONE
        return True

    def send(self, namespace: str, name: str, word: Word) -> bool:
        """False: nobody is there. One that is there and does not read finds out by itself: every waiter looks around
        now and then (E4)."""
        message = "\0".join((word.kind, word.mark, repr(word.seconds), namespace, name)).encode()
        try:
            self._ways()[1].sendto(message, self._short(word.client))
        except OSError as error:
            _log.debug("a wake-up for %s could not be sent: %s", word.mark[:16], error)
            return error.errno not in _GONE
        return True

    def lose(self) -> None:
        """Take the box out of the others' reach, as a cleaner of temporary files would. For rigs."""
        with suppress(OSError):
            os.unlink(self._path(self.address))

    def close(self) -> None:
        with self._guard:
            self._let_go()

    def after_fork(self) -> None:
        """In the child: the parent's box is not ours, and a copy of it would make a dead parent look alive."""
        self._guard, self._out_guard = self._runtime.guard(), self._runtime.guard()
        self._let_go(forked=True)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            self._let_go()

    # -------------------------------------------------------------- the box

    def _bind(self, runtime: Runtime) -> None:
        book = self._book()
        with self._guard:
            if book is None or self.reachable(self.address):
                return
            rebound = bool(self.address)
            self._let_go()
            self._round += 1
            address = f"{book.client}{self._round:x}"
            try:
                # Known from the start: a child forked meanwhile must find its copy, to close it.
                self._box = box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._make_folder()
                address = self._address_of(address)
                box.bind(self._short(address))
                self._open_up(self._path(address), os.stat(self.file))
                self._sweep()
                runtime.aside(_listener(box, self._book), "leasehold-mail")
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread to be had
                made, self._box = self._box, None
                if made is not None:
                    with suppress(OSError):
                        os.unlink(self._path(address))
                    made.close()
                if not self._deaf:
                    _log.warning("no wake-ups for this client, it has to look by itself: %s", error)
                self._deaf = True
                return
            self._deaf = False
            self.address = address
        if rebound:  # whoever waits may have missed its turn, and is known by an address nobody reads
            for mark, _ in every(book.waiting):
                book.deliver("head", mark, 0.0, None)

    def _make_folder(self) -> None:
        if not os.path.isdir(self._folder):
            with suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
                self._open_up(self._folder, os.stat(self.file), folder=True)

    def _open_up(self, path: str, file: os.stat_result, folder: bool = False) -> None:
        """Make it as open to others as the file itself."""
        mode = file.st_mode & 0o666
        if mode & 0o060 and os.stat(path).st_gid != file.st_gid:
            with suppress(PermissionError):  # not of that group: others then find it closed
                os.chown(path, -1, file.st_gid)
        os.chmod(path, mode | (mode & 0o444) >> 2 if folder else mode)

    def _address_of(self, name: str) -> str:
        """A name in the folder, so that every process finds it there by its own path; else a short absolute path."""
        if sys.platform == "linux" or len(os.fsencode(self._path(name))) <= _LONGEST:
            return name
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        folder = os.path.join(base, f"leasehold-{os.getuid()}-{sha256(os.fsencode(self._folder)).hexdigest()[:8]}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return os.path.join(folder, name)

    def _path(self, address: str) -> str:
        return os.path.join(self._folder, address)

    def _short(self, address: str) -> str:
        path = self._path(address)
        if len(os.fsencode(path)) <= _LONGEST or sys.platform != "linux":
            return path
        if self._folder_fd < 0:
            self._folder_fd = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder_fd}/{address}"

    def _ways(self) -> tuple[socket.socket, socket.socket]:
        """Two sockets: one that is connected to somebody sends to nobody else while that one's box is full."""
        if (out := self._out) is None:
            probe, sender = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pack("ll", 0, _FULL_WAIT))
            with self._out_guard:
                if self._out is None:
                    self._out = out = (probe, sender)
                    return out
                out = self._out
            probe.close()
            sender.close()
        return out

    def _sweep(self) -> None:
        """Remove what killed processes left."""
        for entry in list(os.scandir(self._folder))[:200]:
            with suppress(OSError):
                old = time.time() - entry.stat(follow_symlinks=False).st_ctime > _STALE
                if old and not self.reachable(entry.name):
                    os.unlink(entry.path)

    def _let_go(self, forked: bool = False) -> None:
        box, self._box, address, self.address = self._box, None, self.address, ""
        if box is not None and forked:
            box.close()
        elif box is not None:
            with suppress(OSError):
                os.unlink(self._path(address))
            with suppress(OSError):
                box.shutdown(socket.SHUT_RDWR)  # the listener ends, and closes it: in a child, the parent's would
        for each in self._out or ():
            each.close()
        self._out = None
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


def _listener(box: socket.socket, book: ref[Book]) -> Callable[[Runtime], Any]:
    """Reads the box until it is shut. Holds the book weakly: a client nobody has any more must be able to go."""

    async def listen(_: Runtime) -> None:
        with box:
            while True:
                try:
                    message = box.recv(2048)
                except OSError:
                    return
                if not message:
                    return
                if (known := book()) is not None:
                    _deliver(known, message)
                del known

    return listen


def _deliver(book: Book, message: bytes) -> None:
    try:
        kind, mark, seconds, namespace, name = message.decode().split("\0")
        after = float(seconds)
    except ValueError:
        return  # not ours
    if kind in ("go", "head", "lost"):
        stray = Claim(namespace, name, "", mark, Holder("stray"), BEAT)
        book.deliver(cast(Literal["go", "head", "lost"], kind), mark, after, stray)
