"""`leasehold run`: the environment of CMD, its exit code, busy names, and refused command lines."""

import json
import os
import re
import shlex
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.redis import RedisServer
from leasehold.cli.run.job import has_password
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.timing import check_elapsed

PROGRAM = [sys.executable, "-m", "leasehold"]


@pytest.mark.parametrize("code", [0, 1, 7, 75, 79, 126, 255])
def test_run_returns_exit_code_of_child(shell, code):
    done = shell("run", "j", "--", "sh", "-c", f"exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(("number", "code"), [("KILL", 137), ("TERM", 143), ("SEGV", 139), ("INT", 130)])
def test_run_returns_128_plus_signal_when_child_dies_of_a_signal(shell, number, code):
    assert shell("run", "j", "--", "sh", "-c", f"kill -{number} $$").returncode == code


# CMD ends the grant at the engine, which notifies no client: only the release can find that out.
DELETE_GRANT = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('delete from lh_grant'); db.commit()"


@pytest.fixture
def delete_grant(shell, tmp_path) -> list[str]:
    """The command line of a CMD that ends the grant it runs under, and then exits with the code that is added."""
    script = f"{DELETE_GRANT}; raise SystemExit(int(sys.argv[2]))"
    return [sys.executable, "-c", script, str(tmp_path / "locks.db")]


@pytest.mark.parametrize(("options", "cmd_code", "code"), [((), 0, 79), ((), 3, 3), (("--on-lost", "ignore"), 0, 0)])
def test_run_reports_a_loss_that_only_its_release_finds(shell, tmp_path, delete_grant, options, cmd_code, code):
    done = shell("run", *options, "--result-file", "result.json", "j", "--", *delete_grant, str(cmd_code))
    assert done.returncode == code, done.stderr
    assert "was lost before CMD ended: the engine no longer knows it" in done.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["outcome"], found["lost_reason"]) == ("lost", "unknown")
    assert (found["exit_code"], found["child_exit_code"]) == (code, cmd_code)


def test_elect_does_not_repeat_a_command_that_ended_by_itself(shell, delete_grant):
    done = shell("elect", "j", "--", *delete_grant, "0")
    assert done.returncode == 79
    assert done.stderr.count("was lost before CMD ended") == 1


def test_missing_program_is_127(shell):
    done = shell("run", "j", "--", "no-such-program")
    assert done.returncode == 127
    assert "cannot run no-such-program: No such file or directory" in done.stderr
    assert "$PATH" in done.stderr


def test_shell_line_as_one_argument_is_127_and_hints_at_c_option(shell):
    done = shell("run", "j", "--", "echo hello")
    assert done.returncode == 127
    assert "-c" in done.stderr


@pytest.mark.parametrize("program", ["/dev/null", "/"])
def test_file_that_is_not_executable_is_126(shell, program):
    done = shell("run", "j", "--", program)
    assert done.returncode == 126
    assert f"cannot run {program}" in done.stderr


def test_script_without_shebang_is_126(shell, tmp_path):
    script = tmp_path / "script"
    script.write_text("echo hello\n")
    script.chmod(0o755)
    done = shell("run", "j", "--", str(script))
    assert done.returncode == 126
    assert "#!" in done.stderr


def test_child_environment_describes_its_lease(shell):
    done = shell(
        "run", "orders/42", "--ttl", "12.5", "--", "env",
        LEASEHOLD_TOKEN="1", LEASEHOLD_LOCK="outer", LEASEHOLD_SLOT="3", LEASEHOLD_HELD="0",
    )  # fmt: skip
    environment = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert environment["LEASEHOLD_LOCK"] == "orders/42"
    assert int(environment["LEASEHOLD_TOKEN"]) > 1
    assert re.fullmatch(r".+:\d+", environment["LEASEHOLD_HOLDER"])
    assert environment["LEASEHOLD_TTL"] == "12.5"
    assert environment["LEASEHOLD_HELD"] == "1"
    assert "LEASEHOLD_SLOT" not in environment
    assert environment["HOME"] == shell.environment["HOME"]


def test_child_environment_has_its_slot(shell):
    assert shell("run", "--slots", "2", "j", "-c", "echo $LEASEHOLD_SLOT").stdout == "0\n"


def environment_of_child(shell, *options, **environment):
    done = shell(*options, "run", "j", "--", "env", **environment)
    assert done.returncode == 0, done.stderr
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


