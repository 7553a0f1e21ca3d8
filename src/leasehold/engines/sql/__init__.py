"""What the PostgreSQL and MySQL engines share.

engine.py       the verbs: one stored procedure each, one trip, committed by itself
connection.py   SerialConnection: one call at a time, reconnects, takes back unanswered calls
session.py      what a session with a server must offer; sockets that are still being drained
listener.py     the wake-up listener: one session per client, read by a thread
connect.py      name resolution by a thread, and how much time each address gets
fifo_lock.py    FifoLock: callers in order, none waits past its deadline
codec.py        rows to replies and holdings, and back
"""

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
    break_notice=True,
    min_ttl=0.0,
    ttl_step=0.0,
    survives="restart",
)
