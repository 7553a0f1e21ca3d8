"""The same three faults for every approach, each at the worst moment: between a holder's read and its write."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from comparison.approaches import TTL
from comparison.server_setups import SETUPS, balance

_DEADLINE: Final = 90.0  # seconds for what must happen, even on a busy machine
_PAUSED: Final = 6 * TTL  # longest pause of a holder; used in full if the lock has no ttl
_SURVIVED: Final = 3 * TTL  # a lock not granted to another process for this long has survived the failover


class Count(NamedTuple):
    """The results of one fault over all rounds. `waited`: the longest time that the second process waited, in
    seconds."""

    rounds: int
    written: int  # accepted writes, each of which added one
    lost: int  # accepted writes that are missing from the account
    refused: int  # by the fence
    failed: int  # reported to the writer as an error: the connection or the server was gone
    waited: float


class Worker:
    """A process that follows an approach."""

    def __init__(self, approach: str, urls: list[str], account_db: str) -> None:
        command = [sys.executable, "-m", "comparison.worker", approach, json.dumps(urls), account_db, str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
        )

    def receive(self, message: str, seconds: float = _DEADLINE) -> dict[str, Any] | None:
        """Return the process's next message, or None if there is none yet."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            assert seconds < _DEADLINE, f"the worker never sent {message}"
            return None
        line = self._process.stdout.readline()
        assert line, f"the worker ended with {self._process.wait()} before it sent {message}"
        reply: dict[str, Any] = json.loads(line)
        assert reply["word"] == message, reply
        return reply

    def send(self, signum: int) -> None:
        self._process.send_signal(signum)

    def write(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.receive("done") or {}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def run_round(approach: str, setup_name: str, fault: str) -> tuple[list[dict[str, Any]], int, float]:
    """Run one round. Return the result of each write, the account's value, and how long the second process waited."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-comparison-"))
        setup = stack.enter_context(SETUPS[setup_name](f"{folder}/ledger"))
        urls = setup.urls

        def worker() -> Worker:
            new_worker = Worker(approach, urls, setup.account_db)
            stack.callback(new_worker.end)
            return new_worker

        if fault == "failover":
            setup.prepare()
        first = worker()
        first.receive("holds")
        if fault == "failover":
            urls = setup.fail_over()
        else:
            first.send(signal.SIGSTOP if fault == "pause" else signal.SIGKILL)
        second = worker()
        holds = second.receive("holds", {"pause": _PAUSED, "crash": _DEADLINE, "failover": _SURVIVED}[fault])
        done = [second.write()] if holds else []
        if fault != "crash":
            first.send(signal.SIGCONT)
            done.append(first.write())
        if not holds:  # the lock kept the second process out until now, as it should
            holds = second.receive("holds")
            done.append(second.write())
        return done, balance(setup), holds["waited"] if holds else 0.0


def count_faults(approach: str, setup: str, fault: str, rounds: int, report: Callable[[str], None]) -> Count:
    written = lost = refused = failed = 0
    waited = 0.0
    for round_number in range(rounds):
        done, value, second = run_round(approach, setup, fault)
        accepted = sum(result["accepted"] for result in done)
        written, lost, waited = written + accepted, lost + accepted - value, max(waited, second)
        refused += sum(result["why"] == "stale" for result in done)
        failed += sum(result["why"] not in ("", "stale") for result in done)
        report(f"{fault} {round_number + 1} of {rounds}: {accepted} accepted, the account says {value}")
    return Count(rounds, written, lost, refused, failed, round(waited, 1))
