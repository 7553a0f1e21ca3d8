"""URL scheme to engine. A module is imported on first use, so a driver nobody asked for is never loaded."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Final, cast

from leasehold.engine import Opener
from leasehold.errors import ConfigError

GROUP: Final = "leasehold.engines"  # where other packages announce engines: scheme = "package.module:open"

BUILT_IN: Final[dict[str, str]] = {
    "memory": "leasehold.engines.memory",
    "sqlite": "leasehold.engines.sqlite",
}


def opener(scheme: str) -> Opener:
    """The `open(config, runtime, book)` of a scheme, or a ConfigError that names the known ones."""
    if module := BUILT_IN.get(scheme):
        return cast(Opener, import_module(module).open)
    found = {point.name: point for point in entry_points(group=GROUP)}
    if point := found.get(scheme):
        return cast(Opener, point.load())
    known = ", ".join(f"{name}://" for name in sorted({*BUILT_IN, *found}))
    raise ConfigError(f"no engine for {scheme}://; known: {known}")
