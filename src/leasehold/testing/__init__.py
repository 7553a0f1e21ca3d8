"""Tools to test an engine, or code that uses locks.

For engine authors: `conformance_tests` runs every case over an engine, through a `Rig` that opens it and injects
faults. For both: `faulty` wraps an engine so that it loses, delays and repeats calls. For tests of your own code: the
fixtures of the pytest plugin, `expire` and `lose`.

Names are imported on first use: pytest loads the plugin in every run where Leasehold is installed, so it must cost
nothing there.

conformance/     the conformance suite: cases, rigs, and the client that runs them in both runtimes
faulty.py        an engine that loses, delays and repeats calls
lease_faults.py  `expire` and `lose`
plugin.py        the fixtures of the pytest plugin
clock.py         a clock that a test advances
exhaustive.py    cancels every await and loses every message, one at a time
network.py       a network that loses, repeats and delays messages, for the simulated runtime
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# Imported eagerly because module and function share a name: a later import of the module would hide the function.
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