def test_child_uses_the_engine_and_namespace_of_its_run(shell, tmp_path):
    url = f"sqlite://{tmp_path}/other.db?durable=no"
    environment = environment_of_child(shell, "-u", url, "--namespace", "shop")
    assert (environment["LEASEHOLD_URL"], environment["LEASEHOLD_NAMESPACE"]) == (url, "shop")
    inner = [*PROGRAM, "-o", "json", "get", "j"]
    assert json.loads(shell("-u", url, "--namespace", "shop", "run", "j", "--", *inner).stdout)["locked"]


def test_child_gets_relative_database_as_absolute_path(shell, tmp_path):
    (tmp_path / "other folder").mkdir()
    script = f"cd 'other folder' && {shlex.join(PROGRAM)} -o json get j"
    assert json.loads(shell("-u", "sqlite://./x.db", "run", "j", "-c", script).stdout)["locked"]
    assert not (tmp_path / "other folder/x.db").exists()


def test_child_without_url_of_its_run_gets_none(shell):
    del shell.environment["LEASEHOLD_URL"]
    assert "LEASEHOLD_URL" not in environment_of_child(shell)


@pytest.fixture
def redis_with_password():
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    server = RedisServer().start()
    server.ask("ACL", "SETUSER", "app", "on", ">hunter2", "~*", "&*", "+@all")
    yield server
    server.kill()


def test_child_environment_gets_no_url_with_a_password(shell, redis_with_password):
    url = f"redis://app:hunter2@127.0.0.1:{redis_with_password.port}"
    # Empty, which is an error for a `leasehold` in CMD: without it, that would use another engine.
    assert environment_of_child(shell, "-q", "-u", url)["LEASEHOLD_URL"] == ""
    assert environment_of_child(shell, "-q", LEASEHOLD_URL=url)["LEASEHOLD_URL"] == ""


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:6379/0", False),
        ("postgresql://app@db/shop", False),
        ("sqlite:///srv/a@b.db", False),
        ("redis://:pw@h", True),
        ("etcd://app:pw@h1,h2", True),
        ("postgresql://app:p@ss@db/shop", True),
        ("postgresql://app@db/shop?listen_url=postgresql://app:pw@db2/shop", True),
        ("postgresql://app@db/shop?listen_url=postgresql%3A%2F%2Fapp%3Apw%40db2%2Fshop", True),
        ("postgresql://app@db/shop?listen_url=postgresql%3A%2F%2Fapp%40db2%2Fshop", False),
        ("redis+sentinel://s1/main?sentinel_password=pw", True),
        ("postgresql://db/shop?user=app&password=pw", True),
        ("zookeeper://zk1?key_password=pw", True),
        ("postgresql://app@db/shop?scram_client_key=a2V5", True),
    ],
)
def test_password_in_a_url_is_recognized(url, expected):
    assert has_password(url) is expected


def test_silent_engine_delays_the_end_of_run_for_two_seconds_at_most(shell, tmp_path):
    holder = shell.hold("j")
    with sqlite3.connect(tmp_path / "locks.db", isolation_level=None) as blocker:
        blocker.execute("begin exclusive")
        began = time.monotonic()
        _, err = holder.communicate(timeout=60)
        check_elapsed(began, 4.5)  # it was ten; and a busy machine takes its time to end a process
        blocker.execute("rollback")
    blocker.close()
    assert holder.returncode == 0
    assert err == (
        "leasehold: the engine did not confirm the release of j in time: it may stay held until its ttl is over\n"
    )


@pytest.mark.extended
def test_run_of_silent_lock_server_ends_soon_after_its_call_timeout(shell):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        done = shell("-u", f"http://127.0.0.1:{silent.getsockname()[1]}", "run", "j", "--", "echo", "ran")
        check_elapsed(began, 9.5)  # 5 + 2, and time to start and end; it was ten and more
    assert (done.returncode, done.stdout) == (69, "")


def test_child_environment_lacks_the_claim_id(shell):
    assert "LEASEHOLD_LEASE" not in shell("run", "j", "--", "env").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["j", "--", "echo", "-n", "--", "-w"],
        ["j", "echo", "-n", "--", "-w"],
        ["-n", "j", "echo", "-n", "--", "-w"],
        ["j", "-n", "--", "echo", "-n", "--", "-w"],
        ["j", "-w", "5", "echo", "-n", "--", "-w"],
        ["j", "-w5", "echo", "-n", "--", "-w"],
        ["-xw", "5", "j", "--ttl=9", "echo", "-n", "--", "-w"],
        ["-v", "j", "--ttl", "9", "--", "echo", "-n", "--", "-w"],
        ["--", "j", "echo", "-n", "--", "-w"],
    ],
    ids=" ".join,
)
def test_options_end_where_command_begins(shell, arguments):
    done = shell("run", *arguments)
    assert (done.returncode, done.stdout) == (0, "-- -w"), done.stderr


