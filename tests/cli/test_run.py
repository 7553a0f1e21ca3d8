"""`leasehold run`: what CMD gets, what its end means, and what stands in the way."""

import json
import os
import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize("code", [0, 1, 7, 75, 79, 126, 255])
def test_the_exit_code_of_the_child_is_passed_on_exactly(alone, code):
    done = alone("run", "j", "--", "sh", "-c", f"exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(("number", "code"), [("KILL", 137), ("TERM", 143), ("SEGV", 139), ("INT", 130)])
def test_a_child_ended_by_a_signal_gives_128_and_its_number(alone, number, code):
    assert alone("run", "j", "--", "sh", "-c", f"kill -{number} $$").returncode == code


def test_a_missing_program_is_127(alone):
    done = alone("run", "j", "--", "no-such-program")
    assert done.returncode == 127
    assert "cannot run no-such-program: No such file or directory" in done.stderr
    assert "$PATH" in done.stderr


def test_a_shell_line_given_as_one_word_is_answered_with_the_way_out(alone):
    done = alone("run", "j", "--", "echo hello")
    assert done.returncode == 127
    assert "-c" in done.stderr


@pytest.mark.parametrize("program", ["/dev/null", "/"])
def test_what_cannot_be_run_is_126(alone, program):
    done = alone("run", "j", "--", program)
    assert done.returncode == 126
    assert f"cannot run {program}" in done.stderr


def test_a_script_without_its_first_line_is_126(alone, tmp_path):
    script = tmp_path / "script"
    script.write_text("echo hello\n")
    script.chmod(0o755)
    done = alone("run", "j", "--", str(script))
    assert done.returncode == 126
    assert "#!" in done.stderr


def test_the_child_is_told_its_lease(alone):
    done = alone(
        "run", "orders/42", "--ttl", "12.5", "--", "env",
        LEASEHOLD_TOKEN="1", LEASEHOLD_LOCK="outer", LEASEHOLD_SLOT="3", LEASEHOLD_HELD="0",
    )  # fmt: skip
    told = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert told["LEASEHOLD_LOCK"] == "orders/42"
    assert int(told["LEASEHOLD_TOKEN"]) > 1
    assert re.fullmatch(r".+:\d+", told["LEASEHOLD_HOLDER"])
    assert told["LEASEHOLD_TTL"] == "12.5"
    assert told["LEASEHOLD_HELD"] == "1"
    assert "LEASEHOLD_SLOT" not in told
    assert told["HOME"] == alone.environment["HOME"]


def test_a_slot_is_told_too(alone):
    assert alone("run", "--slots", "2", "j", "-c", "echo $LEASEHOLD_SLOT").stdout == "0\n"


def test_the_secret_reaches_no_child(alone):
    assert "LEASEHOLD_LEASE" not in alone("run", "j", "--", "env").stdout


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
def test_options_end_where_the_command_begins(alone, arguments):
    done = alone("run", *arguments)
    assert (done.returncode, done.stdout) == (0, "-- -w"), done.stderr


def test_no_shell_sees_the_words(alone):
    assert alone("run", "j", "--", "echo", "$HOME", "a  b", "*").stdout == "$HOME a  b *\n"


@pytest.mark.parametrize("arguments", [["j", "-c", "echo $((1+1))"], ["-c", "echo $((1+1))", "j"]])
def test_a_line_for_the_shell(alone, arguments):
    assert alone("run", *arguments).stdout == "2\n"


def test_stdin_stdout_and_stderr_pass_through(alone):
    done = alone("run", "j", "--", "sh", "-c", "tr a-z A-Z; echo oops >&2", stdin="hello\n")
    assert (done.stdout, done.stderr) == ("HELLO\n", "oops\n")


def test_other_open_files_pass_through(alone, tmp_path):
    """As with flock: `leasehold run j -- cmd 3<input`."""
    file = os.open(tmp_path / "input", os.O_CREAT | os.O_RDWR)
    os.write(file, b"by descriptor")
    os.lseek(file, 0, os.SEEK_SET)
    process = alone.start("run", "j", "--", "cat", f"/dev/fd/{file}", pass_fds=[file])
    assert process.communicate(timeout=60)[0] == "by descriptor"
    os.close(file)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_obstacle(alone, tmp_path, closed):
    line = f"{sys.executable} -m leasehold run j -- touch ran {closed}"
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path, env=alone.environment, timeout=60).returncode == 0
    assert (tmp_path / "ran").exists()


def test_a_parent_that_ignores_its_children_hides_no_exit_code(alone):
    ignore = "import signal, subprocess, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    code = f"{ignore}; import os; os.execv(sys.executable, [sys.executable, '-m', 'leasehold', *sys.argv[1:]])"
    for words, exit_code in (["sh", "-c", "exit 7"], 7), (["no-such-program"], 127):
        done = subprocess.run([sys.executable, "-c", code, "run", "j", "--", *words], env=alone.environment, timeout=60)
        assert done.returncode == exit_code


