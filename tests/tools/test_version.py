"""The version of the package: from tags, and sensible without them."""

import shutil
import subprocess
from importlib.metadata import version as installed_version
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from packaging.version import Version

import leasehold
from tests.support.paths import ROOT
from tests.support.program import PROGRAM

spec = spec_from_file_location("tools_version", ROOT / "tools" / "version.py")
assert spec is not None
assert spec.loader is not None
tool = module_from_spec(spec)
spec.loader.exec_module(tool)


def git(folder, *arguments):
    identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.com"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def export(folder, target):
    """What `git archive` packs, as a folder."""
    target.mkdir()
    packed = subprocess.run(["git", "-C", folder, "archive", "HEAD"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", target], input=packed, check=True)
    return target


@pytest.fixture
def repository(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed here")
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    for name in (".git_archival.txt", ".gitattributes"):
        shutil.copy(ROOT / name, folder)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_version_of_a_tagged_commit_is_that_of_the_tag(repository, tmp_path):
    git(repository, "tag", "v0.3.1")
    assert tool.version(repository) == "0.3.1"
    assert tool.version(export(repository, tmp_path / "export")) == "0.3.1"


def test_version_after_a_tag_precedes_the_next_release(repository, tmp_path):
    git(repository, "tag", "v0.3.1")
    git(repository, "commit", "-q", "--allow-empty", "-m", "second")
    commit = git(repository, "rev-parse", "--short=9", "HEAD").strip()
    assert tool.version(repository) == f"0.3.2.dev1+g{commit}"
    assert tool.version(export(repository, tmp_path / "export")) == f"0.3.2.dev1+g{commit}"
    assert Version("0.3.1") < Version(tool.version(repository)) < Version("0.3.2")


def test_version_without_tags_precedes_the_first_release(repository, tmp_path):
    commit = git(repository, "rev-parse", "--short=9", "HEAD").strip()
    assert tool.version(repository) == f"0.1.0.dev1+g{commit}"
    assert tool.version(export(repository, tmp_path / "export")) == f"0.1.0.dev0+g{commit}"
    assert Version(tool.version(repository)) < Version("0.1.0")


def test_version_of_uncommitted_changes_is_no_release(repository):
    git(repository, "tag", "v0.3.1")
    (repository / ".gitattributes").write_text("")
    assert tool.version(repository) == "0.3.2.dev0+dirty"


def test_version_of_a_plain_folder_or_without_git_is_valid(repository, tmp_path, monkeypatch):
    shutil.copy(ROOT / ".git_archival.txt", tmp_path)
    assert tool.version(tmp_path) == "0.1.0.dev0+unknown"
    monkeypatch.setenv("PATH", "")
    assert tool.version(repository) == "0.1.0.dev0+unknown"


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ("v1.2.3", "1.2.3"),
        ("v0.2.0rc1", "0.2.0rc1"),
        ("v0.2.0rc1-3-g1a2b3c4d5", "0.2.0rc2.dev3+g1a2b3c4d5"),
        ("v1.2.3-4-g1a2b3c4d5-dirty", "1.2.4.dev4+g1a2b3c4d5.dirty"),
    ],
)
def test_version_follows_the_description(described, expected):
    assert tool.of_description(described) == expected
    assert str(Version(expected)) == expected


@pytest.mark.parametrize("described", ["v1", "v1.2", "v1.2.3.4", "version-1"])
def test_version_of_an_odd_tag_is_refused(described):
    with pytest.raises(ValueError, match="not described by a tag"):
        tool.of_description(described)


def test_program_package_and_metadata_agree_about_the_version(capfd):
    assert leasehold.__version__ == installed_version("leasehold")
    assert subprocess.run([*PROGRAM, "--version"], check=True).returncode == 0
    assert capfd.readouterr().out == f"leasehold {leasehold.__version__}\n"
