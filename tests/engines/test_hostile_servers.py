"""Servers that are broken or hostile: whatever they answer, and whenever, calls of both APIs keep their promises.

For every engine and API, each answer of `harness.servers.hostile` is given to a new connection, to a client that holds
a lease, to its listening connections, and while it closes. No call takes longer than `call_timeout` + 0.5 s, only
`LeaseholdError` is raised, its text is short and printable, the process grows by less than 32 MiB, nothing is printed,
and afterwards the same client works again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from harness.servers.hostile import ANSWERS, Answer, HostileProxy
from leasehold.core.texts import MAX_SERVER_TEXT
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.child_process import Child
from tests.support.paths import SUPPORT

CALL_TIMEOUT = 0.4
PROMISED = CALL_TIMEOUT + 0.5
MEMORY = 32 * 1024 * 1024
MAX_TEXT = 8 * MAX_SERVER_TEXT  # Leasehold's own words, and the texts of five servers
TRIES = 3  # a call is too slow if it is too slow each time: the machine may be busy


class HostileCase:
    """One client in a process of its own, behind proxies that can attack it."""

    def __init__(self, engine: str, api: str, log: Path, exit_stack: ExitStack) -> None:
        rig = rig_or_skip(rig_type(engine))
        exit_stack.callback(rig.close)
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
        arguments = (api, url, namespace, CALL_TIMEOUT)
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

    def check(self, when: str, command: str) -> None:
        report = self.do(command)
        if report["seconds"] > PROMISED:
            self.slow.add(f"{when}: {command}")
        if report["error"] is not None:
            kind, name, text = report["error"]
            if kind != "LeaseholdError":
                self.problems.append(f"{when}: {command} raised {name}: {text[:200]}")
            elif not text.isprintable() or len(text) > MAX_TEXT:
                self.problems.append(f"{when}: {command} has an unsafe text: {text!r}")

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

    def printed(self) -> str:
        return self._log.read_text(errors="replace")


@pytest.fixture(params=["blocking", "asyncio"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(ANSWERS))
def case(request: pytest.FixtureRequest, api: str, tmp_path: Path) -> Iterator[HostileCase]:
    with ExitStack() as exit_stack:
        yield HostileCase(request.param, api, tmp_path / "stderr", exit_stack)


@pytest.fixture
def answers(request: pytest.FixtureRequest, case: HostileCase) -> tuple[Answer, ...]:
    return ANSWERS[request.node.callspec.params["case"]]


def test_hostile_answers_break_no_promise(case, answers, request) -> None:
    speaks_first = request.node.callspec.params["case"] == "mysql"
    case.do("open")
    case.recover("hold")
    case.check("first", "close")
    before, peak = case.do("ping")["peak"], 0
    found = []
    for answer in answers:
        slow: set[str] | None = None
        for _ in range(TRIES):
            case.slow.clear()
            case.run(answer, speaks_first)
            slow = case.slow.copy() if slow is None else slow & case.slow
            if not slow:
                break
        found += [
            f"{answer.name}: {text}" for text in (*case.problems, *(f"{each} is too slow" for each in slow or ()))
        ]
        case.problems.clear()
        peak = case.do("ping")["peak"]
        if peak - before > MEMORY:
            found.append(f"{answer.name}: the process grew by {(peak - before) // 2**20} MiB")
            break
    printed = case.printed()
    assert not found, "\n".join(found)
    assert "Traceback" not in printed
    assert all(line.isprintable() for line in printed.splitlines())
