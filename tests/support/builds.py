"""What takes long to build and is only read: built once for all workers of a run, when the first test asks for it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from harness.servers.folders import scratch
from harness.servers.shared import shared
from tests.support.paths import ROOT

_NEXT_FORMAT: Final = {
    "core/names.py": [('FORMAT = "lh1"', 'FORMAT = "lh2"')],
    "engines/sqlite/schema.py": [("VERSION: Final = 1", "VERSION: Final = 2")],
    "engines/postgresql/schema.py": [("VERSION: Final = 1", "VERSION: Final = 2")],
    "engines/postgresql/verbs.sql": [("lh_meta (version) values (1)", "lh_meta (version) values (2)")],
    "engines/mysql/schema.py": [("VERSION: Final = 1", "VERSION: Final = 2")],
    "engines/mysql/fast_path.sql": [
        ("lh_meta values (1, 1)", "lh_meta values (1, 2)"),
        ("(version, 1)", "(version, 2)"),
    ],
    "engines/remote/servers.py": [("/v1/", "/v2/")],
}


@shared
def site() -> Path:
    """The documentation site. Sphinx ends with an error at the first broken link or page outside the menu."""
    output = Path(scratch())
    assert _run(sys.executable, ROOT / "site" / "build.py", output).stderr == ""
    return output


@shared
def release() -> Path:
    """The folder that `make dist` makes."""
    output = Path(scratch()) / "dist"
    _run(sys.executable, ROOT / "tools" / "dist.py", output)
    return output


@shared
def next_version() -> Path:
    """An installation of this tree with another version number, as a folder for PYTHONPATH."""
    return _installed("0.2.0", {})


@shared
def next_format() -> Path:
    """One with another format too: `lh2`, and version 2 of every schema and of the API of lock servers."""
    return _installed("1.0.0", _NEXT_FORMAT)


def _installed(version: str, changes: dict[str, list[tuple[str, str]]]) -> Path:
    folder = Path(scratch())
    tree = folder / "tree"
    for name in ("src", "docs", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    changes = {"../../tools/version.py": [('FIRST = "0.1.0"', f'FIRST = "{version}"')], **changes}
    for name, replacements in changes.items():
        file = tree / "src" / "leasehold" / name
        text = file.read_text()
        for old, new in replacements:
            assert old in text, (name, old)
            text = text.replace(old, new)
        file.write_text(text)
    if "core/names.py" in changes:
        for file in [*tree.glob("src/leasehold/engines/*sql/*.sql"), *tree.glob("src/leasehold/engines/*sql/*.py")]:
            file.write_text(re.sub(r"(\blh_\w+|lh_\{verb\})_v1\b", r"\1_v2", file.read_text()))
    _run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=tree)
    (wheel,) = folder.glob("*.whl")
    _run(sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target", folder / "site", wheel)
    return folder / "site"


def _run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
