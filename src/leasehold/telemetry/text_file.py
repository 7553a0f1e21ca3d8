"""Metrics of short-lived processes, in a file that node_exporter's textfile collector reads.

A command of cron lives too briefly to be scraped, and must not wait for the network when it ends. So it adds what it
counted to a file on its own machine, which the next scrape of that machine takes along. Counters and histograms go on
from run to run; what is under way, such as leases held, is not in the file, because a process that is killed could not
take it out again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from leasehold.errors import ConfigError
from leasehold.events import Event
from leasehold.files import Folder, open_folder
from leasehold.telemetry.families import Family, Sample, families_text, gauge
from leasehold.telemetry.groups import Group
from leasehold.telemetry.metrics import Metrics

_LOCK_SECONDS: Final = 1.0  # how long to wait for another process that writes the file
_MAX_BYTES: Final = 1 << 20
_MODE: Final = 0o644  # node_exporter runs as another user
# What is under way; and what has no labels of a lock: node_exporter reads no file if two of them have the same series.
_LEFT_OUT: Final = frozenset(
    {
        *("leasehold_acquiring", "leasehold_held", "leasehold_at_risk", "leasehold_token_age_seconds"),
        *("leasehold_build_info", "leasehold_hook_errors", "leasehold_events_dropped", "leasehold_groups_overflowed"),
    }
)
_NOT_WRITTEN: Final = frozenset({"attempted", "waited"})  # what follows them writes the file
_EXIT_CODE: Final = "leasehold_run_last_exit_code"
_END: Final = "leasehold_run_last_end_timestamp_seconds"
_SUCCESS: Final = "leasehold_run_last_success_timestamp_seconds"
_RESULTS: Final = {
    _EXIT_CODE: "Exit code of the last run.",
    _END: "When the last run ended.",
    _SUCCESS: "When a run last ended with exit code 0.",
}
_LINE: Final = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_LabelSet = tuple[tuple[str, str], ...]


class TextFile:
    """A hook that keeps the file current. Raises OSError or ConfigError if it cannot: `events.call_hook` logs that."""

    def __init__(self, path: str, metrics: Metrics) -> None:
        self._folder_path, self._name = os.path.split(os.path.abspath(path))
        if not self._name.endswith(".prom"):
            raise ConfigError(f"the file for metrics must end in .prom, or node_exporter does not read it: {path}")
        self._metrics = metrics
        self._written: dict[tuple[str, _LabelSet], float] = {}  # what this process has added to the file
        self._results: dict[str, Sample] = {}  # of the run, once it has ended
        with open_folder(self._folder_path) as folder:
            labels = [sample.labels for sample in self._read(folder)]
        metrics.remember_groups(
            Group(each["namespace"], each["group"]) for each in labels if {"namespace", "group"} <= each.keys()
        )

    def __call__(self, event: Event) -> None:
        self._metrics(event)
        if event.kind not in _NOT_WRITTEN:
            self.write()

    def write_result(self, namespace: str, name: str, exit_code: int) -> None:
        """Add how a run ended: when, and with which exit code."""
        labels = dict(self._metrics.labels(Event("released", "", namespace, name, 0.0)))
        del labels["engine"]  # runs with another URL continue the same series
        results = {_EXIT_CODE: float(exit_code), _END: time.time()}
        if exit_code == 0:
            results[_SUCCESS] = time.time()
        self._results = {name: Sample(name, labels, value) for name, value in results.items()}
        self.write()

    def write(self) -> None:
        """Add what was counted since the last call."""
        with open_folder(self._folder_path) as folder, _locked(folder, f".{self._name}.lock"):
            before = self._read(folder)
            own = [family for family in self._metrics.families() if family.name not in _LEFT_OUT]
            results = [gauge(name, text) for name, text in _RESULTS.items()]
            families = self._merged(before, [*own, *results])
            with folder.new_file(_MODE) as (fd, temporary):
                with open(fd, "w", encoding="utf-8", closefd=False) as file:
                    file.write(families_text(families))
                os.replace(temporary, self._name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        for family in own:
            self._written |= {_key(sample): sample.value for sample in family.samples}

    def _merged(self, before: list[Sample], own: list[Family]) -> Iterable[Family]:
        found = {_key(sample): sample for sample in before}
        for family in own:
            for sample in family.samples:
                key = _key(sample)
                if family.kind != "gauge" and key in found:
                    added = sample.value - self._written.get(key, 0.0)
                    sample = sample._replace(value=found[key].value + added)
                found[key] = sample
        found |= {_key(sample): sample for sample in self._results.values()}
        for family in own:
            names = {f"{family.name}{suffix}" for suffix in ("", "_total", "_bucket", "_count", "_sum")}
            if samples := [sample for sample in found.values() if sample.name in names]:
                yield family._replace(samples=samples)

    def _read(self, folder: Folder) -> list[Sample]:
        """What the file has. Lines that this module would not write are left out."""
        try:
            fd = folder.open_file(self._name, os.O_RDONLY)
        except FileNotFoundError:
            return []
        # A label may have any other line separator, such as those of Unicode.
        with open(fd, encoding="utf-8", errors="replace", newline="") as file:
            return [sample for line in file.read(_MAX_BYTES).split("\n") if (sample := _parse(line)) is not None]


def _parse(line: str) -> Sample | None:
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    try:
        value = float(found[3])
    except ValueError:
        return None
    return Sample(found[1], {name: _unescape(text) for name, text in _LABEL.findall(found[2] or "")}, value)


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text)


def _key(sample: Sample) -> tuple[str, _LabelSet]:
    return sample.name, tuple(sorted(sample.labels.items()))


@contextmanager
def _locked(folder: Folder, name: str) -> Iterator[None]:
    """Hold a lock: two processes that add to one file must not both start from what was there before. It is on a file
    of its own, because every user who can read the folder could lock that, and so keep metrics from being written."""
    fd = folder.open_file(name, os.O_RDWR, create=True)
    end = time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked", folder.path) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)
