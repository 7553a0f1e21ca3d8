"""Where things are in the repository, and the environment in which a child process finds them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent


def child_environment(**more: str) -> dict[str, str]:
    """This environment, in which a child can import `tests` and `harness` too."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{known}" if known else str(ROOT), **more}
