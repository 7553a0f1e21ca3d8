"""The same three faults for every approach, each at the worst moment: between what a holder read and what it writes."""

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

_DEADLINE: Final = 90.0  # seconds for what must happen, however busy the machine
_PAUSED: Final = 6 * TTL  # how long a holder is stopped for the next one's sake; where a lock has no ttl, all of it
_SURVIVED: Final = 3 * TTL  # a lock that nobody else was granted for so long has survived its fail-over


class Count(NamedTuple):
    """Of one fault, over all rounds. `waited`: the longest that the second process stood in line, in seconds."""

    rounds: int
    written: int  # accepted writes, each of which added one
    lost: int  # so many are missing
    refused: int  # by the fence
    failed: int  # told to whoever wrote: the connection or the server was gone
    waited: float


class Worker:
    """A process under an approach."""

    def __init__(self, approach: str, urls: list[str], account_db: str) -> None:
        command = [sys.executable, "-m", "comparison.worker", approach, json.dumps(urls), account_db, str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
        )

    def receive(self, message: str, seconds: float = _DEADLINE) -> dict[str, Any] | None:
        """What it says; None: nothing yet."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            assert seconds < _DEADLINE, f"it never said {message}"
            return None
        line = self._process.stdout.readline()
        assert line, f"it ended with {self._process.wait()} before it said {message}"
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
    """One round: what became of each write, what the account says, how long the second waited."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-comparison-"))
        setup = stack.enter_context(SETUPS[setup_name](f"{folder}/ledger"))
        urls = setup.urls

        def worker() -> Worker:
            new_worker = Worker(approach, urls, setup.account_db)
            stack.callback(new_worker.end)
            return new_worker

        if fault == "fail-over":
            setup.prepare()
        first = worker()
        first.receive("holds")
        if fault == "fail-over":
            urls = setup.fail_over()
        else:
            first.send(signal.SIGSTOP if fault == "pause" else signal.SIGKILL)
        second = worker()
        holds = second.receive("holds", {"pause": _PAUSED, "crash": _DEADLINE, "fail-over": _SURVIVED}[fault])
        done = [second.write()] if holds else []
        if fault != "crash":
            first.send(signal.SIGCONT)
            done.append(first.write())
        if not holds:  # it was kept out until now, as it should be
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
