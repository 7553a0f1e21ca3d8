"""Everything that commands read, from variables, stdin, files and arguments, is checked: exit 64 or 78, never 70."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from leasehold import ConfigError, current_lease

PROGRAM = [sys.executable, "-m", "leasehold"]
SURROGATE = os.fsdecode(b"\xff")


# Calls the program for each case in one process, because starting it takes longer than the call.
MANY = """
import json, os, sys
from leasehold.cli.app import start
codes = []
with open(sys.argv[1]) as file:
    cases = json.load(file)
for arguments, variables, stdin in cases:
    before = dict(os.environ)
    os.environ.update(variables)
    with open("stdin", "wb") as file:
        file.write((stdin or "").encode("utf-8", "surrogateescape"))
    with open("stdin") as sys.stdin:
        codes.append(start(arguments))
    os.environ.clear()
    os.environ.update(before)
with open(sys.argv[2], "w") as file:
    json.dump(codes, file)
"""


def exit_codes(shell, cases):
    """The exit codes of many calls: arguments, variables, stdin."""
    (shell.folder / "cases").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-c", MANY, "cases", "codes"],
        capture_output=True,
        timeout=120,
        cwd=shell.folder,
        env=shell.environment,
    )
    stderr = done.stderr
    assert done.returncode == 0, stderr
    assert b"bug in leasehold" not in stderr, stderr
    assert b"\x1b" not in stderr
    return json.loads((shell.folder / "codes").read_text())


BAD_VALUES = [
    ("id", "x\ud800"),
    ("id", ""),
    ("id", "x" * 100_000),
    ("name", "n\ud800"),
    ("name", "n" * 256),
    ("namespace", "\ud800"),
    ("token", -1),
    ("token", 2**63),
    ("token", 1.5),
    ("token", True),
    ("ttl", float("nan")),
    ("ttl", float("inf")),
    ("ttl", -5),
    ("ttl", 0),
    ("ttl", 10**400),
    ("delay", float("nan")),
    ("delay", -1),
    ("min_hold", float("inf")),
    ("mode", "exclusive\ud800"),
    ("mode", "both"),
    ("kind", "mutex"),
    ("limit", 0),
    ("limit", 2**40),
    ("holder", "h\ud800"),
    ("holder", "h" * 201),
    ("holder", "\x1b[2J"),
]
NOT_DOCUMENTS = [SURROGATE, "{", "[]", "7", '{"id": 1}', "[" * 60_000, '{"ttl": ' + "9" * 5000 + "}", "{}" + SURROGATE]


def test_lease_with_a_bad_value_is_78(shell):
    document = json.loads(shell("acquire", "j").stdout)
    texts = [json.dumps(document | {field: value}) for field, value in BAD_VALUES] + NOT_DOCUMENTS
    cases = [(["renew"], {}, text) for text in texts]
    cases += [(["release"], {"LEASEHOLD_LEASE": text}, None) for text in texts if len(text) < 100_000]
    assert dict(enumerate(exit_codes(shell, cases))) == dict.fromkeys(range(len(cases)), 78)
    assert shell("release", stdin=json.dumps(document)).returncode == 0


def test_endless_stdin_is_78(shell):
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run(
            [*PROGRAM, "release"],
            stdin=endless,
            capture_output=True,
            timeout=60,
            cwd=shell.folder,
            env=shell.environment,
        )
    assert done.returncode == 78, done.stderr


def test_variable_with_a_bad_value_is_refused(shell):
    values = [
        ("LEASEHOLD_URL", SURROGATE, 78),
        ("LEASEHOLD_URL", f"redis://u:{SURROGATE}@127.0.0.1:1", 78),
        ("LEASEHOLD_URL", f"sqlite:///{SURROGATE}", 78),
        ("LEASEHOLD_URL", "redis://u:p\x1b[2J@127.0.0.1:1", 78),
        ("LEASEHOLD_URL", "x" * 100_000, 78),
        ("LEASEHOLD_URL", "", 78),
        ("LEASEHOLD_NAMESPACE", SURROGATE, 64),
        ("LEASEHOLD_NAMESPACE", "n" * 256, 64),
        ("LEASEHOLD_OUTPUT", SURROGATE, 64),
        ("LEASEHOLD_OUTPUT", "xml", 64),
    ]
    found = exit_codes(shell, [(["ls"], {variable: value}, None) for variable, value, _ in values])
    assert found == [code for _, _, code in values]


def test_path_that_the_system_refuses_is_78(shell):
    found = exit_codes(shell, [(["serve", "key", "list", "--keys", path], {}, None) for path in ("9" * 5000, "x/" * 9)])
    assert found == [78, 78]


BAD_ARGUMENTS = [
    ["ls", SURROGATE],
    ["get", SURROGATE],
    ["run", SURROGATE, "true"],
    ["run", "--holder", SURROGATE, "j", "true"],
    ["run", "--purpose", SURROGATE, "j", "true"],
    ["run", "--ttl", SURROGATE, "j", "true"],
    ["run", "--ttl", "nan", "j", "true"],
    ["run", "--ttl", "1e999", "j", "true"],
    ["run", "--slots", "9" * 5000, "j", "true"],
    ["run", "--result-file", f"no/{SURROGATE}", "j", "true"],
    ["break", "j", "--token", SURROGATE],
    ["--namespace", SURROGATE, "ls"],
    ["-o", SURROGATE, "ls"],
    [SURROGATE],
    ["schema", SURROGATE],
    ["completion", SURROGATE],
    ["demo", SURROGATE],
    ["watch", "--interval", SURROGATE],
]


def test_argument_with_a_bad_value_is_64(shell):
    found = exit_codes(shell, [(arguments, {}, None) for arguments in BAD_ARGUMENTS])
    assert list(zip(BAD_ARGUMENTS, found, strict=True)) == [(arguments, 64) for arguments in BAD_ARGUMENTS]


GOOD = {
    "LEASEHOLD_HELD": "1",
    "LEASEHOLD_LOCK": "job",
    "LEASEHOLD_TOKEN": "41",
    "LEASEHOLD_HOLDER": "web:1",
    "LEASEHOLD_TTL": "30",
}


def set_environment(monkeypatch, **variables):
    for name in (*GOOD, "LEASEHOLD_SLOT", "LEASEHOLD_SHARED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (GOOD | variables).items():
        if value is not None:
            monkeypatch.setenv(name, value)


def test_current_lease_has_what_run_set(monkeypatch):
    set_environment(monkeypatch, LEASEHOLD_SLOT="2", LEASEHOLD_SHARED="1", LEASEHOLD_TTL="1e+06")
    assert tuple(current_lease()) == ("job", 41, "web:1", 1e6, 2, True)
    set_environment(monkeypatch)
    assert tuple(current_lease()) == ("job", 41, "web:1", 30.0, None, False)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("LEASEHOLD_TTL", text) for text in ("nan", "inf", "-1", "0", "1e999", "1_0", "", " 5", "٣", None)),
        *(("LEASEHOLD_TOKEN", text) for text in ("-1", "1.5", "1_0", " 7", "٣", "", str(2**63), "9" * 5000, None)),
        *(("LEASEHOLD_SLOT", text) for text in ("-1", "x", "", str(2**31))),
        *(("LEASEHOLD_SHARED", text) for text in ("0", "yes", "")),
        *(("LEASEHOLD_LOCK", text) for text in ("", SURROGATE, "n" * 256, None)),
        *(("LEASEHOLD_HOLDER", text) for text in ("h" * 201, None)),
    ],
)
def test_current_lease_refuses_what_run_never_sets(monkeypatch, variable, value):
    set_environment(monkeypatch, **{variable: value})
    with pytest.raises(ConfigError, match=variable if variable not in ("LEASEHOLD_TTL", "LEASEHOLD_LOCK") else "run"):
        current_lease()


def test_refused_value_is_cut_in_the_message(shell):
    """A variable may hold a whole file: its value was printed in full."""
    done = shell("ls", LEASEHOLD_OUTPUT="x" * 100_000)
    assert done.returncode == 64
    assert len(done.stderr) < 2000
    assert "LEASEHOLD_OUTPUT" in done.stderr
    assert "'table', 'json'" in done.stderr


@pytest.mark.parametrize("command", ["release", "renew"])
def test_refused_argument_is_not_repeated_for_a_lease(shell, command):
    """A name, or the lease itself, whose id is a secret."""
    lease = shell("acquire", "j").stdout
    done = shell(command, lease)
    assert done.returncode == 64
    assert json.loads(lease)["id"] not in done.stderr
    assert "pipe what `leasehold acquire` printed" in done.stderr


@pytest.mark.parametrize(("word", "ours"), [("lock", "`leasehold run`"), ("unlock", "`leasehold release`")])
def test_word_of_another_program_names_our_command(shell, word, ours):
    done = shell(word, "j")
    assert done.returncode == 64
    assert ours in done.stderr


@pytest.mark.parametrize(("words", "meant"), [("runn j", "run"), ("serve key lst", "list"), ("wacth", "watch")])
def test_mistyped_command_is_answered_with_the_one_that_was_meant(shell, words, meant):
    done = shell(*words.split())
    assert (done.returncode, f"(did you mean {meant}?)" in done.stderr) == (64, True)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("advise <&-", 64),
        ("advise <&- >&-", 64),
        ("top <&- >&-", 0),
        ("watch --for 0.01 >&-", 0),
        ("bench --rounds 2 --held 1 2>&-", 0),
        ("release <&-", 64),
        ("break j <&-", 0),
        ("run j true <&- >&- 2>&-", 0),
    ],
)
def test_closed_stdin_stdout_and_stderr_are_no_terminals(shell, line, code):
    done = shell.sh(line)
    assert (done.returncode, "bug in leasehold" in done.stderr) == (code, False), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_file_gets_the_descriptor_of_a_closed_stdin_or_stderr(shell):
    """The audit file got it: a library that prints an error would have written into it."""
    (shell.folder / "show.sh").write_text(
        "for fd in 0 1 2; do readlink /proc/$PPID/fd/$fd; done > of-run\nls -l /proc/$$/fd/0"
    )
    line = "run --audit audit.jsonl j sh show.sh"
    assert shell.sh(f"{line} <&- >&- 2>&-").returncode != 0, "CMD gets what the caller has closed, as without `run`"
    assert (shell.folder / "of-run").read_text().split() == ["/dev/null"] * 3
