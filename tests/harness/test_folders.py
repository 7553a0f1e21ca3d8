"""Folders of test processes that were killed are removed by the next run, and no other folder is."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.servers.folders import MEMORY, scratch, sweep
from harness.servers.redis import CAN_FAKE_CLOCK, RedisServer
from tests.support import probe_harness
from tests.support.paths import child_environment

OWNER = "import harness.servers.folders as f; print(f.scratch(), flush=True); input()"


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process with a folder, whose path it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def folder_of(owner: subprocess.Popen[str], age: float) -> Path:
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    (folder / "data").write_text("x")
    os.utime(folder.parent, (time.time() - age,) * 2)
    return folder


def test_folder_of_a_killed_process_is_removed(owner: subprocess.Popen[str]) -> None:
    folder = folder_of(owner, age=3600)
    sweep()
    assert folder.exists(), "its process lives"
    owner.kill()
    owner.wait()
    sweep()
    assert not folder.parent.exists()


def test_folder_that_is_not_locked_yet_is_kept(owner: subprocess.Popen[str]) -> None:
    folder = folder_of(owner, age=0)
    owner.kill()
    owner.wait()
    sweep()
    assert folder.exists()
    os.utime(folder.parent, (0, 0))
    sweep()
    assert not folder.exists()


def test_folder_goes_with_a_process_that_ends(owner: subprocess.Popen[str]) -> None:
    folder = folder_of(owner, age=0)
    owner.communicate("\n")
    assert not folder.parent.exists()


def test_folders_of_this_process_are_kept() -> None:
    folder = scratch()
    os.utime(os.path.dirname(folder), (0, 0))
    sweep()
    assert os.path.isdir(folder)


@pytest.mark.skipif(not CAN_FAKE_CLOCK, reason="needs the Debian package faketime")
def test_killed_server_with_a_fake_clock_leaves_no_file() -> None:
    server = RedisServer(fake_clock=True).start()
    own = [name for name in os.listdir(MEMORY) if name.endswith(f"_{server.pid}")]
    assert own
    server.kill()
    assert [name for name in own if os.path.exists(os.path.join(MEMORY, name))] == []


def test_folder_is_on_the_disk_if_little_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the servers of two runs at once fill it, and the kernel kills somebody's program."""
    probe_harness.set_free_memory(monkeypatch, 1 << 30)
    assert scratch().startswith(f"{tempfile.gettempdir()}/")


def test_folder_of_a_measurement_is_on_the_disk() -> None:
    """Else no commit would wait for it."""
    script = "import harness.servers.folders as f; f.keep_on_disk(); print(f.scratch())"
    done = subprocess.run(
        [sys.executable, "-c", script], env=child_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{tempfile.gettempdir()}/")
