"""What broke the command line when it was attacked, in the smallest form that shows it. Each was a defect once."""

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


def line(shell, text, **environment):
    """Through /bin/sh, for its redirections."""
    return subprocess.run(
        ["sh", "-c", text],
        cwd=shell.folder,
        env={**shell.environment, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


# ------------------------------------------------------------- stderr that takes nothing

STUBBORN = "trap '' TERM; echo $$; (while :; do sleep 1; done) & echo $!; wait; while :; do sleep 1; done"


@linux
@pytest.mark.parametrize("way", ["full", "broken"])
def test_a_word_that_cannot_be_said_does_not_come_between_term_and_kill(alone, lives, wait_until, way):
    """`leasehold run ... 2>&1 | head -1`: the wrapper died of its own word after TERM, and released the lease while the
    group worked on.
    """
    if way == "full":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stderr = os.pipe()
        os.close(reader)
    process = alone.start(
        "run", "--max-hold", "0.6", "--result-file", "r.json", "j", "--", "sh", "-c", STUBBORN, stderr=stderr
    )
    os.close(stderr)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    try:
        assert process.wait(60) == 79
        wait_until(lambda: not any(map(lives, pids)), 5)
        assert json.loads((alone.folder / "r.json").read_text())["outcome"] == "lost"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pids[0], signal.SIGKILL)


@linux
def test_a_full_stderr_costs_no_exit_code(shell):
    shell.hold("j")
    assert line(shell, f"{PROGRAM} run -n j true 2>/dev/full").returncode == 75
    assert line(shell, f"{PROGRAM} run --no-such-option 2>/dev/full").returncode == 64
    assert line(shell, f"{PROGRAM} -vv -u nope://x ls 2>/dev/full").returncode == 78


# ------------------------------------------------------------------- a child that differs


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root alone can make a program of its own")
def test_a_child_that_became_another_user_is_not_left_without_its_lock(shell, tmp_path, wait_until):
    """`leasehold run j -- sudo ...`: USR1 to the wrapper was answered by EPERM, which ended it, and the lease."""
    if (setpriv := shutil.which("setpriv")) is None or not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("needs setpriv, and a python3 that everybody may run")
    source = Path(sys.modules["leasehold"].__file__).parents[1]
    click = Path(__import__("click").__file__).parents[1]
    with subprocess.Popen(["mktemp", "-d", "/tmp/leasehold-XXXXXX"], stdout=subprocess.PIPE, text=True) as made:
        place = Path(made.stdout.read().strip())
    try:
        place.chmod(0o777)
        for package in (source / "leasehold", click / "click"):  # where they are may be closed to others
            shutil.copytree(package, place / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        program = shutil.copy(os.path.realpath("/usr/bin/python3"), place / "root-python")
        os.chmod(program, 0o4755)
        script = "import os, sys; os.setuid(0); print(os.getpid(), flush=True); sys.stdin.read(); sys.exit(6)"
        process = subprocess.Popen(
            [setpriv, "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3", "-m", "leasehold",
             "-u", f"sqlite://{place}/locks.db", "run", "j", "--", str(program), "-c", script],
            cwd=place, env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        first = process.stdout.readline()
        if not first:
            pytest.skip(f"set-user-id does not work here: {process.communicate()[1]}")
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate("", timeout=60)
        assert (process.returncode, out, err) == (6, "", "")
    finally:
        shutil.rmtree(place)


@linux
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, 137), (signal.SIGTERM, 143)])
def test_a_child_killed_in_line_gives_its_code(shell, wait_until, signum, code):
    """It was 1, without a word."""
    holder = shell.hold("j")
    waiter = shell.start("run", "--result-file", "r.json", "j", "--", "touch", "ran")
    wait_until(lambda: shell.json("get", "j")["waiters"])
    pid, _guard = Path(f"/proc/{waiter.pid}/task/{waiter.pid}/children").read_text().split()
    os.kill(int(pid), signum)
    holder.stdin.close()
    assert waiter.wait(60) == code
    assert json.loads((shell.folder / "r.json").read_text())["exit_code"] == code
    assert not (shell.folder / "ran").exists()
    assert shell.json("ls") == []


def test_an_empty_word_is_no_command(alone):
    done = alone("run", "j", "--", "")
    assert done.returncode == 127
    assert "No such file" in done.stderr


