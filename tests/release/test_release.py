"""A release: `make dist`, the workflow that publishes it, and an installation from an index."""

from __future__ import annotations

import functools
import hashlib
import http.server
import importlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.docs.test_tables import NOT_MEASURED
from tests.support import builds
from tests.support.paths import ROOT

EXTRAS = ["all", "server", "prometheus", "cron"]


def test_workflow_grants_each_job_only_what_it_needs():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert workflow["permissions"] == {}
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert not [step for step in publish["steps"] if "run" in step], "what may publish runs nothing of ours"
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # PyYAML reads `on` as a truth value


def test_every_build_tool_is_pinned_with_a_hash():
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "tools" / "build-requirements.txt").read_text())
    pinned = re.findall(r"([\w.-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}\n", text)
    assert len(pinned) == text.count("==")
    required = re.search(r"(?m)^requires = (\[.*?\])", (ROOT / "pyproject.toml").read_text())[1]
    assert {Requirement(each).name for each in json.loads(required)} <= set(pinned)


READY = {
    "README.md": "pip install leasehold",
    "site/index.md": "pip install leasehold",
    "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\nNothing yet.\n\n## 1.2.3\n\n- New.\n",
    "docs/speed.md": "<!-- generated: speed -->\n| engine |\n| --- |\n| redis |\n<!-- end -->\n",
}


def unfinished_pages(monkeypatch, folder: Path, version: str, changes: dict[str, str]) -> list[str]:
    monkeypatch.syspath_prepend(ROOT / "tools")
    sdist = folder / f"leasehold-{version}.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in {**READY, **changes}.items():
            (folder / "page").write_text(text)
            archive.add(folder / "page", f"leasehold-{version}/{name}")
    return importlib.import_module("dist").unfinished(sdist)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("README.md", "pip install .  # there is no release yet"),
        ("CHANGELOG.md", READY["CHANGELOG.md"].replace("Nothing yet.", "- Another change.")),
        ("CHANGELOG.md", READY["CHANGELOG.md"].replace("1.2.3", "1.2.2")),
        ("docs/speed.md", f"<!-- generated: speed -->\n{NOT_MEASURED}<!-- end -->\n"),
        ("site/index.md", "pip install .  # there is no release yet"),
    ],
    ids=["readme", "unreleased", "version", "table", "site"],
)
def test_release_with_an_unfinished_page_is_refused(monkeypatch, tmp_path, page, text):
    assert unfinished_pages(monkeypatch, tmp_path, "1.2.3", {}) == []
    assert unfinished_pages(monkeypatch, tmp_path, "1.2.3.dev4+g1a2b3c4d5", {page: text}) == []
    (found,) = unfinished_pages(monkeypatch, tmp_path, "1.2.3", {page: text})
    assert found.startswith(f"{page}: ")


@pytest.fixture(scope="module")
def dist():
    if subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("the release is built from a commit, and this is no repository")
    return builds.release()


def packed(dist: Path, pattern: str) -> Path:
    (found,) = dist.glob(pattern)
    return found


@pytest.mark.extended
def test_release_has_checksums_and_a_bill_of_materials(dist):
    wheel, bill = packed(dist, "*.whl"), json.loads(packed(dist, "*.cdx.json").read_text())
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=True)
    subject = bill["metadata"]["component"]
    assert wheel.name.startswith(f"leasehold-{subject['version']}-")
    hashes = {each["url"]: each["hashes"][0]["content"] for each in subject["externalReferences"]}
    assert hashes[wheel.name] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    required = [each["name"] for each in bill["components"] if each["scope"] == "required"]
    assert required == ["click"]
    assert {"hiredis", "kazoo", "psycopg", "pymysql", "uvicorn"} < {each["name"] for each in bill["components"]}
    assert "hatchling" in {each["name"] for each in bill["metadata"]["tools"]["components"]}


def repacked(found: Distribution, folder: Path) -> Path:
    """The wheel from which an installed package came, or as good: nothing is downloaded."""
    tags = re.findall(r"(?m)^Tag: (\w+)-(\w+)-(\w+)$", found.read_text("WHEEL"))
    tag = "-".join(".".join(dict.fromkeys(part)) for part in zip(*tags, strict=True))
    made = folder / f"{found.metadata['Name'].replace('-', '_').replace('.', '_')}-{found.version}-{tag}.whl"
    with zipfile.ZipFile(made, "w") as wheel:
        for file in found.files:
            if not str(file).startswith("..") and Path(file.locate()).exists():
                wheel.write(file.locate(), str(file))
    return made


def needed(name: str, extras: set[str]) -> set[str]:
    """Names of the installed packages that this one needs, with these extras."""
    found: set[str] = set()
    for text in distribution(name).requires or ():
        each = Requirement(text)
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            more = {each.name} if each.name != name else set()
            found |= more | needed(each.name, set(each.extras) or {""})
    return found


@pytest.fixture(scope="module")
def index(dist, tmp_path_factory):
    """The URL of an index with this release and the packages that it needs, as PEP 503 describes one."""
    root = tmp_path_factory.mktemp("index")
    for name in ("leasehold", *needed("leasehold", set(EXTRAS))):
        folder = root / "simple" / re.sub(r"[-_.]+", "-", name).lower()
        folder.mkdir(parents=True, exist_ok=True)
        ours = name == "leasehold"
        file = Path(shutil.copy(packed(dist, "*.whl"), folder)) if ours else repacked(distribution(name), folder)
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        (folder / "index.html").write_text(f'<!doctype html><a href="{file.name}#sha256={sha256}">{file.name}</a>')
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=root)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}/simple/"
        server.shutdown()
        serving.join()


@pytest.mark.extended
def test_install_from_an_index_runs_and_locks(dist, index, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    environment = {
        "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    version = packed(dist, "*.whl").name.split("-")[1]
    run("python", "-m", "pip", "install", "--pre", "leasehold")
    assert run("leasehold", "--version") == f"leasehold {version}\n"
    assert run("leasehold", "run", "job", "--", "echo", "held") == "held\n"
    program = 'import leasehold\nwith leasehold.Client("memory://").lock("a") as lease: print(lease.token > 0)'
    assert run("python", "-c", program) == "True\n"
    assert (tmp_path / "venv" / "share" / "man" / "man1" / "leasehold-run.1").exists()

    planned = run("python", "-m", "pip", "install", "--pre", "--dry-run", f"leasehold[{','.join(EXTRAS)}]")
    for name in ("hiredis", "kazoo", "psycopg-binary", "PyMySQL", "uvicorn", "prometheus-client", "cronsim"):
        assert re.search(rf"Would install .*\b{name}-[\d.]+", planned.replace("_", "-")), planned
