"""The SQLite engine: locks between the processes of one machine, with nothing but a file.

engine.py  the verbs: one immediate transaction each, retried until the deadline
idle.py    the two verbs on a name nobody else wants: nothing to decide, and no line to bring in
rows.py    one name's line brought in from rows, decided by core/admission.py, written back as differences
file.py    one twin's connection: opened when needed, its errors mapped, closed before a fork
place.py   where a file may live and who may use it: paths, permissions, file systems, schema, boots
mail.py    wake-ups: a unix datagram to the client whose turn it is
host.py    this machine: its clock, and the ids that tell whether two processes share that clock
"""

from leasehold.engines.sqlite.engine import open

__all__ = ["open"]
