"""The process of CMD, its group, and what is left of them when `leasehold run` ends."""

import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from leasehold.cli.run.orphan_killer import OrphanKiller
from tests.support import probe_cli

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root alone can make a program of its own")
def test_signals_to_setuid_child_do_not_end_the_wrapper(shell, tmp_path, wait_until):
    """`leasehold run j -- sudo ...`: forwarding SIGUSR1 failed with EPERM, which ended the wrapper and the lease."""
    if (setpriv := shutil.which("setpriv")) is None or not os.access("/usr/bin/python3", os.X_OK) or os.getuid():
        pytest.skip("needs root, setpriv, and a python3 that everybody may run")
    source = Path(sys.modules["leasehold"].__file__).parents[1]
    click = Path(__import__("click").__file__).parents[1]
    with subprocess.Popen(["mktemp", "-d", "/tmp/leasehold-XXXXXX"], stdout=subprocess.PIPE, text=True) as mktemp:
        folder = Path(mktemp.stdout.read().strip())
    try:
        folder.chmod(0o755)
        (folder / "locks").mkdir(mode=0o700)
        os.chown(folder / "locks", 65534, 65534)
        for package in (source / "leasehold", click / "click"):  # other users may not be able to read the originals
            shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        program = shutil.copy(os.path.realpath("/usr/bin/python3"), folder / "root-python")
        os.chmod(program, 0o4755)
        script = "import os, sys; os.setuid(0); print(os.getpid(), flush=True); sys.stdin.read(); sys.exit(6)"
        process = subprocess.Popen(
            [setpriv, "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3", "-m", "leasehold",
             "-u", f"sqlite://{folder}/locks/locks.db", "run", "j", "--", str(program), "-c", script],
            cwd=folder, env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        first_line = process.stdout.readline()
        if not first_line:
            _, errors = process.communicate()
            assert "Operation not permitted" in errors
            pytest.skip(f"set-user-id does not work here: {errors}")
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate("", timeout=60)
        assert (process.returncode, out, err) == (6, "", "")
    finally:
        shutil.rmtree(folder)


@linux
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, 137), (signal.SIGTERM, 143)])
def test_child_killed_while_run_is_queued_sets_the_exit_code(shell, wait_until, signum, code):
    """It exited with 1, without a message."""
    holder = shell.hold("j")
    waiter = shell.start("run", "--result-file", "r.json", "j", "--", "touch", "ran")
    wait_until(lambda: shell.json("get", "j")["waiters"])
    pid, _orphan_killer_pid = Path(f"/proc/{waiter.pid}/task/{waiter.pid}/children").read_text().split()
    os.kill(int(pid), signum)
    holder.stdin.close()
    assert waiter.wait(60) == code
    assert json.loads((shell.folder / "r.json").read_text())["exit_code"] == code
    assert not (shell.folder / "ran").exists()
    assert shell.json("ls") == []