def test_command_arguments_are_not_expanded_by_a_shell(shell):
    assert shell("run", "j", "--", "echo", "$HOME", "a  b", "*").stdout == "$HOME a  b *\n"


@pytest.mark.parametrize("arguments", [["j", "-c", "echo $((1+1))"], ["-c", "echo $((1+1))", "j"]])
def test_c_option_runs_a_shell_line(shell, arguments):
    assert shell("run", *arguments).stdout == "2\n"


def test_child_inherits_stdin_stdout_and_stderr(shell):
    done = shell("run", "j", "--", "sh", "-c", "tr a-z A-Z; echo oops >&2", stdin="hello\n")
    assert (done.stdout, done.stderr) == ("HELLO\n", "oops\n")


def test_child_inherits_other_open_files(shell, tmp_path):
    """As with flock: `leasehold run j -- cmd 3<input`."""
    file = os.open(tmp_path / "input", os.O_CREAT | os.O_RDWR)
    os.write(file, b"by descriptor")
    os.lseek(file, 0, os.SEEK_SET)
    process = shell.start("run", "j", "--", "cat", f"/dev/fd/{file}", pass_fds=[file])
    assert process.communicate(timeout=60)[0] == "by descriptor"
    os.close(file)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_run_works_with_closed_standard_streams(shell, tmp_path, closed):
    command_line = f"{sys.executable} -m leasehold run j -- touch ran {closed}"
    assert subprocess.run(["sh", "-c", command_line], cwd=tmp_path, env=shell.environment, timeout=60).returncode == 0
    assert (tmp_path / "ran").exists()


def test_run_returns_exit_code_when_sigchld_is_ignored(shell):
    ignore = "import signal, subprocess, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    code = f"{ignore}; import os; os.execv(sys.executable, [sys.executable, '-m', 'leasehold', *sys.argv[1:]])"
    for words, exit_code in (["sh", "-c", "exit 7"], 7), (["no-such-program"], 127):
        done = subprocess.run([sys.executable, "-c", code, "run", "j", "--", *words], env=shell.environment, timeout=60)
        assert done.returncode == exit_code


