"""A crowd at one door: polling, nobody knows whose turn it is; in a line, everybody does."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any, Final

from leasehold.aio import AsyncClient
from leasehold.stories import Outcome
from leasehold.stories.stage import Stage

if TYPE_CHECKING:
    from leasehold.stories.actor import Part

TITLE: Final = "a crowd of pollers at one lock"
CURE: Final = "a fair line: wait=, and nobody asks again before it is woken"

_CROWD: Final = 200
_ARRIVING: Final = 2.0  # seconds, over which they come
_INSIDE: Final = 0.02
_POLL: Final = 0.05
_OUT_OF_BREATH: Final = 0.7  # seconds: a line passes over who does not answer for one to three
_AGAIN: Final = 3
_LATER: Final = 1.0  # who came so much later and was served first has overtaken


def crowd(part: Part) -> None:
    part.say("done", "its crowd has been served", **asyncio.run(_crowd(part)))


async def _crowd(part: Part) -> dict[str, Any]:
    async with AsyncClient(part.url, namespace=part.namespace, holder=part.who) as client:
        lock, served, asked = client.lock("door"), [], [0]

        async def poller() -> None:
            await asyncio.sleep(random.random() * _ARRIVING)  # noqa: S311
            came = time.monotonic()
            while True:
                asked[0] += 1
                if part.cured:
                    lease = await lock.acquire()
                elif (found := await lock.try_acquire()) is None:
                    await asyncio.sleep(_POLL * (0.5 + random.random()))  # noqa: S311
                    continue
                else:
                    lease = found
                served.append((came, time.monotonic()))
                await asyncio.sleep(_INSIDE)
                await lease.release()
                return

        watching = asyncio.create_task(_breath(worst := [0.0]))
        await asyncio.gather(*(poller() for _ in range(part.many)))
        watching.cancel()
    return {"served": served, "asked": asked[0], "stood": worst[0]}


async def _breath(worst: list[float]) -> None:
    """The longest that this process could not run at all."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_POLL)
        worst[0] = max(worst[0], time.monotonic() - before - _POLL)


ROLES: Final = {"crowd": crowd}


def play(stage: Stage, cured: bool) -> Outcome:
    for _ in range(_AGAIN):
        outcome, stood = _played(stage, cured)
        if outcome.seen or stood < _OUT_OF_BREATH:
            break
        stage.tell(f"this machine let one of them stand for {stood:.1f} s, and whoever is silent is passed over: again")
    return outcome


def _played(stage: Stage, cured: bool) -> tuple[Outcome, float]:
    size, people = stage.size or _CROWD, "ABCDE"
    stage.tell(f"{size} come within {_ARRIVING:g} s, and each needs the door for {1000 * _INSIDE:g} ms")
    actors = [stage.start("crowd", who, many=size // len(people), cured=cured) for who in people]
    said = stage.hear(actors, "done")
    served = [one for each in said for one in each["served"]]
    asked = sum(each["asked"] for each in said)
    overtaken = sum(_overtaken(each["served"]) for each in said)
    longest = max(got - came for came, got in served)
    text = f"asked {asked} times for {len(served)}; {overtaken} were overtaken; the longest wait was {longest:.1f} s"
    facts = {"served": len(served), "asked": asked, "overtaken": overtaken, "longest": round(longest, 3)}
    stood: float = max(each["stood"] for each in said)
    return Outcome((overtaken == 0) if cured else overtaken > 0, text, facts), stood


def _overtaken(served: list[tuple[float, float]]) -> int:
    """How many of one process's crowd, in order of service, had their turn after somebody who came much later.

    Of one process alone: what it asks for goes out in order, while another may be late in asking at all.
    """
    count, latest = 0, 0.0
    for came, _ in sorted(served, key=lambda one: one[1]):
        count += latest - came > _LATER
        latest = max(latest, came)
    return count
