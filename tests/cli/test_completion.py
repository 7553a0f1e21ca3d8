"""`leasehold completion`: the scripts of the shells, and what they offer."""

import shutil
import subprocess

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


def complete(shell, *words):
    done = shell(
        COMP_WORDS=" ".join(("leasehold", *words)), COMP_CWORD=str(len(words)), _LEASEHOLD_COMPLETE="bash_complete"
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_completion_offers_commands_options_and_held_names(shell):
    assert complete(shell, "re") == ["renew", "release", "rebase"]
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
