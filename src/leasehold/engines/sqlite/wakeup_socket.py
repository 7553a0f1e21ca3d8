"""Wake-ups between the processes of a machine: a unix datagram to the client whose waiter is next.

Each client binds one socket in a folder next to the database; the socket's file name is the client's address in the
rows. The transaction that decides checks whether a client can be notified (`is_reachable`): the socket of a dead
process has no listener, so its waiters are passed over at once. Notifications are sent after COMMIT (`send`), and
sending never blocks for long.

The socket is also the proof that a holder lives (`is_dead`). The kernel closes it with the process, however that ends,
and its file stays. A process that is stopped keeps it open; a socket that cannot be asked proves nothing. So a client
that lives must never have a file here whose socket is closed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import socket
import stat
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from functools import partial
from struct import pack
from typing import Any, Final, Literal, TypeVar, cast
from weakref import ref

from leasehold.core.queue_entry import Notification
from leasehold.core.timing import NEVER, WAITER_TTL, backoff
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.engines.repeated_logs import log_once
from leasehold.errors import ConfigError
from leasehold.files import Folder, open_folder
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Mutex, Runtime, log_unexpected

T = TypeVar("T")

_log = logging.getLogger("leasehold.sqlite")

_MAX_PATH_BYTES: Final = 100  # of a socket's path; the limit is 103 on macOS, 107 on Linux
_SEND_TIMEOUT_US: Final = 20_000  # microseconds: a socket buffers ten messages until its client has to read them
_STALE_AFTER: Final = 60.0  # a socket accepts messages only a moment after its file appears: keep young files
_MAX_REACHED: Final = 1000  # clients
_MAX_RETIRED: Final = 100  # a member of the group that shares the folder can have a client replace its socket any time
_ADDRESS: Final = re.compile("[0-9a-f]{17,}")  # a client's id and the number of the socket
_UNREACHABLE_ERRNOS: Final = (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTSOCK, errno.ENOTDIR)


class WakeupSocket:
    """A client's receiving socket, and its way to send to other clients. Shared by its two engine instances."""

    def __init__(self, path: str, runtime: Runtime, registry: ClaimRegistry, *, trust_folder: bool = False) -> None:
        self._folder, self._trust_folder = f"{path}-wakeup", trust_folder
        self._folder_bytes = len(os.fsencode(self._folder))
        self.database_path = path
        self._runtime, self._registry_ref = runtime, ref(registry)
        self._mutex: Mutex = runtime.mutex()  # for the receiving socket
        self._senders_mutex: Mutex = runtime.mutex()
        self._socket: socket.socket | None = None
        self._retired: list[socket.socket] = []  # replaced, but kept open: their files may come back
        self._stop_flag: list[bool] = []  # of the current listener; not empty: it must stop
        self._senders: tuple[socket.socket, socket.socket] | None = None  # to probe, and to send
        self._reached_at: dict[str, float] = {}  # by address: when a client was last found to listen there
        self._folder_fd = -1
        self._shared: bool | None = None  # others can write the folder of the database; None: not known yet
        self._bind_count = 0
        self._unavailable = False
        self.sweep_due = False  # once per bound socket
        self.address = ""  # empty: this client cannot be notified

    def ensure_bound(self, runtime: Runtime) -> str:
        """This client's address, after checking that its socket is still reachable; binds a new one if not."""
        if not self.is_reachable(self.address):
            self._bind(runtime)
        return self.address

    def is_reachable(self, address: str, since: float = NEVER) -> bool:
        """Whether a client listens at this address, or was found to listen there since then. Never sends, never
        blocks."""
        if not address:
            return False
        if self._reached_at.get(address, -NEVER) >= since:
            return True
        try:
            self._call_with_path(address, self._sender_sockets()[0].connect)
        except OSError as error:
            if error.errno in _UNREACHABLE_ERRNOS:
                self._reached_at.pop(address, None)
                return False
        if len(self._reached_at) >= _MAX_REACHED:
            self._reached_at.clear()
        self._reached_at[address] = self._runtime.now()
        return True

    def is_dead(self, address: str) -> bool:
        """Whether it is certain that the client with this address has ended: its socket has a file, and no process has
        it open. A file that is gone, or a socket that this process may not use, proves nothing. Never blocks."""
        if not address:
            return False
        try:
            return self._call_with_path(address, self._is_dead_at)
        except OSError:
            return False

    def _is_dead_at(self, path: str) -> bool:
        try:
            self._sender_sockets()[0].connect(path)
        except ConnectionRefusedError:  # also if the file is not a socket
            return stat.S_ISSOCK(os.stat(path).st_mode)
        return False

    def descriptor(self) -> int | None:
        """Of the socket. While any process has it open, this client is not dead to others."""
        sock = self._socket
        return sock.fileno() if sock is not None and self.address else None

    def send(self, namespace: str, name: str, notification: Notification, *, may_wait: bool = True) -> bool:
        """Send a notification. False: no client listens there. A client whose socket stays full misses it, but every
        waiter re-checks from time to time (E4). `may_wait=False`: BlockingIOError if the socket is full."""
        _, kind, id_hash, seconds = notification
        message = f"{kind}\0{id_hash}\0{seconds!r}\0{namespace}\0{name}".encode()
        flags = 0 if may_wait else socket.MSG_DONTWAIT
        try:
            self._call_with_path(notification.client, partial(self._sender_sockets()[1].sendto, message, flags))
        except OSError as error:
            if not may_wait and isinstance(error, BlockingIOError):
                raise
            _log.debug("could not send a wake-up to %s: %s", notification.id_hash[:16], error)
            return error.errno not in _UNREACHABLE_ERRNOS
        return True

    def remove_stale_sockets(self, holders: Set[str]) -> None:
        """Remove the sockets that killed processes of this user left behind, and nothing else: not those of holders,
        because they are the proof that the holder has ended."""
        self.sweep_due = False
        with suppress(OSError, ConfigError), self._open_folder() as folder:
            for name in os.listdir(folder.fd)[:200]:
                found = folder.find(name) if _ADDRESS.fullmatch(name) and name not in holders else None
                if found is None or not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                    continue
                if time.time() - found.st_ctime > _STALE_AFTER and not self.is_reachable(name):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder.fd)

    def unlink_socket(self) -> None:
        """Delete the socket file, as a cleaner of temporary files would. For test rigs."""
        with suppress(OSError):
            os.unlink(self._socket_path(self.address))

    def close(self) -> None:
        with self._mutex:
            self._unbind()
            for sock in self._retired:  # no lease depends on them any more
                sock.close()
            self._retired = []

    def after_fork(self) -> None:
        """In the child: close the copy of the parent's socket, which would make a dead parent look alive."""
        self._mutex, self._senders_mutex = self._runtime.mutex(), self._runtime.mutex()
        self._unbind(forked=True)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            self._unbind()

    # -------------------------------------------------- the receiving socket

    def _bind(self, runtime: Runtime) -> None:
        registry = self._registry_ref()
        with self._mutex:
            if registry is None or self.is_reachable(self.address):
                return
            rebound = bool(self.address)
            if self._socket is not None:
                try:
                    self._retired.append(self._socket.dup())
                except OSError:  # too many open files
                    return
                if len(self._retired) > _MAX_RETIRED:
                    self._retired.pop(0).close()
            self._unbind()
            self._bind_count += 1
            address = f"{registry.client_id}{self._bind_count:x}"
            try:
                # Set at once: a child forked from here on must find its copy, to close it.
                self._socket = sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                with self._open_folder() as folder:
                    address = self._choose_address(address)
                    # By the descriptor: in a shared folder, another member may have put a link there by now.
                    on_linux = sys.platform == "linux"
                    sock.bind(f"/proc/self/fd/{folder.fd}/{address}" if on_linux else self._socket_path(address))
                    self._set_socket_mode(folder, address)
                self.sweep_due = True
                self._stop_flag = []
                runtime.start_thread(_make_listener(sock, self._registry_ref, self._stop_flag), "leasehold-wakeup")
            # RuntimeError: the thread could not be started. ConfigError: the folder is not ours.
            except (OSError, RuntimeError, ConfigError) as error:
                failed_socket, self._socket = self._socket, None
                if failed_socket is not None:
                    with suppress(OSError):
                        os.unlink(self._socket_path(address))
                    failed_socket.close()
                if not self._unavailable:
                    text = f"push notifications of {self.database_path} unavailable, falling back to polling: {error}"
                    log_once(_log, logging.WARNING, text)
                self._unavailable = True
                return
            self._unavailable = False
            self.address = address
        if rebound:  # waiters may have missed a wake-up, and are queued with an address that no longer works
            for id_hash, _ in snapshot_items(registry.waiting):
                registry.on_notification("recheck", id_hash, 0.0, None)

    def _open_folder(self) -> Folder:
        """The folder of the sockets, created if it is missing, with the group of the database if that is shared."""
        parent_path, name = os.path.split(self._folder)
        with open_folder(parent_path, private=not self._trust_folder) as parent:
            try:
                os.mkdir(name, 0o700, dir_fd=parent.fd)
            except FileExistsError:
                return parent.open_folder(name)
            folder = parent.open_folder(name)
            database = os.stat(self.database_path, follow_symlinks=False)
            if database.st_mode & 0o060 == 0o060:
                with suppress(PermissionError):  # this user is not in the group, so the group gets no access
                    os.fchown(folder.fd, -1, database.st_gid)
                    os.fchmod(folder.fd, 0o2770)  # nosec B103  # the group's own: sockets in it get the same group
            return folder

    def _set_socket_mode(self, folder: Folder, address: str) -> None:
        """Let the group of a shared folder send to this socket, and no other user. Changed by a descriptor, because
        another member of the group could replace the name by a link."""
        mode = 0o660 if stat.S_IMODE(os.fstat(folder.fd).st_mode) & 0o020 else 0o600
        if sys.platform != "linux":
            os.chmod(self._socket_path(address), mode, follow_symlinks=False)
            return
        fd = os.open(address, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
        try:
            found = os.fstat(fd)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.ESTALE, "the folder of the sockets was replaced", self._folder)
            os.chmod(f"/proc/self/fd/{fd}", mode)
        finally:
            os.close(fd)

    def _choose_address(self, name: str) -> str:
        """A name in the folder, so that every process finds it through its own path; else a short absolute path."""
        if sys.platform == "linux" or len(os.fsencode(self._socket_path(name))) <= _MAX_PATH_BYTES:
            return name
        from hashlib import sha256  # only here: it loads OpenSSL
        from tempfile import gettempdir  # only here: it loads modules for all kinds of archives

        base = os.environ.get("XDG_RUNTIME_DIR") or gettempdir()
        folder = os.path.join(base, f"leasehold-{os.getuid()}-{sha256(os.fsencode(self._folder)).hexdigest()[:8]}")
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        open_folder(folder, private=True).close()  # refuses one that another user made
        return os.path.join(folder, name)

    def _socket_path(self, address: str) -> str:
        return os.path.join(self._folder, address)  # on other systems than Linux, an address is a path of its own

    def _short_path(self, address: str) -> str:
        if sys.platform != "linux":
            return self._socket_path(address)
        # A row that was edited must not lead us to other sockets, nor a folder that is a link now.
        if not _ADDRESS.fullmatch(address):
            raise OSError(errno.ENOENT, "not an address of a client")
        if self._folder_bytes + 1 + len(address) <= _MAX_PATH_BYTES:
            return f"{self._folder}/{address}"
        if self._folder_fd < 0:
            self._folder_fd = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder_fd}/{address}"

    def _call_with_path(self, address: str, function: Callable[[str], T]) -> T:
        """Call it with a path that leads to the socket with this address. In a folder that others can write, another
        user could make it a link to a socket to which only this user may send."""
        path = self._short_path(address)
        if sys.platform != "linux" or not self._is_shared():
            return function(path)
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), path)
            return function(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    def _is_shared(self) -> bool:
        """Of the folder of the database: the owner of a folder inside it could change that one's mode."""
        if self._shared is None:
            mode = os.stat(os.path.dirname(self.database_path)).st_mode
            self._shared = bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
        return self._shared

    def _sender_sockets(self) -> tuple[socket.socket, socket.socket]:
        """Two sockets: one that is connected cannot send to another client while its peer's buffer is full."""
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

    def _unbind(self, forked: bool = False) -> None:
        sock, self._socket, address, self.address = self._socket, None, self.address, ""
        listener_ended = bool(self._stop_flag)
        self._stop_flag.append(True)
        if forked:
            for each in (*self._retired, *([sock] if sock is not None else [])):
                each.close()
            self._retired = []
        elif sock is not None:
            with suppress(OSError):
                os.unlink(self._socket_path(address))
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # the listener ends and closes it; in a child, the parent's would end
            if listener_ended:
                sock.close()
        for each in self._senders or ():
            each.close()
        self._senders = None
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


def _make_listener(
    sock: socket.socket, registry_ref: ref[ClaimRegistry], stop_flag: list[bool]
) -> Callable[[Runtime], Any]:
    """The thread that reads the socket until it is shut down. It refers to the registry weakly, so that a dropped
    client can be garbage-collected."""

    async def listen(runtime: Runtime) -> None:
        failures = 0
        try:
            while not stop_flag and sock.fileno() >= 0:
                try:
                    if not (message := sock.recv(2048)) and _is_shut_down(sock):
                        return
                    if (registry := registry_ref()) is not None:
                        _dispatch(registry, message)
                    registry, failures = None, 0
                except Exception as error:  # if this thread ended, the client's waiters would miss their wake-ups
                    registry = None
                    if stop_flag:
                        return
                    log_unexpected(_log, "the wake-up thread", error)
                    failures += 1
                    await runtime.sleep(backoff(failures, 0.02, 1.0, 0.5 + runtime.random() / 2))
        finally:
            if stop_flag:
                sock.close()
            else:  # the client lives, and must not look dead: `_unbind` closes the socket
                stop_flag.append(True)

    return listen


def _is_shut_down(sock: socket.socket) -> bool:
    """After an empty message, which any process that may use the database can send: whether it was the socket's end."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))


def _dispatch(registry: ClaimRegistry, message: bytes) -> None:
    try:
        kind, id_hash, seconds, namespace, name = message.decode().split("\0")
        delay = float(seconds)
    except ValueError:
        return  # not a message of ours
    if kind in ("reserved", "recheck", "broken"):
        unknown_claim = Claim(namespace, name, "", id_hash, Holder("stray"), WAITER_TTL)
        registry.on_notification(cast(Literal["reserved", "recheck", "broken"], kind), id_hash, delay, unknown_claim)
