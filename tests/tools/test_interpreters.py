"""Which other interpreters `make interpreters` finds."""

from __future__ import annotations

import sys

from tools import interpreters

VERSION = "{}.{}".format(*sys.version_info)


def test_interpreter_of_pyenv_is_found_without_the_path(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "versions" / f"{VERSION}.0" / "bin"
    folder.mkdir(parents=True)
    (folder / f"python{VERSION}").symlink_to(sys.executable)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert interpreters.find(VERSION) == str(folder / f"python{VERSION}")


def test_name_on_the_path_without_an_interpreter_is_not_one(tmp_path, monkeypatch) -> None:
    shim = tmp_path / f"python{VERSION}"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert interpreters.find(VERSION) is None
