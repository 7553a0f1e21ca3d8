"""Load for a lock server, and what it costs: for the bench table `server`, and for tests of overload.

The generator is one thread with many connections, each with one request under way. It parses as little as possible:
it shares the machine with the server that it measures.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.servers.process import descendants


def http_request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Connection:
    """A keep-alive connection with one request under way at a time."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.sent_at = 0.0

    def send(self, request: bytes) -> None:
        self.sent_at = time.perf_counter()
        self.sock.sendall(request)

    def receive(self) -> bytes | None:
        """The answer, head and body; None: it has not arrived completely."""
        data = self.sock.recv(1 << 20)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return None
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(body) < length:
            return None
        answer, self._received = self._received, b""
        return answer

    def ask(self, request: bytes) -> bytes:
        self.send(request)
        while (answer := self.receive()) is None:
            continue
        return answer

    def close(self) -> None:
        self.sock.close()


@contextmanager
def connections(port: int, count: int) -> Iterator[list[Connection]]:
    opened: list[Connection] = []
    try:
        opened += [Connection(port) for _ in range(count)]
        yield opened
    finally:
        for each in opened:
            each.close()


def run_requests(
    opened: Sequence[Connection],
    next_request: Callable[[int], bytes | None],
    on_answer: Callable[[int, bytes, float], None] = lambda _number, _answer, _seconds: None,
) -> int:
    """Send requests over all connections until `next_request(number of the connection)` returns None. Returns how many
    were answered."""
    answered, under_way = 0, 0
    with selectors.DefaultSelector() as selector:
        for number, connection in enumerate(opened):
            selector.register(connection.sock, selectors.EVENT_READ, number)
            if (request := next_request(number)) is not None:
                connection.send(request)
                under_way += 1
        while under_way:
            for key, _ in selector.select(60):
                number = key.data
                connection = opened[number]
                if (answer := connection.receive()) is None:
                    continue
                answered += 1
                on_answer(number, answer, time.perf_counter() - connection.sent_at)
                if (request := next_request(number)) is not None:
                    connection.send(request)
                else:
                    under_way -= 1
    return answered


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, its threads and its children, by the scheduler's clock (Linux)."""
    total = 0
    for process in (pid, *descendants(pid)):
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError):
                total += int(Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[0])
    return total / 1e9


def resident_bytes(pid: int) -> int:
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in (pid, *descendants(pid)))
    return pages * os.sysconf("SC_PAGE_SIZE")