def test_the_child_does_not_inherit_an_ignored_pipe_signal(alone):
    done = alone("run", "j", "--", "sh", "-c", "grep SigIgn /proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert ignored & 1 << (13 - 1) == 0


def test_the_child_has_a_group_of_its_own(alone):
    done = alone("run", "j", "--", "sh", "-c", "ps -o pid=,pgid= -p $$")
    pid, group = done.stdout.split()
    assert pid == group


# ------------------------------------------------------------------------- busy


def test_two_shells(shell):
    holder = shell.hold("j")
    busy = shell("run", "-n", "j", "--", "true")
    assert busy.returncode == 75
    (seen,) = shell.json("get", "j")["holders"]
    assert seen["pid"] == holder.pid
    assert f"held by {seen['holder']} (pid {holder.pid} on {seen['host']}, sh, token {seen['token']}, " in busy.stderr
    assert re.search(r"\d+\.\d s left\); -w SECS stands in line$", busy.stderr.strip())
    assert busy.stdout == ""

    holder.stdin.close()
    assert holder.wait(60) == 0
    after = shell("run", "-n", "j", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN")
    assert int(after.stdout) > seen["token"]


def test_a_wait_that_runs_out_is_75(shell):
    shell.hold("j")
    busy = shell("run", "-w", "0.2", "j", "--", "true")
    assert busy.returncode == 75
    assert "gave up after 0." in busy.stderr
    assert "at place 1 in line" in busy.stderr


@pytest.mark.parametrize(("options", "code"), [(["-E", "3"], 3), (["-E", "0"], 0), (["--skip-ok"], 0)])
def test_busy_may_have_another_code(shell, options, code):
    shell.hold("j")
    done = shell("run", "-n", *options, "j", "--", "false")
    assert done.returncode == code
    assert "is held by" in done.stderr


def test_quiet_says_nothing_of_a_busy_name(shell):
    shell.hold("j")
    done = shell("-q", "run", "-n", "j", "--", "true")
    assert (done.returncode, done.stderr) == (75, "")


def test_who_stands_in_line_gets_its_turn(shell, wait_until):
    holder = shell.hold("j")
    waiter = shell.start("run", "j", "--", "echo", "my turn")
    wait_until(lambda: shell.json("get", "j")["waiters"])
    holder.stdin.close()
    assert waiter.communicate(timeout=60)[0] == "my turn\n"
    assert holder.wait(60) == 0


def test_a_name_is_free_as_soon_as_the_child_has_ended(shell):
    for _ in range(3):
        assert shell("run", "-n", "j", "--", "true").returncode == 0
    assert shell.json("ls") == []


def test_readers_share_and_writers_do_not(shell):
    shell.hold("j", "-s")
    assert shell("run", "-n", "-s", "j", "--", "true").returncode == 0
    assert shell("run", "-n", "-x", "j", "--", "true").returncode == 75


def test_slots(shell):
    shell.hold("j", "--slots", "2")
    assert shell("run", "-n", "--slots", "2", "j", "-c", "echo $LEASEHOLD_SLOT").stdout == "1\n"
    shell.hold("j", "--slots", "2")
    assert shell("run", "-n", "--slots", "2", "j", "--", "true").returncode == 75
    other = shell("run", "-n", "--slots", "3", "j", "--", "true")
    assert other.returncode == 78
    assert "semaphore of 2" in other.stderr


def test_min_hold_keeps_the_name(shell):
    assert shell("run", "--min-hold", "60", "j", "--", "true").returncode == 0
    assert shell("run", "-n", "j", "--", "true").returncode == 75
    assert shell.json("get", "j")["holders"][0]["state"] == "cooling"


def test_namespaces_are_apart(shell):
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


def test_a_result_file_tells_what_happened(alone, tmp_path):
    path = tmp_path / "result.json"
    assert alone("run", "--result-file", str(path), "j", "--", "sh", "-c", "exit 3").returncode == 3
    found = result(path)
    assert found["outcome"] == "done"
    assert (found["exit_code"], found["child_exit_code"]) == (3, 3)
    assert found["token"] > 0
    assert found["command"] == ["sh", "-c", "exit 3"]
    assert found["began"] <= found["ended"]
    assert found["lost_reason"] is found["error"] is found["slot"] is None
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_file_of_a_busy_name(shell, tmp_path):
    holder = shell.hold("j")
    shell("run", "-n", "--skip-ok", "--result-file", "result.json", "j", "--", "true")
    found = result(tmp_path / "result.json")
    assert (found["outcome"], found["exit_code"], found["child_exit_code"]) == ("busy", 0, None)
    assert f"pid {holder.pid}" in found["error"]


def test_a_result_file_of_a_program_that_is_not_there(alone, tmp_path):
    alone("run", "--result-file", "result.json", "j", "--", "no-such-program")
    found = result(tmp_path / "result.json")
    assert (found["outcome"], found["exit_code"]) == ("not run", 127)
    assert "no-such-program" in found["error"]


def test_a_result_file_of_a_bad_engine(alone, tmp_path):
    alone("-u", "nope://x", "run", "--result-file", "result.json", "j", "--", "true")
    found = result(tmp_path / "result.json")
    assert (found["outcome"], found["exit_code"]) == ("failed", 78)


def test_a_result_file_without_a_folder_is_refused_before_the_work(alone, tmp_path):
    done = alone("run", "--result-file", "no/such/folder", "j", "--", "touch", "ran")
    assert done.returncode == 64
    assert not (tmp_path / "ran").exists()


def test_a_result_that_cannot_be_written_changes_no_exit_code(alone, tmp_path):
    (tmp_path / "folder").mkdir()
    done = alone("run", "--result-file", "folder/result.json", "j", "-c", "rmdir folder; exit 3")
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
        (["j", "-c", "true", "true"], "exclude each other"),
        (["-n", "-w", "1", "j", "true"], "exclude each other"),
        (["-s", "-x", "j", "true"], "exclude each other"),
        (["-s", "--slots", "2", "j", "true"], "exclude each other"),
        (["-x", "--slots", "2", "j", "true"], "exclude each other"),
        (["--ttl", "3", "--kill-after", "1.1", "j", "true"], "a third of --ttl"),
        (["--max-hold", "1", "--kill-after", "1", "j", "true"], "--max-hold"),
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
def test_a_wrong_command_line_is_64_and_says_why(alone, arguments, why):
    done = alone("run", *arguments)
    assert done.returncode == 64
    assert why in done.stderr
    assert "Try 'leasehold run --help'." in done.stderr
    assert done.stdout == ""
