"""What the PostgreSQL and MySQL engines share.

engine.py       the verbs: one stored procedure, one round trip and one transaction each
connection.py   SerialConnection: one call at a time, reconnects, compensates unanswered attempts
session.py      the life of a session with a server, and what each kind of session must offer
listener.py     the wake-up listener: one session per client, read by a thread
connect.py      name resolution in a thread, and how much time each address gets
fair_mutex.py   FairMutex: one caller at a time, in order of arrival, none beyond its deadline
abandoned.py    sessions whose callers gave up: compensated, then drained
codec.py        rows to holdings, and values to columns
"""

from __future__ import annotations

from typing import Final

from leasehold.model import Traits

TRAITS: Final = Traits(survives="restart")
