"""Build the documentation site: `make site`, or `python site/build.py [OUTPUT]`.

The pages are the Markdown files of this repository, as they are. Sphinx wants all of them below one folder, so they are
copied into a temporary one at the same relative places, which keeps every relative link valid; a link to a page that
does not exist fails the build. A version is a folder of the output: build it again and only that folder changes.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path

from packaging.version import Version
from sphinx.cmd.build import main as sphinx

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = [
    "docs",
    "deploy",
    "examples",
    "bench/RESULTS.md",
    "bench/plots",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]


def stage(folder: Path) -> None:
    """Copy all sources of the site into `folder`."""
    for page in PAGES:
        source, target = ROOT / page, folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    shutil.copytree(HERE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("build.py", "__pycache__"))
    shutil.copytree(ROOT / "src" / "leasehold" / "server" / "dashboard" / "static", folder / "fonts")


def version() -> str:
    """The folder of this version: `dev` if it is no release."""
    found = Version(installed_version("leasehold"))
    return "dev" if found.is_devrelease else str(found)


_NOT_FOUND = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Not found - Leasehold</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 1rem/1.6 system-ui, sans-serif; max-width: 34rem; margin: 15vh auto; padding: 0 1.2rem; }
  a { color: light-dark(#0b7a5a, #52cba4); }
</style>
<h1>This page does not exist</h1>
<p>It may have another name in this version. Search from the <a id="home" href="/">first page</a>.</p>
<script>
  // A web server shows this page for any address: the site may be below a path, and the address may name a version.
  const versions = %s;
  const parts = location.pathname.split("/");
  const at = parts.findIndex((part) => versions.includes(part));
  if (at > 0) document.getElementById("home").href = parts.slice(0, at + 1).join("/") + "/index.html";
</script>
"""


def list_versions(output: Path) -> None:
    """Write the list that the menu of every version reads, a first page that leads to the newest, and the page that a
    web server can show for an address that does not exist."""
    names = [page.parent.name for page in output.glob("*/index.html")]
    names.sort(key=lambda name: Version("0" if name == "dev" else name), reverse=True)
    (output / "versions.js").write_text(f"window.LEASEHOLD_VERSIONS = {json.dumps(names)};\n")
    (output / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>Leasehold</title>'
        f'<meta http-equiv="refresh" content="0; url={names[0]}/index.html">'
        f'<a href="{names[0]}/index.html">Leasehold {names[0]}</a>\n'
    )
    (output / "404.html").write_text(_NOT_FOUND % json.dumps(names))


def main(output: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        target = output / version()
        shutil.rmtree(target, ignore_errors=True)
        code = sphinx(["-q", "-W", "--keep-going", "-E", "-d", f"{folder}/.doctrees", folder, str(target)])
    if code == 0:
        list_versions(output)
        print(f"open {target / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()))
