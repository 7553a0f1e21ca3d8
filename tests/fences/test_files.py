"""Files: what a crash leaves behind, locking between processes, and invalid token files."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leasehold import ConfigError, StaleToken, Unavailable
from leasehold.fences import File, TokenInfo
from leasehold.fences.token_file import TokenFile


def test_first_write_creates_the_file(tmp_path):
    file = File(tmp_path / "report.csv")
    with pytest.raises(FileNotFoundError):
        file.read(5)
    with pytest.raises(StaleToken):
        file.write(4, "too old: a read of nothing is a read")
    file.write(5, "Grüße")
    assert file.read(5) == "Grüße".encode()
    file.write(5, b"\x00\xff")
    assert file.read(5) == b"\x00\xff"
    assert sorted(os.listdir(tmp_path)) == [".report.csv.fence", "report.csv"]


def test_file_write_keeps_mode_and_symlinks(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    File(tmp_path / "link").write(5, "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
    with pytest.raises(StaleToken):
        File(tmp_path / "real").write(4, "by another name")


def test_corrupt_token_file_refuses_writes(tmp_path):
    file = File(tmp_path / "a")
    file.write(5, "x")
    for text in ("garbage", "7", " " * 20 + "x" + " " * 11):
        (tmp_path / ".a.fence").write_text(text)
        with pytest.raises(ConfigError, match="does not contain a fence's highest token"):
            file.write(9, "y")
    assert (tmp_path / "a").read_text() == "x"
    (tmp_path / ".a.fence").write_text("")  # as after a crash before the first token was written
    file.write(1, "z")


def test_token_file_keeps_one_record_per_slot(tmp_path):
    file = File(tmp_path / "a")
    file.write(TokenInfo(7, slot=3), "x")
    file.write(5, "y")
    assert (tmp_path / ".a.fence").stat().st_size == 5 * 32
    file.write(TokenInfo(1, slot=2), "z")  # the slots in between were never used
    with pytest.raises(StaleToken):
        file.write(TokenInfo(6, slot=3), "x")


def test_token_file_replaced_before_its_lock_is_not_locked(tmp_path):
    token_file = TokenFile(str(tmp_path / "m"))
    other_fds = []

    def open_replaced():
        """Another process removes and recreates the file between our open and our lock."""
        fd = real_open()
        token_file._open = real_open
        os.remove(tmp_path / "m")
        other_fds.append(token_file.try_lock())
        return fd

    real_open, token_file._open = token_file._open, open_replaced
    assert token_file.try_lock() is None, "two processes hold the lock of two files with the same name"
    os.close(other_fds[0])
    fd = token_file.try_lock()
    assert fd is not None
    os.close(fd)


WRITER_SCRIPT = """
import os, sys, leasehold
from leasehold.fences import file
def stop(body): print("inside", flush=True); sys.stdin.readline(); real(body)
fence = file.File(sys.argv[1])
real, fence._replace = fence._replace, stop
try:
    fence.write(int(sys.argv[2]), "late")
    print("written", flush=True)
except leasehold.StaleToken:
    print("stale", flush=True)
"""


@pytest.fixture
def holder():
    writers = []

    def start(path: Path, token: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER_SCRIPT, str(path), str(token)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        writers.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "inside\n"
        return child

    yield start
    for child in writers:
        child.kill()
        child.communicate(timeout=30)


def test_writer_stopped_between_check_and_rename_blocks_others(tmp_path, holder):
    """Check and rename are atomic: other writers wait meanwhile, and a stale writer is always refused."""
    path = tmp_path / "a"
    File(path).write(1, "old")
    child = holder(path, 5)
    os.kill(child.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="check if it is stopped"):
        File(path, wait=0.3).write(9, "newer")
    assert time.monotonic() - began < 5
    os.kill(child.pid, signal.SIGCONT)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "written\n"
    File(path).write(9, "newer")
    assert path.read_text() == "newer"


def test_writer_killed_before_rename_leaves_old_content_and_new_token(tmp_path, holder):
    path = tmp_path / "a"
    File(path).write(1, "old")
    child = holder(path, 5)
    child.kill()
    child.wait(30)
    assert path.read_text() == "old"
    with pytest.raises(StaleToken):
        File(path).write(4, "x")
    File(path).write(5, "new")
    assert path.read_text() == "new"
