"""Wake-ups between the processes of a machine: a unix datagram to the client whose turn it is.

Each client binds one socket in a folder beside the file; its name is the client's address in the rows. Whether a client
can be told is asked inside the transaction that decides (`is_reachable`): nobody listens behind a dead process's
socket, so it is passed over at once. What there is to tell is sent after COMMIT (`send`), and never waited for long.
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

from leasehold.core.queue_entry import Notification
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Mutex, Runtime

_log = logging.getLogger("leasehold.sqlite")

_MAX_PATH_BYTES: Final = 100  # of a socket's path, in bytes; 103 on macOS, 107 on Linux
_SEND_TIMEOUT_US: Final = 20_000  # microseconds: a socket takes ten messages before its client has to read them
_STALE_AFTER: Final = 60.0  # a socket is bound a moment after its file appears: leave young ones alone
_UNREACHABLE_ERRNOS: Final = (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTSOCK, errno.ENOTDIR)


class WakeupSocket:
    """A client's mailbox, and its way to the others'. Shared by both twins."""

    def __init__(self, path: str, runtime: Runtime, registry: ClaimRegistry) -> None:
        self._folder = f"{os.path.realpath(path)}-wakeup"  # one folder for all, whatever links lead to the file
        self.database_path = path
        self._runtime, self._registry_ref = runtime, ref(registry)
        self._mutex: Mutex = runtime.mutex()  # of the box
        self._senders_mutex: Mutex = runtime.mutex()
        self._socket: socket.socket | None = None
        self._senders: tuple[socket.socket, socket.socket] | None = None  # to ask, and to send
        self._folder_fd = -1
        self._bind_count = 0
        self._unavailable = False
        self.address = ""  # empty: cannot be told anything

    def ensure_bound(self, runtime: Runtime) -> str:
        """This client's address, after seeing that mail still reaches it."""
        if not self.is_reachable(self.address):
            self._bind(runtime)
        return self.address

    def is_reachable(self, address: str) -> bool:
        """Does anybody listen there? Never sends, never waits."""
        if not address:
            return False
        try:
            self._sender_sockets()[0].connect(self._short_path(address))
        except OSError as error:
            return error.errno not in _UNREACHABLE_ERRNOS
        return True

    def send(self, namespace: str, name: str, notification: Notification) -> bool:
        """False: nobody is there. One that is there and does not read finds out by itself: every waiter looks around
        now and then (E4)."""
        message = "\0".join(
            (notification.kind, notification.id_hash, repr(notification.seconds), namespace, name)
        ).encode()
        try:
            self._sender_sockets()[1].sendto(message, self._short_path(notification.client))
        except OSError as error:
            _log.debug("a wake-up for %s could not be sent: %s", notification.id_hash[:16], error)
            return error.errno not in _UNREACHABLE_ERRNOS
        return True

    def unlink_socket(self) -> None:
        """Take the box out of the others' reach, as a cleaner of temporary files would. For rigs."""
        with suppress(OSError):
            os.unlink(self._socket_path(self.address))

    def close(self) -> None:
        with self._mutex:
            self._unbind()

    def after_fork(self) -> None:
        """In the child: the parent's box is not ours, and a copy of it would make a dead parent look alive."""
        self._mutex, self._senders_mutex = self._runtime.mutex(), self._runtime.mutex()
        self._unbind(forked=True)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            self._unbind()

    # -------------------------------------------------------------- the box

    def _bind(self, runtime: Runtime) -> None:
        registry = self._registry_ref()
        with self._mutex:
            if registry is None or self.is_reachable(self.address):
                return
            rebound = bool(self.address)
            self._unbind()
            self._bind_count += 1
            address = f"{registry.client_id}{self._bind_count:x}"
            try:
                # Known from the start: a child forked meanwhile must find its copy, to close it.
                self._socket = sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._make_folder()
                address = self._choose_address(address)
                sock.bind(self._short_path(address))
                self._copy_permissions(self._socket_path(address), os.stat(self.database_path))
                self._remove_stale_sockets()
                runtime.start_thread(_make_listener(sock, self._registry_ref), "leasehold-wakeup")
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread to be had
                failed_socket, self._socket = self._socket, None
                if failed_socket is not None:
                    with suppress(OSError):
                        os.unlink(self._socket_path(address))
                    failed_socket.close()
                if not self._unavailable:
                    _log.warning("no wake-ups for this client, it has to look by itself: %s", error)
                self._unavailable = True
                return
            self._unavailable = False
            self.address = address
        if rebound:  # whoever waits may have missed its turn, and is known by an address nobody reads
            for id_hash, _ in snapshot_items(registry.waiting):
                registry.on_notification("head", id_hash, 0.0, None)

    def _make_folder(self) -> None:
        if not os.path.isdir(self._folder):
            with suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
                self._copy_permissions(self._folder, os.stat(self.database_path), is_folder=True)

    def _copy_permissions(self, path: str, file_stat: os.stat_result, is_folder: bool = False) -> None:
        """Make it as open to others as the file itself."""
        mode = file_stat.st_mode & 0o666
        if mode & 0o060 and os.stat(path).st_gid != file_stat.st_gid:
            with suppress(PermissionError):  # not of that group: others then find it closed
                os.chown(path, -1, file_stat.st_gid)
        os.chmod(path, mode | (mode & 0o444) >> 2 if is_folder else mode)

    def _choose_address(self, name: str) -> str:
        """A name in the folder, so that every process finds it there by its own path; else a short absolute path."""
        if sys.platform == "linux" or len(os.fsencode(self._socket_path(name))) <= _MAX_PATH_BYTES:
            return name
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        folder = os.path.join(base, f"leasehold-{os.getuid()}-{sha256(os.fsencode(self._folder)).hexdigest()[:8]}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return os.path.join(folder, name)

    def _socket_path(self, address: str) -> str:
        return os.path.join(self._folder, address)

    def _short_path(self, address: str) -> str:
        path = self._socket_path(address)
        if len(os.fsencode(path)) <= _MAX_PATH_BYTES or sys.platform != "linux":
            return path
        if self._folder_fd < 0:
            self._folder_fd = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder_fd}/{address}"

    def _sender_sockets(self) -> tuple[socket.socket, socket.socket]:
        """Two sockets: one that is connected to somebody sends to nobody else while that one's box is full."""
        if (senders := self._senders) is None:
            probe, sender = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pack("ll", 0, _SEND_TIMEOUT_US))
            with self._senders_mutex:
                if self._senders is None:
                    self._senders = senders = (probe, sender)
                    return senders
                senders = self._senders
            probe.close()
            sender.close()
        return senders

    def _remove_stale_sockets(self) -> None:
        """Remove what killed processes left."""
        for entry in list(os.scandir(self._folder))[:200]:
            with suppress(OSError):
                is_stale = time.time() - entry.stat(follow_symlinks=False).st_ctime > _STALE_AFTER
                if is_stale and not self.is_reachable(entry.name):
                    os.unlink(entry.path)

    def _unbind(self, forked: bool = False) -> None:
        sock, self._socket, address, self.address = self._socket, None, self.address, ""
        if sock is not None and forked:
            sock.close()
        elif sock is not None:
            with suppress(OSError):
                os.unlink(self._socket_path(address))
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # the listener ends, and closes it: in a child, the parent's would
        for each in self._senders or ():
            each.close()
        self._senders = None
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


def _make_listener(sock: socket.socket, registry_ref: ref[ClaimRegistry]) -> Callable[[Runtime], Any]:
    """Reads the box until it is shut. Holds the book weakly: a client nobody has any more must be able to go."""

    async def listen(_: Runtime) -> None:
        with sock:
            while True:
                try:
                    message = sock.recv(2048)
                except OSError:
                    return
                if not message:
                    return
                if (registry := registry_ref()) is not None:
                    _dispatch(registry, message)
                del registry

    return listen


def _dispatch(registry: ClaimRegistry, message: bytes) -> None:
    try:
        kind, id_hash, seconds, namespace, name = message.decode().split("\0")
        delay = float(seconds)
    except ValueError:
        return  # not ours
    if kind in ("go", "head", "lost"):
        unknown_claim = Claim(namespace, name, "", id_hash, Holder("stray"), WAITER_TTL)
        registry.on_notification(cast(Literal["go", "head", "lost"], kind), id_hash, delay, unknown_claim)
