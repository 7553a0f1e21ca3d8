"""What the PostgreSQL and MySQL engines share.

engine.py       the verbs: one stored procedure, one round trip and one transaction each
connection.py   SerialConnection: one call at a time, reconnects, compensates unanswered attempts
session.py      what a session with a server must offer; sockets that are still being drained
listener.py     the wake-up listener: one session per client, read by a thread
connect.py      name resolution in a thread, and how much time each address gets
fifo_lock.py    FifoLock: callers in order, none waits past its deadline
codec.py        rows to holdings, and values to columns
"""

from __future__ import annotations

from typing import Final

from leasehold.model import Traits

TRAITS: Final = Traits(survives="restart")