def test_what_the_child_started_dies_with_the_wrapper(shell, wait_until, lives):
    """kill -9 (or the OOM killer) of the wrapper of `-c 'work; more'`: `work` goes on beside the next holder."""
    process = shell.start("run", "--ttl", "1", "j", "-c", "sh -c 'echo $$; exec sleep 60'; true")
    pid = int(process.stdout.readline())
    process.kill()
    try:
        assert shell("run", "-w", "30", "j", "true").returncode == 0
        assert not lives(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@linux
def test_a_guard_kills_nothing_of_a_command_that_ended_well(shell, wait_until, lives):
    """What CMD leaves in the background on purpose lives on, and no guard stays."""
    done = shell("run", "j", "-c", "sleep 60 >/dev/null 2>&1 & echo $!")
    pid = int(done.stdout)
    try:
        assert (done.returncode, done.stderr) == (0, "")
        assert lives(pid)
        group = [one for one in Path("/proc").glob("[0-9]*/cmdline") if b"run\0j\0-c\0sleep" in _read(one)]
        assert group == []
    finally:
        os.kill(pid, signal.SIGKILL)


def _read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


# ------------------------------------------------------------------------ a run in a run


def test_a_run_that_would_wait_for_itself_is_refused(shell):
    done = shell("run", "j", "--", *PROGRAM.split(), "run", "j", "--", "touch", "ran")
    assert done.returncode == 78
    assert "wait for itself" in done.stderr
    assert not (shell.folder / "ran").exists()


def test_a_run_in_a_run_may_have_another_name_or_another_engine(shell, tmp_path):
    inner = [*PROGRAM.split(), "run", "k", "--", "sh", "-c", "echo $LEASEHOLD_LOCK"]
    assert shell("run", "j", "--", *inner).stdout == "k\n"
    other = [*PROGRAM.split(), "-u", f"sqlite://{tmp_path}/other.db", "run", "j", "--", "echo", "apart"]
    assert shell("run", "j", "--", *other).stdout == "apart\n"


# --------------------------------------------------------------- files, streams, encodings


@pytest.mark.parametrize("kind", ["fifo", "device", "empty"])
def test_a_result_file_replaces_nothing_but_a_file(alone, kind):
    """As root, `--result-file /dev/null` replaced /dev/null by a file."""
    path = alone.folder / "special"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null") if os.geteuid() else path
        if not os.geteuid():
            try:
                os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
            except OSError as error:
                pytest.skip(f"no device can be made here: {error}")
    done = alone("run", "--result-file", "" if kind == "empty" else str(path), "j", "--", "touch", "ran")
    assert done.returncode == 64
    assert "no plain file" in done.stderr
    assert not path.is_file()
    assert not (alone.folder / "ran").exists()


def test_a_result_file_behind_a_link_is_written_there(alone):
    (alone.folder / "link").symlink_to("real.json")
    assert alone("run", "--result-file", "link", "j", "true").returncode == 0
    assert (alone.folder / "link").is_symlink()
    assert json.loads((alone.folder / "real.json").read_text())["outcome"] == "done"


@pytest.mark.parametrize("command", ["renew", "release"])
def test_a_closed_stdin_is_an_empty_one(shell, command):
    done = line(shell, f"{PROGRAM} {command} <&-")
    assert done.returncode == 64
    assert "no lease" in done.stderr


def test_a_break_cannot_ask_a_closed_stdin(shell):
    shell.hold("j")
    done = line(shell, f"{PROGRAM} break j <&-")
    assert done.returncode == 64
    assert "--yes" in done.stderr


def test_a_lease_is_not_acquired_for_a_closed_stdout(shell):
    assert line(shell, f"{PROGRAM} acquire j >&-").returncode == 64
    assert shell.json("ls") == []


def test_a_name_is_shown_also_where_the_locale_lacks_its_letters(shell):
    shell.hold("日本")
    for command in (["ls"], ["get", "日本"], ["watch", "--for", "0"]):
        done = shell(*command, PYTHONIOENCODING="latin-1")
        assert done.returncode == 0, done.stderr
        assert "\\u65e5\\u672c" in done.stdout


@pytest.mark.parametrize("text", ["[" * 100_000, '{"name":' * 100_000], ids=["array", "object"])
def test_a_lease_nested_without_end_is_refused(shell, text):
    assert shell("release", stdin=text).returncode == 78


# ------------------------------------------------------------------------ wrong command lines


@pytest.mark.parametrize("command", ["ls", "watch", "get"])
def test_bytes_that_are_no_text_are_64(shell, command):
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
        (["--ttl", "1e-9", "j", "true"], "too short"),
        (["-w", "1e300", "j", "true"], "wait"),
        (["j", "-c"], "requires an argument"),
        (["j", "--ttl"], "requires an argument"),
        (["j", "--result-file"], "requires an argument"),
    ],
)
def test_numbers_out_of_range_and_values_left_out_are_64(shell, arguments, why):
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
def test_the_tab_key_completes_from_the_namespace_and_engine_given(shell, words, environment):
    shell.hold("elsewhere")
    shell.hold("here", "--namespace", "shop")
    count = str(len(words.split(" ")) - 1)
    done = shell(COMP_WORDS=words, COMP_CWORD=count, _LEASEHOLD_COMPLETE="bash_complete", **environment)
    assert done.stdout == "plain,here\n"


def test_the_tab_key_completes_from_the_engine_given(shell, tmp_path):
    shell.hold("elsewhere")
    shell.hold("here", "-u", f"sqlite://{tmp_path}/other.db")
    words = f"leasehold -u sqlite://{tmp_path}/other.db get "
    done = shell(COMP_WORDS=words, COMP_CWORD="4", _LEASEHOLD_COMPLETE="bash_complete")
    assert done.stdout == "plain,here\n"
