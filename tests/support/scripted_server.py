"""A lock server by script: it answers each verb of the remote engine as a test says, or not at all."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

from leasehold.engines.remote import wire
from leasehold.model import Traits

Json: TypeAlias = dict[str, Any]
SILENT: Final = object()  # an answer that never comes
HANG_UP: Final = object()  # the connection is closed instead
_TRAITS: Final = Traits(survives="restart")


class Raw(bytes):
    """A whole response, as it is sent."""


def problem(kind: str, status: int = 503, **members: Any) -> Json:
    return {"problem": {"type": wire.PROBLEM_TYPE + kind, "status": status, "detail": f"it is {kind}", **members}}


def response(status: int, body: object, headers: str = "") -> Raw:
    data = json.dumps(body).encode()
    return Raw(f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def free_engine(call: Json) -> Any:
    """The answers of an engine in which every name is free."""
    match call["do"]:
        case "attempt":
            return {"grant": [7, call["claim"]["ttl"], None]}
        case "renew":
            return {"renewed": [{"alive": [claim["ttl"], None]} for claim in call["claims"]]}
        case "inspect":
            return {"value": []}
        case "ping":
            return {"value": wire.traits_to_json(_TRAITS)}
    return {"value": True}


class ScriptedServer:
    """`script` gets each call and returns its answer, `Raw`, `SILENT` or `HANG_UP`. `calls` has all that arrived."""

    def __init__(self, script: Callable[[Json], Any] = free_engine) -> None:
        self.script = script
        self.stream_begin: Any = [{"hello": {"traits": wire.traits_to_json(_TRAITS)}}]  # or Raw
        self.calls: list[Json] = []
        self.batches: list[int] = []
        self.heads: list[str] = []
        self.accepted = 0
        self._streams: list[socket.socket] = []
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def streams(self) -> int:
        return len(self._streams)

    def verbs(self) -> list[str]:
        return [call["do"] for call in self.calls]

    def push(self, *notifications: Json) -> None:
        for stream in list(self._streams):
            with suppress(OSError):
                stream.sendall(_chunk(f"data: {json.dumps(notifications)}\n\n".encode()))

    def hang_up(self) -> None:
        """Reset every connection; new ones are accepted."""
        for connection in list(self._connections):
            self._reset(connection)

    def close(self) -> None:
        """Refuse connections from now on, and reset all."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def _reset(self, connection: socket.socket) -> None:
        self._connections.discard(connection)
        with suppress(ValueError):
            self._streams.remove(connection)
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError):
            file = connection.makefile("rb")
            while head := self._read_head(file):
                self.heads.append(head)
                if head.startswith("GET "):
                    self._begin_stream(connection)
                elif not self._answer(connection, json.loads(file.read(_content_length(head)))):
                    break
        self._reset(connection)

    def _read_head(self, file: Any) -> str:
        lines = []
        while (line := file.readline()) not in (b"", b"\r\n"):
            lines.append(line.decode())
        return "".join(lines)

    def _begin_stream(self, connection: socket.socket) -> None:
        if isinstance(self.stream_begin, Raw):
            connection.sendall(self.stream_begin)
            return
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._streams.append(connection)
        connection.sendall(head + _chunk(f"data: {json.dumps(self.stream_begin)}\n\n".encode()))

    def _answer(self, connection: socket.socket, calls: list[Json]) -> bool:
        self.batches.append(len(calls))
        self.calls += calls
        answers = [self.script(call) for call in calls]
        for answer in answers:
            if isinstance(answer, Raw):
                connection.sendall(answer)
                return True
            if answer is SILENT:
                return True
            if answer is HANG_UP:
                return False
        connection.sendall(response(200, answers))
        return True


def _content_length(head: str) -> int:
    return next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
