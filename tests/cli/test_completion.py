"""`leasehold completion`: the scripts of the shells, and what they offer."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize(("name", "check"), [("bash", ["-n"]), ("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_completion_script_parses(shell, tmp_path, name, check):
    script = shell("completion", name)
    assert script.returncode == 0
    assert "_LEASEHOLD_COMPLETE" in script.stdout
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    (tmp_path / "script").write_text(script.stdout)
    subprocess.run([found, *check, tmp_path / "script"], check=True, timeout=60)


def installed(name):
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed here")
    return found


@pytest.fixture
def program_path(shell, tmp_path):
    """A PATH with the program `leasehold`, for shells of the test."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "leasehold"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m leasehold "$@"\n')
    program.chmod(0o755)
    return f"{tmp_path}/bin:{os.environ['PATH']}"


def test_fish_completes_commands_options_and_held_names(shell, tmp_path, program_path):
    fish = installed("fish")
    (tmp_path / "leasehold.fish").write_text(shell("completion", "fish").stdout)
    shell.hold("orders/42")
    shell.hold("pair/a,b")

    def described(line):
        done = subprocess.run(
            [fish, "--no-config", "-c", f"source {tmp_path}/leasehold.fish; complete -C '{line}'"],
            env={**shell.environment, "PATH": program_path, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return [each.partition("\t")[::2] for each in done.stdout.splitlines()]

    def completions(line):
        return [word for word, _ in described(line)]

    assert completions("leasehold ren") == ["renew"]
    assert completions("leasehold run --kill-") == ["--kill-after"]
    assert completions("leasehold get ord") == ["orders/42"]
    assert completions("leasehold get pai") == ["pair/a,b"]
    assert described("leasehold rel") == [
        ("release", "Release a lease, so that the next waiter...")
    ]  # shortened by click


def test_zsh_completes_commands_options_and_held_names(shell, tmp_path, program_path):
    """In a terminal: zsh completes only there."""
    zsh = installed("zsh")
    functions = tmp_path / "functions"
    functions.mkdir()
    (functions / "_leasehold").write_text(shell("completion", "zsh").stdout)
    (tmp_path / ".zshrc").write_text(f"fpath=({functions} $fpath); autoload -U compinit; compinit -u; PS1='ready> '\n")
    shell.hold("orders/42")
    environment = {**shell.environment, "PATH": program_path, "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)}
    child, terminal = pty.fork()
    if child == 0:
        os.execve(zsh, ["zsh", "-i"], {**environment, "TERM": "dumb"})
    try:
        read_until(terminal, "ready> ")
        for typed, completed in (("ren", "renew "), ("run --kill-", "--kill-after "), ("get ord", "orders/42 ")):
            os.write(terminal, f"\x15leasehold {typed}\t".encode())  # Ctrl-U: an empty line; Ctrl-C drops what is typed
            read_until(terminal, completed.removeprefix(typed.split()[-1]))
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def read_until(terminal, text):
    seen, end = "", time.monotonic() + 120
    while text not in seen:
        assert select.select([terminal], [], [], max(0, end - time.monotonic()))[0], f"no {text!r} after {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")


def complete(shell, *words):
    done = shell(
        COMP_WORDS=" ".join(("leasehold", *words)), COMP_CWORD=str(len(words)), _LEASEHOLD_COMPLETE="bash_complete"
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_completion_offers_commands_options_and_held_names(shell):
    assert complete(shell, "re") == ["resize", "renew", "release", "rebase"]
    assert "--kill-after" in complete(shell, "run", "--k")
    shell.hold("orders/42")
    assert complete(shell, "get", "or") == ["orders/42"]
    shell.environment["LEASEHOLD_URL"] = "nope://"
    assert complete(shell, "get", "or") == []


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


def test_name_that_a_shell_would_run_is_not_completed(shell):
    """bash put it on the command line without quotes, and ran it with the next Enter."""
    plain = ["job/1:a,b@c%d+e=f_g-h", "jöb"]
    for name in (
        *plain,
        "j$(id)",
        "j;id",
        "j`id`",
        "j|id",
        "j>f",
        "j&",
        "j'",
        "j*",
        "j id",
        "j\\",
        "j!!",
        "j#",
        "~j",
        "-j",
    ):
        assert shell("acquire", "--ttl", "60", "--", name).returncode == 0
    variables = {"_LEASEHOLD_COMPLETE": "bash_complete", "COMP_WORDS": "leasehold get ", "COMP_CWORD": "2"}
    assert shell(**variables).stdout.splitlines() == [f"plain,{name}" for name in plain]
