"""The MySQL and MariaDB engine: locks in a database, one stored procedure per verb.

verbs.sql  lock_state.sql  tables.sql   the procedures, the state machine that they share, and its tables
release_on_commit.sql a release as part of the application's transaction
fast_path.sql         attempt and release of an uncontended name
hand_off.sql          the usual hand-off of a plain lock
no_procedures.py  no_procedures.sql
                      the verbs as statements, for accounts that may not create procedures: locks only, no wake-ups
schema.py       those files as text under any database name, and the rights an account needs
engine.py       what the server promises as configured
connection.py   opens connections, creates the schema
session.py      one session: requests and replies of the protocol, each with the call's deadline
driver.py       PyMySQL's connections, safe from hosts that pose as the server; records use them, too
connect.py      address, PyMySQL's handshake, session settings
listener.py     wake-ups by KILL QUERY on a sleeping session
health.py       the health of the server
url.py          mysql:// URLs
errors.py       MySQL's and PyMySQL's errors as Leasehold's (E9)
"""

from leasehold.engines.mysql.engine import lease_check_sql, open, release_on_commit_sql

__all__ = ["lease_check_sql", "open", "release_on_commit_sql"]
