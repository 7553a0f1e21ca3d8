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
    "redis": "leasehold.engines.redis",
    "rediss": "leasehold.engines.redis",
    "redis+unix": "leasehold.engines.redis",
}


# The module of an engine that needs a driver -> the extra that brings it.
EXTRAS: Final[dict[str, str]] = {
    "leasehold.engines.redis": "redis",
}


def opener(scheme: str) -> Opener:
    """The `open(config, runtime, book)` of a scheme, or a ConfigError that names the known ones."""
    if module := BUILT_IN.get(scheme):
        try:
            return cast(Opener, import_module(module).open)
        except ModuleNotFoundError as error:
            if module not in EXTRAS or (error.name or "").startswith("leasehold"):
                raise
            way = f'pip install "leasehold[{EXTRAS[module]}]"'
            raise ConfigError(f"{scheme}:// needs {error.name}, which is not installed: {way}") from error
    found = {point.name: point for point in entry_points(group=GROUP)}
    if point := found.get(scheme):
        return cast(Opener, point.load())
    known = ", ".join(f"{name}://" for name in sorted({*BUILT_IN, *found}))
    raise ConfigError(f"no engine for {scheme}://; known: {known}")
