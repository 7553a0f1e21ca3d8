"""The PostgreSQL engine: locks in a database, one stored function per verb.

attempt.sql, verbs.sql   the functions a verb calls
line.sql, tables.sql     the state machine they decide by, and its tables
schema.py   those four as text, under any schema name, and the rights a role needs
engine.py   what the server as met promises, and how a client is told
lane.py     one twin's connection: a call at a time, the schema made when it is missing
wire.py     one session, by libpq's calls that never block, each with the call's deadline
reach.py    how a session begins: address, hand-shake, settings
ear.py      wake-ups: one listening session per client, which is also its proof of life
url.py      a postgresql:// URL in parts
meaning.py  what errors mean
"""

from leasehold.engines.postgresql.engine import inside, open

__all__ = ["inside", "open"]
