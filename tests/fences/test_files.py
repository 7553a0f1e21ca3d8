"""Files: what a crash leaves behind, locking between processes, and invalid token files."""

from __future__ import annotations

import itertools
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from leasehold import ConfigError, StaleToken, Unavailable, fences
from leasehold.fences import File, TokenInfo
from leasehold.fences.token_file import TokenFile
from tests.support import probe_fences
from tests.support.paths import child_environment
from tests.support.timing import check_elapsed


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
        setattr(*place, real_open)
        os.remove(tmp_path / "m")
        other_fds.append(token_file.try_lock())
        return fd

    place = probe_fences.OPEN.of(token_file)
    real_open = getattr(*place)
    setattr(*place, open_replaced)
    assert token_file.try_lock() is None, "two processes hold the lock of two files with the same name"
    os.close(other_fds[0])
    fd = token_file.try_lock()
    assert fd is not None
    os.close(fd)


WRITER_SCRIPT = """
import os, sys, leasehold
from leasehold.fences import file
from tests.support import probe_fences
def stop(body): print("inside", flush=True); sys.stdin.readline(); real(body)
fence = file.File(sys.argv[1])
place = probe_fences.REPLACE.of(fence)
real = getattr(*place)
setattr(*place, stop)
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
        child = subprocess.Popen(
            command, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
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
    check_elapsed(began, 5)
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


FORKER = """
import os, sys, time
from leasehold.fences import File
from tests.support import probe_fences
fence = File(sys.argv[1])
place = probe_fences.REPLACE.of(fence)
real = getattr(*place)
def forking(body):
    if os.fork() == 0:  # what a thread of a prefork server does while another is in here
        time.sleep(60)
        os._exit(0)
    real(body)
