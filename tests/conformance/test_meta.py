"""Every engine has a rig, a guarantees page, and a case for each trait it promises."""

import inspect
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest

from leasehold.engines import BUILT_IN
from leasehold.model import Traits
from leasehold.runtime.base import run_sync
from leasehold.testing import RIGS, Rig
from leasehold.testing.conformance.case import CASE_REQUIREMENTS, unexercised_promises
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.memory_rig import MemoryRig
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import all_cases, rig_or_skip

PAGES = Path(__file__).parents[2] / "docs" / "guarantees"


def gaps(engines, rigs, pages, cases, traits_of):
    """Describe what is missing, one line each."""
    found = []
    for scheme, module in engines.items():
        engine = module.rpartition(".")[2]  # several schemes may share one engine: redis, rediss
        engine = {"remote": "server"}.get(engine, engine)  # a page for servers, whose client is the remote engine
        if not (pages / f"{engine}.md").is_file():
            found.append(f"{scheme}:// has no guarantees page {engine}.md")
        engine_rigs = {name: rig for name, rig in rigs.items() if engines.get(rig.scheme) == module}
        if not engine_rigs:
            found.append(f"{scheme}:// has no rig")
        for name, rig in engine_rigs.items():
            found += [
                f"no case exercises {what} of {name}" for what in unexercised_promises(traits_of(rig), rig, cases)
            ]
    return found


def traits_of(rig: type[Rig]) -> Traits:
    context = CaseContext(rig_or_skip(rig), "blocking")
    try:
        return run_sync(context.traits())
    finally:
        run_sync(context.close())


@pytest.mark.extended  # it starts the servers of every rig
def test_every_engine_has_rig_guarantees_page_and_trait_cases():
    rigs = {name: rig_type(name) for name in RIGS}
    assert gaps(BUILT_IN, rigs, PAGES, all_cases(), traits_of) == []


def test_every_case_names_promises_and_every_promise_has_a_case():
    for case in all_cases():
        assert inspect.iscoroutinefunction(case.run), case.name
        assert case.shows, case.name
    assert {promise for case in all_cases() for promise in case.shows} == {f"E{number}" for number in range(1, 10)}


# ------------------------------------------------------------- the test itself can fail


@dataclass
class Inventory:
    """A complete inventory without gaps, in which a test plants one."""

    engines: dict
    rigs: dict
    pages: Path
    cases: list
    traits: Traits

    def gaps(self):
        return gaps(self.engines, self.rigs, self.pages, self.cases, lambda rig: self.traits)


@pytest.fixture
def inventory(tmp_path):
    (tmp_path / "memory.md").write_text("# memory")
    return Inventory({"memory": "x.memory"}, {"memory": MemoryRig}, tmp_path, all_cases(), traits_of(MemoryRig))


def test_complete_inventory_has_no_gaps(inventory):
    assert inventory.gaps() == []


def test_gaps_names_engine_without_rig(inventory):
    inventory.engines["other"] = "x.memory"
    assert inventory.gaps() == []
    inventory.engines["other"] = "x.other"
    assert inventory.gaps() == ["other:// has no guarantees page other.md", "other:// has no rig"]


def test_gaps_names_engine_without_guarantees_page(inventory):
    (inventory.pages / "memory.md").unlink()
    assert inventory.gaps() == ["memory:// has no guarantees page memory.md"]


MEMORY_TRAITS = [
    requirement
    for requirement in CASE_REQUIREMENTS
    if requirement not in ("session", "survives-restart", "survives-minority")
]


@pytest.mark.parametrize("requirement", MEMORY_TRAITS)
def test_gaps_names_trait_that_no_case_exercises(inventory, requirement):
    inventory.cases = [case for case in inventory.cases if requirement not in case.needs]
    assert f"no case exercises the trait {requirement!r} of memory" in inventory.gaps()


def test_gaps_names_trait_whose_cases_the_rig_cannot_run(inventory):
    inventory.traits = inventory.traits._replace(survives="restart")
    assert inventory.gaps() == ["no case exercises the trait 'survives-restart' of memory"]


def test_gaps_names_traits_field_without_requirement(inventory):
    extended_traits = namedtuple("Traits", [*Traits._fields, "telepathic"])
    inventory.traits = extended_traits(*inventory.traits, telepathic=True)
    assert inventory.gaps() == ["no case exercises the field 'telepathic' of Traits of memory"]
