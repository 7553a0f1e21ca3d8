"""The help is a manual: every command has examples and exit codes, every flag names its environment variable."""

import sys
from pathlib import Path

import click
import pytest

from leasehold.cli.help import WIDTH
from leasehold.cli.program import leasehold

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def paths(group: click.Group, above: str = "") -> list[str]:
    """The commands and, after each, its own commands: "serve", "serve key", "serve key create"."""
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        found.append(above + name)
        if isinstance(command, click.Group):
            found += paths(command, f"{above}{name} ")
    return found


COMMANDS = paths(leasehold)

HEAD = """\
# The command line

The help of `leasehold` and of each command. `python tests/cli/test_help.py` generates this page.
The output of `-o json` is described in [JSON](json.md).
"""


def context_of(path: str = "") -> click.Context:
    context = click.Context(leasehold, info_name="leasehold", terminal_width=WIDTH, **leasehold.context_settings)
    for name in path.split():
        assert isinstance(context.command, click.Group)
        command = context.command.get_command(context, name)
        assert command is not None
        context = click.Context(command, context, info_name=name, terminal_width=WIDTH)
    return context


def help_of(path: str = "") -> str:
    context = context_of(path)
    return context.command.get_help(context)


def manual() -> str:
    parts = [HEAD, "## leasehold\n", f"```text\n{help_of()}\n```\n"]
    for name in COMMANDS:
        parts += [f"## leasehold {name}\n", f"```text\n{help_of(name)}\n```\n"]
    return "\n".join(parts)


def test_cli_reference_page_equals_the_help():
    assert PAGE.read_text(encoding="utf-8") == manual(), "run: python tests/cli/test_help.py"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_help_has_examples_and_exit_codes(name):
    text = help_of(name)
    assert "\nExamples:\n" in text
    assert f"leasehold {name}" in text.partition("Examples:")[2]
    assert "\nExit codes:\n" in text
    assert "docs/" not in text or (PAGE.parents[1] / "reference/json.md").exists()
    assert all(len(line) <= WIDTH for line in text.splitlines())


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("run", ["0", "64", "69", "75", "77", "78", "79", "126", "127", "128+n", "other"]),
        ("elect", ["0", "64", "69", "74", "77", "78", "126", "127", "128+n", "other"]),
        ("ls", ["0", "64", "69", "74", "77", "78"]),
        ("demo", ["0", "1", "64", "69", "74", "77", "78"]),
        ("doctor", ["0", "1", "2", "64", "74", "78"]),
        ("", ["0", "1", "2", "64", "69", "74", "75", "77", "78", "79", "126", "127", "128+n"]),
        ("completion", ["0", "64", "74"]),
    ],
)
def test_help_lists_the_exit_codes_of_its_command(name, codes):
    rows = help_of(name).partition("Exit codes:\n")[2].splitlines()
    assert [row.split()[0] for row in rows if row[2] != " "] == codes


def test_every_option_has_help():
    for path in ("", *COMMANDS):
        command = context_of(path).command
        for param in command.params:
            assert not isinstance(param, click.Option) or param.help, (command.name, param.name)


def test_help_names_environment_variable_of_each_flag():
    text = " ".join(help_of().split())
    for variable in ("LEASEHOLD_URL", "LEASEHOLD_NAMESPACE", "LEASEHOLD_OUTPUT", "NO_COLOR"):
        assert f"[env var: {variable}]" in text, variable
    for name in ("renew", "release"):
        assert "[env var: LEASEHOLD_LEASE]" in " ".join(help_of(name).split())


def test_help_does_not_truncate_the_list_of_commands(shell):
    for text in (help_of(), shell("--help", COLUMNS="80").stdout):
        assert "..." not in text.partition("Commands:")[2].partition("Examples:")[0]


def test_help_goes_to_stdout(shell):
    for arguments in (["--help"], ["-h"], ["run", "-h"], ["run", "j", "--help"]):
        done = shell(*arguments)
        assert done.returncode == 0
        assert done.stdout.startswith("Usage: leasehold")
        assert done.stderr == ""


@pytest.mark.parametrize("words", [["leasehold", "-u"], ["leasehold", "ls", "-o"], ["leasehold", "run", "--ttl"]])
def test_usage_error_of_a_missing_value_shows_the_usage_of_its_command(shell, words):
    done = shell(*words[1:])
    assert done.returncode == 64
    assert done.stderr.splitlines()[-1] == f"Try '{' '.join(words[:-1])} --help'."


def test_missing_command_prints_help_to_stderr_and_is_64(shell):
    done = shell()
    assert done.returncode == 64
    assert "Commands:" in done.stderr
    assert done.stdout == ""


if __name__ == "__main__":
    PAGE.write_text(manual(), encoding="utf-8")
    sys.exit(0)
