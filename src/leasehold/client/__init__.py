"""What the blocking and the asyncio API share, written once over the `Engine` protocol.

base.py            BaseClient: options, engine, inspect, break, close, fork hook
core.py            ClientCore: what all leases of a client share; outlives the client while a lease lives
acquire.py         the only attempt-and-wait loop
attempt_limit.py   how many attempts of a client are under way at a time
lock.py            BaseLock: locks, read and write locks, semaphores; reentrancy and self-deadlock
lease.py           BaseLease: state, validity, renewal answers, release, loss
watchdog.py        the background renewer: heartbeats, renewals, pending releases
held_locks.py      which `with` blocks hold what, per thread or task
breaker.py         the circuit breaker: an engine that does not answer is asked once a second
callbacks.py       the thread that runs callbacks and event hooks
decorator.py       `@client.locked`: lock names from arguments, the `lease` parameter
lease_document.py  a lease as JSON, for another process
deadlock_search.py  cycles found while a caller waits: `on_deadlock="raise"`
any_of.py          one name of several, in all their queues at once
multilock.py       several locks, all or nothing
election.py        leader election
"""
