"""How a server accepts connections: many at a time under load, and always some more."""

import asyncio
import contextlib
import errno
import socket

import pytest
import uvloop

from leasehold.server import listener
from leasehold.server.listener import MAX_ACCEPTED, Listener
from leasehold.server.settings import TLSFiles
from leasehold.server.tls import Certificates
from tests.support import probe_server
from tests.support.certificates import Authority


class Opened(asyncio.Protocol):
    """Notes the turn of the event loop in which the connection was opened."""

    def __init__(self, turns, now):
        self._turns, self._now = turns, now

    def connection_made(self, transport):
        self._turns.append(self._now())


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request):
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@contextlib.contextmanager
def listening(context=None):
    """A listener in the running loop, its address, and the turns in which connections were opened."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as sock:
        turns, turn = [], [0]
        found = Listener(sock, lambda: Opened(turns, lambda: turn[0]), context and (lambda: context))
        try:
            yield found, sock.getsockname(), turns, turn
        finally:
            found.close()


async def turn_until(condition, turn):
    async with asyncio.timeout(60):
        while not condition():
            turn[0] += 1
            await asyncio.sleep(0)


def test_many_connections_are_accepted_in_few_turns(runner):
    """uvloop accepts one in each: the connections of one caller held up those of others for ten seconds."""

    async def main():
        with listening() as (_, address, turns, turn), contextlib.ExitStack() as stack:
            for _ in range(5 * MAX_ACCEPTED):
                stack.enter_context(socket.create_connection(address))
            await turn_until(lambda: len(turns) == 5 * MAX_ACCEPTED, turn)
            assert turns[-1] - turns[0] < MAX_ACCEPTED
            assert turns.count(turns[0]) == 1, "the first turn leaves the others to other workers"

    runner.run(main())


def test_connections_are_accepted_again_after_too_many_open_files(runner, monkeypatch, caplog):
    class Full(socket.socket):
        left = 7

        def accept(self):
            self.left -= 1
            if self.left >= 0 and self.left != 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(*probe_server.ACCEPT_PAUSE, 0.01)

    async def main():
        with Full() as sock, socket.socket() as caller:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            turns, turn = [], [0]
            found = Listener(sock, lambda: Opened(turns, lambda: turn[0]))
            caller.connect(sock.getsockname())
            with socket.create_connection(sock.getsockname()):
                await turn_until(lambda: len(turns) == 2, turn)
            assert sock.left < 0
            assert caplog.text.count("no connection can be accepted") == 1, "a caller could fill the log"
            found.close()

    runner.run(main())


@pytest.mark.parametrize("then", ["too many open files", "closed"])
def test_accepted_connection_is_opened_whatever_comes_next(runner, monkeypatch, then):
    """uvloop ends one that is cancelled meanwhile without telling its protocol, which then counts for ever."""
    monkeypatch.setattr(*probe_server.ACCEPT_PAUSE, 60)

    class Full(socket.socket):
        accepted = 0

        def accept(self):
            self.accepted += 1
            if self.accepted > 1:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    class Counted(asyncio.Protocol):
        made = lost = 0

        def connection_made(self, transport):
            Counted.made += 1

        def connection_lost(self, exc):
            Counted.lost += 1

    async def main():
        with Full() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            found = Listener(sock, Counted)
            with socket.create_connection(sock.getsockname()), socket.create_connection(sock.getsockname()):
                await turn_until(lambda: probe_server.opening_connections(found), [0])
                if then == "closed":
                    found.close()
                else:
                    probe_server.accept(found)
                await turn_until(lambda: Counted.made, [0])
            await turn_until(lambda: Counted.lost == Counted.made, [0])
            found.close()
            await found.wait_closed()

    runner.run(main())


def test_oldest_of_too_many_handshakes_is_ended(runner, monkeypatch, tmp_path):
    """Else they could use up the open files of the process, above all those of the engine."""
    monkeypatch.setattr(listener, "MAX_HANDSHAKES", 3)
    cert, key = Authority(tmp_path).issue("server", "IP:127.0.0.1")

    async def main():
        context = Certificates(TLSFiles(cert, key)).context
        with listening(context) as (found, address, _, turn), contextlib.ExitStack() as stack:
            half = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
            half[0].setblocking(False)

            def is_ended():
                with contextlib.suppress(BlockingIOError, ConnectionResetError):
                    return half[0].recv(1) == b""
                return False

            await turn_until(is_ended, turn)
            assert probe_server.opening_connections(found) == 3
            found.close()
            await found.wait_closed()

    runner.run(main())
