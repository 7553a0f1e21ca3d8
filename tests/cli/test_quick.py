"""`run` without click: whatever is understood quickly means the same to click, and all else is left to click."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.cli.console import Console
from leasehold.cli.program import leasehold
from leasehold.cli.quick import understood
from leasehold.cli.run import command

Asked = tuple[Console, dict[str, Any]]  # what `run_job` gets


def quickly(words: Sequence[str], variables: dict[str, str]) -> Asked | None:
    with patch.dict(os.environ, variables, clear=True), patch.object(Console, "prepare_logs"):
        run = understood(words)
    return None if run is None else (run.args[0], run.keywords)  # type: ignore[attr-defined]  # it is a partial


def by_click(words: Sequence[str], variables: dict[str, str]) -> Asked | None:
    """None: click refuses it, prints a help, or runs another command."""
    asked: list[Asked] = []
    with (
        patch.dict(os.environ, variables, clear=True),
        patch.object(Console, "prepare_logs"),
        patch.object(command, "run_job", lambda console, **given: asked.append((console, given))),
    ):
        try:
            leasehold.main(list(words), prog_name="leasehold", standalone_mode=False)
        except click.ClickException:
            return None
    return asked[0] if asked else None


@pytest.mark.parametrize(
    "line",
    [
        "run job -- true",
        "run job true -n --ttl 5",
        "run -n job -- true",
        "run job -w 60 --ttl=1h --skip-ok true",
        "run -s job -c true",
        "run --strict --drift 0.02 --max-hold 60 --kill-after 1 --delay 2 --min-hold 3 job true",
        "run --holder me --purpose=-p --audit file --audit-key-file key job true",
        "-u sqlite:///f --namespace=n -q run -u redis://h -x job true",
        "--namespace a run --namespace= job true",
        "run --holder -- job -c -x",
        "run job",
    ],
)
def test_plain_command_line_is_understood_as_by_click(line):
    assert quickly(line.split(), {}) == by_click(line.split(), {}) is not None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ls",
        "ls run",
        "run",
        "run -- true",
        "run --help",
        "--version run job true",
        "run -nx job true",
        "run -w5 job true",
        "run -w=5 job true",
        "run --skip-ok=yes job true",
        "run --skip job true",
        "run -w -- job",
        "run -w many job true",
        "run --slots 3 job true",
        "run --on-lost kill job true",
        "run --metrics-group g job true",
        "-v run job true",
        "run -v 1 job true",
        "-o json run job true",
    ],
)
def test_command_line_that_is_not_plain_is_left_to_click(line):
    assert quickly(line.split(), {}) is None


def test_usage_error_of_a_quick_run_shows_the_usage(shell):
    done = shell("run", "job")
    assert quickly(["run", "job"], {}) is not None
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.splitlines() == [
        "leasehold: nothing to run: pass CMD after NAME, or -c STRING",
        "Usage: leasehold run [OPTIONS] NAME [--] CMD [ARG]...",
        "Try 'leasehold run --help'.",
    ]


@pytest.mark.parametrize(
    "variables",
    [
        {"LEASEHOLD_URL": "sqlite:///f", "LEASEHOLD_NAMESPACE": "n", "LEASEHOLD_AUDIT": "file"},
        {"LEASEHOLD_URL": "", "LEASEHOLD_OUTPUT": "", "LEASEHOLD_OTEL": ""},
    ],
)
def test_variables_are_understood_as_by_click(variables):
    assert quickly(["run", "job", "true"], variables) == by_click(["run", "job", "true"], variables) is not None


@pytest.mark.parametrize(
    "variables",
    [
        {"_LEASEHOLD_COMPLETE": "bash_complete"},
        {"LEASEHOLD_OUTPUT": "json"},
        {"LEASEHOLD_OTEL": "1"},
        {"LEASEHOLD_METRICS_FILE": "f.prom"},
        {"LEASEHOLD_NAMESPACE": "n" * 300},
    ],
)
def test_variable_that_only_click_understands_is_left_to_it(variables):
    assert quickly(["run", "--namespace", "n", "job", "true"], variables) is None


_WORDS = (
    "-n|-x|-s|-q|-v|-nx|-h|-|--|--strict|--skip-ok|--skip|-w 5|-w5|--wait=1m|-w x|-w|--wait |--ttl 0|--ttl=5 --ttl=6|"
    "-u redis://h|-u |--url=|--namespace n|--namespace=|-o json|--slots 2|--on-lost kill|-E 3|--metrics-group g|"
    "--audit file|-c true|--command=-x|--purpose p|--holder |--drift 0.9|--delay -1|--holder|-c|job|true|run|ls||=="
)
_PIECES = st.lists(st.sampled_from(_WORDS.split("|")), max_size=6)
_VARIABLES = st.dictionaries(
    st.sampled_from(["LEASEHOLD_URL", "LEASEHOLD_NAMESPACE", "LEASEHOLD_AUDIT", "LEASEHOLD_OUTPUT", "LEASEHOLD_OTEL"]),
    st.sampled_from(["", "json", "1", "x" * 300]),
    max_size=2,
)


@given(_PIECES, _PIECES, _VARIABLES)
def test_whatever_is_understood_quickly_means_the_same_to_click(before, after, variables):
    words = " ".join([*before, "run", *after]).split(" ")
    asked = quickly(words, variables)
    if asked is not None:
        assert asked == by_click(words, variables)