setattr(*place, forking)
fence.write(5, "x")
print("written", flush=True)
sys.stdin.readline()
"""


def test_child_forked_during_file_write_does_not_keep_the_flock(tmp_path):
    """The child inherits the descriptor, and with it the flock."""
    command = [sys.executable, "-c", FORKER, str(tmp_path / "a")]
    with subprocess.Popen(
        command,
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "written\n"
            fences.File(tmp_path / "a", wait=2).write(6, "y")
        finally:
            os.killpg(parent.pid, 9)


def test_file_write_does_not_write_through_leftover_hard_link(tmp_path):
    """The leftover may be a hard link that a backup made."""
    (tmp_path / "backup").write_text("precious")
    os.link(tmp_path / "backup", tmp_path / ".a.new")
    fences.File(tmp_path / "a").write(5, "x")
    assert (tmp_path / "backup").read_text() == "precious"
    assert (tmp_path / "a").read_text() == "x"


def test_private_file_is_never_readable_by_others_during_write(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("secret")
    (tmp_path / "a").chmod(0o600)
    modes, real = [], os.fchmod

    def fchmod(fd: int, mode: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        real(fd, mode)

    monkeypatch.setattr(os, "fchmod", fchmod)
    fences.File(tmp_path / "a").write(5, "more secret")
    assert set(modes) == {0o600}, "a process that opened it before fchmod could read what is written later"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_file_keeps_its_owner(tmp_path):
    (tmp_path / "a").write_text("theirs")
    os.chown(tmp_path / "a", 12345, 23456)
    fences.File(tmp_path / "a").write(5, "x")
    found = (tmp_path / "a").stat()
    assert (found.st_uid, found.st_gid) == (12345, 23456)


def test_file_write_of_wrong_type_leaves_no_file(tmp_path):
    for bad in (7, None, ["a"]):
        with pytest.raises(TypeError):
            fences.File(tmp_path / "a").write(5, bad)
    assert os.listdir(tmp_path) == []


def crash_after(path: Path, steps_left: int) -> tuple[bool, list[str]]:
    """Run a child that writes and dies after `steps_left` steps. Return whether it died, and the steps it took."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:

        def counted(name: str, real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal steps_left
                result = real(*args, **kwargs)
                os.write(writer, f"{name} ".encode())
                steps_left -= 1
                if steps_left == 0:
                    os.kill(os.getpid(), 9)
                return result

            return call

        try:
            for name in ("open", "pwrite", "unlink", "fchown", "fchmod", "fsync", "replace", "close"):
                setattr(os, name, counted(name, getattr(os, name)))
            fences.File(path).write(5, "new")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as output:
        steps = output.read().split()
    return os.waitpid(pid, 0)[1] == 9, steps


@pytest.mark.extended
def test_file_crash_after_any_step_never_leaves_new_content_unfenced(tmp_path):
    path, steps, died = tmp_path / "a", [], True
    for step in itertools.count(1):
        for name in os.listdir(tmp_path):
            os.remove(tmp_path / name)
        fences.File(path).write(1, "old")
        died, steps = crash_after(path, step)
        if not died:
            break
        assert len(steps) == step
        assert path.read_text() in ("old", "new")
        if path.read_text() == "new" or "pwrite" in steps:
            with pytest.raises(StaleToken):
                fences.File(path).write(4, "stale")
        fences.File(path, wait=5).write(5, "newer")
        assert path.read_text() == "newer"
    # A power cut can only undo later steps: first the token, then the content, then the name are synced to disk.
    order = [step for step in steps if step in ("pwrite", "fsync", "replace")]
    assert order == ["pwrite", "fsync", "fsync", "replace", "fsync"]


# ---------------------------------------------------------------- other users

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to give files to another user")
STRANGER = 65533


@needs_root
def test_token_file_planted_by_another_user_is_refused(tmp_path):
    """Whoever owns the token file could lower the highest token, or keep the file locked."""
    (tmp_path / ".a.fence").touch(0o600)
    os.chown(tmp_path / ".a.fence", STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}"):
        File(tmp_path / "a").write(5, "x")
    assert os.listdir(tmp_path) == [".a.fence"]


@needs_root
@pytest.mark.parametrize("name", ["a", "folder"])
def test_link_of_another_user_is_not_followed(tmp_path, name):
    (tmp_path / "precious").mkdir()
    (tmp_path / name).symlink_to("precious" if name == "folder" else "precious/a")
    os.lchown(tmp_path / name, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=f"user {STRANGER} could change"):
        File(tmp_path / ("a" if name == "a" else "folder/a")).write(5, "x")
    assert not os.listdir(tmp_path / "precious")


@pytest.mark.parametrize("name", ["a", ".a.new", ".a.fence"])
def test_link_planted_after_the_fence_was_made_is_not_followed(tmp_path, name):
    (tmp_path / "precious").write_text("keep me")
    file = File(tmp_path / "a")
    (tmp_path / name).symlink_to("precious")
    if name == ".a.new":  # it is removed, as a leftover of a crash
        file.write(5, "x")
    else:
        with pytest.raises(ConfigError, match=r"not a regular file|symbolic link"):
            file.write(5, "x")
    if name == "a":
        with pytest.raises(OSError, match="Too many levels"):
            file.read(5)
    assert (tmp_path / "precious").read_text() == "keep me"


def test_file_write_drops_setuid_and_setgid(tmp_path):
    """Another member of the group could choose the mode of a file that then belongs to the writer."""
    (tmp_path / "a").touch()
    (tmp_path / "a").chmod(0o6751)
    File(tmp_path / "a").write(5, "x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o751


def test_token_file_is_for_the_owner_or_the_group_of_a_shared_folder(tmp_path):
    for mode, expected in ((0o755, 0o600), (0o2770, 0o660)):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        File(folder / "a").write(5, "x")
        assert stat.S_IMODE((folder / ".a.fence").stat().st_mode) == expected


@needs_root
def test_folder_of_tokens_that_another_user_made_is_refused(tmp_path):
    """Its owner could lower the highest tokens of a service."""
    (tmp_path / "marks").mkdir()
    os.chown(tmp_path / "marks", STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}"):
        fences.FileTokens(tmp_path / "marks")


@needs_root
def test_link_of_another_user_to_a_folder_of_tokens_is_refused(tmp_path):
    """The user who made it would choose where highest tokens are kept, and forgotten after the next restart."""
    public = tmp_path / "run-lock"
    public.mkdir()
    public.chmod(0o1777)
    for name in ("tokens", "folder"):
        (public / name).symlink_to(tmp_path / "elsewhere")
        os.lchown(public / name, STRANGER, STRANGER)
    for path in (public / "tokens", public / "folder" / "tokens"):
        with pytest.raises(ConfigError, match=f"is a symbolic link that user {STRANGER} could change"):
            fences.FileTokens(path)
    assert os.listdir(tmp_path) == ["run-lock"]


def test_folder_of_tokens_is_created_also_behind_an_own_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fences.FileTokens(tmp_path / "link" / "tokens")
    fences.FileTokens(tmp_path / "link" / "tokens")
    assert stat.S_IMODE((tmp_path / "real" / "tokens").stat().st_mode) == 0o700
