"""The commands of the README's first screen, taken from there and run."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = "\n".join(README.splitlines()[:25])


def commands() -> list[str]:
    """The commands of the first shell block, without comments."""
    block = re.search(r"^```sh\n(.*?)^```$", FIRST_SCREEN, re.M | re.S)
    assert block is not None
    return [re.sub(r"\s+# .*", "", line) for line in block[1].splitlines()]


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment without variables of pytest, make and the user's settings."""
    dropped = ("LEASEHOLD", "PYTEST", "MAKE", "MFLAGS", "XDG", "PIP", "VIRTUAL_ENV", "COV")
    return {key: value for key, value in os.environ.items() if not key.startswith(dropped)} | variables


def test_readme_first_screen_says_why_how_and_what_state():
    for word in ("redis-py", "filelock", "`flock`"):
        assert word in FIRST_SCREEN
    assert commands()[:2] == ["pip install .", "leasehold demo zombie"]
    state = " ".join(README.split())
    assert "**Alpha:**" in state
    assert (
        "Linux and Python 3.11 or newer; it is untested on macOS and Windows, and much of it does not run on Windows"
        in state
    )


@pytest.mark.extended
def test_readme_first_commands_work_from_the_wheel(tmp_path):
    """In a fresh environment. Nothing is downloaded: hatchling is found outside of it, click is copied into it."""
    pytest.importorskip("hatchling", reason="`make test` installs it")
    venv.create(tmp_path / "venv", with_pip=True)
    outer_site = Path(sysconfig.get_path("purelib"))
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for path in (outer_site / "click", *outer_site.glob("click-*.dist-info")):
        shutil.copytree(path, site / path.name)
    tree = tmp_path / "leasehold"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    environment = clean_environment(
        PATH=f"{tmp_path}/venv/bin:{os.environ['PATH']}",
        HOME=str(tmp_path),
        PIP_NO_INDEX="1",
        PIP_NO_BUILD_ISOLATION="0",  # pip's way to say: no isolation
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_ROOT_USER_ACTION="ignore",
    )

    def run(*command: str, path: str = "") -> str:
        done = subprocess.run(
            command,
            cwd=tree if path else tmp_path,
            env={**environment, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    install, *others = commands()
    run("sh", "-ec", install, path=str(outer_site))
    shutil.rmtree(tree)
    printed = run("sh", "-ec", "\n".join(others))
    assert "2 sold of a stock of 1  (the failure, as expected)" in printed
    assert re.search(r"^one at a time, token \d+$", printed, re.M)
    assert "# Tutorial" in printed
    assert (tmp_path / ".local/state/leasehold/locks.db").exists()
    assert list(site.glob("leasehold/cli/run/command.py")), "it ran what it had installed"
    assert "Documentation, https://" in run("pip", "show", "-v", "leasehold")


@pytest.mark.extended
def test_readme_test_command_runs_pytest():
    """All of `make test` would be this very run: check what it would do, and run a small part."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed here")
    assert "`make test`" in README
    words = ["make", "test"]
    plan = subprocess.run(
        [*words, "-n"], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=120
    )
    assert plan.returncode == 0, plan.stderr
    assert "-m pytest" in plan.stdout

    installed = subprocess.run(
        [make, "-q", ".venv/.installed"], cwd=ROOT, env=clean_environment(), capture_output=True, timeout=120
    )
    if installed.returncode != 0 or Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        pytest.skip("this is not a run of `make test`: a part of it would make .venv first")
    part = subprocess.run(
        [*words, "ARGS=tests/core/test_names.py", "JOBS=0"],
        cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert part.returncode == 0, part.stdout + part.stderr
    assert " passed" in part.stdout
