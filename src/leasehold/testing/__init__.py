"""What engine authors and users need to prove a lock.

For engine authors: `conformance` runs every case over an engine, through a `Rig` that makes it and hurts it. For
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
    from leasehold.testing.choosing import CASES, Case, case
    from leasehold.testing.clock import Clock
    from leasehold.testing.fate import expire, lose
    from leasehold.testing.rig import RIGS, Absent, Machine, Rig, register
    from leasehold.testing.seat import Seat
    from leasehold.testing.suite import conformance
    from leasehold.testing.trial import Trial

_HOMES = {
    "CASES": "choosing",
    "Case": "choosing",
    "case": "choosing",
    "Clock": "clock",
    "expire": "fate",
    "lose": "fate",
    "RIGS": "rig",
    "Absent": "rig",
    "Machine": "rig",
    "Rig": "rig",
    "register": "rig",
    "conformance": "suite",
    "Seat": "seat",
    "Trial": "trial",
}

__all__ = [
    "CASES",
    "RIGS",
    "Absent",
    "Case",
    "Clock",
    "Fault",
    "Faults",
    "Machine",
    "Rig",
    "Seat",
    "Trial",
    "cannot_tell",
    "case",
    "conformance",
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
