"""The conformance suite, as an engine author uses it in a test file:

    from leasehold.testing import conformance_tests

    test_conformance = conformance_tests("memory")

One test per case and runtime, called `memory-blocking-<case>` and `memory-asyncio-<case>`. A case is skipped if it
needs a trait that the engine does not promise, or an ability that its rig does not have; the skip names it. An absent
server is a skip too, but a failure if `$CI` is set, where a skip would go unnoticed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable

import pytest

from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.case import CASES, Case
from leasehold.testing.conformance.context import SHORT_CALL, CaseContext
from leasehold.testing.conformance.rig import RUNTIMES, Absent, Rig, RuntimeName, rig_type

if "leasehold.testing.conformance.cases" not in sys.modules:
    pytest.register_assert_rewrite("leasehold.testing.conformance.cases")  # for readable failures


class Skipped(Exception):
    """This case cannot run on this engine; names the missing trait or ability."""


def run_case(case: Case, trial: CaseContext) -> None:
    """Run one case, on this thread or in a new event loop. Raises what the case raises, or `Skipped`."""
    if case.lets_ttls_pass:
        trial.ttl = trial.rig.ttl
    if case.lets_calls_fail:
        trial.call_timeout = SHORT_CALL
    if trial.mode == "blocking":
        run_sync(_run(case, trial))
    else:
        asyncio.run(_run(case, trial))


async def _run(case: Case, trial: CaseContext) -> None:
    try:
        if why := case.unmet_requirement(await trial.traits(), type(trial.rig)):
            raise Skipped(why)
        await case.run(trial)
    finally:
        await trial.close()


def all_cases() -> list[Case]:
    import leasehold.testing.conformance.cases  # registers them  # noqa: F401

    return list(CASES.values())


def conformance_tests(
    rig: str | type[Rig], *, name: str | None = None, cases: Iterable[Case] | None = None
) -> Callable[[Case, RuntimeName], None]:
    """A test function over all cases and both runtimes. `rig` is a registered name or a `Rig` class of your own."""
    rig_class = rig_type(rig) if isinstance(rig, str) else rig
    label = name or (rig if isinstance(rig, str) else rig_class.scheme)
    chosen = list(all_cases() if cases is None else cases)
    parameters = [
        pytest.param(case, mode, id=f"{label}-{mode}-{case.name}", marks=_pytest_marks(case, rig_class))
        for mode in RUNTIMES
        for case in chosen
    ]

    @pytest.mark.parametrize(("case", "mode"), parameters)
    def test_conformance(case: Case, mode: RuntimeName) -> None:
        try:
            run_case(case, CaseContext(rig_or_skip(rig_class), mode))
        except Skipped as why:
            pytest.skip(f"{label}: {why}")

    return test_conformance


def rig_or_skip(rig_class: type[Rig]) -> Rig:
    """A rig; if its software is absent, a skip that names it, or a failure in CI."""
    try:
        return rig_class()
    except Absent as absent:
        if os.environ.get("CI"):
            pytest.fail(f"{rig_class.scheme}: {absent}")
        pytest.skip(f"{rig_class.scheme}: {absent}")


def _pytest_marks(case: Case, rig: type[Rig]) -> list[pytest.MarkDecorator]:
    """Slow cases are quick if the rig can advance the clock; otherwise they belong to the long fault runs. So do cases
    that also run on the engine's main rig."""
    if case.missing_ability(rig):
        return [pytest.mark.skip(reason=f"{rig.scheme}: {case.missing_ability(rig)}")]
    if (main := rig.main_rig) and case.missing_ability(main) is None and not _is_long(case, main):
        return [pytest.mark.faults]
    return [pytest.mark.faults] if _is_long(case, rig) else []


def _is_long(case: Case, rig: type[Rig]) -> bool:
    return case.slow and not rig.can_advance_clock
