"""The manual pages: one per command, from its help, and readable by `man`."""

import os
import shutil
import subprocess
import sys

import pytest

from leasehold.cli.program import COMMANDS
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, "-B", ROOT / "tools" / "man.py", folder], check=True)
    return {path.stem: path for path in folder.glob("*.1")}


def test_every_command_has_a_page(pages):
    assert {"leasehold", *(f"leasehold-{name}" for name in COMMANDS)} <= set(pages)
    assert {"leasehold-audit-verify", "leasehold-serve-key-create"} <= set(pages)


@pytest.mark.extended
def test_man_renders_every_page_without_warnings(pages):
    if shutil.which("man") is None:
        pytest.skip("man is not installed here")
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "100"}
    for name, path in pages.items():
        command = ["man", "--warnings", "-E", "UTF-8", "-l", path]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (name, done.returncode, done.stderr) == (name, 0, "")
        if name == "leasehold-run":
            shown = done.stdout

    assert "leasehold-run - Hold NAME while CMD runs" in shown
    assert "--conflict-exit-code CODE" in shown
    assert "leasehold run deploy -c 'make && make install'    through /bin/sh" in shown
    assert "128+n  ended by signal n" in shown
