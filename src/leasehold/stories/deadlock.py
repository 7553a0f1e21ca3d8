"""Two processes take two locks in two orders, and wait for each other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from leasehold.errors import NotAcquired
from leasehold.stories import Outcome
from leasehold.stories.stage import Stage

if TYPE_CHECKING:
    from leasehold.stories.actor import Part

TITLE: Final = "two transfers lock two accounts in two orders"
CURE: Final = "one order for everybody: names are locked sorted"

_PATIENCE: Final = 1.5  # without a bound they would wait for ever: each lease is renewed


def transfer(part: Part) -> None:
    client = part.client()
    first, second = part.names
    lock = client.lock(first).acquire(wait=30)
    part.say("one", f"holds {first}, wants {second}")
    part.cue()
    try:
        other = client.lock(second).acquire(wait=part.patience)
        part.say("done", f"holds {second} too: done", stuck=False)
        time.sleep(0.1)
        other.release()
    except NotAcquired as busy:
        part.say("done", f"gives up: {busy}", stuck=True)
        part.cue()  # nobody lets go before both are seen to be stuck
    lock.release()
    client.close()


ROLES: Final = {"transfer": transfer}


def play(stage: Stage, cured: bool) -> Outcome:
    wants = {"A": ["account/1", "account/2"], "B": ["account/2", "account/1"]}
    patience = 30.0 if cured else _PATIENCE
    orders = {who: sorted(names) if cured else names for who, names in wants.items()}
    actors = [stage.start("transfer", who, names=names, patience=patience) for who, names in orders.items()]
    if not cured:  # with one order, the other stands in line for its first lock
        stage.hear(actors, "one")
    for actor in actors:
        actor.go()
    stuck = [said["stuck"] for said in stage.hear(actors, "done")]
    for actor in actors:
        actor.go()
    text = "both wait for each other" if all(stuck) else "both are through" if not any(stuck) else "one is through"
    return Outcome(not any(stuck) if cured else all(stuck), text, {"stuck": sum(stuck)})
