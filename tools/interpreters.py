"""Runs the tests that need no server with the other versions of Python that this machine has.

Each version gets an environment of its own below `.venv`, with the wheel that the other tests use. A version that is
not installed is named and left out: `python3.12` must start from the path, or be one of pyenv's. Fails if one of the
versions fails.

    python tools/interpreters.py WHEEL [PYTEST ARGUMENT ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.12", "3.13", "3.14")
PACKAGES = ("pytest>=9.0", "pytest-xdist>=3.8", "hypothesis>=6.130")  # as in pyproject.toml
TESTS = (
    "tests/core",
    "tests/client",
    "tests/engines/test_memory.py",
    "tests/engines/sqlite",
    "tests/conformance/test_conformance.py::test_memory",
    "tests/conformance/test_conformance.py::test_sqlite",
)


def find(version: str) -> str | None:
    """The path of an interpreter of this version."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [f"python{version}", *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")))]
    for candidate in candidates:
        try:
            done = subprocess.run(
                [candidate, "-c", "import ensurepip, sys; print(sys.executable)"],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            continue
        if done.returncode == 0:  # else one of pyenv's names without a version behind it
            return done.stdout.strip()
    return None


def run_tests(interpreter: str, environment: Path, wheel: str, arguments: list[str]) -> bool:
    """Whether the tests pass with this interpreter."""
    subprocess.run([interpreter, "-m", "venv", "--clear", environment], check=True)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "--no-input", "--disable-pip-version-check", "-qq", "install"]
    subprocess.run([*pip, f"{wheel}[all]", *PACKAGES], check=True)
    # Without the cache: what pytest remembers of failed tests is of the main environment.
    options = ["-q", "-p", "no:cacheprovider", "--durations=0", "--durations-min=30"]
    tests = [] if any(argument.startswith("tests") for argument in arguments) else TESTS
    return subprocess.run([python, "-m", "pytest", *options, *arguments, *tests], check=False).returncode == 0


def main(wheel: str, *arguments: str) -> int:
    """The exit code."""
    results = {}
    for version in VERSIONS:
        interpreter = find(version)
        if interpreter is None:
            results[version] = "not on this machine"
            continue
        print(f"Python {version}:", flush=True)
        passed = run_tests(interpreter, Path(".venv") / f"python{version}", wheel, list(arguments))
        results[version] = "passed" if passed else "FAILED"
    for version, result in results.items():
        print(f"Python {version}: {result}")
    return int("FAILED" in results.values())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
