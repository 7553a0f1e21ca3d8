"""The stories that locks are for, played by real processes: each without its cure, and then with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from leasehold.cli.demo.runner import DemoRunner

Facts: TypeAlias = Mapping[str, Any]


class DemoResult(NamedTuple):
    """How one half of a story ended. `as_expected`: what was to be shown was seen."""

    as_expected: bool
    text: str
    facts: Facts


class Demo(Protocol):
    """What a module of this package offers."""

    TITLE: str
    CURE: str  # what the second half has and the first has not
    ROLES: Mapping[str, Callable[..., None]]  # the parts, each played by a process

    def run(self, runner: DemoRunner, cured: bool) -> DemoResult: ...


NAMES: Final = ("zombie", "lost-update", "deadlock", "expired-lease", "thundering-herd", "failover")


def load_demo(name: str) -> Demo:
    return import_module(f"leasehold.cli.demo.{name.replace('-', '_')}")
