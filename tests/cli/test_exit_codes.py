"""Each exit code and its cause, with a message that says what to do, and no traceback unless requested."""

import errno
import os
import pathlib
import sqlite3
import subprocess
import sys

import pytest

from leasehold import errors
from leasehold.cli import exit_codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotAcquired("j"), 75),
        (errors.LeaseLost("j"), 79),
        (errors.Unavailable("silence"), 69),
        (errors.Unsupported("no"), 78),
        (errors.Mismatch("j", wanted="lock", found="semaphore of 2"), 78),
        (errors.ConfigError("no"), 78),
        (errors.AccessDenied("no"), 77),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_maps_to_exit_code(error, code):
    assert exit_codes.code_for(error) == code


COMMANDS = [["ls"], ["get", "j"], ["watch"], ["break", "j"], ["acquire", "j"], ["run", "j", "true"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_unknown_engine_is_78(shell, command):
    done = shell("-u", "nope://host", *command)
    assert done.returncode == 78
    assert "no engine for nope://; known: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["ls"], ["run", "j", "true"]], ids=lambda command: command[0])
def test_database_path_below_a_file_is_78(shell, command, tmp_path):
    (tmp_path / "file").write_text("")
    done = shell("-u", f"sqlite://{tmp_path}/file/locks.db", *command)
    assert done.returncode == 78
    assert str(tmp_path / "file") in done.stderr
    assert "Traceback" not in done.stderr


def test_database_on_read_only_file_system_is_78(shell):
    if not pathlib.Path("/proc/self").exists():
        pytest.skip("needs /proc, where nobody can write, root included")
    done = shell("-u", "sqlite:///proc/locks.db", "run", "j", "true")
    assert done.returncode == 78
    assert "Traceback" not in done.stderr


def test_file_that_is_not_a_database_is_78_and_unchanged(shell, tmp_path):
    (tmp_path / "notes.txt").write_text("this is no database\n" * 500)
    done = shell("-u", f"sqlite://{tmp_path}/notes.txt", "ls")
    assert done.returncode == 78
    assert (tmp_path / "notes.txt").read_text() == "this is no database\n" * 500


def test_engine_that_does_not_answer_is_69(shell, tmp_path):
    assert shell("run", "j", "true").returncode == 0
    with sqlite3.connect(tmp_path / "locks.db", isolation_level=None) as blocker:
        blocker.execute("begin exclusive")
        done = shell("run", "j", "touch", "ran")
        assert done.returncode == 69, done.stderr
        assert "Traceback" not in done.stderr
        blocker.execute("rollback")
    blocker.close()
    assert not (tmp_path / "ran").exists()


def test_result_file_without_write_permission_is_77(shell, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may do anything; `break`, answered with no, is the other way to 77")
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    done = shell("run", "--result-file", f"{folder}/result.json", "j", "true")
    assert done.returncode == 77
    assert os.strerror(errno.EACCES) in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["no-such-command"], ["--no-such-option"], ["-o", "xml", "ls"], ["ls", "a", "b"], ["get"], ["completion", "tcsh"]],
    ids=" ".join,
)
def test_wrong_command_line_is_64(shell, arguments):
    done = shell(*arguments)
    assert done.returncode == 64
    assert done.stderr.startswith("leasehold: ")
    assert "--help" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["schema"], "Missing argument '{mysql|postgresql}'. Choose from: mysql, postgresql"),
        (["break", "j", "--token", "x"], "Invalid value for '--token': 'x' is not a valid whole number."),
        (["docs", "reference/jsn"], "no page 'reference/jsn': did you mean 'reference/json'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_error_is_one_plain_line(shell, arguments, text):
    first, *_ = shell(*arguments).stderr.splitlines()
    assert text in first
    assert "\\t" not in first


@pytest.mark.parametrize("url", ["redis://H:1", "etcd://H:1", "mysql://H:1/x", "redlock://H:1,H:2,H:3", "zk://H:1"])
def test_refused_connection_names_host_and_port_and_the_reason(shell, url):
    done = shell("-u", url.replace("H", "127.0.0.1"), "ls")
    assert done.returncode == 69
    assert "127.0.0.1:1" in done.stderr
    assert "Connection refused" in done.stderr
    assert "0.0 s" not in done.stderr
    assert "Errno" not in done.stderr


def test_refused_postgresql_connection_names_host_and_port(shell):
    done = shell("-u", "postgresql://127.0.0.1:1/x", "ls")
    assert done.returncode == 69
    assert 'at "127.0.0.1", port 1 failed: Connection refused' in done.stderr
    assert "\\t" not in done.stderr


def test_invalid_namespace_is_64(shell):
    done = shell("--namespace", "n" * 256, "ls")
    assert done.returncode == 64
    assert "at most 255 bytes" in done.stderr


def test_traceback_is_printed_only_with_vv(shell):
    for flags, shown in ([], False), (["-v"], False), (["-vv"], True), (["-v", "-v"], True):
        done = shell(*flags, "-u", "nope://host", "ls")
        assert ("Traceback" in done.stderr) is shown, flags
    assert "Traceback" in shell("ls", "-u", "nope://host", "-vv").stderr


def test_password_of_url_is_never_printed(shell):
    for flag in ("-q", "-vv"):
        done = shell(flag, "-u", "nope://user:hunter2@host", "ls")
        assert "hunter2" not in done.stderr


def test_default_url_is_database_in_state_home_of_user(shell, tmp_path):
    del shell.environment["LEASEHOLD_URL"]
    shell.environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    shell.hold("j")
    assert shell("run", "-n", "j", "true").returncode == 75
    assert (tmp_path / "state/leasehold/locks.db").exists()
    assert (tmp_path / "state/leasehold").stat().st_mode & 0o777 == 0o700


def test_empty_url_is_refused_before_the_command_runs(shell, tmp_path):
    for done in (shell("-u", "", "run", "j", "touch", "ran"), shell("run", "j", "touch", "ran", LEASEHOLD_URL="")):
        assert (done.returncode, done.stdout) == (78, "")
        assert "is empty: set it to an engine's URL" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert [shell(command, "").returncode for command in ("doctor", "bench")] == [78, 78]


@pytest.mark.parametrize("command", [("run", "j", "touch", "ran"), ("elect", "j", "touch", "ran"), ("acquire", "j")])
def test_memory_engine_is_refused_because_it_excludes_no_process(shell, tmp_path, command):
    done = shell("-u", "memory://x", *command)
    assert (done.returncode, done.stdout) == (78, "")
    assert "memory:// locks exist in one process only" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_version_option_prints_the_version(shell):
    import leasehold

    assert shell("--version").stdout == f"leasehold {leasehold.__version__}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_exit_code_is_kept_when_stderr_is_full(shell):
    shell.hold("j")
    assert shell.sh("run -n j true 2>/dev/full").returncode == 75
    assert shell.sh("run --no-such-option 2>/dev/full").returncode == 64
    assert shell.sh("-vv -u nope://x ls 2>/dev/full").returncode == 78


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("line", ["-o json ls", "acquire j", "demo --list", "--help", "ls --help", "--version"])
def test_full_device_on_stdout_is_74(shell, line):
    done = shell.sh(f"{line} >/dev/full")
    assert done.returncode == 74
    assert done.stderr == "leasehold: the output could not be written to stdout: No space left on device\n"
    assert shell.json("ls") == []  # `acquire` released what it could not print


@pytest.mark.parametrize("line", ["run --result-file r.json j true", "-u sqlite://./x.db ls"])
def test_deleted_working_directory_is_78_where_it_is_needed(shell, tmp_path, line):
    (tmp_path / "gone").mkdir()
    shell.folder = tmp_path / "gone"
    done = shell.sh(line, before="rmdir ../gone")
    assert done.returncode == 78
    assert "the working directory has been deleted" in done.stderr
    assert "bug" not in done.stderr


EXHAUSTED = """
import os
from leasehold.cli.app import start
def refuse():
    raise OSError({number}, os.strerror({number}))
os.{function} = refuse
raise SystemExit(start(["run", "j", "true"]))
"""


@pytest.mark.parametrize(("function", "number"), [("fork", errno.EAGAIN), ("pipe", errno.EMFILE)])
def test_limit_of_the_process_is_69_and_named(shell, function, number):
    """It was reported as stdout that takes no data."""
    program = EXHAUSTED.format(function=function, number=number)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=shell.folder, env=shell.environment
    )
    assert (done.returncode, os.strerror(number) in done.stderr, "ulimit" in done.stderr) == (69, True, True)
    assert len(done.stderr.splitlines()) == 1
