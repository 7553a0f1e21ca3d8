"""The MySQL and MariaDB engine: locks in a database, one stored procedure per verb.

verbs.sql, line.sql, tables.sql   the procedures a verb calls, the state machine they decide by, and its tables
alone.sql   taking a name and giving it back while nobody else is near, as mostly happens
plain.py, plain.sql   the verbs as statements, for an account that may not have procedures: locks only, and no wake-ups
schema.py   those files as text, under any database name, and the rights an account needs
engine.py   what the server as met promises, and how a client is told
lane.py     one twin's connection: how it is opened, which procedures the verbs are, how the schema is made
wire.py     one session: requests and answers of the protocol, each with the call's deadline
reach.py    how a session begins: address, PyMySQL's hand-shake, settings
ear.py      wake-ups: a session that sleeps until somebody ends its sleep, and one that is the proof of life
url.py      a mysql:// URL in parts
meaning.py  what errors mean
"""

from leasehold.engines.mysql.engine import inside, open

__all__ = ["inside", "open"]
