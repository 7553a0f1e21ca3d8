"""Servers that are broken or hostile: whatever they answer, and whenever, calls of both APIs keep their promises.

For every engine and API, each answer of `harness.servers.hostile` is given to a new connection, to a client that holds
a lease, to its listening connections, and while it closes. No call takes longer than `call_timeout` + 0.5 s (measured
in the second tier), only `LeaseholdError` is raised, its text is short and printable, the process grows by less than
32 MiB, nothing is printed, and afterwards the same client works again.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain, product, repeat
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from harness.servers import forged
from harness.servers.hostile import ENGINES, Answer, HostileProxy, answers_of
from harness.servers.process import poll
from leasehold import Client, Unavailable
from leasehold.core.texts import MAX_SERVER_TEXT
from leasehold.engines.zookeeper.connection import KazooHandler
from leasehold.testing.conformance.rig import Rig, rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.child_process import Child
from tests.support.paths import SUPPORT
from tests.support.tiers import first_tier
from tests.support.timing import MEASURING, check_elapsed
from tests.support.tls_clients import TLS_CLIENTS

CALL_TIMEOUT = 0.4
PROMISED = CALL_TIMEOUT + 0.5
PATIENT = 8.0  # seconds
MEMORY = 32 * 1024 * 1024
# What is promised is for each thread. The watchdog's repeats the releases of calls that got no answer, and all five
# nodes answer it at the same time as the caller's thread.
THREADS = {"redlock": 2}
MAX_TEXT = 8 * MAX_SERVER_TEXT  # Leasehold's own words, and the texts of five servers
TRIES = 3  # a call is too slow if it is too slow each time: the machine may be busy
AT_ONCE = 5  # answers without a flood, which clients mostly wait for: each client is a process of its own
PINGS = 100
COMMANDS = (  # that are answered with what is forged
    *("attempt", "semaphore", "read", "renew", "release", "inspect", "deadlocks", "ping"),
    *("set_limit", "break_lock", "hand_over", "take_over"),
)
LISTS = ("many items", "many items of one name", "null texts")  # with as many items as the client accepts, or more
QUICK = ("garbage", "truncated")  # the answers of `make test`, as the whole table takes minutes


class HostileCase:
    """One client in a process of its own, behind proxies that can attack it."""

    def __init__(
        self,
        rig: Rig,
        api: str,
        log: Path,
        exit_stack: ExitStack,
        make_url: Callable[[str], str] = str,
        call_timeout: float = CALL_TIMEOUT,
    ) -> None:
        machine: Any = rig.client_path()
        exit_stack.callback(machine.close)
        self.proxies, url = [], machine.url
        for proxy in machine.proxies:
            self.proxies.append(HostileProxy(proxy.port))
            exit_stack.callback(self.proxies[-1].close)
            url = url.replace(f":{proxy.port}", f":{self.proxies[-1].port}")
        namespace = f"hostile-{uuid4().hex[:8]}"
        holder = exit_stack.enter_context(rig.client(namespace=namespace))
        exit_stack.enter_context(holder.lock("contended", ttl=600))
        self._log = log
        arguments = (api, make_url(url), namespace, call_timeout)
        self.child = Child(
            *arguments, script=SUPPORT / "hostile_child.py", stderr=exit_stack.enter_context(log.open("wb"))
        )
        exit_stack.callback(self.child.close)
        self.problems: list[str] = []
        self.slow: set[str] = set()

    def attack(self, answer: Answer, *, at_once: bool = False) -> None:
        for proxy in self.proxies:
            proxy.attack(answer, at_once=at_once)

    def relent(self) -> None:
        for proxy in self.proxies:
            proxy.relent()

    def do(self, command: str) -> dict[str, Any]:
        assert self.child.process.stdin is not None
        self.child.process.stdin.write(json.dumps(command) + "\n")
        self.child.process.stdin.flush()
        report: dict[str, Any] = self.child.read_message()
        return report

    def check(self, when: str, command: str) -> Any:
        """Do it, and note what breaks a promise. Returns the error: its kind, name and text."""
        report = self.do(command)
        if report["seconds"] > PROMISED:
            self.slow.add(f"{when}: {command}")
        if report["error"] is not None:
            kind, name, text = report["error"]
            if kind != "LeaseholdError":
                self.problems.append(f"{when}: {command} raised {name}: {text[:200]}")
            elif not text.isprintable() or len(text) > MAX_TEXT:
                self.problems.append(f"{when}: {command} has an unsafe text: {text!r}")
        return report["error"]

    def recover(self, command: str) -> None:
        """Until it works again: the servers answer properly now."""
        end = time.monotonic() + 60
        while (report := self.do(command))["error"] is not None:
            if time.monotonic() > end:
                self.problems.append(f"{command} does not work again: {report['error']}")
                return

    def run(self, answer: Answer, at_once: bool) -> None:
        """`at_once`: also when the client has said nothing, as a MySQL server speaks first."""
        self.attack(answer, at_once=at_once)
        self.do("open")
        for command in ("ping", "attempt"):
            self.check("connecting", command)
        self.relent()
        self.recover("hold")
        self.do("wait")
        self.attack(answer)
        for command in ("renew", "attempt", "wait", "inspect", "release"):
            self.check("connected", command)
        self.relent()
        self.recover("hold")
        self.do("wait")
        self.attack(answer, at_once=True)
        for command in ("attempt", "renew"):
            self.check("listening", command)
        self.relent()
        self.recover("attempt")
        self.attack(answer)
        self.check("closing", "close")
        self.relent()

    def run_forged(self, answer: Answer) -> None:
        """Every call but those that wait. The client knows the server: it has answered well before."""
        for command in COMMANDS:
            self.recover("hold" if command in ("renew", "release") else "ping")
            if command == "take_over":
                self.do("hand_over")  # not on engines whose grants die with their client
            self.attack(answer)
            self.check("forged", command)
            self.relent()

    def run_until_fast(self, name: str, run: Callable[[], None]) -> list[str]:
        """Everything that breaks a promise, with the name of the answer."""
        run()
        slow = self.slow.copy()
        for _ in range(TRIES - 1 if MEASURING else 0):
            if slow:
                self.slow.clear()
                run()
                slow &= self.slow
        self.slow.clear()
        too_slow = [f"{each} is too slow" for each in slow if MEASURING]
        problems, self.problems = self.problems + too_slow, []
        return [f"{name}: {problem}" for problem in problems]

    def warm_up(self) -> int:
        """Use every call once. Returns the largest size that the process had, in bytes."""
        self.do("open")
        self.recover("hold")
        self.check("first", "close")
        return self.peak()

    def peak(self) -> int:
        peak: int = self.do("ping")["peak"]
        return peak

    def printed(self) -> str:
        return self._log.read_text(errors="replace")


@pytest.fixture(params=["blocking", "asyncio"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_case(engine: str, api: str, tmp_path: Path) -> Iterator[Callable[..., HostileCase]]:
    rig = rig_or_skip(rig_type(engine))
    with ExitStack() as exit_stack:
        exit_stack.callback(rig.close)

        def make(**options: Any) -> HostileCase:
            return HostileCase(rig, api, tmp_path / uuid4().hex, exit_stack, **options)

        yield make


def assert_nothing_printed(case: HostileCase) -> None:
    printed = case.printed()
    assert "Traceback" not in printed
    assert all(line.isprintable() for line in printed.splitlines())


def attack_with(answers: Sequence[Answer], case: HostileCase, engine: str, with_forged: bool = False) -> list[str]:
    """Everything that breaks a promise."""
    before, found = case.warm_up(), []
    if with_forged:
        case.do("open")
    for answer in answers:
        if with_forged:
            found += case.run_until_fast(answer.name, lambda answer=answer: case.run_forged(answer))
        else:
            found += case.run_until_fast(answer.name, lambda answer=answer: case.run(answer, at_once=engine == "mysql"))
        if (grown := case.peak() - before) > MEMORY * THREADS.get(engine, 1):
            return [*found, f"{answer.name}: the process grew by {grown // 2**20} MiB"]
    return found


def assert_no_promise_broken(
    answers: Sequence[Answer], cases: Sequence[HostileCase], engine: str, with_forged: bool = False
) -> None:
    shares = [answers[number :: len(cases)] for number in range(len(cases))]
    with ThreadPoolExecutor(len(cases)) as pool:
        results = pool.map(attack_with, shares, cases, repeat(engine), repeat(with_forged))
        found = [problem for each in results for problem in each]
    assert not found, "\n".join(found)
    for case in cases:
        assert_nothing_printed(case)


@pytest.mark.parametrize("api", ["asyncio"])
def test_unreadable_answers_break_no_promise(make_case, engine) -> None:
    answers = [answer for answer in answers_of(engine) if answer.name in QUICK]
    assert len(answers) == len(QUICK)
    assert_no_promise_broken(answers, [make_case() for _ in answers], engine)


LONG_FORGED = ("redis", "redlock", "zookeeper")


@pytest.mark.extended
def test_hostile_answers_break_no_promise(make_case, engine) -> None:
    answers = [
        answer
        for answer in answers_of(engine)
        if not answer.floods and not answer.forged and (answer.name not in LISTS or engine == "redlock")
    ]
    assert_no_promise_broken(answers, [make_case() for _ in range(AT_ONCE)], engine)


@pytest.mark.extended
@pytest.mark.parametrize(
    "engine",
    # The long ones take half a minute to a minute.
    [pytest.param(each, marks=[pytest.mark.faults] * (each in LONG_FORGED)) for each in forged.ENGINES],
    indirect=True,
)
def test_forged_answers_break_no_promise(make_case, engine) -> None:
    assert_no_promise_broken(forged.answers_of(engine), [make_case() for _ in range(AT_ONCE)], engine, with_forged=True)


@pytest.mark.extended
@pytest.mark.parametrize("engine", first_tier(ENGINES, sorted(set(ENGINES) - {"mysql"})), indirect=True)
def test_many_items_take_a_bounded_part_of_the_memory(make_case, engine) -> None:
    """With so much time that the client decodes them all."""
    answers = [answer for answer in answers_of(engine) if answer.name in LISTS]
    assert answers
    case = make_case(call_timeout=PATIENT)
    before, grown = case.warm_up(), {}
    for answer, command in product(answers, ("inspect", "attempt", "renew", "release", "ping")):
        case.do("open")  # a new client each time: forged answers may say that all its leases are lost
        case.recover("hold")
        case.attack(answer)
        case.check(answer.name, command)
        grown[f"{answer.name}: {command}"] = case.peak() - before
        case.relent()
        case.check("closing", "close")
    assert not case.problems
    assert_bounded(grown)
    assert_nothing_printed(case)


@pytest.mark.extended
@pytest.mark.parametrize("engine", first_tier(["mysql", "postgresql"], ["postgresql"]), indirect=True)
def test_forged_rows_take_a_bounded_part_of_the_memory(make_case, engine) -> None:
    """Each in a process of its own, because what is freed may stay a part of the process."""
    grown = {}
    for answer, command in product([each for each in answers_of(engine) if each.forged], ("inspect", "attempt")):
        case = make_case(call_timeout=PATIENT)
        before = case.warm_up()
        case.do("open")
        case.recover("hold")
        case.attack(answer)
        case.check(answer.name, command)
        grown[f"{answer.name}: {command}"] = case.peak() - before
        assert not case.problems
        case.child.close()
    assert_bounded(grown)


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
@pytest.mark.parametrize("name", ["many notifications", "many parameters", "long error"])
def test_messages_that_were_not_asked_for_take_bounded_memory(make_case, engine, name) -> None:
    """libpq keeps notifications and parameters as long as the session lives."""
    (answer,) = (each for each in answers_of(engine) if each.name == name)
    case = make_case(call_timeout=PATIENT)
    before = case.warm_up()
    case.do("open")
    case.recover("hold")
    case.attack(answer)
    errors = [case.check(name, "ping") for _ in range(PINGS)]
    assert (errors[0] is None) == (name != "long error")  # the reply itself is a good one
    assert not case.problems
    assert_bounded({name: case.peak() - before})


def assert_bounded(grown: dict[str, int]) -> None:
    assert max(grown.values()) <= MEMORY, {name: f"{size / 2**20:.1f} MiB" for name, size in grown.items()}


@pytest.mark.extended
@pytest.mark.parametrize("engine", first_tier(ENGINES, ["redis", "postgresql"]), indirect=True)
def test_floods_break_no_promise(make_case, engine) -> None:
    """One after the other: a flood keeps a processor busy."""
    assert_no_promise_broken([answer for answer in answers_of(engine) if answer.floods], [make_case()], engine)


TLS_SCHEMES = {"redis": ("redis", "rediss"), "etcd": ("etcd", "etcds"), "http-memory": ("http", "https")}
TLS_OPTIONS = {
    "redlock": "tls=yes",
    "zookeeper": "tls=yes",
    "postgresql": "sslmode=require",
    "mysql": "ssl_ca={certificate}",
}


@pytest.mark.extended
@pytest.mark.measured
def test_tls_client_at_a_plain_port_fails_in_time(make_case, engine, certificate) -> None:
    def make_url(url: str) -> str:
        if engine in TLS_SCHEMES:
            return url.replace(*TLS_SCHEMES[engine], 1)
        return f"{url}{'&' if '?' in url else '?'}{TLS_OPTIONS[engine].format(certificate=certificate[1])}"

    case = make_case(make_url=make_url)

    def run() -> None:
        case.do("open")
        for command in ("ping", "attempt", "inspect"):
            if (error := case.check("TLS", command)) is None:
                case.problems.append(f"{command} was sent without TLS")
            elif command == "ping" and "TLS" not in error[2] and "SSL" not in error[2]:
                case.problems.append(f"the error does not name the cause: {error[2]}")
        case.check("TLS", "close")

    found = case.run_until_fast("plain port", run)
    assert not found, "\n".join(found)
    assert_nothing_printed(case)


@pytest.mark.parametrize("how", ["flood", "drip"])
@pytest.mark.parametrize("engine", sorted(TLS_CLIENTS))
def test_tls_handshake_without_end_is_ended_at_the_deadline(engine, how, certificate, monkeypatch) -> None:
    """OpenSSL ignores any number of HelloRequest messages, so a flood of them kept a call busy, and at ZooKeeper the
    thread of the session for ever."""
    monkeypatch.setattr(KazooHandler, "connect_timeout", 0.5)
    url, greeting, _ = TLS_CLIENTS[engine]
    flood = b"\x16\x03\x03\x00\x04\0\0\0\0" * 1000
    record = chain(b"\x16\x03\x03\x3f\xff", repeat(0))
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            if engine == "postgresql":  # whose server answers a request for TLS
                connection.recv(1024)
            connection.sendall(greeting)
            connection.recv(1024)
            while how == "flood":
                connection.sendall(flood)
            for byte in record:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)  # pause: the next byte is a segment of its own

    def accept() -> None:
        with suppress(OSError):
            while True:
                connections.append(listener.accept()[0])
                threading.Thread(target=serve, args=connections[-1:], name="server", daemon=True).start()

    def client_threads() -> set[threading.Thread]:
        return {thread for thread in set(threading.enumerate()) - before if thread.name != "server"}

    with socket.create_server(("", 0)) as listener:
        threading.Thread(target=accept, name="server", daemon=True).start()
        before = set(threading.enumerate())
        url = url.format(port=listener.getsockname()[1], certificate=certificate[1])
        with Client(url, call_timeout=0.5) as client:
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.ping()
            check_elapsed(began, 0.5 + 0.5)
        try:
            poll(lambda: not client_threads(), 60, lambda: f"{client_threads()} have ended")
        finally:
            for sock in (listener, *connections):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # ends the server's threads
