"""What is decided by compare-and-set on a record instead of a lock: run-once, schedules, state machines.

store.py           the Store protocol, S1 to S4
access.py          reads and writes with deadlines, resolves lost answers; opens a client's stores
once.py            idempotent execution by key
schedule.py        a job once per tick in the whole fleet
cron.py            the ticks of a cron expression in a time zone
state_machine.py   a named status that moves by atomic steps
optimistic.py      read, decide, write; retried after a conflict
value.py           a versioned value, for `leasehold.versioned`
stores/            one module per database
"""
