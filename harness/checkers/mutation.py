"""A suite that cannot fail proves nothing: plant a bug in an engine, and check that the conformance cases detect it.

planted_bugs = PlantedBugs("memory")

@planted_bugs.bug("E1", "lock_has_at_most_one_holder")
def every_claim_is_admitted(patch):
    patch(LockState, "_can_admit", lambda self, mode: True)

test_a_planted_bug_is_caught = planted_bugs.test()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import pytest

from leasehold.errors import LeaseholdError
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.rig import RUNTIMES, RuntimeName, rig_type
from leasehold.testing.conformance.suite import all_cases, rig_or_skip, run_case

Patch: TypeAlias = Callable[[object, str, object], None]  # pytest's monkeypatch.setattr
Plant: TypeAlias = Callable[[Patch], None]

_TIMEOUT: Final = 0.5  # seconds: an effect that is still missing then is missing because of the bug
_FAILURES: Final = (AssertionError, pytest.fail.Exception, LeaseholdError, OSError)


class Bug(NamedTuple):
    plant: Plant
    promise: str  # the E-number of the contract that it breaks
    caught_by: tuple[str, ...]


class PlantedBugs:
    """Bugs to plant in the engine of one rig."""

    def __init__(self, rig: str) -> None:
        self._rig = rig_type(rig)
        self.bugs: dict[str, Bug] = {}

    def bug(self, promise: str, *caught_by: str) -> Callable[[Plant], Plant]:
        """Register a function that plants a bug, the promise it breaks, and the cases that must each detect it."""

        def enter(plant: Plant) -> Plant:
            self.bugs[plant.__name__] = Bug(plant, promise, caught_by)
            return plant

        return enter

    def test(self) -> Callable[[str, str, RuntimeName, pytest.MonkeyPatch], None]:
        """A test function over all bugs, their cases, and both runtimes."""
        cases = {case.name: case for case in all_cases()}

        @pytest.mark.parametrize("mode", RUNTIMES)
        @pytest.mark.parametrize(("bug", "case"), [(name, case) for name in self.bugs for case in self.bugs[name][2]])
        def test_a_planted_bug_is_caught(
            bug: str, case: str, mode: RuntimeName, monkeypatch: pytest.MonkeyPatch
        ) -> None:
            self.bugs[bug].plant(monkeypatch.setattr)
            with pytest.raises(_FAILURES):
                run_case(cases[case], CaseContext(rig_or_skip(self._rig), mode, timeout=_TIMEOUT))

        return test_a_planted_bug_is_caught
