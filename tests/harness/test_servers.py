"""The proxy and the server process that all server rigs build on, tested with a minimal server."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from harness.servers.folders import scratch
from harness.servers.process import Server, free_ports, poll, program
from harness.servers.proxy import Proxy
from leasehold.testing import Absent
from tests.support import probe_harness
from tests.support.paths import child_environment

ECHO = """
import socketserver, sys
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("127.0.0.1", int(sys.argv[1])), Echo).serve_forever()
"""


class Echo(Server):
    package = "python3"

    def command(self) -> Sequence[str]:
        return [sys.executable, "-c", ECHO, str(self.port)]

    def ready(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), 1).close()
        return True


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo(scratch(), free_ports(1)[0]).start()
    yield server
    server.stop()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    proxy = Proxy(echo.port)
    yield proxy
    proxy.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 5)


def receive(connection: socket.socket, seconds: float = 5.0) -> bytes | None:
    """The next bytes. Empty: closed. None: nothing arrived."""
    connection.settimeout(seconds)
    try:
        return connection.recv(100)
    except TimeoutError:
        return None
    except ConnectionResetError:
        return b""


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20


@pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's")
def test_port_stays_reserved_while_its_server_is_down() -> None:
    (port,) = free_ports(1)
    code = f"from harness.servers.process import reserve; print(reserve({port}))"
    output = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, check=True
    ).stdout
    assert output == "False\n"


def test_missing_program_error_names_package_to_install() -> None:
    with pytest.raises(Absent, match="apt-get install some-package"):
        program("no-such-program", package="some-package")


def test_server_that_exits_at_start_reports_its_log() -> None:
    class Broken(Echo):
        def command(self) -> Sequence[str]:
            return [sys.executable, "-c", "raise SystemExit('no such luck')"]

    with pytest.raises(RuntimeError, match="no such luck"):
        Broken(scratch(), 1).start()


def test_server_can_be_paused_killed_and_restarted(echo: Echo) -> None:
    with connect(echo.port) as connection:
        echo.pause()
        connection.sendall(b"one\n")
        assert receive(connection, 0.1) is None
        echo.resume()
        assert receive(connection) == b"one\n"
        echo.kill()
        assert receive(connection) == b""
        assert not echo.running
    echo.restart()
    with connect(echo.port) as connection:
        connection.sendall(b"two\n")
        assert receive(connection) == b"two\n"


def test_cut_proxy_is_silent_and_later_closes_lossy_connections(proxy: Proxy) -> None:
    with connect(proxy.port) as idle, connect(proxy.port) as connection:
        for peer in (idle, connection):
            peer.sendall(b"hello\n")
            assert receive(peer) == b"hello\n"
        proxy.cut()
        connection.sendall(b"lost\n")
        assert receive(connection, 0.1) is None
        with connect(proxy.port) as late:
            assert receive(late, 0.1) is None
            proxy.restore()
            assert receive(late) == b""
        assert receive(connection) == b""
        idle.sendall(b"still here\n")
        assert receive(idle) == b"still here\n"


def test_lose_answers_drops_answers_but_delivers_requests(proxy: Proxy) -> None:
    seen = []
    proxy.watch = lambda outward, data: seen.append((outward, data))
    with connect(proxy.port) as connection:
        proxy.lose_answers()
        connection.sendall(b"one\n")
        assert receive(connection, 0.1) is None
        assert seen == [(True, b"one\n")]
        proxy.restore()
        assert receive(connection) == b""


def test_reset_closes_connections_and_accepts_new_ones(proxy: Proxy) -> None:
    with connect(proxy.port) as connection:
        connection.sendall(b"one\n")
        assert receive(connection) == b"one\n"
        proxy.reset()
        assert receive(connection) == b""
    with connect(proxy.port) as connection:
        connection.sendall(b"two\n")
        assert receive(connection) == b"two\n"
    assert proxy.accepted == 2


def test_delayed_requests_arrive_late_and_in_order(proxy: Proxy) -> None:
    with connect(proxy.port) as connection:
        delays = iter([0.3, 0.0, 0.0])
        proxy.delay = lambda: next(delays)
        began = time.monotonic()
        connection.sendall(b"one\n")
        poll(lambda: len(probe_harness.delayed_requests(proxy)) == 1, 60, lambda: "the first request is delayed")
        connection.sendall(b"two\n")
        answer = receive(connection)
        assert time.monotonic() - began >= 0.3
        while answer != b"one\ntwo\n":
            assert answer
            answer += receive(connection) or b""
        proxy.delay = None
        connection.sendall(b"three\n")
        assert receive(connection) == b"three\n"


def test_cut_proxy_drops_delayed_requests(proxy: Proxy) -> None:
    with connect(proxy.port) as connection:
        proxy.delay = lambda: 0.2
        connection.sendall(b"one\n")
        poll(lambda: bool(probe_harness.delayed_requests(proxy)), 60, lambda: "the request is delayed")
        proxy.cut()
        poll(lambda: not probe_harness.delayed_requests(proxy), 60, lambda: "the request is due")
        proxy.restore()
        assert receive(connection) == b""
