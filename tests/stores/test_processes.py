"""Real processes, real databases: runners killed half-way, and fleets whose clocks differ."""

import contextlib
import glob
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest

from leasehold import stores

CHILD = Path(__file__).with_name("once_child.py")


class Child:
    """One process, whose lines are kept as they come."""

    def __init__(self, *args: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), *map(str, args)],
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
    def inside(self) -> bool:
        return bool(self.lines) and self.lines[-1].startswith("inside")

    def end(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(30)
        self.process.stdout.close()
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


def until(what, seconds, why):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, why
        time.sleep(0.005)
    return found


@pytest.mark.parametrize(
    ("size", "kills"), [(6, 2), pytest.param(50, 10, marks=pytest.mark.faults)], ids=["short", "whole"]
)
def test_the_effect_is_there_exactly_once_though_runners_are_killed(size, kills, server, tmp_path, key):
    database = server("postgresql").url()
    with psycopg.connect(database, autocommit=True) as connection:
        for statement in stores.schema("postgresql").split(";\n"):
            if statement.strip():
                connection.execute(statement)
        connection.execute("create table if not exists paid (name text, pid int)")
    ttl = 1.0
    made = [Child("pay", f"sqlite://{tmp_path}/locks.db?durable=no", database, key, 0.3, ttl) for _ in range(size)]
    with children(*made):
        killed: list[Child] = []
        while len(killed) < kills:
            runner = until(lambda: next((c for c in made if c.inside and c not in killed), None), 120, "nobody runs it")
            runner.kill()
            killed.append(runner)
        assert all(len([line for line in child.lines if line.startswith("inside")]) == 1 for child in killed)
        left = [child for child in made if child not in killed]
        assert [child.end(120) for child in left] == [0] * len(left)
        results = {line for child in left for line in child.lines if line.startswith("result")}
    with psycopg.connect(database) as connection:
        rows = connection.execute("select pid from paid where name = %s", (key,)).fetchall()
    assert len(rows) == 1, "the effect is there exactly once"
    assert results == {f"result {rows[0][0]}"}, "and everybody has the result of the one that did it"
    runners = [child for child in made if any(line.startswith("inside") for line in child.lines)]
    tokens = sorted(int(line.split()[1]) for child in runners for line in child.lines if line.startswith("inside"))
    assert len(set(tokens)) == len(tokens) == kills + 1, "each take-over has a token of its own"


FAKETIME = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")


@pytest.mark.skipif(not FAKETIME and not os.environ.get("CI"), reason="faketime is not installed")
@pytest.mark.parametrize(
    ("every", "count"), [(0.25, 8), pytest.param(1.0, 30, marks=pytest.mark.faults)], ids=["short", "whole"]
)
def test_a_tick_runs_once_though_clocks_differ_by_two_seconds(every, count, tmp_path):
    runs = tmp_path / "runs"
    runs.touch()
    last = int((time.time() + 5) / every) + count  # however long it takes them to start, there are so many for them
    skews = ["+2", "-2", "+1", "-1", "+0"]
    where = [f"sqlite://{tmp_path}/locks.db?durable=no", f"sqlite://{tmp_path}/store.db", "job"]
    made = [
        Child(
            "ticks",
            *where,
            every,
            last,
            runs,
            LD_PRELOAD=FAKETIME[0],
            FAKETIME=f"{skew}s",
            DONT_FAKE_MONOTONIC="1",
        )
        for skew in skews
    ]
    with children(*made):
        assert [child.end(120) for child in made] == [0] * len(made)
    said = [float(child.lines[0].split()[1]) for child in made]
    assert max(said) - min(said) > 2, "the clocks do differ"
    ticks = [int(line.split()[0]) for line in runs.read_text().splitlines()]
    assert len(ticks) >= count
    assert ticks == list(range(ticks[0], ticks[0] + len(ticks))), "every tick, each once, in order"
    assert ticks[-1] >= last  # the next one may come while they look for the last time
