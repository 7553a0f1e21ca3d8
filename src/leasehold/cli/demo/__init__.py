"""Demos of failures that locks and fences prevent, with real processes: each without the fix, and then with it.

command.py  runner.py  worker.py     the command; runs a demo; a process of it
race.py             updates that are lost without a lock
expired_lease.py    work that goes on after the lease
zombie.py           a holder paused between its check and its write
failover.py         a Redis primary that dies with the grant
partition.py        a holder cut off from the majority
deadlock.py         two locks in opposite order
thundering_herd.py  many callers that poll
redis_server.py     Redis servers for the demos that need them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from leasehold.cli.demo.runner import DemoRunner

Facts: TypeAlias = Mapping[str, Any]


class DemoResult(NamedTuple):
    """The result of one half of a demo. `as_expected`: it showed what it should."""

    as_expected: bool
    text: str
    facts: Facts


class Demo(Protocol):
    """The interface of a demo module of this package."""

    TITLE: str
    FIX: str  # the fix, which only the second half uses
    ROLES: Mapping[str, Callable[..., None]]  # what its processes do, by name

    def run(self, runner: DemoRunner, fixed: bool) -> DemoResult: ...


NAMES: Final = ("zombie", "race", "deadlock", "expired-lease", "thundering-herd", "failover", "partition")


def load_demo(name: str) -> Demo:
    return import_module(f"leasehold.cli.demo.{name.replace('-', '_')}")
