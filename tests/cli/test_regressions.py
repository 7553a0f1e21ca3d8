"""Regressions of the command line, each in its smallest form. Each was a bug once."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

PROGRAM = f"{sys.executable} -m leasehold"
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def run_in_sh(shell, command_line, **environment):
    """Through /bin/sh, for its redirections."""
    return subprocess.run(
        ["sh", "-c", command_line],
        cwd=shell.folder,
        env={**shell.environment, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


# ------------------------------------------------------------- stderr that takes nothing

IGNORES_TERM = "trap '' TERM; echo $$; (while :; do sleep 1; done) & echo $!; wait; while :; do sleep 1; done"


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
    process = shell.start(
        "run", "--max-hold", "0.6", "--result-file", "r.json", "j", "--", "sh", "-c", IGNORES_TERM, stderr=stderr
    )
    os.close(stderr)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    try:
        assert process.wait(60) == 79
        wait_until(lambda: not any(map(is_alive, pids)), 5)
        assert json.loads((shell.folder / "r.json").read_text())["outcome"] == "lost"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pids[0], signal.SIGKILL)


@linux
def test_exit_code_is_kept_when_stderr_is_full(shell):
    shell.hold("j")
    assert run_in_sh(shell, f"{PROGRAM} run -n j true 2>/dev/full").returncode == 75
    assert run_in_sh(shell, f"{PROGRAM} run --no-such-option 2>/dev/full").returncode == 64
    assert run_in_sh(shell, f"{PROGRAM} -vv -u nope://x ls 2>/dev/full").returncode == 78


# ------------------------------------------------------------------- a child that differs


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root alone can make a program of its own")
def test_signals_to_setuid_child_do_not_end_the_wrapper(shell, tmp_path, wait_until):
    """`leasehold run j -- sudo ...`: forwarding SIGUSR1 failed with EPERM, which ended the wrapper and the lease."""
    if (setpriv := shutil.which("setpriv")) is None or not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("needs setpriv, and a python3 that everybody may run")
    source = Path(sys.modules["leasehold"].__file__).parents[1]
    click = Path(__import__("click").__file__).parents[1]
    with subprocess.Popen(["mktemp", "-d", "/tmp/leasehold-XXXXXX"], stdout=subprocess.PIPE, text=True) as mktemp:
        folder = Path(mktemp.stdout.read().strip())
    try:
        folder.chmod(0o777)
        for package in (source / "leasehold", click / "click"):  # other users may not be able to read the originals
            shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        program = shutil.copy(os.path.realpath("/usr/bin/python3"), folder / "root-python")
        os.chmod(program, 0o4755)
        script = "import os, sys; os.setuid(0); print(os.getpid(), flush=True); sys.stdin.read(); sys.exit(6)"
        process = subprocess.Popen(
            [setpriv, "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3", "-m", "leasehold",
             "-u", f"sqlite://{folder}/locks.db", "run", "j", "--", str(program), "-c", script],
            cwd=folder, env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        first_line = process.stdout.readline()
        if not first_line:
            pytest.skip(f"set-user-id does not work here: {process.communicate()[1]}")
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


def test_run_of_empty_command_is_127(shell):
    done = shell("run", "j", "--", "")
    assert done.returncode == 127
    assert "No such file" in done.stderr


def test_grandchild_dies_before_next_grant_when_wrapper_is_killed(shell, wait_until, is_alive):
    """kill -9 (or the OOM killer) of the wrapper of `-c 'work; more'`: `work` kept running next to the next holder."""
    process = shell.start("run", "--ttl", "1", "j", "-c", "sh -c 'echo $$; exec sleep 60'; true")
    pid = int(process.stdout.readline())
    process.kill()
    try:
        assert shell("run", "-w", "30", "j", "true").returncode == 0
        assert not is_alive(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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


# ------------------------------------------------------------------------ a run in a run


def test_nested_run_of_the_same_name_is_refused(shell):
    done = shell("run", "j", "--", *PROGRAM.split(), "run", "j", "--", "touch", "ran")
    assert done.returncode == 78
    assert "wait for itself" in done.stderr
    assert not (shell.folder / "ran").exists()


def test_nested_run_of_other_name_or_engine_is_allowed(shell, tmp_path):
    inner = [*PROGRAM.split(), "run", "k", "--", "sh", "-c", "echo $LEASEHOLD_LOCK"]
    assert shell("run", "j", "--", *inner).stdout == "k\n"
    other = [*PROGRAM.split(), "-u", f"sqlite://{tmp_path}/other.db", "run", "j", "--", "echo", "apart"]
    assert shell("run", "j", "--", *other).stdout == "apart\n"


# --------------------------------------------------------------- files, streams, encodings


@pytest.mark.parametrize("kind", ["fifo", "device", "empty"])
def test_result_file_that_is_no_regular_file_is_refused(shell, kind):
    """As root, `--result-file /dev/null` replaced /dev/null by a file."""
    path = shell.folder / "special"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null") if os.geteuid() else path
        if not os.geteuid():
            try:
                os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
            except OSError as error:
                pytest.skip(f"no device can be made here: {error}")
    done = shell("run", "--result-file", "" if kind == "empty" else str(path), "j", "--", "touch", "ran")
    assert done.returncode == 64
    assert "not a regular file" in done.stderr
    assert not path.is_file()
    assert not (shell.folder / "ran").exists()


def test_result_file_given_as_symlink_is_written_to_its_target(shell):
    (shell.folder / "link").symlink_to("real.json")
    assert shell("run", "--result-file", "link", "j", "true").returncode == 0
    assert (shell.folder / "link").is_symlink()
    assert json.loads((shell.folder / "real.json").read_text())["outcome"] == "done"


@pytest.mark.parametrize("command", ["renew", "release"])
def test_renew_and_release_with_closed_stdin_are_64(shell, command):
    done = run_in_sh(shell, f"{PROGRAM} {command} <&-")
    assert done.returncode == 64
    assert "no lease" in done.stderr


def test_break_with_closed_stdin_is_refused(shell):
    shell.hold("j")
    done = run_in_sh(shell, f"{PROGRAM} break j <&-")
    assert done.returncode == 64
    assert "--yes" in done.stderr


def test_acquire_with_closed_stdout_leaves_no_lease(shell):
    assert run_in_sh(shell, f"{PROGRAM} acquire j >&-").returncode == 64
    assert shell.json("ls") == []


def test_name_outside_of_the_output_encoding_is_escaped(shell):
    shell.hold("日本")
    for command in (["ls"], ["get", "日本"], ["watch", "--for", "0"]):
        done = shell(*command, PYTHONIOENCODING="latin-1")
        assert done.returncode == 0, done.stderr
        assert "\\u65e5\\u672c" in done.stdout


@pytest.mark.parametrize("text", ["[" * 100_000, '{"name":' * 100_000], ids=["array", "object"])
def test_release_of_deeply_nested_json_is_78(shell, text):
    assert shell("release", stdin=text).returncode == 78


# ------------------------------------------------------------------------ wrong command lines


@pytest.mark.parametrize("command", ["ls", "watch", "get"])
def test_name_that_is_not_utf8_is_64(shell, command):
    done = subprocess.run(
        [*PROGRAM.split(), command, b"\xff"], env=shell.environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 64
    assert "UTF-8" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--slots", "9" * 30, "j", "true"], "--slots"),
        (["--ttl", "1e300", "j", "true"], "ttl"),
        (["--ttl", "1e-9", "j", "true"], "must be greater than 0.002 s"),
        (["-w", "1e300", "j", "true"], "wait"),
        (["j", "-c"], "requires an argument"),
        (["j", "--ttl"], "requires an argument"),
        (["j", "--result-file"], "requires an argument"),
    ],
)
def test_run_option_out_of_range_or_without_value_is_64(shell, arguments, why):
    done = shell("run", *arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert why in done.stderr


# ------------------------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        ("leasehold get ", {"LEASEHOLD_NAMESPACE": "shop"}),
        ("leasehold --namespace shop get ", {}),
        ("leasehold run ", {"LEASEHOLD_NAMESPACE": "shop"}),
    ],
)
def test_completion_lists_names_of_the_given_namespace(shell, words, environment):
    shell.hold("elsewhere")
    shell.hold("here", "--namespace", "shop")
    count = str(len(words.split(" ")) - 1)
    done = shell(COMP_WORDS=words, COMP_CWORD=count, _LEASEHOLD_COMPLETE="bash_complete", **environment)
    assert done.stdout == "plain,here\n"


def test_completion_lists_names_of_the_given_engine(shell, tmp_path):
    shell.hold("elsewhere")
    shell.hold("here", "-u", f"sqlite://{tmp_path}/other.db")
    words = f"leasehold -u sqlite://{tmp_path}/other.db get "
    done = shell(COMP_WORDS=words, COMP_CWORD="4", _LEASEHOLD_COMPLETE="bash_complete")
    assert done.stdout == "plain,here\n"
