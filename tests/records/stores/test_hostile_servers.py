"""Servers that are broken or hostile: no call of a store takes longer than its time, every error is one of Leasehold's
with a short text, and a password goes to no server that is not the one meant."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from kazoo.protocol.serialization import Create, Delete

from harness.servers.hostile import Answer, HostileProxy, answers_of
from harness.servers.process import poll
from leasehold import Client, ConfigError, LeaseholdError, Unavailable
from leasehold.core.texts import MAX_SERVER_TEXT
from leasehold.records import stores
from leasehold.records.store import MAX_DATA, Record
from leasehold.runtime.base import maybe_await, run_sync
from tests.records.stores.conftest import PERSISTENT
from tests.support.certificates import Authority
from tests.support.multi_forger import END, MultiForger, failed
from tests.support.password_thief import GREETING, SECRET, SWITCHES, PasswordThief
from tests.support.repeating_proxy import RepeatingProxy
from tests.support.timing import check_elapsed

SECONDS = 0.5  # of a call
PATIENT = 20.0
# Answers that take no time to refuse, on servers that have such an answer.
QUICK = ("garbage", "zeros", "local file", "error text", "wrong types", "many nulls", "many columns of a short reply")
SLOW = ("silence", "drip")


@pytest.fixture
def attacked(server: Callable[[str], Any]) -> Iterator[Callable[[str], tuple[HostileProxy, str]]]:
    """A proxy that can attack, and a URL of the server behind it."""
    opened: list[Any] = []

    def make(which: str) -> tuple[HostileProxy, str]:
        path = server(which).path()
        hostile = HostileProxy(path.proxies[0].port)
        opened.extend((hostile, path))
        return hostile, path.url.replace(f":{path.proxies[0].port}", f":{hostile.port}")

    yield make
    for each in opened:
        each.close()


def check_calls(hostile: HostileProxy, url: str, key: str, answer: Answer, seconds: float, which: str) -> None:
    """On a connection that is open, and on a new one."""
    with Client("memory://", call_timeout=PATIENT) as client:
        store: Any = stores.open_store(client, url)
        assert run_sync(maybe_await(store.write(key, Record(os.urandom(16).hex(), b"1"), "", None, PATIENT)))
        hostile.attack(answer, at_once=which == "mysql")
        for call in (
            lambda: store.read(key, seconds),
            lambda: store.write(key, Record(os.urandom(16).hex(), b"2"), "", None, seconds),
        ):
            began, text = time.monotonic(), ""
            try:
                run_sync(maybe_await(call()))
            except LeaseholdError as error:
                text = str(error)
            check_elapsed(began, seconds + 0.5, answer.name)
            assert text.isprintable()
            assert len(text) <= 3 * MAX_SERVER_TEXT
        hostile.relent()
        run_sync(maybe_await(store.close() or 0))
    poll(lambda: run_sync_read(url, key), 60, lambda: "the server answers again")


def run_sync_read(url: str, key: str) -> bool:
    with Client("memory://", call_timeout=PATIENT) as client, suppress(Unavailable):
        store: Any = stores.open_store(client, url)
        try:
            return run_sync(maybe_await(store.read(key, PATIENT))) is not None
        finally:
            run_sync(maybe_await(store.close() or 0))
    return False


@pytest.mark.parametrize("which", ["redis", "postgresql", "mysql"])
def test_invalid_answers_raise_only_errors_of_leasehold(which, attacked, key):
    hostile, url = attacked(which)
    answers = [answer for answer in answers_of(which) if answer.name in QUICK]
    assert len(answers) >= 3
    for number, answer in enumerate(answers):
        check_calls(hostile, url, f"{key}-{number}", answer, PATIENT, which)


@pytest.mark.extended
@pytest.mark.parametrize("names", [SLOW, pytest.param(None, marks=pytest.mark.faults)])
@pytest.mark.parametrize("which", PERSISTENT)
def test_hostile_answers_keep_no_call_beyond_its_time(which, names, attacked, key):
    hostile, url = attacked(which)
    for number, answer in enumerate(each for each in answers_of(which) if names is None or each.name in names):
        check_calls(hostile, url, f"{key}-{number}", answer, SECONDS, which)


@pytest.mark.parametrize("name", ["long row", "endless rows", "endless notices"])
def test_postgresql_store_receives_a_bounded_reply(name, attacked, key):
    """libpq keeps whatever a server sends: a message that was announced as long took 800 MB in half a second."""
    hostile, url = attacked("postgresql")
    (answer,) = (each for each in answers_of("postgresql") if each.name == name)
    with Client("memory://") as client:
        store: Any = stores.open_store(client, url)
        assert run_sync(store.read(key, PATIENT)) is None
        hostile.attack(answer)
        with pytest.raises(Unavailable, match="too long a reply"):
            run_sync(store.read(key, 10 * PATIENT))  # millions of small messages take a while
        hostile.relent()


def test_mysql_store_keeps_few_rows_of_an_endless_reply(attacked, key):
    """PyMySQL keeps all rows, and one of two bytes takes a hundred times as much memory."""
    hostile, url = attacked("mysql")
    (answer,) = (each for each in answers_of("mysql") if each.name == "endless rows")
    with Client("memory://") as client:
        store: Any = stores.open_store(client, url)
        assert run_sync(store.read(key, PATIENT)) is None
        hostile.attack(answer)
        tracemalloc.start()
        try:
            with pytest.raises(Unavailable, match="too long"):
                run_sync(store.read(key, 3 * PATIENT))
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()
        hostile.relent()


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
@pytest.mark.parametrize("which", ["postgresql", "mysql"])
def test_reply_sent_twice_is_not_taken_for_the_next(which, at_once, server, key):
    """A write of a record that another client had written was reported as done, with the reply to the last one.
    The other stores use the connections of their engines."""
    path = server(which).path()
    repeating = RepeatingProxy(path.proxies[0].port)
    url = path.url.replace(f":{path.proxies[0].port}", f":{repeating.port}")
    mine, theirs = (Record(os.urandom(16).hex(), data) for data in (b"mine", b"theirs"))
    with Client("memory://", call_timeout=PATIENT) as client:
        store: Any = stores.open_store(client, url)

        def write(name: str, record: Record) -> bool:
            return run_sync(maybe_await(store.write(f"{key}-{name}", record, "", None, PATIENT)))

        def read(name: str) -> Record | None:
            return run_sync(maybe_await(store.read(f"{key}-{name}", PATIENT)))

        def repeated(call: Callable[[], object]) -> None:
            repeating.twice_at_once = at_once
            call()
            repeating.twice_at_once = False
            if not at_once:
                repeating.repeat()

        assert write("taken", theirs)
        repeated(lambda: read("taken"))
        assert write("free", mine)
        repeated(lambda: read("free"))
        assert not write("taken", mine)
        repeated(lambda: read("free"))
        assert read("taken") == theirs
        run_sync(maybe_await(store.close() or 0))
    repeating.close()
    path.close()


@pytest.mark.parametrize(
    "results",
    [
        END,
        failed(0) * 2 + END,
        failed(-2) * 2 + END,
        struct.pack(">i?i", Delete.type, False, -1) * 2 + END,
        failed(-101) * 3 + END,
        struct.pack(">i?ii2s", Create.type, False, -1, 2, b"/a") + failed(-110) + END,
        failed(-101) * 2,
    ],
    ids=["none", "rolled back", "not begun", "other operations", "too many", "only one failed", "cut off"],
)
def test_results_that_do_not_fit_a_zookeeper_record_are_no_answer(results, server, key):
    """The first and the fourth counted as written, the second and the third raised RuntimeError, and a server could
    send so many that they took 90 MB."""
    path = server("zookeeper").path()
    forger = MultiForger(path.proxies[0].port)
    record = Record(os.urandom(16).hex(), b"1")
    with Client("memory://") as client:
        store: Any = stores.open_store(client, path.url.replace(f":{path.proxies[0].port}", f":{forger.port}"))
        assert run_sync(store.write(f"{key}-first", record, "", None, PATIENT))
        forger.results = results
        with pytest.raises(Unavailable, match="invalid reply"):
            run_sync(store.write(key, record, "", None, PATIENT))
        forger.results = None
        run_sync(maybe_await(store.close() or 0))
    forger.close()
    path.close()


@pytest.mark.extended
@pytest.mark.parametrize("which", ["postgresql", "mysql"])
def test_large_record_is_not_written_beyond_the_deadline(which, server, key):
    path = server(which).path()
    with Client("memory://") as client:
        store: Any = stores.open_store(client, path.url)
        assert run_sync(store.read(key, PATIENT)) is None
        path.cut()
        began = time.monotonic()
        with pytest.raises(Unavailable):
            run_sync(store.write(key, Record(os.urandom(16).hex(), bytes(MAX_DATA)), "", None, SECONDS))
        check_elapsed(began, SECONDS + 0.5)
    path.close()


@pytest.mark.extended
@pytest.mark.parametrize("which", ["postgresql", "mysql"])
def test_silent_name_server_costs_a_store_its_deadline(which, monkeypatch):
    end = threading.Event()

    def getaddrinfo(*_: object, **__: object) -> Any:
        end.wait(120)
        raise socket.gaierror(socket.EAI_AGAIN, "the test is over")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with Client("memory://", call_timeout=PATIENT) as client:
        store: Any = stores.open_store(client, f"{which}://user:{SECRET}@silent.example/test")
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"resolve host silent\.example") as raised:
            run_sync(store.read("a:b", 1.0))
        check_elapsed(began, 1.5)
        assert SECRET not in str(raised.value)
    end.set()


@pytest.mark.parametrize("switch", SWITCHES)
def test_mysql_store_sends_no_password_in_clear_text_without_tls(switch):
    thief = PasswordThief(SWITCHES[switch])
    with Client("memory://") as client:
        store: Any = stores.open_store(client, f"mysql://user:{SECRET}@127.0.0.1:{thief.port}/test")
        with pytest.raises(ConfigError, match="in clear text"):
            run_sync(store.read("a:b", PATIENT))
    thief.close()
    assert b"user\0" in thief.received
    assert SECRET.encode() not in thief.received


@pytest.mark.parametrize(
    ("authority", "host", "options"),
    [("other", "127.0.0.1", ""), ("ca", "localhost", ""), ("other", "localhost", "&ssl_verify_identity=no")],
)
def test_mysql_store_verifies_the_server_if_the_url_names_an_authority(tmp_path, authority, host, options):
    """It used TLS, and sent the password to whoever answered."""
    authorities = {name: Authority(tmp_path, name) for name in ("ca", "other")}
    issued = authorities["ca"].issue("server", "IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.cert, issued.key)
    received = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            body = GREETING.replace(b"\xff\xf7", b"\xff\xff") + b"123456789012\0mysql_native_password\0"  # offers TLS
            connection.sendall(len(body).to_bytes(3, "little") + b"\0" + body)
            connection.recv(36, socket.MSG_WAITALL)  # asks for TLS
            with context.wrap_socket(connection, server_side=True) as tls:
                received.append(tls.recv(1024))

    with socket.create_server(("127.0.0.1", 0)) as listener, Client("memory://") as client:
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        address = f"user:{SECRET}@{host}:{listener.getsockname()[1]}"
        url = f"mysql://{address}/test?ssl_ca={authorities[authority].cert}{options}"
        with pytest.raises(ConfigError, match="certificate verify failed"):
            run_sync(stores.open_store(client, url).read("a:b", PATIENT))
        server.join(60)
    assert not any(received)
