"""Build the sdist and the wheel of the last commit into dist/: `make dist`, or `python tools/dist.py [OUTPUT]`.

Each is built twice, in other folders, at other times, under another umask, time zone and locale, the wheel once from
the sdist and once from the tree, and the bytes are compared. Beside them: an SBOM (tools/sbom.py) and SHA256SUMS.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import sbom

ROOT = Path(__file__).resolve().parents[1]
SURROUNDINGS: tuple[Mapping[str, str], ...] = (
    {"TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "1"},
    {"TZ": "Asia/Kathmandu", "LC_ALL": "C", "PYTHONHASHSEED": "2"},
)
MADE = {"PKG-INFO", "src/leasehold/_version.py"}  # in the sdist, but not in the repository


def git(*arguments: str) -> str:
    command = ["git", "-C", ROOT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def export(folder: Path) -> Path:
    """The tree of the last commit, as `git archive` packs it."""
    folder.mkdir(parents=True)
    packed = folder.with_suffix(".tar")
    git("archive", "-o", str(packed), "HEAD")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder


def build(tree: Path, target: str, output: Path, environment: Mapping[str, str]) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", output]
    subprocess.run(command, cwd=tree, env={**os.environ, **environment}, check=True, capture_output=True)
    (made,) = output.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


def built_twice(folder: Path, epoch: str) -> list[tuple[Path, Path]]:
    """The two sdists and the two wheels."""
    made: list[tuple[Path, Path]] = []
    for number, surroundings in enumerate(SURROUNDINGS):
        os.umask(0o022 if number == 0 else 0o077)
        here = folder / ("a" if number == 0 else "another-folder")
        tree, environment = export(here / "tree"), {**surroundings, "SOURCE_DATE_EPOCH": epoch}
        for path in tree.rglob("*"):
            os.utime(path, (number * 1e9, number * 1e9))
        sdist = build(tree, "sdist", here / "out", environment)
        if number == 0:
            with tarfile.open(sdist) as archive:
                archive.extractall(here / "sdist", filter="data")
            (tree,) = (here / "sdist").iterdir()
        made.append((sdist, build(tree, "wheel", here / "out", environment)))
    os.umask(0o022)
    return made


def members(path: Path) -> dict[str, bytes]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(path) as sdist:
        return {
            each.name.partition("/")[2]: file.read() for each in sdist if (file := sdist.extractfile(each)) is not None
        }


def differences(first: Path, second: Path) -> list[str]:
    if (first.name, first.read_bytes()) == (second.name, second.read_bytes()):
        return []
    one, other = members(first), members(second)
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return [f"{first.name} and {second.name} differ: {', '.join(names[:20]) or 'only in how they are packed'}"]


def misplaced(sdist: Path, wheel: Path) -> list[str]:
    """Files that are missing, or that do not belong there. The sdist is the whole repository: the tests run from it."""
    expected = set(git("ls-tree", "-r", "--name-only", "HEAD").splitlines()) | MADE
    packed = set(members(sdist))
    found = [f"the sdist lacks {name}" for name in sorted(expected - packed)]
    found += [f"the sdist has {name}, which is not in the repository" for name in sorted(packed - expected)]
    stem = "-".join(wheel.name.split("-")[:2])
    places = ("leasehold/", f"{stem}.dist-info/", f"{stem}.data/data/share/man/man1/")
    return found + [f"the wheel has {name}" for name in sorted(members(wheel)) if not name.startswith(places)]


def unfinished(sdist: Path) -> list[str]:
    """What the pages of a release may not say: that there is none, that it was not measured, that changes are new."""
    release = re.fullmatch(r"leasehold-(\d+\.\d+\.\d+)\.tar\.gz", sdist.name)
    if release is None:  # a development version or a release candidate
        return []
    texts = {name: text.decode() for name, text in members(sdist).items() if name.endswith(".md")}
    wrong = [
        f"{name}: {title} is not measured: run `make bench ARGS=report`"
        for name, text in sorted(texts.items())
        for title in re.findall(r"<!-- generated: (.+?) -->\n\*Not measured", text)
    ]
    unreleased, _, sections = texts["CHANGELOG.md"].partition("## Unreleased\n")[2].partition("\n## ")
    if not sections.startswith(f"{release[1]}\n"):
        wrong.append(f"CHANGELOG.md: the newest version is not {release[1]}")
    if unreleased.strip() not in ("", "Nothing yet."):
        wrong.append("CHANGELOG.md: move what is under Unreleased below the version")
    first_pages = ("README.md", "site/index.md")
    wrong += [f"{name}: says `there is no release yet`" for name in first_pages if "there is no release" in texts[name]]
    return wrong


def print_contents(path: Path) -> None:
    found = members(path)
    print(f"{path.name}: {len(found)} files, {path.stat().st_size:,} bytes")
    depth = 2 if path.suffix == ".whl" else 1
    folders = Counter("/".join(name.split("/")[:-1][:depth]) or "." for name in found)
    for folder, count in sorted(folders.items()):
        print(f"    {count:5}  {folder}")


def main(output: Path) -> int:
    if git("status", "--porcelain"):
        print("changes that are not committed are left out", file=sys.stderr)
    epoch = git("log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory() as folder:
        (sdist, wheel), (other_sdist, other_wheel) = built_twice(Path(folder), epoch)
        wrong = differences(sdist, other_sdist) + differences(wheel, other_wheel) + misplaced(sdist, wheel)
        wrong += unfinished(sdist)
        if wrong:
            print("\n".join(wrong), file=sys.stderr)
            return 1
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        for path in (sdist, wheel):
            print_contents(path)
            shutil.copyfile(path, output / path.name)
        bill = sbom.document(wheel, sdist, int(epoch))
    (output / sdist.name.replace(".tar.gz", ".cdx.json")).write_text(bill)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(output.iterdir())]
    (output / "SHA256SUMS").write_text("".join(sums))
    print(f"the two builds are equal, byte for byte:\n{''.join(sums)}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"))
