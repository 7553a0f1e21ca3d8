"""Signals reach the child. When the lease ends, the child and all processes it started are ended."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.timing import check_elapsed, check_seconds

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")

REPORTS_SIGNALS = """
import signal, sys
def tell(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for name in sys.argv[1:]:
    signal.signal(signal.Signals[name], tell)
print("ready", flush=True)
while True:
    signal.pause()
"""
DIES_OF_SIGINT = "import signal; signal.signal(2, signal.SIG_DFL); print('ready', flush=True); signal.pause()"
SIGNAL_NAMES = ["SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGWINCH"]


def start_run(shell, *options, script, name="j", max_hold=None, **settings):
    """A run whose child has printed its first line, and that line. A busy machine may end `max_hold` before that: then
    another run gets more."""
    for seconds in [None] if max_hold is None else [max_hold, 10, 60]:
        limit = [] if seconds is None else ["--max-hold", str(seconds)]
        process = shell.start("run", *limit, *options, name, "--", "sh", "-c", script, **settings)
        if first_line := process.stdout.readline().strip():
            return process, first_line
    raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize("name", SIGNAL_NAMES)
def test_signal_is_forwarded_to_child(shell, name):
    process = shell.start("run", "j", "--", sys.executable, "-c", REPORTS_SIGNALS, *SIGNAL_NAMES, "SIGTERM")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[name])
    assert process.stdout.readline() == f"{name}\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("SIGTERM\n", "")
    assert process.returncode == 5


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_run_returns_128_plus_forwarded_signal_when_child_dies_of_it(shell, signum, code):
    process = shell.start("run", "j", "--", sys.executable, "-c", DIES_OF_SIGINT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    assert process.wait(60) == code


def test_term_reaches_processes_started_by_child(shell, wait_until, is_alive):
    process, pid = start_run(shell, script="sleep 60 & echo $!; wait")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    wait_until(lambda: not is_alive(int(pid)))


def test_ignored_sighup_stays_ignored(shell):
    """`nohup leasehold run ...` is immune, and so is CMD."""
    process = shell.start(
        "run", "j", "--", "sh", "-c", "echo ready; read line; exit 4",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 4


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_queued_run_leaves_the_queue_when_interrupted(shell, wait_until, signum, code):
    shell.hold("j")
    waiter = shell.start("run", "j", "--result-file", "result.json", "--", "touch", "ran")
    wait_until(lambda: shell.json("get", "j")["waiters"])
    waiter.send_signal(signum)
    assert waiter.wait(60) == code
    assert shell.json("get", "j")["waiters"] == []
    assert not (shell.folder / "ran").exists()
    assert json.loads((shell.folder / "result.json").read_text())["outcome"] == "interrupted"


@linux
def test_child_dies_when_wrapper_is_killed(shell, wait_until, is_alive):
    process, pid = start_run(shell, script="echo $$; exec sleep 60")
    process.kill()
    wait_until(lambda: not is_alive(int(pid)))


@linux
def test_queued_run_leaves_no_process_when_killed(shell, wait_until, is_alive):
    shell.hold("j")
    waiter = shell.start("run", "j", "--", "touch", "ran")
    wait_until(lambda: shell.json("get", "j")["waiters"])
    children = Path(f"/proc/{waiter.pid}/task/{waiter.pid}/children").read_text().split()
    assert len(children) == 2, "CMD to be, and the guard"
    waiter.kill()
    wait_until(lambda: not any(is_alive(int(pid)) for pid in children))
    assert not (shell.folder / "ran").exists()


# ------------------------------------------------------------------ a lost lease


def test_child_is_terminated_before_max_hold(shell):
    script = "trap 'echo told; sleep 0.05; exit 0' TERM; echo ready; sleep 60 & wait"
    process, _ = start_run(shell, "--kill-after", "5", script=script, max_hold=6)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 79
    assert out == "told\n"
    assert re.search(r"the lease of j \(token \d+\) ends in \d\.\d s: .*max_hold.*; sent SIGTERM to sh", err)


def test_child_that_ignores_term_is_killed_at_the_deadline(shell):
    began = time.monotonic()
    process, _ = start_run(shell, script="trap '' TERM; echo ready; while :; do sleep 60; done", max_hold=0.9)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 79
    assert time.monotonic() - began > 0.8
    assert "killed sh (pid" in err


def test_process_left_behind_by_child_after_term_is_killed(shell, wait_until, is_alive):
    script = "(trap '' TERM; echo $(exec sh -c 'echo $PPID'); while :; do sleep 1; done) & wait"
    process, pid = start_run(shell, script=script, max_hold=0.9)
    assert process.wait(60) == 79
    wait_until(lambda: not is_alive(int(pid)))


def test_run_with_full_stderr_pipe_still_kills_child_after_term(shell, wait_until, is_alive):
    """`leasehold run ... 2>&1 | less`, and the pager stops reading: the wrapper must not block on its own messages."""
    reader, writer = os.pipe()
    with open(reader, "rb", 0) as stderr:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while os.write(writer, b"x" * 4096):
                pass
        os.set_blocking(writer, True)
        script = "trap '' TERM; echo $$; while :; do sleep 60; done"
        process, pid = start_run(shell, script=script, max_hold=0.6, stderr=writer)
        os.close(writer)
        pid = int(pid)
        wait_until(lambda: not is_alive(pid))
        output = b""
        while chunk := stderr.read(65536):
            output += chunk
    assert process.wait(60) == 79
    assert b"sent SIGTERM" in output
    assert b"killed sh" in output


def test_on_lost_kill_sends_no_term(shell):
    script = "trap 'echo told' TERM; echo ready; sleep 60 & wait"
    process, _ = start_run(shell, "--on-lost", "kill", script=script, max_hold=0.6)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (79, "")


def test_on_lost_ignore_lets_child_continue(shell, tmp_path):
    process, _ = start_run(
        shell, "--on-lost", "ignore", "--result-file", "result.json",
        script="echo ready; read line; exit 6", max_hold=0.3,
    )  # fmt: skip
    assert "is lost: it was held for as long as max_hold allows" in process.stderr.readline()
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 6
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["outcome"], found["lost_reason"], found["child_exit_code"]) == ("lost", "max_hold", 6)


def test_child_is_killed_when_lease_is_broken(shell, wait_until, is_alive):
    process, pid = start_run(shell, "--ttl", "3", script="trap '' TERM; echo $$; while :; do sleep 60; done")
    token = shell.json("get", "j")["holders"][0]["token"]
    assert shell("break", "j", "--token", str(token)).returncode == 0
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 79
    assert "is lost" in err
    assert "killed sh" in err
    assert not is_alive(int(pid))
    check_elapsed(began, 2.5, "the next renewal tells it at the latest")


def test_child_is_killed_before_lease_ends_when_engine_is_silent(shell, tmp_path):
    """SIGTERM comes `kill_after` before the local deadline, SIGKILL at the deadline: before the next grant."""
    process, _ = start_run(
        shell, "--ttl", "3", "--kill-after", "1", "--result-file", "result.json",
        script="trap ': >> told' TERM; echo ready; while :; do sleep 0.02; done",
    )  # fmt: skip
    blocker = sqlite3.connect(tmp_path / "locks.db", isolation_level=None)
    blocker.execute("begin exclusive")
    silent_since = time.time()
    try:
        _, err = process.communicate(timeout=60)
    finally:
        blocker.rollback()
        blocker.close()
    assert process.returncode == 79
    assert "sent SIGTERM to sh" in err
    assert "killed sh" in err
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["outcome"], found["child_exit_code"]) == ("lost", 137)
    term_at = (tmp_path / "told").stat().st_mtime
    assert silent_since < term_at
    check_seconds(term_at - silent_since, 3 + 1, "a life of 3 s less 1 s, of which the engine was silent for up to all")
    assert shell("run", "-w", "10", "j", "true").returncode == 0


def test_strict_run_gives_its_child_time_after_the_first_failed_renewal(shell, tmp_path):
    """SIGTERM comes with the first failed renewal, SIGKILL `kill_after` later: the engine still keeps the name."""
    process, _ = start_run(
        shell, "--ttl", "6", "--kill-after", "1", "--strict", "--drift", "0.02", "--result-file", "result.json",
        script="trap 'echo told >> told; exit 7' TERM; echo ready; while :; do sleep 0.02; done",
    )  # fmt: skip
    blocker = sqlite3.connect(tmp_path / "locks.db", isolation_level=None)
    blocker.execute("begin exclusive")
    try:
        _, err = process.communicate(timeout=60)
    finally:
        blocker.rollback()
        blocker.close()
    assert process.returncode == 79
    assert "sent SIGTERM to sh" in err
    assert "killed" not in err
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["outcome"], found["child_exit_code"]) == ("lost", 7)


def stop_outside_a_transaction(pid: int, database: Path) -> None:
    """Stop a process while it does not write: otherwise every other one would wait for it."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        connection = sqlite3.connect(database, timeout=0.05)
        try:
            connection.execute("begin immediate")
        except sqlite3.OperationalError:
            os.kill(pid, signal.SIGCONT)
        else:
            return
        finally:
            connection.close()


def test_child_group_is_killed_after_pause_past_the_ttl(shell, wait_until, is_alive):
    """Wrapper and child are stopped past the ttl. When they resume, the whole group is killed at once."""
    script = "sleep 300 & echo $$ $! $LEASEHOLD_TOKEN; while :; do sleep 0.01; done"
    first, line = start_run(shell, "--ttl", "4", script=script)  # a busy machine must not reach it before the pause
    pid, other, token = map(int, line.split())
    stop_outside_a_transaction(first.pid, shell.folder / "locks.db")
    os.killpg(pid, signal.SIGSTOP)
    try:
        second = shell("run", "-w", "60", "j", "-c", "echo $LEASEHOLD_TOKEN")
        assert second.returncode == 0, second.stderr
        assert int(second.stdout) > token
        assert is_alive(pid)
    finally:
        os.kill(first.pid, signal.SIGCONT)
        os.killpg(pid, signal.SIGCONT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 79
    assert "is lost" in err
    assert "killed sh" in err
    wait_until(lambda: not is_alive(pid) and not is_alive(other))


def test_child_continues_after_pause_within_the_ttl(shell):
    process, pid = start_run(shell, "--ttl", "20", script="echo $$; read line; exit 3")
    os.kill(process.pid, signal.SIGSTOP)
    os.killpg(int(pid), signal.SIGSTOP)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate("go on\n", timeout=60)  # the wrapper resumes the child, too
    assert process.returncode == 3


IGNORES_TERM = "trap '' TERM; (while :; do sleep 1; done) & echo $$ $!; wait; while :; do sleep 1; done"


@linux
@pytest.mark.parametrize("way", ["full", "broken"])
def test_run_with_unwritable_stderr_still_kills_group_after_term(shell, is_alive, wait_until, way):
    """`leasehold run ... 2>&1 | head -1`: the wrapper died while printing after SIGTERM, and released the lease while
    the group was still working.
    """
    if way == "full":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stderr = os.pipe()
        os.close(reader)
    process, line = start_run(shell, "--result-file", "r.json", script=IGNORES_TERM, max_hold=0.6, stderr=stderr)
    os.close(stderr)
    pids = [int(pid) for pid in line.split()]
    try:
        assert process.wait(60) == 79
        wait_until(lambda: not any(map(is_alive, pids)), 60)
        assert json.loads((shell.folder / "r.json").read_text())["outcome"] == "lost"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pids[0], signal.SIGKILL)


@pytest.mark.parametrize("when", ["before", "after"])
def test_signal_around_the_end_of_a_child_ends_the_next_term(when):
    """`elect` starts another child after a lost term: a SIGTERM that arrives in between must not be forgotten."""
    program = """
import os, signal, sys
from leasehold.cli.run.signals import Interrupted, SignalQueue, raise_on_signals

raise_on_signals()
queue = SignalQueue()
queue.open()
if sys.argv[1] == "before":
    os.kill(os.getpid(), signal.SIGTERM)
queue.close()
if sys.argv[1] == "after":
    os.kill(os.getpid(), signal.SIGTERM)
try:
    raise_on_signals()
except Interrupted as interrupted:
    print(interrupted.signum)
raise_on_signals()
"""
    done = subprocess.run([sys.executable, "-c", program, when], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{signal.SIGTERM.value}\n", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_while_an_error_is_explained_ends_the_program_quietly(name):
    """A usage error loads click first, which takes longer than anything else in such a call."""
    program = """
import os, signal, sys
from leasehold.cli import app, program

program.explain = lambda error: os.kill(os.getpid(), signal.Signals[sys.argv[1]])
raise SystemExit(app.start(["run", "job"]))
"""
    done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.Signals[name], "", "")


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("leasehold.cli.run.job", []),
        ("leasehold.cli.program", ["-v"]),
        ("leasehold.cli.run.command", ["-v"]),
        ("leasehold.engines.sqlite.engine", []),
    ],
)
def test_signal_while_a_module_is_loaded_is_not_forgotten(module, options, shell):
    """Python drops what a handler raises in a finalizer or in a callback of a weak reference, which imports have."""
    program = """
import os, signal, sys
from leasehold.cli.app import start

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):  # here Python calls the handler, if the signal is not held back
            pass

class Finder:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            Finalized()

sys.meta_path.insert(0, Finder())
raise SystemExit(start(sys.argv[2:]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, module, "run", *options, "j", "--", "echo", "ran"],
        capture_output=True,
        text=True,
        check=False,
        cwd=shell.folder,
        env=shell.environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_at_the_very_start_ends_the_program_without_traceback(name):
    program = """
import os, signal, sys
from leasehold.cli import main

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "leasehold.cli.app":
            os.kill(os.getpid(), signal.Signals[sys.argv[1]])

sys.meta_path.insert(0, Finder())
main()
"""
    done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.Signals[name], "", "")


def test_signal_that_python_drops_ends_the_program_before_a_child_starts():
    program = """
import os, signal
from leasehold.cli.run.signals import Interrupted, SignalQueue, raise_on_signals

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

raise_on_signals()
Finalized()
queue = SignalQueue()
try:
    queue.open()
except Interrupted as interrupted:
    print(interrupted.signum)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{signal.SIGTERM.value}\n")
    assert done.stderr.startswith("Exception ignored in: <function Finalized.__del__")
