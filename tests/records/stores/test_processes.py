"""Real processes and databases: runners killed midway, and processes whose clocks differ."""

import contextlib
import glob
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from leasehold import Client
from leasehold.records import stores
from tests.records.stores.conftest import ENGINE_STORES
from tests.support.paths import SUPPORT
from tests.support.tiers import first_tier

CHILD = SUPPORT / "once_child.py"


class Child:
    """A child process whose output lines are collected as they come."""

    def __init__(self, *args: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.strip())

    @property
    def runs(self) -> list[int]:
        """Return the tokens that the child ran under."""
        return [int(line.split()[1]) for line in self.lines if line.startswith("inside")]

    @property
    def inside(self) -> bool:
        return bool(self.lines) and self.lines[-1].startswith("inside")

    def end(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(30)
        self.process.stdout.close()
        self.process.stdin.close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.end(30)


@contextlib.contextmanager
def children(*made: Child):
    try:
        yield made
    finally:
        for child in made:
            if child.process.poll() is None:
                child.kill()


def wait_until(condition, seconds, message):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, message
        time.sleep(0.005)
    return found


TABLES = (
    "create table paid (name varchar(200), pid int)",
    "create table keyed (name varchar(200) primary key, pid int)",
)


@pytest.fixture
def shop(server, url_of):
    """A database with tables for effects and records: its URL, and a function to query it."""
    with contextlib.ExitStack() as stack:

        def make(kind):
            connection = stack.enter_context(contextlib.closing(server(kind).server.connect()))
            if kind == "mysql":
                connection.select_db("test")

            def query(*arguments):
                with connection.cursor() as cursor:
                    cursor.execute(*arguments)
                    return list(cursor.fetchall()) if cursor.description else []

            for statement in (*stores.schema(kind).split(";\n"), "drop table if exists paid, keyed", *TABLES):
                if statement.strip():
                    query(statement)
            return url_of(kind), query

        yield make


@pytest.mark.extended
@pytest.mark.parametrize(
    ("size", "kills"), [(4, 2), pytest.param(50, 10, marks=pytest.mark.faults)], ids=["short", "whole"]
)
@pytest.mark.parametrize("kind", first_tier(["postgresql", "mysql", *ENGINE_STORES], ["postgresql", "redis"]))
def test_effect_happens_exactly_once_when_runners_are_killed(kind, size, kills, shop, url_of, tmp_path, key):
    """On PostgreSQL and MySQL, effect and record commit together. Elsewhere they cannot, so the resource gets the
    key."""
    elsewhere = kind in ENGINE_STORES
    store, table = (url_of(kind), "keyed") if elsewhere else ("within", "paid")
    database, query = shop("postgresql" if elsewhere else kind)
    locks = url_of(kind) if elsewhere else f"sqlite://{tmp_path}/locks.db?durable=no"
    began = time.monotonic()
    made = [Child("pay", locks, store, database, key, 0.3, 1.0) for _ in range(size)]
    with children(*made):
        killed: list[Child] = []
        while len(killed) < kills:
            runner = wait_until(
                lambda: next((c for c in made if c.inside and c not in killed), None), 120, "nobody runs it"
            )
            runner.kill()
            killed.append(runner)
        assert all(len(child.runs) == 1 for child in killed)
        survivors = [child for child in made if child not in killed]
        assert [child.end(120) for child in survivors] == [0] * len(survivors)
        results = {line for child in survivors for line in child.lines if line.startswith("result")}
    rows = query(f"select pid from {table} where name = %s", (key,))
    assert len(rows) == 1, "the effect must have happened exactly once"
    assert results == {f"result {rows[0][0]}"}, "every survivor must get the result of that run"
    tokens = sorted(token for child in made for token in child.runs)
    assert len(set(tokens)) == len(tokens) == kills + 1, "each take-over must have its own token"
    print(f"{kind}: {size} processes, {kills} killed, one effect, in {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize(
    "kind", first_tier(["sqlite", "postgresql", "mysql", *ENGINE_STORES], ["sqlite", "mysql", "etcd"])
)
def test_runner_paused_past_its_lease_is_replaced_and_refused(kind, url_of, tmp_path, key):
    """The runner is stopped, not killed: it resumes and believes that it is the only one."""
    arguments = (f"sqlite://{tmp_path}/locks.db?durable=no", url_of(kind), key, 1.0)
    first = Child("sleep", *arguments)
    with children(first):
        wait_until(lambda: first.inside, 120, "nobody runs it")
        os.kill(first.process.pid, signal.SIGSTOP)
        second = Child("sleep", *arguments)
        with children(second):
            wait_until(lambda: second.inside, 120, "nobody takes over")
            os.kill(first.process.pid, signal.SIGCONT)
            first.process.stdin.close()  # both finish now, the late runner first
            assert first.end(120) == 0
            second.process.stdin.close()
            assert second.end(120) == 0
    assert first.lines[-1] == "refused StaleToken"
    assert second.lines[-1] == f"result {second.process.pid}"
    assert second.runs[0] > first.runs[0]
    with Client(arguments[0]) as client:
        assert client.outcome(key, store=arguments[1]).result == {"pid": second.process.pid}


FAKETIME = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")


@pytest.mark.skipif(not FAKETIME and not os.environ.get("CI"), reason="faketime is not installed")
@pytest.mark.parametrize(
    ("kind", "every", "count"),
    [
        pytest.param("sqlite", 0.25, 8, marks=pytest.mark.extended, id="short"),
        *(pytest.param(kind, 1.0, 30, marks=pytest.mark.faults, id=kind) for kind in ("sqlite", "redis", "postgresql")),
    ],
)
def test_tick_runs_once_when_clocks_differ_by_two_seconds(kind, every, count, tmp_path, url_of, key):
    runs = tmp_path / "runs"
    runs.touch()
    locks = f"sqlite://{tmp_path}/locks.db?durable=no" if kind == "sqlite" else url_of(kind)
    made = [
        Child(
            *("ticks", locks, url_of(kind), key, every, count, runs),
            LD_PRELOAD=FAKETIME[0],
            FAKETIME=f"{skew}s",
            DONT_FAKE_MONOTONIC="1",
        )
        for skew in ("+2", "-2", "+1", "-1", "+0")
    ]
    with children(*made):
        wait_until(lambda: all(child.lines for child in made), 120, "all have started")
        first = int((time.time() + 3) / every) + 1  # in the future for every clock, even the one that is ahead
        for child in made:
            print(first, file=child.process.stdin, flush=True)
        assert [child.end(120) for child in made] == [0] * len(made)
    clocks = [float(child.lines[0].split()[1]) for child in made]
    assert max(clocks) - min(clocks) > 2, "the clocks must differ"
    lines = [line.split() for line in runs.read_text().splitlines()]
    ticks = [int(number) for number, _ in lines]
    assert len(ticks) >= count  # the next ticks may come before the last process has seen that
    assert ticks == list(range(first, first + len(ticks))), "every tick must run once, in order"
    print(f"{kind}: {count} ticks, {len(ticks)} runs, by {len({pid for _, pid in lines})} processes")
