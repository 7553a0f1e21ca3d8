"""Processes contend for one name while nodes of the redlock are killed and paused; their histories are judged."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from leasehold.core.timing import BEAT
from leasehold.testing.checker import check
from leasehold.testing.history import History
from leasehold.testing.redis_rig import ALWAYS
from leasehold.testing.redlock_rig import RedlockRig
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.redlock import Nodes
from leasehold.testing.suite import made

SCRIPT = Path(__file__).with_name("redlock_child.py")


def judge(events: list[tuple[float, int, str, int | None]]) -> int:
    """Told to the checker in the order of the machine's one clock. Gives the number of grants."""
    clock = [0.0]
    history = History(lambda: clock[0])
    asked, grants = {}, 0
    for at, who, what, *more in sorted(events, key=lambda event: event[0]):
        clock[0] = at
        if what == "asks":
            asked[who] = history.invoke(str(who), "acquire", "hot")
        elif what == "fails":
            asked[who].unknown(more[0])  # of several that come at once all may be refused, and what they got given back
        elif what == "holds":
            asked[who].ok(token=more[0])
            grants += 1
        elif what == "lost":
            history.lost(str(who), "hot", more[0], at=more[1])
        else:
            history.invoke(str(who), "release", "hot", token=more[0]).unknown("not waited for")
    verdict = check(history)
    assert verdict.result == "valid", verdict
    return grants


def hurt(nodes: Nodes, chance: random.Random, end: float) -> int:
    """At most two of the five at a time, for longer or shorter than the ttl."""
    done = 0
    while time.monotonic() < end:
        which = chance.sample(nodes.all, chance.choice([1, 2]))
        how = [chance.choice(["kill", "pause"]) for _ in which]
        for node, each in zip(which, how, strict=True):
            getattr(node, each)()
        until = time.monotonic() + chance.choice([0.1, 0.5, 2.0])
        while time.monotonic() < until:
            time.sleep(0.02)
        for node, each in zip(which, how, strict=True):
            node.start() if each == "kill" else node.resume()
            done += 1
    return done


def contend(child, seconds: float, seed: int, processes: int) -> None:
    made(RedlockRig)
    nodes = Nodes(*ALWAYS)  # they do not forget: then there are never two
    try:
        kinds = ["blocking", "asyncio"]
        crowd = [
            child(nodes.url, "hot", seconds, seed * 100 + number, kinds[number % 2], script=SCRIPT)
            for number in range(processes)
        ]
        hurts = hurt(nodes, random.Random(seed), time.monotonic() + seconds)
        events = [(at, number, *what) for number, one in enumerate(crowd) for at, *what in one.heard()]
        grants = judge(events)
        tokens = [what[0] for _, _, kind, *what in sorted(events, key=lambda event: event[0]) if kind == "holds"]
        assert tokens == sorted(set(tokens)), "in the order of the grants"
        assert grants > 10 * seconds / 5
        if seconds > 10:  # a place that a node did not see given up is over after three beats
            poll(lambda: not nodes.left(), 3 * BEAT + 5, lambda: "nothing is left")
        print(f"{grants} grants, {hurts} nodes hurt, {processes} processes, {seconds} s")
    finally:
        nodes.close()


def test_nodes_are_killed_and_paused_while_processes_contend(child) -> None:
    contend(child, 5, seed=1, processes=4)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(2, 8))
def test_the_same_for_long(child, seed) -> None:
    contend(child, 40, seed, processes=6)
