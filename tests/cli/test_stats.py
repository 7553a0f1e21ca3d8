"""`leasehold stats`, and `leasehold history` and `leasehold top` of a lock server."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import click
import pytest

from leasehold import Client
from leasehold.cli import server_api
from leasehold.cli.server_api import ServerApi
from leasehold.errors import AccessDenied, ConfigError, LeaseholdError, Unavailable
from tests.support import probe_cli
from tests.support.running_server import poll, running

JSON_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"


def test_stats_of_an_engine_show_what_inspect_can_tell(shell):
    shell.hold("orders/42")
    done = shell("stats")
    assert done.returncode == 0
    now, oldest, cycles = done.stdout.splitlines()
    assert now == "now             1 held, 0 waiting, 1 name"
    assert re.fullmatch(r"oldest          hold [\dhms.]+, wait -", oldest)
    assert cycles == "deadlocks       0"
    assert "rates, latencies and losses need a lock server" in done.stderr
    found = shell.json("stats")
    section = JSON_PAGE.read_text().partition("\n## `stats`\n")[2].partition("\n## ")[0]
    assert list(found) == re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert (found["now"]["held"], found["stats"], found["missing"]) == (1, None, [])


@pytest.fixture(scope="module")
def server():
    with running(url="memory://") as server:
        yield server


@pytest.mark.extended
def test_stats_history_and_top_of_a_server(shell, server):
    url = f"http://127.0.0.1:{server.port}"
    with Client(url, namespace="shop", holder="web-3") as client, Client(url, namespace="shop") as other:
        for _ in range(3):
            client.lock("orders/42").acquire().release()
        held = client.lock("orders/42").acquire()
        assert other.lock("orders/42").try_acquire() is None
        waiting = threading.Thread(target=lambda: other.lock("orders/42", wait=60).acquire().release())
        waiting.start()
        poll(lambda: len(client.inspect("orders/42")) == 2)
        arguments = ("-u", url, "--namespace", "shop")
        row = shell(*arguments, "top").stdout.splitlines()[1].split()
        assert (row[:3], row[6]) == (["orders/42", "held", "web-3"], "1")
        (listed, queued) = json.loads(shell(*arguments, "-o", "json", "top").stdout)
        assert (listed["token"], listed["state"], queued["position"]) == (held.token, "held", 0)
        client.break_lock("orders/42", token=held.token, why="a test")
        waiting.join(60)

    def stats() -> str:
        return shell(*arguments, "stats", "--since", "1h").stdout

    poll(lambda: re.search(r"^broken +1$", stats(), re.M))  # a server counts anew once a second at most
    text = stats()
    assert re.search(r"^acquires +\d+, [\d.]+/s$", text, re.M)
    assert re.search(r"^direct +p50 [\dms.]+, p95 [\dms.]+, p99 [\dms.]+$", text, re.M)
    assert re.search(r"^orders/\* +[\d.]+ ", text, re.M)
    found = json.loads(shell(*arguments, "-o", "json", "stats").stdout)
    assert found["stats"]["namespace"] == "shop"
    grants = json.loads(shell(*arguments, "-o", "json", "history", "orders/42").stdout)
    assert [each["end"] for each in grants] == ["released"] * 3 + ["broken", "released"]
    assert [each["token"] for each in grants] == sorted(each["token"] for each in grants)
    assert grants[3]["token"] == held.token
    assert grants[0]["holder"] == "web-3"
    assert re.fullmatch(r"2\d{3}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", grants[0]["granted_at"])
    table = shell(*arguments, "history", "orders/42").stdout.splitlines()
    assert len(table) == 6
    assert shell(*arguments, "history", "none").stderr == "leasehold: no grants of none that the server remembers\n"


def test_history_without_server_or_files_says_what_to_do(shell):
    done = shell("history", "job")
    assert done.returncode == 64
    assert "name the audit FILE, or set LEASEHOLD_AUDIT, or pass the URL of a lock server with -u" in done.stderr


def test_stats_of_more_than_an_hour_are_refused(shell):
    done = shell("-u", "http://127.0.0.1:1", "stats", "--since", "2h")
    assert done.returncode == 64
    assert "at most one hour" in done.stderr


# ------------------------------------------------------------- the requests


@contextmanager
def answering(status: int, body: bytes, seen: list[str] | None = None):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if seen is not None:
                seen.append(f"{self.path} {self.headers['Authorization']}")
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, b"[1]", Unavailable),
        (200, b"<html>", Unavailable),
        (200, b'{"a": NaN}', Unavailable),
        (200, b'{"a": -1e400}', Unavailable),
        (502, b"<html>", Unavailable),
        (404, b'{"type": "x/not-found"}', ConfigError),
        (403, b'{"type": "x/forbidden", "detail": "no"}', AccessDenied),
        (503, b'{"type": "x/overloaded", "detail": "no"}', Unavailable),
        pytest.param(200, b"[" * 200_000, Unavailable, id="deep"),
        pytest.param(200, b'{"a": [' + b"[]," * 200_000 + b"[]]}", Unavailable, id="many values"),
        pytest.param(200, b'{"a": "' + b"x" * 8_000_000 + b'"}', Unavailable, id="long"),
    ],
)
def test_answer_that_is_no_answer_raises(status, body, error):
    with answering(status, body) as port:
        api = ServerApi(f"http://127.0.0.1:{port}")
        with pytest.raises(LeaseholdError) as raised:
            api.get("/v1/stats")
        api.close()
    assert isinstance(raised.value, error)


@pytest.mark.parametrize("begin", [b"", b"\r\nContent-Length: 1200\r\n\r\n"], ids=["headers", "body"])
def test_answer_without_an_end_is_cut_off(monkeypatch, begin):
    """Each byte comes in time for the timeout of a socket."""
    monkeypatch.setattr(*probe_cli.SERVER_TIMEOUT, 0.2)
    over = threading.Event()

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.request.recv(65536)
                self.request.sendall(b"HTTP/1.1 200 OK" + begin)
                for _ in range(1200):  # a minute
                    self.request.sendall(b" ")
                    over.wait(0.05)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            with pytest.raises(Unavailable, match="timed out"):
                ServerApi(f"http://127.0.0.1:{server.server_address[1]}").get("/v1/stats")
        finally:
            over.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("command", "body"),
    [
        (["history", "orders/42"], b'{"missing": [], "grants": [{}]}'),
        (["top", "--once"], b'{"holdings": [{}], "queue": 1, "cursor": null}'),
    ],
)
def test_answer_of_another_version_is_no_bug_of_the_command(shell, command, body):
    with answering(200, body) as port:
        done = shell("-u", f"http://127.0.0.1:{port}", *command)
    assert done.returncode == 69, done.stderr
    assert "has another form than this version of Leasehold knows" in done.stderr


GRANT = {
    "token": 5,
    "fingerprint": "f",
    "holder": "web",
    "purpose": None,
    "mode": "exclusive",
    "slot": None,
    "granted_at": 1.7e9,
    "waited": 1.0,
    "partial": False,
    "ended_at": 1.8e9,
    "end": "lost",
    "reason": "expired",
    "actor": None,
    "refused": [],
    "trace": None,
}


def test_tls_handshake_without_end_is_ended_at_the_deadline(monkeypatch):
    """OpenSSL ignores these messages and reads on: no timeout of a socket ends that."""
    monkeypatch.setattr(*probe_cli.SERVER_TIMEOUT, 0.3)
    hung_up = threading.Event()

    def serve() -> None:
        with suppress(TimeoutError):
            while True:
                connection, _ = listener.accept()
                end = time.monotonic() + 10
                try:
                    with connection:
                        connection.recv(1024)
                        while time.monotonic() < end:
                            connection.sendall(b"\x16\x03\x03\x00\x04\0\0\0\0" * 1000)  # HelloRequest
                except OSError:
                    hung_up.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(2)
        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(Unavailable):
            ServerApi(f"https://127.0.0.1:{listener.getsockname()[1]}").get("/v1/stats")
        assert hung_up.is_set() or hung_up.wait(1)
        server.join()


@pytest.mark.parametrize(
    ("member", "value"),
    [("waited", "-rf"), ("holder", 0), ("reason", {}), ("token", "5"), ("granted_at", 1e300), ("refused", 1)],
)
def test_grant_with_a_member_of_another_type_is_no_answer(member, value):
    assert probe_cli.read_past_grant(GRANT).end == "lost"
    with pytest.raises(Unavailable), server_api.reading("/v1/history"):
        probe_cli.read_past_grant({**GRANT, member: value})


def test_texts_of_a_server_cannot_move_the_cursor():
    counts = {"lost": {"\x1b[2J\u202e": 3}}
    total = {
        "counts": counts,
        "rate": 1.0,
        "contention": 0.0,
        "errors": 0.0,
        "direct": None,
        "queued": None,
        "held": None,
    }
    stats = {"since": 0.0, "until": 60.0, "total": total, "groups": [{**total, "group": "\x1b]0;title\x07"}]}
    assert all(click.unstyle(line).isprintable() for line in probe_cli.stats_lines(stats))


def test_request_goes_to_the_next_server_with_the_key(monkeypatch):
    monkeypatch.setenv("LEASEHOLD_API_KEY", "lh_web_secret")
    seen: list[str] = []
    with answering(200, b'{"a": 1}', seen) as port:
        api = ServerApi(f"http://127.0.0.1:1,127.0.0.1:{port}/base")
        for _ in range(2):
            assert api.get("/v1/locks", namespace="a b", prefix="") == {"a": 1}
        api.close()
    assert seen == ["/base/v1/locks?namespace=a+b Bearer lh_web_secret"] * 2


def test_no_server_that_answers_is_unavailable_with_the_reason():
    with pytest.raises(Unavailable, match=r"no Leasehold server answers: 127\.0\.0\.1:1: Connection refused"):
        ServerApi("http://127.0.0.1:1").get("/v1/locks")
