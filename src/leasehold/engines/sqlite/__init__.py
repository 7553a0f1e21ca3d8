"""The SQLite engine: locks between the processes of one machine, with nothing but a file.

engine.py          the verbs: one immediate transaction each, retried until the deadline
fast_path.py       acquire and release of an uncontended name: nothing to decide, no queue to load
hand_off.py        release, claim and join of a crowd: the usual case of each, without loading the queue
rows.py            one name's state loaded from rows, decided by core/lock_state.py, written back as differences
connection.py      one engine instance's connection: opened when needed, errors mapped, closed before a fork
location.py        where a file may live and who may use it: paths, permissions, file systems
schema.py          the tables, and what happens to them after a reboot
wakeup_socket.py   wake-ups: a unix datagram to the client whose waiter is next
health.py          whether the file can be written now, and the room that is left
boot_clock.py      the machine's boot clock, and whether two processes share it
"""

from leasehold.engines.sqlite.engine import open

__all__ = ["open"]
