"""Host names are looked up by a deadline, on one thread for each name."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from leasehold.runtime.net.blocking import SocketAddress
from leasehold.runtime.net.fanout_blocking import NonblockingConnection
from leasehold.runtime.net.host_names import note_connect, resolve_blocking, start_look_up
from tests.support import probe_runtime


class NameServer:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = threading.Event()

    def getaddrinfo(self, host, port, **_):
        self.asked.append(host)
        if host.endswith(".example"):
            self.may_answer.wait(60)
        if host == "unknown.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if host == "a..example":
            raise UnicodeError("label empty")
        return [(socket.AF_INET6, 1, 6, "", ("::1", 0, 0, 3)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]


@pytest.fixture
def names(monkeypatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.may_answer.set()
    for look_up in list(probe_runtime.look_ups().under_way.values()):  # else the next test finds its name under way
        done = threading.Event()
        look_up.when_done(done.set)
        assert done.wait(60)


def test_address_gets_the_port_and_keeps_its_scope(names) -> None:
    names.may_answer.set()
    found = resolve_blocking("a.example", 80, 60)
    assert found == [(socket.AF_INET6, ("::1", 80, 0, 3)), (socket.AF_INET, ("127.0.0.1", 80))]


def test_address_that_did_not_connect_the_last_time_comes_last(names) -> None:
    """Else each call would begin with a silent address, and have no time for another one."""
    names.may_answer.set()
    first, second = resolve_blocking("a.example", 81, 60)
    note_connect(first, succeeded=False)
    assert resolve_blocking("a.example", 81, 60) == [second, first]
    assert resolve_blocking("a.example", 82, 60)[0][1][0] == first[1][0], "it is another server"
    note_connect(second, succeeded=False)
    assert resolve_blocking("a.example", 81, 60) == [first, second]
    note_connect(first, succeeded=True)
    note_connect(second, succeeded=True)
    assert resolve_blocking("a.example", 81, 60) == [first, second]


def test_bounded_number_of_addresses_that_did_not_connect_is_kept(names) -> None:
    names.may_answer.set()
    first, second = resolve_blocking("a.example", 83, 60)
    for port in (83, *range(1000, 2000)):
        note_connect((socket.AF_INET6, ("::1", port, 0, 3)), succeeded=False)
    assert resolve_blocking("a.example", 83, 60) == [first, second]
    for port in range(1000, 2000):
        note_connect((socket.AF_INET6, ("::1", port, 0, 3)), succeeded=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ip_address_needs_no_thread(names, monkeypatch, address) -> None:
    monkeypatch.setattr(threading.Thread, "start", None)
    assert resolve_blocking(address, 80, 0)


def test_callers_that_give_up_share_one_look_up(names) -> None:
    for _ in range(5):
        with pytest.raises(socket.gaierror, match="in time"):
            resolve_blocking("a.example", 80, 0.01)
    assert names.asked == ["a.example"]
    late = start_look_up("a.example")
    done = threading.Event()
    late.when_done(done.set)
    names.may_answer.set()
    assert done.wait(60)
    assert late.targets(80)


@pytest.mark.parametrize("host", ["unknown.example", "a..example"])
def test_error_is_raised_to_each_caller_as_its_own(names, host) -> None:
    names.may_answer.set()
    look_up = start_look_up(host)
    done = threading.Event()
    look_up.when_done(done.set)
    assert done.wait(60)
    errors = []
    for _ in range(2):
        with pytest.raises(OSError, match=r"not known|label empty") as caught:
            look_up.targets(80)
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_very_many_names_start_a_bounded_number_of_threads(names, monkeypatch) -> None:
    monkeypatch.setattr(*probe_runtime.MAX_LOOK_UPS, 3)
    for number in range(3):
        start_look_up(f"many{number}.example")
    with pytest.raises(socket.gaierror, match="too many"):
        start_look_up("many3.example")
    assert resolve_blocking("127.0.0.1", 80, 60)


def test_name_is_looked_up_by_the_caller_if_no_thread_can_be_started(names, monkeypatch) -> None:
    """At the end of the interpreter, when releases are sent."""

    def start(_) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert resolve_blocking("localhost", 80, 60)


def test_forked_child_does_not_wait_for_a_look_up_of_its_parent(names) -> None:
    start_look_up("a.example")
    child = os.fork()
    if not child:
        names.may_answer.set()
        os._exit(0 if resolve_blocking("a.example", 80, 30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_name_is_looked_up_again_if_the_first_look_up_was_interrupted(names, monkeypatch, error) -> None:
    def start(_) -> None:
        raise error

    names.may_answer.set()
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(threading.Thread, "start", start)
        start_look_up("a.example")
    assert resolve_blocking("a.example", 80, 30)


class InterruptedMutex:
    """Ctrl-C arrives as soon as it is released."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        raise KeyboardInterrupt


def test_name_is_looked_up_again_if_ctrl_c_came_before_the_thread(names, monkeypatch) -> None:
    names.may_answer.set()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(probe_runtime.look_ups(), "mutex", InterruptedMutex())
        start_look_up("a.example")
    assert resolve_blocking("a.example", 80, 30)


def test_look_up_that_fails_unexpectedly_ends(monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("refused by an audit hook")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(OSError, match="RuntimeError"):
        resolve_blocking("a.example", 80, 30)
    assert "a.example" not in probe_runtime.look_ups().under_way


def test_connection_dropped_before_the_answer_leaves_no_descriptor(names, monkeypatch) -> None:
    made, socketpair = list[socket.socket](), socket.socketpair

    def record() -> tuple[socket.socket, socket.socket]:
        made.extend(socketpair())
        return made[0], made[1]

    monkeypatch.setattr(socket, "socketpair", record)
    server: Any = SimpleNamespace(address=SocketAddress("a.example", 80))
    parser: Any = None
    connection = NonblockingConnection(server, parser, 1)
    connection.close()
    del connection
    assert [sock.fileno() for sock in made] == [-1, -1]
