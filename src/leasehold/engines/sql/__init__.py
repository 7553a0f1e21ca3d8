"""What the engines on SQL servers share: the verbs, the rows they are answered by, and turns at a connection."""

from __future__ import annotations

from typing import Final

from leasehold.model import Traits

TRAITS: Final = Traits(
    liveness="ttl",
    clock="engine",
    fencing=True,
    fair=True,
    push=True,
    shared=True,
    max_limit=None,
    slots=True,
    outlives=True,
    told=True,
    min_ttl=0.0,
    ttl_step=0.0,
    survives="restart",
)
