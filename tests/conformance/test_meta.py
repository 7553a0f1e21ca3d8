"""No engine is left out: each has a rig, a guarantees page, and a case for every trait it promises."""

import inspect
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path

import pytest

from leasehold.engines import BUILT_IN
from leasehold.model import Traits
from leasehold.runtime.base import step
from leasehold.testing import RIGS, Rig
from leasehold.testing.choosing import WORDS, unexercised
from leasehold.testing.memory_rig import MemoryRig
from leasehold.testing.rig import rig_type
from leasehold.testing.suite import all_cases, made
from leasehold.testing.trial import Trial

PAGES = Path(__file__).parents[2] / "docs" / "guarantees"


def gaps(engines, rigs, pages, cases, traits_of):
    """What is missing, one line each."""
    found = []
    for scheme, module in engines.items():
        engine = module.rpartition(".")[2]  # several schemes may lead to one engine: redis, rediss
        if not (pages / f"{engine}.md").is_file():
            found.append(f"{scheme}:// has no guarantees page {engine}.md")
        mine = {name: rig for name, rig in rigs.items() if engines.get(rig.scheme) == module}
        if not mine:
            found.append(f"{scheme}:// has no rig")
        for name, rig in mine.items():
            found += [f"no case exercises {what} of {name}" for what in unexercised(traits_of(rig), rig, cases)]
    return found


def traits_of(rig: type[Rig]) -> Traits:
    trial = Trial(made(rig), "blocking")
    try:
        return step(trial.traits())
    finally:
        step(trial.close())


def test_no_engine_is_left_out():
    rigs = {name: rig_type(name) for name in RIGS}
    assert gaps(BUILT_IN, rigs, PAGES, all_cases(), traits_of) == []


def test_every_case_says_what_it_shows_and_every_promise_is_shown():
    for case in all_cases():
        assert inspect.iscoroutinefunction(case.run), case.name
        assert case.shows, case.name
    assert {promise for case in all_cases() for promise in case.shows} == {f"E{number}" for number in range(1, 10)}


# ------------------------------------------------------------- the test itself can fail


@dataclass
class World:
    """A whole world without gaps, to plant one in."""

    engines: dict
    rigs: dict
    pages: Path
    cases: list
    traits: Traits

    def gaps(self):
        return gaps(self.engines, self.rigs, self.pages, self.cases, lambda rig: self.traits)


@pytest.fixture
def world(tmp_path):
    (tmp_path / "memory.md").write_text("# memory")
    return World({"memory": "x.memory"}, {"memory": MemoryRig}, tmp_path, all_cases(), traits_of(MemoryRig))


def test_a_world_without_gaps(world):
    assert world.gaps() == []


def test_an_engine_without_a_rig_is_found(world):
    world.engines["other"] = "x.memory"
    assert world.gaps() == []
    world.engines["other"] = "x.other"
    assert world.gaps() == ["other:// has no guarantees page other.md", "other:// has no rig"]


def test_an_engine_without_a_page_is_found(world):
    (world.pages / "memory.md").unlink()
    assert world.gaps() == ["memory:// has no guarantees page memory.md"]


PROMISED = [word for word in WORDS if word not in ("session", "survives-restart", "survives-minority")]


@pytest.mark.parametrize("word", PROMISED)
def test_a_trait_that_no_case_exercises_is_found(world, word):
    world.cases = [case for case in world.cases if word not in case.needs]
    assert f"no case exercises the trait {word!r} of memory" in world.gaps()


def test_a_trait_whose_cases_all_need_what_the_rig_cannot_do_is_found(world):
    world.traits = replace(world.traits, survives="restart")
    assert world.gaps() == ["no case exercises the trait 'survives-restart' of memory"]


def test_a_trait_that_no_word_stands_for_is_found(world):
    more = make_dataclass("Traits", [("telepathic", bool)], bases=(Traits,), frozen=True)
    world.traits = more(**{name: getattr(world.traits, name) for name in Traits.__dataclass_fields__}, telepathic=True)
    assert world.gaps() == ["no case exercises the field 'telepathic' of Traits of memory"]
