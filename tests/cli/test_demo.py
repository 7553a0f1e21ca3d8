"""The stories, as a shell meets them: seen without the cure and gone with it, in little time and without rights."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from leasehold.stories import NAMES, story
from leasehold.testing.servers.process import descendants

FAILS = {  # what each story shows without its cure, and with it
    "zombie": (lambda half: half["sold"] == 2, lambda half: half["sold"] == 1 and half["refused"]),
    "naive": (lambda half: half["lost"] > 0, lambda half: half["lost"] == 0),
    "deadlock": (lambda half: half["stuck"] == 2, lambda half: half["stuck"] == 0),
    "extender": (
        lambda half: half["overlap"] > 0,
        lambda half: half["overlap"] == 0 and half["why"] in ("unreachable", "stalled"),
    ),
    "herd": (lambda half: half["overtaken"] > 0, lambda half: half["overtaken"] == 0 and half["served"] == 200),
    "failover": (
        lambda half: half["paid"] == 2 and not half["refused"],
        lambda half: half["paid"] == 1 and half["refused"] and not half["granted"],
    ),
}


def played(shell, name, *options):
    done = shell("-o", "json", "demo", *options, name, LEASEHOLD_URL="", seconds=120)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_story_goes_as_told(name, shell):
    began = time.monotonic()
    code, told, errors = played(shell, name)
    assert (code, told["story"], told["shown"], errors) == (0, name, True, ""), told
    fails, cured = FAILS[name]
    assert fails(told["without"]), told
    assert cured(told["with"]), told
    if name == "zombie":
        assert time.monotonic() - began < 20


@pytest.mark.faults
@pytest.mark.parametrize("name", NAMES)
def test_a_story_goes_as_told_twenty_times(name, shell):
    runs = [played(shell, name)[1] for _ in range(20)]
    fails, cured = FAILS[name]
    assert [told for told in runs if not fails(told["without"]) or not cured(told["with"])] == []


def test_the_timeline(shell):
    done = shell("demo", "zombie", LEASEHOLD_URL="")
    assert done.returncode == 0, done.stderr
    without, _, cured = done.stdout.partition(" with the cure")
    assert "2 sold of 1  (as told)" in without
    assert "A is stopped: SIGSTOP" in without
    assert "1 sold of 1  (as told)" in cured
    assert "is refused: stock refused token" in cured
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_the_list(shell):
    listed = shell("demo", "--list").stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(NAMES)
    rows = [json.loads(line) for line in shell("-o", "json", "demo", "--list").stdout.splitlines()]
    assert rows[0].keys() == {"story", "title", "cure"}
    for name in NAMES:
        assert story(name).TITLE
        assert story(name).CURE
    assert shell("demo", "nonsense").returncode == 64


def test_a_story_on_an_engine_of_ones_own(shell):
    done = shell("-o", "json", "demo", "deadlock")  # LEASEHOLD_URL names one
    assert (done.returncode, json.loads(done.stdout)["shown"]) == (0, True)
    assert shell("ls").stdout == ""  # and nothing of it stays there


def test_what_cannot_be_played_there_is_said(shell):
    done = shell("-u", "memory://x", "demo", "extender")
    assert done.returncode == 78
    assert "needs the embedded engine" in done.stderr


def test_a_story_that_does_not_go_as_told_ends_with_one(shell):
    """Processes of one story in `memory://` exclude nobody: the cure of the unlocked race is none."""
    done = shell("-o", "json", "-u", "memory://x", "demo", "naive")
    assert (done.returncode, json.loads(done.stdout)["shown"]) == (1, False)


@pytest.mark.parametrize("name", ["zombie", "failover"])
def test_no_process_and_no_folder_stays(name, shell, tmp_path):
    assert shell("demo", name, LEASEHOLD_URL="", TMPDIR=str(tmp_path)).returncode == 0
    assert [name for name in os.listdir(tmp_path) if name.startswith("leasehold-demo")] == []
    assert [pid for pid in os.listdir("/proc") if str(tmp_path) in words_of(pid)] == []


def words_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def state_of(pid: int) -> str:
    """T: stopped. Empty: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", "")
    except OSError:
        return ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
@pytest.mark.parametrize("name", ["zombie", "failover"])
def test_a_demo_that_is_killed_leaves_no_process_behind(name, shell, wait_until, tmp_path):
    """One that is stopped for the story's sake would stay so for ever."""
    shell.environment["TMPDIR"] = str(tmp_path)  # the folder does stay
    demo = shell.start("-u", "", "demo", name)
    wants = {"zombie": lambda pids: any(state_of(pid) == "T" for pid in pids), "failover": lambda pids: len(pids) > 2}
    wait_until(lambda: wants[name](descendants(demo.pid)))
    pids = descendants(demo.pid)
    demo.kill()
    demo.wait(30)
    wait_until(lambda: not any(map(state_of, pids)), 10)


def test_a_missing_server_is_named_with_how_to_get_it(shell, tmp_path):
    if shutil.which("redis-server", path="/usr/sbin:/usr/local/sbin"):
        pytest.skip("redis-server is in a folder where it is always looked for")
    done = shell("demo", "failover", LEASEHOLD_URL="", PATH=str(tmp_path))
    assert done.returncode == 78
    assert "redis-server is not installed: apt-get install redis-server" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_package_is_named_with_how_to_get_it(shell, tmp_path):
    (tmp_path / "redis.py").write_text("raise ModuleNotFoundError(\"No module named 'redis'\", name='redis')")
    (tmp_path / "hiredis.py").write_text("raise ModuleNotFoundError(\"No module named 'hiredis'\", name='hiredis')")
    done = shell("demo", "failover", LEASEHOLD_URL="", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 78
    assert 'pip install "leasehold[redis]"' in done.stderr
