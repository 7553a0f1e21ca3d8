"""What engine authors and users need to prove a lock.

For engine authors: `conformance_tests` runs every case over an engine, through a `Rig` that makes it and hurts it. For
everybody: `faulty` wraps an engine so that it loses, delays and repeats calls. For users' own tests: the fixtures of
the pytest plugin, `expire` and `lose`.

Names are loaded on first use: the pytest plugin comes with every test run where Leasehold is installed, and must cost
those nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# Not on first use, because module and function share a name: importing the module would hide the function.
from leasehold.testing.faulty import (
    Fault,
    Faults,
    cannot_tell,
    delay,
    drop_answer,
    drop_request,
    duplicate,
    each_call,
    faulty,
    repeat_answer,
    repeat_later,
    silently,
)

if TYPE_CHECKING:
    from leasehold.testing.clock import Clock
    from leasehold.testing.conformance.case import CASES, Case, case
    from leasehold.testing.conformance.context import CaseContext
    from leasehold.testing.conformance.engine_driver import EngineDriver
    from leasehold.testing.conformance.rig import RIGS, Absent, ClientPath, Rig, register
    from leasehold.testing.conformance.suite import conformance_tests
    from leasehold.testing.lease_faults import expire, lose

_HOMES = {
    "CASES": "conformance.case",
    "Case": "conformance.case",
    "case": "conformance.case",
    "Clock": "clock",
    "expire": "lease_faults",
    "lose": "lease_faults",
    "RIGS": "conformance.rig",
    "Absent": "conformance.rig",
    "ClientPath": "conformance.rig",
    "Rig": "conformance.rig",
    "register": "conformance.rig",
    "conformance_tests": "conformance.suite",
    "EngineDriver": "conformance.engine_driver",
    "CaseContext": "conformance.context",
}

__all__ = [
    "CASES",
    "RIGS",
    "Absent",
    "Case",
    "CaseContext",
    "ClientPath",
    "Clock",
    "EngineDriver",
    "Fault",
    "Faults",
    "Rig",
    "cannot_tell",
    "case",
    "conformance_tests",
    "delay",
    "drop_answer",
    "drop_request",
    "duplicate",
    "each_call",
    "expire",
    "faulty",
    "lose",
    "register",
    "repeat_answer",
    "repeat_later",
    "silently",
]


def __getattr__(name: str) -> object:
    if home := _HOMES.get(name):
        return getattr(import_module(f"leasehold.testing.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
