"""`leasehold serve` as a process of a test, with requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.program import ForkedProgram, run_program

SECONDS = 60.0  # how long a test waits for what must happen, even on a slow machine


def run_serve(*arguments: str, url: str | None = "memory://", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `leasehold serve` that ends by itself."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD")}
    options = [] if url is None else ["-u", url]
    return run_program([*options, "serve", *arguments], Path.cwd(), {**inherited, **environment}, seconds=SECONDS)


def poll(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Poll with a deadline; returns what was found."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
    return found


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def kind(self) -> str:
        """Of a problem: the last part of its type."""
        return str(self.json["type"]).rpartition("/")[2]


class Stream:
    """Server-sent events of a response, as text."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._response = connection.getresponse()
        body = self._response.read() if self._response.status >= 400 else b""
        self.answer = Answer(self._response.status, dict(self._response.getheaders()), body)
        self.text = ""

    def wait_for(self, text: str) -> None:
        """Read until the text has come."""
        while text not in self.text:
            line = self._response.readline()
            assert line, f"the stream ended before {text!r}: {self.text}"
            self.text += line.decode()

    def read_to_end(self) -> str:
        """Everything until the server ends the stream. It sends something every 5 s, so this does not time out."""
        began = time.monotonic()
        while line := self._response.readline():
            assert time.monotonic() - began < SECONDS, "the stream did not end"
            self.text += line.decode()
        return self.text


class RunningServer:
    def __init__(
        self, *arguments: str, url: str | None = "memory://", environment: dict[str, str] | None = None
    ) -> None:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD")}
        program = [*([] if url is None else ["-u", url]), "serve"]
        if not any(argument.startswith("--listen") for argument in arguments):
            program += ["--listen", "127.0.0.1:0"]
        output, written = os.pipe()
        self._output = open(output, "rb")  # noqa: SIM115  # closed by stop()
        self.process = ForkedProgram([*program, *arguments], {**inherited, **(environment or {})}, written)
        os.close(written)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        poll(lambda: self._address() or self.process.poll() is not None)
        assert self._address(), self.output
        self.port = int(self._address().rpartition(":")[2])

    def _read(self) -> None:
        for line in self._output:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    def _address(self) -> str:
        return next((line for line in self.lines if "listening on http" in line), "")

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        port: int | None = None,
    ) -> Answer:
        sent = dict(headers or {})
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        where = ("127.0.0.1", self.port if port is None else port)
        connection = (
            http.client.HTTPConnection(*where, timeout=SECONDS)
            if tls is None
            else http.client.HTTPSConnection(*where, timeout=SECONDS, context=tls)
        )
        with contextlib.closing(connection):
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())

    def post(self, path: str, body: Any, **named: Any) -> Answer:
        return self.request("POST", path, body, **named)

    def get(self, path: str, **named: Any) -> Answer:
        return self.request("GET", path, **named)

    def open(self, path: str, *, key: str | None = None, headers: dict[str, str] | None = None) -> Answer:
        """The head of an answer that does not end; the body only of a problem."""
        with self.stream(path, key=key, headers=headers) as stream:
            return stream.answer

    @contextlib.contextmanager
    def stream(self, path: str, *, key: str | None = None, headers: dict[str, str] | None = None) -> Iterator[Stream]:
        """Server-sent events, read in the background."""
        sent = dict(headers or {})
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)) as connection:
            connection.request("GET", path, headers=sent)
            yield Stream(connection)

    def memory(self) -> int:
        """Bytes of resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu(self) -> float:
        """Processor seconds of its main thread, which runs the event loop."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9

    def stop(self) -> int:
        """End it with SIGTERM, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join()
        self._output.close()
        return code


@contextlib.contextmanager
def running(*arguments: str, **named: Any) -> Iterator[RunningServer]:
    server = RunningServer(*arguments, **named)
    try:
        yield server
    finally:
        code = server.stop()
    assert code == 0, server.output


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test in an event loop, for a minute at most."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(60):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run
