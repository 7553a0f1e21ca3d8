"""A power cut under the SQLite engine, at any instant of a recorded run.

Processes run under strace, which records every write, truncation and sync of the file and its log. To cut the power at
an instant, the files are built again from what had been written by then: everything before the last sync that had
ended, and of the rest none, all, a random half, or random sectors. Then the machine starts again: another boot, with a
wall clock of 1970.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from leasehold.config import EngineConfig
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.engine import open_with_clock
from leasehold.model import Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads
from tests.support import power_cut_child

_SECTOR = 512
_CALL = re.compile(r"(\d+)\s+(\d+\.\d+) (.*)")
_UNFINISHED = " <unfinished ...>"
_SHM = "/dev/shm"  # thousands of small files

Unsynced = Literal["none", "all", "half", "torn"]


class Event(NamedTuple):
    at: float
    kind: Literal["write", "truncate", "synced"]
    file: str  # "": the database, "-wal": its log, "facts"
    offset: int = 0  # or the new length
    data: bytes = b""
    began: float = 0.0  # of a sync: it covers what was written before


class Recording:
    """`processes` of `power_cut_child.py` at work on one file for some seconds."""

    def __init__(self, folder: Path, options: str, seed: int, *, processes: int = 3, seconds: float = 2.5) -> None:
        path, facts = folder / "locks.db", folder / "facts"
        self._names = {str(path): "", f"{path}-wal": "-wal", str(facts): "facts"}
        url = f"sqlite://{path}{options}"
        self._work(url, facts, 0.05, seed)
        facts.unlink()
        self.before = {"": path.read_bytes(), "-wal": b""}
        traced = "trace=pwrite64,write,ftruncate,fsync,fdatasync"
        strace = ["strace", "-f", "-y", "-xx", "-s", "70000", "-e", traced, "-ttt", "-T", "-o"]
        logs = [folder / f"strace{number}" for number in range(processes)]
        started = [
            subprocess.Popen([*strace, str(log), *self._command(url, facts, seconds, seed * 10 + number)])
            for number, log in enumerate(logs)
        ]
        if any(process.wait(300) for process in started):
            raise RuntimeError("a recorded process failed")
        self.events = sorted((event for log in logs for event in self._read(log)), key=lambda event: event.at)

    def _command(self, url: str, facts: Path, seconds: float, seed: int) -> list[str]:
        return [sys.executable, power_cut_child.__file__, url, str(facts), str(seconds), str(seed)]

    def _work(self, url: str, facts: Path, seconds: float, seed: int) -> None:
        subprocess.run(self._command(url, facts, seconds, seed), check=True, timeout=60)

    def _read(self, log: Path) -> Iterator[Event]:
        unfinished: dict[str, tuple[float, str]] = {}
        for line in log.read_text().splitlines():
            if (match := _CALL.match(line)) is None:
                continue
            pid, at, call = match[1], float(match[2]), match[3]
            if call.endswith(_UNFINISHED):
                unfinished[pid] = (at, call.removesuffix(_UNFINISHED))
                continue
            if call.startswith("<... "):
                at, first = unfinished.pop(pid)
                call = first + call.split("resumed>", 1)[1]
            yield from self._events(at, call)

    def _events(self, at: float, call: str) -> Iterator[Event]:
        match = re.match(r"(\w+)\(\d+<([^>]*)>(.*)", call)
        took = re.search(r"<(\d+\.\d+)>$", call)
        if match is None or took is None or (file := self._names.get(_decode(match[2]).decode())) is None:
            return
        what, arguments = match[1], match[3]
        if what in ("fsync", "fdatasync"):
            yield Event(at + float(took[1]), "synced", file, began=at)
        elif what == "ftruncate":
            yield Event(at, "truncate", file, int(arguments.split(")")[0].strip(", ")))
        elif written := re.match(r', "((?:\\x..)*)", \d+(?:, (\d+))?', arguments):
            yield Event(at, "write", file, int(written[2] or 0), _decode(written[1]))

    def files_after(self, cut: int, unsynced: Unsynced, rnd: random.Random) -> dict[str, bytes]:
        """The database and its log if the power fails right after the event number `cut`."""
        files = {}
        for file, before in self.before.items():
            past = [event for event in self.events[: cut + 1] if event.file == file]
            safe_before = max((event.began for event in past if event.kind == "synced"), default=0.0)
            content = bytearray(before)
            for event in past:
                if event.at < safe_before or unsynced == "all" or (unsynced == "half" and rnd.random() < 0.5):
                    _apply(content, event)
                elif unsynced == "torn" and event.kind == "write":
                    for start in range(0, len(event.data), _SECTOR):
                        if rnd.random() < 0.7:
                            part = event.data[start : start + _SECTOR]
                            _apply(content, event._replace(offset=event.offset + start, data=part))
            files[file] = bytes(content)
        return files

    def facts_at(self, cut: int) -> tuple[int, dict[str, int]]:
        """The highest token that was given, and the grants that must be found, by name."""
        highest, kept = 0, {}
        for event in self.events[: cut + 1]:
            if event.file == "facts":
                for line in event.data.decode().splitlines():
                    fact, token, name = line.split()
                    if fact == "GRANTED":
                        highest = max(highest, int(token))
                    elif fact == "KEPT":
                        kept[name] = int(token)
                    else:
                        kept.pop(name, None)
        return highest, kept


def _decode(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", "")) if text.startswith("\\x") else text.encode()


def _apply(content: bytearray, event: Event) -> None:
    if event.kind == "truncate":
        del content[event.offset :]
    if len(content) < event.offset:
        content.extend(bytes(event.offset - len(content)))
    if event.kind == "write":
        content[event.offset : event.offset + len(event.data)] = event.data


def violations(recording: Recording, cuts: int, seed: int, *, forget_ceiling: bool = False) -> Counter[str]:
    """Cut the power at some instants, restart, and count what was promised and is not so. `forget_ceiling` plants a
    bug: tokens then go on from the last one that is found."""
    rnd, found = random.Random(seed), Counter[str]()
    for cut in rnd.sample(range(len(recording.events)), min(cuts, len(recording.events))):
        highest, kept = recording.facts_at(cut)
        unsynced: Unsynced
        for unsynced in ("none", "all", "half", "torn"):
            with tempfile.TemporaryDirectory(dir=_SHM if os.path.isdir(_SHM) else None) as folder:
                path = f"{folder}/locks.db"
                for file, content in recording.files_after(cut, unsynced, rnd).items():
                    Path(path + file).write_bytes(content)
                if forget_ceiling:
                    with sqlite3.connect(path) as db:
                        db.execute("update lh_meta set ceiling = 0")
                    db.close()
                token, grants = _restart(path, f"after {cut} {unsynced}")
                found["recoveries"] += 1
                found["tokens fell"] += token <= highest
                found["grants lost"] += sum(grants.get(name) != token for name, token in kept.items())
    return found


def _restart(path: str, boot: str) -> tuple[int, dict[str, int]]:
    """Use the file in another boot: the token of a new grant, and the tokens of all others by name."""
    here, runtime = BootClock.of_this_machine(), Threads()
    clock = BootClock(here.machine, boot, here.time_namespace, here.now, lambda: 0.0)
    config = EngineConfig.parse(f"sqlite://{path}", 5.0)
    engine = open_with_clock(config, runtime, ClaimRegistry(runtime, os.urandom(8).hex()), clock)
    try:
        holdings = run_sync(engine.inspect("", "", False, runtime.now() + 60))
        claim = Claim("", "new", "secret", os.urandom(16).hex(), Holder("test"), 30.0)
        grant = run_sync(engine.attempt(claim, runtime.now() + 60))
        assert isinstance(grant, Grant)
        return grant.token, {holding.name: holding.token or 0 for holding in holdings}
    finally:
        run_sync(engine.close())