def test_child_does_not_inherit_ignored_sigpipe(shell):
    done = shell("run", "j", "--", "sh", "-c", "grep SigIgn /proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert ignored & 1 << (13 - 1) == 0


def test_child_has_its_own_process_group(shell):
    done = shell("run", "j", "--", "sh", "-c", "ps -o pid=,pgid= -p $$")
    pid, group = done.stdout.split()
    assert pid == group


# ------------------------------------------------------------------------- busy


def test_second_run_is_busy_until_first_run_ends(shell):
    holder = shell.hold("j")
    busy = shell("run", "-n", "j", "--", "true")
    assert busy.returncode == 75
    (seen,) = shell.json("get", "j")["holders"]
    assert seen["pid"] == holder.pid
    assert f"held by {seen['holder']} (sh, token {seen['token']}, " in busy.stderr
    assert re.search(r"\d+\.\d s left unless renewed\); pass -w SECS to wait for it$", busy.stderr.strip())
    assert busy.stdout == ""

    holder.stdin.close()
    assert holder.wait(60) == 0
    after = shell("run", "-n", "j", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN")
    assert int(after.stdout) > seen["token"]


def test_run_is_75_when_its_wait_is_over(shell):
    shell.hold("j")
    busy = shell("run", "-w", "3", "j", "--", "true")
    assert busy.returncode == 75
    assert "gave up after " in busy.stderr
    assert "at position 0 in the queue (next)" in busy.stderr


def test_busy_exit_code_can_be_chosen(shell):
    shell.hold("j")
    done = shell("run", "-n", "-E", "3", "j", "--", "false")
    assert done.returncode == 3
    assert "is held by" in done.stderr


@pytest.mark.parametrize("options", [["-E", "0"], ["--skip-ok"]], ids=" ".join)
def test_busy_run_that_is_no_failure_is_silent_unless_verbose(shell, options):
    """cron sends a mail for everything that a job prints."""
    shell.hold("j")
    done = shell("run", "-n", *options, "j", "--", "false")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "is held by" in shell("-v", "run", "-n", *options, "j", "--", "false").stderr


def test_quiet_run_of_busy_name_prints_nothing(shell):
    shell.hold("j")
    done = shell("-q", "run", "-n", "j", "--", "true")
    assert (done.returncode, done.stderr) == (75, "")


def test_queued_run_starts_when_holder_ends(shell, wait_until):
    holder = shell.hold("j")
    waiter = shell.start("run", "j", "--", "echo", "my turn")
    wait_until(lambda: shell.json("get", "j")["waiters"])
    holder.stdin.close()
    assert waiter.communicate(timeout=60)[0] == "my turn\n"
    assert holder.wait(60) == 0


def test_name_is_free_as_soon_as_child_has_ended(shell):
    for _ in range(3):
        assert shell("run", "-n", "j", "--", "true").returncode == 0
    assert shell.json("ls") == []


def test_shared_runs_exclude_exclusive_runs_only(shell):
    shell.hold("j", "-s")
    assert shell("run", "-n", "-s", "j", "--", "true").returncode == 0
    assert shell("run", "-n", "-x", "j", "--", "true").returncode == 75


def test_run_with_slots_admits_that_many_holders(shell):
    shell.hold("j", "--slots", "2")
    assert shell("run", "-n", "--slots", "2", "j", "-c", "echo $LEASEHOLD_SLOT").stdout == "1\n"
    shell.hold("j", "--slots", "2")
    assert shell("run", "-n", "--slots", "2", "j", "--", "true").returncode == 75
    other = shell("run", "-n", "--slots", "3", "j", "--", "true")
    assert other.returncode == 78
    assert "semaphore of 2" in other.stderr


def test_min_hold_keeps_the_name_after_child_has_ended(shell):
    assert shell("run", "--min-hold", "60", "j", "--", "true").returncode == 0
    assert shell("run", "-n", "j", "--", "true").returncode == 75
    assert shell.json("get", "j")["holders"][0]["state"] == "cooling"


def test_names_of_other_namespaces_are_free(shell):
    shell.hold("j")
    assert shell("--namespace", "other", "run", "-n", "j", "--", "true").returncode == 0
    assert shell("run", "-n", "j", "--", "true", LEASEHOLD_NAMESPACE="third").returncode == 0


# ------------------------------------------------------------------ result file

KEYS = [
    *("namespace", "name", "command", "outcome", "exit_code", "child_exit_code", "token", "slot", "holder"),
    *("waited", "ran", "lost_reason", "error", "began", "ended"),
]


def result(path):
    found = json.loads(path.read_text())
    assert list(found) == KEYS
    return found


def test_result_file_describes_a_finished_run(shell, tmp_path):
    path = tmp_path / "result.json"
    assert shell("run", "--result-file", str(path), "j", "--", "sh", "-c", "exit 3").returncode == 3
    found = result(path)
    assert found["outcome"] == "done"
    assert (found["exit_code"], found["child_exit_code"]) == (3, 3)
    assert found["token"] > 0
    assert found["command"] == ["sh", "-c", "exit 3"]
    assert found["began"] <= found["ended"]
    assert found["lost_reason"] is found["error"] is found["slot"] is None
    assert [entry.name for entry in tmp_path.iterdir() if "locks.db" not in entry.name] == [path.name]


def test_result_file_describes_a_busy_name(shell, tmp_path):
    holder = shell.hold("j")
    shell("run", "-n", "--skip-ok", "--result-file", "result.json", "j", "--", "true")
    found = result(tmp_path / "result.json")
    assert (found["outcome"], found["exit_code"], found["child_exit_code"]) == ("busy", 0, None)
    assert f"held by {os.uname().nodename}:{holder.pid} (sh, token" in found["error"]


def test_result_file_describes_a_missing_program(shell, tmp_path):
    shell("run", "--result-file", "result.json", "j", "--", "no-such-program")
    found = result(tmp_path / "result.json")
    assert (found["outcome"], found["exit_code"]) == ("not run", 127)
    assert "no-such-program" in found["error"]


def test_result_file_describes_an_unknown_engine(shell, tmp_path):
    shell("-u", "nope://x", "run", "--result-file", "result.json", "j", "--", "true")
    found = result(tmp_path / "result.json")
    assert (found["outcome"], found["exit_code"]) == ("failed", 78)


def test_result_file_in_missing_folder_is_refused_before_child_starts(shell, tmp_path):
    done = shell("run", "--result-file", "no/such/folder", "j", "--", "touch", "ran")
    assert done.returncode == 64
    assert not (tmp_path / "ran").exists()


def test_result_file_that_is_a_link_is_refused_and_not_followed(shell, tmp_path):
    """In /tmp, another user could make root's run write any file by planting the link."""
    (tmp_path / "link").symlink_to("real.json")
    done = shell("run", "--result-file", "link", "j", "touch", "ran")
    assert done.returncode == 64
    assert "a symbolic link is not followed" in done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name in ("ran", "real.json")) == []
    done = shell("run", "--result-file", "late.json", "j", "ln", "-s", "real.json", "late.json")  # while CMD runs
    assert done.returncode == 0
    assert not (tmp_path / "real.json").exists()
    assert result(tmp_path / "late.json")["outcome"] == "done"


def test_result_file_is_readable_by_its_owner_only(shell, tmp_path):
    """It has the command line of CMD. Also if an older one had another mode."""
    (tmp_path / "r.json").touch(0o644)
    assert shell("run", "--result-file", "r.json", "j", "true").returncode == 0
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a link of another user")
def test_result_file_behind_a_link_of_another_user_is_refused(shell, tmp_path):
    (tmp_path / "jobs").symlink_to(tmp_path)
    os.lchown(tmp_path / "jobs", 65533, 65533)
    done = shell("run", "--result-file", "jobs/result.json", "j", "true")
    assert done.returncode == 64
    assert "could change" in done.stderr


def test_exit_code_is_kept_when_result_file_cannot_be_written(shell, tmp_path):
    (tmp_path / "folder").mkdir()
    done = shell("run", "--result-file", "folder/result.json", "j", "-c", "rmdir folder; exit 3")
    assert done.returncode == 3
    assert "could not be written" in done.stderr


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["j"], "nothing to run"),
        ([], "NAME"),
        (["", "true"], "at least one character"),
        (["n" * 256, "true"], "at most 255 bytes"),
        (["j", "-c", "true", "true"], "cannot be combined"),
        (["-n", "-w", "1", "j", "true"], "cannot be combined"),
        (["-s", "-x", "j", "true"], "cannot be combined"),
        (["-s", "--slots", "2", "j", "true"], "cannot be combined"),
        (["-x", "--slots", "2", "j", "true"], "cannot be combined"),
        (["--ttl", "3", "--kill-after", "1.1", "j", "true"], "a third of --ttl"),
        (["--max-hold", "1", "--kill-after", "1", "j", "true"], "--max-hold"),
        (["--drift", "2", "j", "true"], "a share between 0 and 0.5"),
        (["--drift", "1%", "j", "true"], "a share between 0 and 0.5"),
        (["--min-hold", "2", "--max-hold", "1", "j", "true"], "--min-hold"),
        (["--ttl", "0", "j", "true"], "more than 0"),
        (["--ttl", "soon", "j", "true"], "not a number of seconds"),
        (["-w", "-1", "j", "true"], "0 or more"),
        (["-w", "inf", "j", "true"], "finite"),
        (["-E", "256", "j", "true"], "255"),
        (["--slots", "0", "j", "true"], "x>=1"),
        (["--on-lost", "cry", "j", "true"], "ignore"),
        (["--holder", "a\nb", "j", "true"], "printable"),
        (["--no-such-option", "j", "true"], "--no-such-option"),
        (["j", "--", "--ttl", "4"], "dash"),
    ],
)
def test_wrong_command_line_is_64_and_says_why(shell, arguments, why):
    done = shell("run", *arguments)
    assert done.returncode == 64
    assert why in done.stderr
    assert "Try 'leasehold run --help'." in done.stderr
    assert done.stdout == ""


def test_run_of_empty_command_is_127(shell):
    done = shell("run", "j", "--", "")
    assert done.returncode == 127
    assert "No such file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--slots", "9" * 30, "j", "true"], "--slots"),
        (["--ttl", "1e300", "j", "true"], "--ttl must be at most 86400 s"),
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


def test_nested_run_of_the_same_name_is_refused(shell):
    done = shell("run", "j", "--", *PROGRAM, "run", "j", "--", "touch", "ran")
    assert done.returncode == 78
    assert "wait for itself" in done.stderr
    assert not (shell.folder / "ran").exists()


def test_nested_run_of_other_name_or_engine_is_allowed(shell, tmp_path):
    inner = [*PROGRAM, "run", "k", "--", "sh", "-c", "echo $LEASEHOLD_LOCK"]
    assert shell("run", "j", "--", *inner).stdout == "k\n"
    other = [*PROGRAM, "-u", f"sqlite://{tmp_path}/other.db", "run", "j", "--", "echo", "apart"]
    assert shell("run", "j", "--", *other).stdout == "apart\n"


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
