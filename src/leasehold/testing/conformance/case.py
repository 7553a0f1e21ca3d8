"""What a conformance case is: a coroutine function, what it needs of an engine and its rig, and what it shows.

Cases are chosen by traits, so that a skip always names a trait, or an ability of the rig. Words are those of
`require=`, and four more for the traits that a user does not require but an engine promises all the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import Final, NamedTuple, TypeAlias

from leasehold.config import REQUIREMENTS
from leasehold.model import Traits
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.rig import Rig

Run: TypeAlias = Callable[[CaseContext], Awaitable[None]]


class Requirement(NamedTuple):
    """A promise by its short name: which field of `Traits` makes it, and when."""

    field: str
    promised: Callable[[Traits], bool]


_FIELDS: Final = {
    "break-notice": "break_notice",
    "engine-clock": "clock",
    "survives-restart": "survives",
    "survives-minority": "survives",
}

CASE_REQUIREMENTS: Final[dict[str, Requirement]] = {
    **{
        requirement: Requirement(_FIELDS.get(requirement, requirement), promised)
        for requirement, promised in REQUIREMENTS.items()
    },
    "semaphore": Requirement("max_limit", lambda traits: traits.max_limit is None or traits.max_limit > 1),
    "ttl": Requirement("liveness", lambda traits: traits.liveness == "ttl"),
    "session": Requirement("liveness", lambda traits: traits.liveness == "session"),
    "rounding": Requirement("min_ttl", lambda _: True),  # with ttl_step: what becomes of a ttl is always promised
}
ROUNDING_FIELD: Final = "ttl_step"


@dataclass(frozen=True)
class Case:
    run: Run
    needs: frozenset[str]  # words that the engine's traits must promise
    rig: frozenset[str]  # abilities that the rig must have
    shows: tuple[str, ...]  # the numbers of the contract
    slow: bool  # lets more than a few seconds pass

    @property
    def name(self) -> str:
        return getattr(self.run, "__name__", repr(self.run))

    def unmet_requirement(self, traits: Traits, rig: type[Rig]) -> str | None:
        """Why this case cannot run there, by the name of what is missing; None: it can."""
        for requirement in sorted(self.needs):
            if not CASE_REQUIREMENTS[requirement].promised(traits):
                return f"the engine does not promise the trait {requirement!r}"
        return self.missing_ability(rig)

    def missing_ability(self, rig: type[Rig]) -> str | None:
        """The same, as far as it can be known without the engine."""
        for ability in sorted(self.rig):
            if not rig.can(ability):
                return f"the rig does not have the ability {ability!r}"
        return None


CASES: Final[dict[str, Case]] = {}


def case(
    *,
    needs: Iterable[str] = (),
    rig: Iterable[str] = (),
    shows: tuple[str, ...] = (),
    slow: bool = False,
    into: dict[str, Case] = CASES,
) -> Callable[[Run], Run]:
    """Enter a coroutine function of one argument, the `CaseContext`, among the cases; its name is the case's name."""

    def enter(run: Run) -> Run:
        new = Case(run, frozenset(needs), frozenset(rig), shows, slow)
        unknown = [requirement for requirement in new.needs if requirement not in CASE_REQUIREMENTS]
        unknown += [ability for ability in new.rig if not hasattr(Rig, f"can_{ability}")]
        assert not unknown, f"{new.name} needs what no engine or rig could declare: {unknown}"
        assert new.name not in into, f"two cases are called {new.name}"
        into[new.name] = new
        return run

    return enter


def unexercised_promises(traits: Traits, rig: type[Rig], cases: Collection[Case]) -> list[str]:
    """Promises of an engine that no case puts to the test there."""
    chosen = [case for case in cases if case.unmet_requirement(traits, rig) is None]
    tested = {requirement for case in chosen for requirement in case.needs}
    found = [
        f"the trait {requirement!r}"
        for requirement, (_, promised) in CASE_REQUIREMENTS.items()
        if promised(traits) and requirement not in tested
    ]
    known = {requirement.field for requirement in CASE_REQUIREMENTS.values()} | {ROUNDING_FIELD}
    return found + [f"the field {field.name!r} of Traits" for field in fields(traits) if field.name not in known]
