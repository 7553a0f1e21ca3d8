"""Pure decisions: no I/O, no clock, no threads, no randomness of its own.

lock_state.py      who may hold a name: the state machine that engines implement
queue_entry.py     one claim in it, and the notifications it causes
timing.py          every duration: trust, renewal, heartbeat, backoff
names.py           names, namespaces, claim ids and their hashes
deadlocks.py       cycles among waiters
once.py            states of a run-once record
record_fields.py   the JSON of records, which another program may have written
ticks.py           numbered ticks of a schedule
conflicts.py       which errors mean that another writer was first
breaker.py         when to stop asking an engine that does not answer
texts.py           texts that other programs wrote, made safe to show
listing.py         how much one `inspect` may list
"""
