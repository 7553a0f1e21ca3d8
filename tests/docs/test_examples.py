"""The programs in examples/ run as they are, and end with success."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))


@pytest.mark.extended
@pytest.mark.parametrize("program", PROGRAMS)
def test_example_runs_as_it_is(program, tmp_path):
    command = ["sh" if program.endswith(".sh") else sys.executable, str(EXAMPLES / program)]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # for the command `leasehold`
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout, done.stderr


def test_readme_of_the_examples_lists_every_program():
    text = (EXAMPLES / "README.md").read_text()
    assert [name for name in PROGRAMS if f"({name})" not in text] == []
