"""Processes contend for one name while Redlock nodes are killed and paused; a checker judges their history."""

from __future__ import annotations

import random
import time

import pytest

from harness.rigs.redis import AOF_ALWAYS
from harness.rigs.redlock import RedlockRig
from harness.servers.process import poll
from harness.servers.redlock import RedlockNodes
from leasehold.core.timing import WAITER_TTL
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.contention import check_history, read_events, start_children


def inject_faults(nodes: RedlockNodes, rng: random.Random, end: float) -> int:
    """Kill or pause one or two of five nodes at a time, for more or less than the ttl. Returns the number of faults."""
    fault_count = 0
    while time.monotonic() < end:
        chosen_nodes = rng.sample(nodes.all, rng.choice([1, 2]))
        faults = [rng.choice(["kill", "pause"]) for _ in chosen_nodes]
        for node, fault in zip(chosen_nodes, faults, strict=True):
            getattr(node, fault)()
        resume_at = time.monotonic() + rng.choice([0.1, 0.5, 2.0])
        while time.monotonic() < resume_at:
            time.sleep(0.02)
        for node, fault in zip(chosen_nodes, faults, strict=True):
            node.start() if fault == "kill" else node.resume()
            fault_count += 1
    return fault_count


def contend(child, seconds: float, seed: int, processes: int) -> None:
    rig_or_skip(RedlockRig)
    nodes = RedlockNodes(*AOF_ALWAYS)  # nodes that never lose data: then two claims never hold the name
    try:
        children = start_children(child, nodes.url, seconds, seed, processes)
        fault_count = inject_faults(nodes, random.Random(seed), time.monotonic() + seconds)
        grants = check_history(read_events(children))
        assert grants > 10 * seconds / 5
        if seconds > 10:  # a queued claim whose release a node missed expires after three heartbeat intervals
            poll(lambda: not nodes.remaining_keys(), 3 * WAITER_TTL + 5, lambda: "no key is left")
        print(f"{grants} grants, {fault_count} nodes hurt, {processes} processes, {seconds} s")
    finally:
        nodes.close()


@pytest.mark.extended
def test_history_is_valid_while_nodes_are_killed_and_paused(child) -> None:
    contend(child, 5, seed=1, processes=4)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(2, 8))
def test_history_is_valid_over_long_runs_with_node_faults(child, seed) -> None:
    contend(child, 40, seed, processes=6)
