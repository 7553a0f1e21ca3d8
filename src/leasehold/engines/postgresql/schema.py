"""The schema as text: tables, the state machine, and the verbs, under any schema name.

The files are plain SQL for a schema called "leasehold"; `text` replaces that identifier by another name. Everything may
be run again: tables are kept, and functions are replaced by equal ones. Function names contain a version: a newer
schema adds its own functions, and clients of both versions work on the same tables during a roll-out.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from leasehold.errors import ConfigError

VERSION: Final = 1
DEFAULT_NAME: Final = "leasehold"

_PARTS: Final = ("tables.sql", "lock_state.sql", "hand_off.sql", "attempt.sql", "release_on_commit.sql", "verbs.sql")
_MAX_NAME_BYTES: Final = 63  # bytes; PostgreSQL cuts off the rest
_QUOTE: Final = "$lh$"  # delimits the function bodies

# What a role that uses locks must be allowed to do, and nothing else. The others are for operators.
_LOCK_VERBS: Final = ("attempt", "renew", "heartbeat", "release", "decline", "check", "release_on_commit")
_OPERATOR_VERBS: Final = ("inspect", "break", "set_limit")


def validate_name(schema: str) -> str:
    """The name, if PostgreSQL accepts it for a schema; else raises ValueError."""
    if not schema or len(schema.encode()) > _MAX_NAME_BYTES or "\0" in schema or _QUOTE in schema:
        raise ValueError(f"a schema name must have 1 to {_MAX_NAME_BYTES} bytes, without NUL and {_QUOTE}")
    return schema


def quote_identifier(schema: str) -> str:
    return '"' + schema.replace('"', '""') + '"'


def text(schema: str = DEFAULT_NAME) -> str:
    """The statements that create or upgrade the schema."""
    folder = files(__package__)
    parts = [(folder / part).read_text(encoding="utf-8") for part in _PARTS]
    return "\n".join(parts).replace('"leasehold"', quote_identifier(schema))


def grants(role: str, schema: str = DEFAULT_NAME, *, operator: bool = True) -> str:
    """The statements that let a role use locks, and with `operator` inspect and break those of others and set limits
    of semaphores."""
    verbs = _LOCK_VERBS + (_OPERATOR_VERBS if operator else ())
    names = "|".join(verbs)
    return f"""\
grant usage on schema {quote_identifier(schema)} to {quote_identifier(role)};
do $lh$
declare
    _function regprocedure;
begin
    for _function in
        select p.oid from pg_catalog.pg_proc p
        where p.proname::text ~ '^lh_({names})_v[0-9]+$' and p.pronamespace = (
            select relnamespace from pg_catalog.pg_class
            where oid = (select tableoid from {quote_identifier(schema)}.lh_meta))
    loop
        execute pg_catalog.format('grant execute on function %s to %I', _function, {_literal(role)});
    end loop;
end
$lh$;
"""  # noqa: S608  # quoted


def _literal(value: str) -> str:
    if _QUOTE in value or "\0" in value:
        raise ConfigError(f"{value!r} is not a valid role name")
    return "'" + value.replace("'", "''") + "'"
