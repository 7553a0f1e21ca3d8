"""One run: the servers of a setup, contenders as processes, one fault again and again, and the verdict."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from harness.lab.contender import SELECT, Task, now
from harness.lab.expectations import Expectation
from harness.lab.faults import Fault
from harness.lab.setups import Link, Setup
from harness.lab.soak import SHARE, Load, Residue, Samples, measure_capacity, residue, sample
from harness.lab.verdict import Event, Recording, Silence, Verdict, judge
from harness.servers.folders import scratch
from harness.servers.process import poll
from harness.servers.proxy import Proxy
from leasehold.fences import sql_schema

CONTENDERS: Final = 4
CROWD: Final = 10_000
_PROGRESS: Final = 10.0  # seconds between reports about a crowd
_DEADLINE: Final = 90.0  # seconds for what must happen, even on a busy machine


class NotGranted(TimeoutError):
    """The lock was not granted for far longer than promised: a finding, unlike other timeouts, which are the lab's."""


class Contender:
    """The lab's side of a contender. A thread reads what it reports."""

    def __init__(self, name: str, link: Link, task: Task, on_event: Callable[[Event], None]) -> None:
        self.name, self.link, self._on_event = name, link, on_event
        self.cycle = 0
        self.between = False  # it has read the account, and not begun to write
        self.long = False
        self.ready = False
        self.reported_at = 0.0
        self._last = ""
        self.log = os.path.join(scratch(), "log")
        command = [sys.executable, "-m", "harness.lab.contender", task.to_json()]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                link.site.netns_command(command) if link.site else command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[2],
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith(b"\n"):  # a kill cut it short
                return
            at, number, what, *details = json.loads(line)
            self.ready, self.reported_at = True, at
            if what == "asks":
                self.cycle += 1
            elif what == "holds":
                self.long = details[1]
            self.between = (self._last, what) == ("reads", "accepted")
            self._last = what
            name = self.name if number is None else f"{self.name}/{number}"
            self._on_event(Event(at, name, self.cycle, what, tuple(details)))

    def order_long(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(b"long\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def end(self) -> str:
        """Ask it to end. Returns what went wrong, if anything did."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            code = self.process.wait(_DEADLINE)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.name} did not end within {_DEADLINE:.0f} s"
        self._close()
        with open(self.log) as log:
            return f"{self.name} ended with {code}: {log.read()[-2000:]}" if code else ""


class Run:
    """What faults see of a run."""

    def __init__(
        self,
        setup: Setup,
        fault: Fault,
        expectation: Expectation,
        *,
        seconds: float = 20.0,
        seed: int = 0,
        plain: bool = False,
        crowd: int = CROWD,
        capacity: float | None = None,
        report: Callable[[str], object] = str,
    ) -> None:
        self.setup, self.fault, self.expectation, self.report = setup, fault, expectation, report
        self.rng, self.seed, self.plain = random.Random(seed), seed, plain
        self.seconds, self.crowd = seconds, crowd if fault.crowd else 0
        self.ttl = setup.ttl if fault.slow_ttl is None else fault.slow_ttl
        setup.session = self.ttl
        self.call_timeout = setup.call_timeout if fault.slow_ttl is None else 5.0
        self.contenders: list[Contender] = []
        self.clock_offset = 0.0
        self.end = 0.0
        self.recording = Recording([])
        self.samples: Samples = {}
        self.capacity = capacity  # of a soak; None: it is measured first
        self._load: Load | None = None
        self.residue: Residue | None = None
        self._count = 0
        self._links: list[Link] = []
        self._written: tuple[float, str] = (0.0, "")  # the last accepted write
        self._granted_at: list[float] = []
        self._account = os.path.join(scratch(), "account")
        create_account(self._account)

    # ------------------------------------------------------------------ for faults

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def proxies(self) -> list[Proxy]:
        return [proxy for contender in self.contenders for proxy in contender.link.all]

    def start_contender(self) -> Contender:
        link = self.setup.link()
        for proxy in link.all:
            proxy.watch = self._count_request
        self._links.append(link)
        self._count += 1
        task = Task(
            url=link.url,
            account=self._account,
            kind="asyncio" if self._count % 2 else "blocking",
            seed=1000 * self.seed + self._count,
            ttl=600.0 if self.crowd else self.ttl,
            call_timeout=60.0 if self.crowd else self.call_timeout,
            parent=os.getpid(),
            plain=self.plain,
            crowd=self.crowd // CONTENDERS,
        )
        contender = Contender(f"p{self._count}", link, task, self._record)
        self.contenders.append(contender)
        return contender

    def long_holder(self, *, among: Sequence[Contender] = ()) -> Contender:
        """Let some contender acquire the lock for three ttls, and return it, between its read and its write."""
        chosen = self.rng.choice(among or self.contenders)
        end = time.monotonic() + _DEADLINE
        while time.monotonic() < end:
            chosen.order_long()
            with suppress(TimeoutError):
                poll(lambda: chosen.long and chosen.between, 5 * self.ttl, str)
                return chosen
        raise NotGranted(f"{chosen.name} was not granted the lock for {_DEADLINE:.0f} s")

    def kill(self, contender: Contender) -> None:
        """SIGKILL it. Its end is reported late: by then the next contender may hold the lock."""
        killed_at = now()
        contender.kill()
        self.contenders.remove(contender)
        self.recording.crashes.append((max(killed_at, contender.reported_at), contender.name))

    @contextmanager
    def pause(self, contender: Contender) -> Iterator[None]:
        """SIGSTOP it meanwhile."""
        began = now()
        contender.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            contender.between = False  # as far as the lab knows: its lease may be over
            contender.process.send_signal(signal.SIGCONT)
            self.recording.pauses.append((contender.name, began, now()))

    @contextmanager
    def silence(self, *contenders: Contender) -> Iterator[None]:
        """Meanwhile these contenders reach too few servers to be granted anything."""
        start, names = now(), frozenset(contender.name for contender in contenders)
        try:
            yield
        finally:
            self.recording.silences.append(Silence(names, start, now()))

    def must_keep(self, contender: Contender) -> None:
        """What it holds at this moment must not be lost."""
        self.recording.kept.add((contender.name, contender.cycle))

    def await_write(self, *, other_than: Contender, since: float) -> None:
        def written() -> bool:
            at, name = self._written
            return at > since and name != other_than.name

        try:
            poll(written, _DEADLINE, str)
        except TimeoutError:
            raise NotGranted(f"no other contender wrote within {_DEADLINE:.0f} s") from None

    def await_grant(self, since: float, seconds: float = _DEADLINE) -> float:
        """Seconds from `since` to the next grant."""
        try:
            poll(lambda: bool(self._granted_at) and self._granted_at[-1] > since, seconds, str)
        except TimeoutError:
            raise NotGranted(f"the lock was not granted within {seconds:.0f} s after the fault") from None
        return next(at for at in list(self._granted_at) if at > since) - since

    def await_reported_no_majority(self, contenders: Sequence[Contender], since: float) -> None:
        """Wait until each of them was refused because the servers that it reaches have no majority."""
        names = {contender.name for contender in contenders}

        def refusals() -> list[Event]:
            return [event for event in list(self.recording.events) if event.what == "fails" and event.at > since]

        try:
            poll(lambda: names <= {event.process for event in refusals() if event.details[1]}, _DEADLINE, str)
        except TimeoutError:
            texts = [f"{event.process}: {event.details[2]}" for event in refusals() if event.process in names]
            raise NotGranted(
                f"not all of {', '.join(sorted(names))} learned within {_DEADLINE:.0f} s that there is no majority; "
                f"their last refusals: {texts[-4:]}"
            ) from None

    def await_crowd(self) -> None:
        """Wait until all tasks have ended, and report meanwhile how many were served."""
        end = now() + 20 * _DEADLINE
        while running := [contender for contender in self.contenders if contender.process.poll() is None]:
            if now() > end:
                raise NotGranted(f"{len(running)} processes had not ended after {20 * _DEADLINE:.0f} s")
            with suppress(subprocess.TimeoutExpired):
                running[0].process.wait(_PROGRESS)
                continue
            self.report(f"{len(self._granted_at):,} of {self.crowd:,} tasks served")

    def take_samples(self) -> None:
        """Of the servers, of the processes that offer load, and of a contender that lives through the run."""
        assert self._load is not None
        pids = {f"server {number}": server.pid for number, server in enumerate(self.setup.servers, start=1)}
        pids |= {f"client {number}": pid for number, pid in enumerate(self._load.pids, start=1)}
        for process, pid in (pids | {"contender": self.contenders[0].process.pid}).items():
            self.samples.setdefault(process, []).append(sample(pid))

    # ------------------------------------------------------------------ the run

    def execute(self) -> Verdict:
        self.setup.start()
        try:
            if self.fault.soaks:
                url = self.setup.direct_url()
                self.capacity = self.capacity or measure_capacity(url, self.report)
                self.report(f"offering {SHARE:.0%} of {self.capacity:,.0f} pairs a second")
                self._load = Load(url, SHARE * self.capacity, self.seconds)
            for _ in range(CONTENDERS):
                self.start_contender()
            poll(lambda: all(contender.ready for contender in self.contenders), _DEADLINE, self._logs)
            self._inject_faults()
            if self._load is not None:
                self._load.end()
                self.take_samples()
        finally:
            failures = [contender.end() for contender in self.contenders]
            if self._load is not None:
                self._load.close()
                if self.samples:
                    self.residue = residue(self.setup, self.samples, self.capacity or 0.0, self._load)
            for link in self._links:
                for proxy in link.all:
                    proxy.close()
            self.setup.close()
        self.recording.failures += filter(None, failures)
        self.recording.balance = balance(self._account)
        verdict = judge(self.recording, self.expectation, plain=self.plain, call_timeout=self.call_timeout)
        if self.crowd and verdict.grants != self.crowd:
            verdict.violations.append(f"{verdict.grants} of {self.crowd} tasks were granted the lock")
        if self.residue is not None:
            verdict.violations += self.residue.violations
            verdict.late += self.residue.late
        return verdict

    def _inject_faults(self) -> None:
        self.end = now() + self.seconds
        try:
            if not self.crowd:
                self.await_grant(0.0)
            if self._load is not None:
                self._load.start()
            while not self.recording.waits or now() < self.end:
                self.sleep(0.0 if self.crowd else self.rng.uniform(0.3, 1.0))
                since = self.fault.inject(self)
                self.recording.waits.append(0.0 if self.crowd else self.await_grant(since))
                self.report(f"fault {len(self.recording.waits)} injected and healed")
                if self.crowd:
                    break
        except NotGranted as error:
            self.recording.failures.append(str(error))

    def _record(self, event: Event) -> None:
        self.recording.events.append(event)
        if event.what == "holds":
            self._granted_at.append(event.at)
        elif event.what == "writes":
            self._written = event.at, event.process

    def _count_request(self, from_client: bool, data: bytes) -> None:
        self.recording.requests += bool(from_client and data)

    def _logs(self) -> str:
        return "all contenders run; their errors:\n" + "\n".join(Path(each.log).read_text() for each in self.contenders)


def create_account(path: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute("create table account (v integer)")
        db.execute("insert into account values (0)")
        db.execute(sql_schema("sqlite"))
    db.close()


def balance(path: str) -> int:
    with sqlite3.connect(path) as db:
        (value,) = db.execute(SELECT).fetchone()
    db.close()
    return int(value)
