"""The stories that locks are for, played by real processes: each without its cure, and then with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from leasehold.stories.stage import Stage

Facts: TypeAlias = Mapping[str, Any]


class Outcome(NamedTuple):
    """How one half of a story ended. `seen`: what was to be shown was seen."""

    seen: bool
    text: str
    facts: Facts


class Story(Protocol):
    """What a module of this package offers."""

    TITLE: str
    CURE: str  # what the second half has and the first has not
    ROLES: Mapping[str, Callable[..., None]]  # the parts, each played by a process

    def play(self, stage: Stage, cured: bool) -> Outcome: ...


NAMES: Final = ("zombie", "naive", "deadlock", "extender", "herd", "failover")


def story(name: str) -> Story:
    return import_module(f"leasehold.stories.{name}")
