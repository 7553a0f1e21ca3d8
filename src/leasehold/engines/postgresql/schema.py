"""The schema as text: tables, the state machine, and the verbs, under any schema name.

The files are plain SQL for a schema called "leasehold"; another name is put in the place of that identifier. Everything
may be run again: what is there is kept, functions are replaced by the same. Functions carry a version in their names: a
newer schema adds its own beside these, and both kinds of client work on the same tables while a roll-out lasts.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from leasehold.errors import ConfigError

VERSION: Final = 1
USUAL: Final = "leasehold"

_PARTS: Final = ("tables.sql", "line.sql", "attempt.sql", "verbs.sql")
_LONGEST: Final = 63  # bytes; PostgreSQL cuts off the rest
_QUOTE: Final = "$lh$"  # around the functions' texts

# What a role that uses locks must be allowed to do, and nothing else. `inspect` and `break` are for operators.
_FOR_LOCKS: Final = ("attempt", "renew", "beat", "release", "check")
_FOR_OPERATORS: Final = ("inspect", "break")


def checked(schema: str) -> str:
    """A name that PostgreSQL can have for a schema."""
    if not schema or len(schema.encode()) > _LONGEST or "\0" in schema or _QUOTE in schema:
        raise ValueError(f"a schema's name has 1 to {_LONGEST} bytes, not {schema[:80]!r}")
    return schema


def quoted(schema: str) -> str:
    return '"' + schema.replace('"', '""') + '"'


def text(schema: str = USUAL) -> str:
    """The statements that make or upgrade the schema."""
    folder = files(__package__)
    parts = [(folder / part).read_text(encoding="utf-8") for part in _PARTS]
    return "\n".join(parts).replace('"leasehold"', quoted(schema))


def grants(role: str, schema: str = USUAL, *, operator: bool = True) -> str:
    """The statements that let a role use locks; `operator`: also look at those of others and break them."""
    verbs = _FOR_LOCKS + (_FOR_OPERATORS if operator else ())
    names = "|".join(verbs)
    return f"""\
grant usage on schema {quoted(schema)} to {quoted(role)};
do $lh$
declare
    _function regprocedure;
begin
    for _function in
        select p.oid from pg_proc p
        where p.proname ~ '^lh_({names})_v[0-9]+$' and p.pronamespace = (
            select relnamespace from pg_class where oid = (select tableoid from {quoted(schema)}.lh_meta))
    loop
        execute format('grant execute on function %s to %I', _function, {_literal(role)});
    end loop;
end
$lh$;
"""


def _literal(word: str) -> str:
    if _QUOTE in word or "\0" in word:
        raise ConfigError(f"{word!r} cannot be the name of a role")
    return "'" + word.replace("'", "''") + "'"
