"""What a conformance case is: a coroutine function, what it needs from an engine and its rig, and what it tests.

Cases are chosen by traits, so a skip always names a trait or an ability of the rig. The names are those of `require=`,
and four more for traits that an engine promises but a user cannot require.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from leasehold.config import REQUIREMENTS
from leasehold.model import Traits
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.rig import Rig

Run: TypeAlias = Callable[[CaseContext], Awaitable[None]]


class Requirement(NamedTuple):
    """Which field of `Traits` makes a promise, and for which values."""

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
    "rounding": Requirement("min_ttl", lambda _: True),  # with ttl_step; every engine declares its rounding
}
ROUNDING_FIELD: Final = "ttl_step"
_DISRUPTIVE: Final = frozenset({"cut", "pause", "kill", "restart", "lose_minority"})  # abilities of a rig


@dataclass(frozen=True)
class Case:
    run: Run
    needs: frozenset[str]  # requirements that the engine's traits must meet
    rig: frozenset[str]  # abilities that the rig must have
    shows: tuple[str, ...]  # the rules of the contract that it tests, as E-numbers
    slow: bool  # takes more than a few seconds unless the rig can advance the clock
    expires: bool  # lets the ttl of a claim or client pass that states none

    @property
    def name(self) -> str:
        return getattr(self.run, "__name__", repr(self.run))

    @property
    def lets_calls_fail(self) -> bool:
        """Whether calls without an answer must end within seconds. In all other cases every call is answered."""
        return not _DISRUPTIVE.isdisjoint(self.rig)

    @property
    def lets_ttls_pass(self) -> bool:
        """Whether ttls must end within seconds. In all other cases they must not end at all."""
        return self.expires or self.slow or self.lets_calls_fail

    def unmet_requirement(self, traits: Traits, rig: type[Rig]) -> str | None:
        """Why this case cannot run there: the missing trait or ability; None: it can run."""
        for requirement in sorted(self.needs):
            if not CASE_REQUIREMENTS[requirement].promised(traits):
                return f"the engine does not promise the trait {requirement!r}"
        return self.missing_ability(rig)

    def missing_ability(self, rig: type[Rig]) -> str | None:
        """The same for abilities only, which are known without opening the engine."""
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
    expires: bool = False,
    into: dict[str, Case] = CASES,
) -> Callable[[Run], Run]:
    """Register a coroutine function as a case. It takes one argument, the `CaseContext`, and names the case."""

    def enter(run: Run) -> Run:
        new = Case(run, frozenset(needs), frozenset(rig), shows, slow, expires)
        unknown = [requirement for requirement in new.needs if requirement not in CASE_REQUIREMENTS]
        unknown += [ability for ability in new.rig if not hasattr(Rig, f"can_{ability}")]
        assert not unknown, f"{new.name} needs unknown traits or abilities: {unknown}"
        assert new.name not in into, f"two cases have the name {new.name}"
        into[new.name] = new
        return run

    return enter


def unexercised_promises(traits: Traits, rig: type[Rig], cases: Collection[Case]) -> list[str]:
    """Promises of an engine that no case tests with this rig."""
    chosen = [case for case in cases if case.unmet_requirement(traits, rig) is None]
    tested = {requirement for case in chosen for requirement in case.needs}
    found = [
        f"the trait {requirement!r}"
        for requirement, (_, promised) in CASE_REQUIREMENTS.items()
        if promised(traits) and requirement not in tested
    ]
    known = {requirement.field for requirement in CASE_REQUIREMENTS.values()} | {ROUNDING_FIELD}
    return found + [f"the field {field!r} of Traits" for field in traits._fields if field not in known]
