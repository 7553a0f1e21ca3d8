"""The proxy and the process that every rig of a server stands on, tried with a server of a few lines."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from leasehold.testing import Absent
from leasehold.testing.servers.process import Server, free_ports, program, scratch
from leasehold.testing.servers.proxy import Proxy

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


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 5)


def said(side: socket.socket, seconds: float = 5.0) -> bytes | None:
    """The next bytes; empty: closed; None: silence."""
    side.settimeout(seconds)
    try:
        return side.recv(100)
    except TimeoutError:
        return None
    except ConnectionResetError:
        return b""


def test_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


@pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's")
def test_a_port_is_nobody_else_s_while_its_server_is_down() -> None:
    (port,) = free_ports(1)
    ask = f"from leasehold.testing.servers.process import _reserved; print(_reserved({port}))"
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert said == "False\n"


def test_a_missing_program_says_what_to_install() -> None:
    with pytest.raises(Absent, match="apt-get install some-package"):
        program("no-such-program", package="some-package")


def test_a_server_that_ends_at_once_shows_its_log() -> None:
    class Broken(Echo):
        def command(self) -> Sequence[str]:
            return [sys.executable, "-c", "raise SystemExit('no such luck')"]

    with pytest.raises(RuntimeError, match="no such luck"):
        Broken(scratch(), 1).start()


def test_a_server_is_paused_killed_and_started_again(echo: Echo) -> None:
    with connected(echo.port) as side:
        echo.pause()
        side.sendall(b"one\n")
        assert said(side, 0.1) is None
        echo.resume()
        assert said(side) == b"one\n"
        echo.kill()
        assert said(side) == b""
        assert not echo.running
    echo.restart()
    with connected(echo.port) as side:
        side.sendall(b"two\n")
        assert said(side) == b"two\n"


def test_a_cut_is_silent_and_what_lost_bytes_is_closed_when_mended(proxy: Proxy) -> None:
    with connected(proxy.port) as idle, connected(proxy.port) as side:
        for each in (idle, side):
            each.sendall(b"hello\n")
            assert said(each) == b"hello\n"
        proxy.cut()
        side.sendall(b"lost\n")
        assert said(side, 0.1) is None
        with connected(proxy.port) as late:
            assert said(late, 0.1) is None
            proxy.mend()
            assert said(late) == b""
        assert said(side) == b""
        idle.sendall(b"still here\n")
        assert said(idle) == b"still here\n"


def test_answers_are_lost_though_requests_arrive(proxy: Proxy) -> None:
    seen = []
    proxy.watch = lambda outward, data: seen.append((outward, data))
    with connected(proxy.port) as side:
        proxy.lose_answers()
        side.sendall(b"one\n")
        assert said(side, 0.1) is None
        assert seen == [(True, b"one\n")]
        proxy.mend()
        assert said(side) == b""


def test_a_reset_closes_what_is_open_and_welcomes_new_ones(proxy: Proxy) -> None:
    with connected(proxy.port) as side:
        side.sendall(b"one\n")
        assert said(side) == b"one\n"
        proxy.reset()
        assert said(side) == b""
    with connected(proxy.port) as side:
        side.sendall(b"two\n")
        assert said(side) == b"two\n"
    assert proxy.accepted == 2
