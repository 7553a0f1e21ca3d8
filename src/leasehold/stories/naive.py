"""Processes that read, think and write, each for itself: updates are lost."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from leasehold.stories import Outcome
from leasehold.stories.stage import Stage

if TYPE_CHECKING:
    from leasehold.stories.actor import Part

TITLE: Final = "four processes add to one number without a lock"
CURE: Final = 'a lock: with client.lock("counter")'

_ROUNDS: Final = 25
_THINKS: Final = 0.002


def adder(part: Part) -> None:
    client = part.client()
    part.say("ready")
    part.cue()
    for _ in range(part.rounds):
        with client.lock("counter") if part.cured else nullcontext():
            with open(part.file) as file:
                count = int(file.read() or 0)
            time.sleep(_THINKS)
            with open(f"{part.file}.{part.who}", "w") as file:
                file.write(str(count + 1))
            os.replace(f"{part.file}.{part.who}", part.file)  # so that nobody reads half a number
    part.say("done", f"added one {part.rounds} times")
    client.close()


ROLES: Final = {"adder": adder}


def play(stage: Stage, cured: bool) -> Outcome:
    path = stage.path(f"counter-{cured}")
    with open(path, "w") as file:
        file.write("0")
    actors = [stage.start("adder", who, file=path, rounds=_ROUNDS, cured=cured) for who in "ABCD"]
    stage.hear(actors, "ready")
    for each in actors:
        each.go()
    stage.hear(actors, "done")
    with open(path) as file:
        counted = int(file.read())
    added = _ROUNDS * len(actors)
    seen = (counted == added) if cured else (counted < added)
    text = f"{added} were added, the number says {counted}: {added - counted} lost"
    return Outcome(seen, text, {"added": added, "counted": counted, "lost": added - counted})