def test_grandchild_dies_before_next_grant_when_wrapper_is_killed(shell, wait_until, is_alive):
    """kill -9 (or the OOM killer) of the wrapper of `-c 'work; more'`: `work` kept running next to the next holder."""
    process = shell.start("run", "--ttl", "600", "j", "-c", "sh -c 'echo $$; exec sleep 60'; true")
    pid = int(process.stdout.readline())
    process.kill()
    try:
        assert shell("run", "-w", "60", "j", "true").returncode == 0  # long before the ttl
        assert not is_alive(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@linux
def test_orphan_killer_keeps_the_descriptor_until_the_group_is_gone(wait_until):
    """A dead process that no process has waited for is still in its group."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    command = subprocess.Popen(["sleep", "600"], process_group=0)
    orphan_killer = OrphanKiller(command.pid)
    orphan_killer.keep_open(writer, 600.0)
    os.close(writer)
    probe_cli.pretend_wrapper_died(orphan_killer)  # as if the wrapper had died
    wait_until(lambda: Path(f"/proc/{command.pid}/stat").read_text().split()[2] == "Z")
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    command.wait()
    wait_until(lambda: probe_cli.has_ended(orphan_killer))
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root, to start processes of two users")
def test_orphan_killer_keeps_the_descriptor_beside_another_users_command(wait_until):
    """`leasehold run j -- sudo CMD`, and the wrapper is killed: CMD cannot be killed, and the name was free at once."""
    reader, writer = os.pipe()
    command = subprocess.Popen(["sleep", "600"], process_group=0)
    try:
        if (wrapper := os.fork()) == 0:
            try:
                os.close(reader)
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                OrphanKiller(command.pid).keep_open(writer, 600.0)
            finally:
                os._exit(0)  # as if the wrapper had been killed
        os.close(writer)
        os.waitpid(wrapper, 0)
        assert select.select([reader], [], [], 0.3)[0] == []  # many polls of the group later
    finally:
        command.kill()
        command.wait()
    assert select.select([reader], [], [], 60)[0] == [reader]
    assert os.read(reader, 1) == b""
    os.close(reader)


@linux
def test_orphan_killer_spares_background_jobs_when_command_succeeds(shell, wait_until, is_alive):
    """A process that CMD leaves in the background survives, and the orphan killer ends."""
    done = shell("run", "j", "-c", "sleep 60 >/dev/null 2>&1 & echo $!")
    pid = int(done.stdout)
    try:
        assert (done.returncode, done.stderr) == (0, "")
        assert is_alive(pid)
        leftovers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"run\0j\0-c\0sleep" in _read(path)]
        assert leftovers == []
    finally:
        os.kill(pid, signal.SIGKILL)


def _read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


INTERRUPTED_FORK = """
import os, signal, sys
from leasehold.cli.run.child import Child
from leasehold.cli.run.signals import Interrupted, raise_on_signals

raise_on_signals()
os.register_at_fork(**{sys.argv[1]: lambda: os.kill(os.getpid(), signal.SIGTERM)})
try:
    Child(["true"])
except Interrupted as interrupted:
    print(interrupted.signum)
"""


@pytest.mark.parametrize("when", ["before", "after_in_parent"])
def test_signal_that_comes_during_the_fork_is_not_lost(when):
    """Python only prints what a handler raises while the hooks of a fork run."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_FORK, when], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{signal.SIGTERM:d}\n", "")


@linux
def test_command_blocks_no_signals(shell):
    done = shell("run", "j", "--", "grep", "SigBlk", "/proc/self/status")
    assert int(done.stdout.split()[1], 16) == 0


@linux
def test_command_starts_beside_thousands_of_inherited_files(shell):
    """`select` refused the descriptor of the signals, and CMD went on without a lease. With more than 4096, a process
    kept the other end of CMD's pipe open, and CMD never started."""
    program = """
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (4500, hard))
for descriptor in range(3, 4200):
    os.dup2(0, descriptor)
os.execv(sys.argv[1], sys.argv[1:])
"""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 4500:
        pytest.skip("needs 4500 descriptors (ulimit -Hn)")
    argv = [sys.executable, "-c", program, sys.executable, "-m", "leasehold", "run", "j", "--", "echo", "ran"]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, cwd=shell.folder, env=shell.environment, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


@linux
def test_unexpected_error_of_the_wrapper_kills_the_group(shell, wait_until, is_alive):
    """Its lease was released, and what CMD had started went on."""
    program = """
import os, sys, time
from leasehold.cli.app import start
from leasehold.cli.run.supervisor import Supervisor

def fail(_):
    while not os.path.exists("pid"):
        time.sleep(0.01)
    raise MemoryError

Supervisor.watch = fail
raise SystemExit(start(["run", "j", "--", "sh", "-c", "sleep 60 & echo $! > new; mv new pid; wait"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, cwd=shell.folder, env=shell.environment, check=False,
    )  # fmt: skip
    assert (done.returncode, "MemoryError" in done.stderr) == (70, True)
    wait_until(lambda: not is_alive(int((shell.folder / "pid").read_text())))
    assert shell.json("ls") == []
