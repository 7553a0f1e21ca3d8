"""The metrics file of short-lived processes: counts go on from process to process, and none is lost."""

from __future__ import annotations

import fcntl
import os
import stat

import pytest

from leasehold import Event
from leasehold.telemetry import Metrics
from leasehold.telemetry.text_file import TextFile
from tests.support import probe_telemetry
from tests.support.metric_samples import samples


def test_metrics_file_keeps_only_lines_that_it_would_write(tmp_path):
    file = tmp_path / "x.prom"
    file.write_text('garbage\nleasehold_once_total{group="a\\"\\n\\\\",namespace="",outcome="ran"} 4.0\nx 1 2 3\ny z\n')
    hook = TextFile(str(file), Metrics())
    hook(Event("ran", "memory", "", "b", 1.0))
    assert file.read_text().splitlines() == [
        "# HELP leasehold_once_total Calls of once.",
        "# TYPE leasehold_once_total counter",
        'leasehold_once_total{group="a\\"\\n\\\\",namespace="",outcome="ran"} 4.0',
        'leasehold_once_total{engine="memory",group="b",namespace="",outcome="ran"} 1.0',
    ]


@pytest.mark.parametrize("separator", ["\r", "\x0b", "\x1e", "\x85", "\u2028"])
def test_line_separator_in_a_name_begins_no_line(tmp_path, separator):
    """The counts of such a name began anew in each process, and the name could contain a line of another metric."""
    file = tmp_path / "x.prom"
    name = f"a{separator}leasehold_run_last_exit_code 0{separator}b"
    for _ in range(2):
        TextFile(str(file), Metrics())(Event("ran", "memory", "", name, 1.0))
    lines = [line for line in file.read_bytes().decode().split("\n") if line and line[0] != "#"]
    assert len(lines) == 1
    assert lines[0].endswith("} 2.0")


def test_file_that_a_group_shares_is_read_in_linear_time(tmp_path):
    """A member of the group could keep each run of the others from beginning, for an hour."""
    file = tmp_path / "x.prom"
    file.write_text(f"x{{{'a' * 1_000_000}}} 1\n")
    TextFile(str(file), Metrics())(Event("ran", "memory", "", "b", 1.0))
    assert samples(file) == {"leasehold_once_total memory b  ran": 1}


def test_foreign_metric_with_a_group_in_the_file_stops_no_run(tmp_path):
    file = tmp_path / "x.prom"
    file.write_text('node_disks{group="a"} 4\n')
    TextFile(str(file), Metrics())(Event("ran", "memory", "", "b", 1.0))
    assert samples(file) == {"leasehold_once_total memory b  ran": 1}


def test_two_processes_that_write_one_file_lose_no_count(tmp_path, monkeypatch):
    monkeypatch.setattr(*probe_telemetry.FILE_LOCK_SECONDS, 60)
    file = tmp_path / "x.prom"
    TextFile(str(file), Metrics()).write()
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            try:
                hook = TextFile(str(file), Metrics())
                for _ in range(20):
                    hook(Event("ran", "memory", "", "b", 1.0))
                os._exit(0)
            except BaseException:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert samples(file) == {"leasehold_once_total memory b  ran": 80}


def test_groups_in_the_file_count_for_the_cap(tmp_path):
    file = tmp_path / "x.prom"
    for number in range(40):
        TextFile(str(file), Metrics())(
            Event("ran", "memory", "", f"g{chr(97 + number // 20)}{chr(97 + number % 20)}", 1.0)
        )
    found = samples(file)
    assert len(found) == 31
    assert found["leasehold_once_total memory other other ran"] == 10


def test_locked_file_is_given_up_after_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr(*probe_telemetry.FILE_LOCK_SECONDS, 0.05)
    file = TextFile(str(tmp_path / "x.prom"), Metrics())
    timed_out = pytest.raises(TimeoutError, match="another process keeps it locked")
    file.write()
    with open(tmp_path / ".x.prom.lock") as lock, timed_out:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file.write()


def test_reader_of_the_folder_cannot_keep_metrics_from_being_written(tmp_path):
    """Every user who can read the folder could lock it, or the file: then no job on the machine wrote its metrics."""
    file = TextFile(str(tmp_path / "x.prom"), Metrics())
    file.write()
    for readable in (tmp_path, tmp_path / "x.prom"):
        fd = os.open(readable, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            file.write()
        finally:
            os.close(fd)
    assert stat.S_IMODE((tmp_path / ".x.prom.lock").stat().st_mode) == 0o600
