"""The version of the package, from the tags of the repository; hatchling evaluates `version()` when it builds.

    v0.1.0 at this commit             0.1.0
    3 commits after v0.1.0            0.1.1.dev3+g1a2b3c4d5
    3 commits after v0.2.0rc1         0.2.0rc2.dev3+g1a2b3c4d5
    a clone without tags              0.1.0.dev840+g1a2b3c4d5
    a folder that is no repository    0.1.0.dev0+unknown

`.dirty` at the end: with changes that are not committed. `git archive` writes the same into .git_archival.txt, and in
an sdist hatchling reads PKG-INFO instead.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = "0.1.0"  # as long as there is no tag
_DESCRIBED = re.compile(r"v(\d+\.\d+\.|\d+\.\d+\.\d+(?:a|b|rc))(\d+)(?:-(\d+)-g([0-9a-f]+))?(-dirty)?")


def version(root: Path = ROOT) -> str:
    if (root / ".git").exists():
        return _of_repository(root)
    archival = root / ".git_archival.txt"
    text = archival.read_text() if archival.exists() else ""
    if found := re.search(r"(?m)^describe: (v\S+)$", text):
        return of_description(found[1])
    if found := re.search(r"(?m)^commit: ([0-9a-f]{9})", text):
        return f"{FIRST}.dev0+g{found[1]}"
    return f"{FIRST}.dev0+unknown"


def of_description(described: str) -> str:
    """The version for the output of `git describe`. After a release, that of the next one to come, as a pre-release."""
    found = _DESCRIBED.fullmatch(described)
    if found is None:
        raise ValueError(f"{described!r} is not described by a tag such as v0.1.0 or v0.2.0rc1")
    release, last, distance, commit, dirty = found.groups()
    if distance is None and dirty is None:
        return f"{release}{last}"
    local = ".".join(filter(None, [commit and f"g{commit}", dirty and "dirty"]))
    return f"{release}{int(last) + 1}.dev{distance or 0}+{local}"


def _of_repository(root: Path) -> str:
    described = _git(root, "describe", "--tags", "--match", "v[0-9]*", "--abbrev=9", "--dirty")
    if described:
        return of_description(described)
    commits = _git(root, "rev-list", "--count", "HEAD")
    if not commits:  # without git, or before the first commit
        return f"{FIRST}.dev0+unknown"
    dirty = ".dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    return f"{FIRST}.dev{commits}+g{_git(root, 'rev-parse', '--short=9', 'HEAD')}{dirty}"


def _git(root: Path, *arguments: str) -> str:
    """What git prints, or nothing if it fails."""
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
