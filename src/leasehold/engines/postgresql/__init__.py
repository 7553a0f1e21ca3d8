"""The PostgreSQL engine: locks in a database, one stored function per verb.

attempt.sql  verbs.sql         the verbs as functions
release_on_commit.sql          a release as part of the application's transaction
lock_state.sql  tables.sql     the state machine that they share, and its tables
hand_off.sql    the usual hand-off of a lock, in fewer statements
schema.py       those files as text under any schema name, and the rights a role needs
engine.py       what the server promises as configured
connection.py   opens connections, creates the schema
session.py      one session, over libpq's non-blocking calls, each with the call's deadline
connect.py      address, handshake, session settings
relay.py        between libpq and the server: bounds what libpq receives
listener.py     wake-ups by LISTEN, and the advisory lock that shows a client is reachable
health.py       the health of each host in the URL
url.py          postgresql:// URLs
errors.py       PostgreSQL's errors as Leasehold's (E9)
"""

from leasehold.engines.postgresql.engine import lease_check_sql, open, release_on_commit_sql

__all__ = ["lease_check_sql", "open", "release_on_commit_sql"]
