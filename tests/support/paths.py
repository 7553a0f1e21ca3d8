"""Paths in the repository, and an environment for child processes that import from it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, with `tests` and `harness` importable too."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{known}" if known else str(ROOT), **more}
