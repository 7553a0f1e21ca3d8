"""What a long run leaves behind: memory and descriptors of a contender that lives through it, claims on the servers."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from harness.lab.contender import NAME
from harness.servers.process import poll
from leasehold import Client, LeaseholdError

_MAX_GROWTH: Final = 1.05
_CLAIM_SECONDS: Final = 30.0  # until the claims of killed contenders have expired, in the queue as well
_WARM_UP: Final = 0.2  # the share of the samples before all code has run once


class Sample(NamedTuple):
    memory: int  # bytes
    descriptors: int


def sample(pid: int) -> Sample:
    with open(f"/proc/{pid}/statm") as statm:
        pages = int(statm.read().split()[1])
    return Sample(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")))


class Residue(NamedTuple):
    """`memory` and `descriptors`: before and after, for people."""

    claims: int
    memory: str
    descriptors: str
    violations: list[str]


def residue(url: str, samples: list[Sample]) -> Residue:
    """Judge what is left when all contenders have ended."""
    warm = samples[int(_WARM_UP * len(samples)) :]
    memory = [each.memory / 1e6 for each in warm]
    descriptors = [each.descriptors for each in warm]
    claims = claims_left(url)
    violations = [f"{claims} claims are left, though all contenders have ended"] if claims else []
    for what, (first, *_, last) in (("memory", memory), ("descriptors", descriptors)):
        if last > _MAX_GROWTH * first + 1:
            violations.append(f"the {what} of a contender grew from {first:.1f} to {last:.1f}")
    texts = f"{memory[0]:.1f} to {memory[-1]:.1f} MB", f"{descriptors[0]} to {descriptors[-1]}"
    return Residue(claims, *texts, violations)


def claims_left(url: str) -> int:
    count = 0

    def none_left() -> bool:
        nonlocal count
        try:
            count = len(client.inspect(NAME, exact=True))
        except LeaseholdError:  # the server has just come back
            count = -1
        return count == 0

    with Client(url) as client:
        try:
            poll(none_left, _CLAIM_SECONDS, str)
        except TimeoutError:
            return count
    return 0
