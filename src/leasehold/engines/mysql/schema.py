"""The schema as text: tables, the state machine, and the verbs, under any database name.

The files are scripts for the mysql client and a database called `leasehold`; `text` replaces that identifier by another
name. Everything may be run again: tables and procedures that exist are kept. Procedure names contain a version: a newer
schema adds its own procedures, and clients of both versions work on the same tables during a roll-out.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Final

VERSION: Final = 1
DEFAULT_NAME: Final = "leasehold"

_TABLES: Final = ("tables.sql",)
# Attempt and release, in fast_path.sql, come last: no client is granted anything while other procedures are missing.
_PROCEDURES: Final = ("lock_state.sql", "verbs.sql", "release_on_commit.sql", "hand_off.sql", "fast_path.sql")
_CREATE_PROCEDURE: Final = "create procedure if not exists "
_MAX_NAME_LENGTH: Final = 64  # characters
_DELIMITER: Final = "delimiter "

# What an account that uses locks must be allowed to do, and nothing else. The others are for operators.
_LOCK_VERBS: Final = (
    *("attempt", "renew", "heartbeat", "release", "decline", "listen"),
    *("check", "in_transaction", "release_on_commit", "release_unless_locked"),
)
_OPERATOR_VERBS: Final = ("inspect", "break", "set_limit")


def validate_name(database: str) -> str:
    """The name, if MySQL accepts it for a database; else raises ValueError."""
    if (
        not 0 < len(database) <= _MAX_NAME_LENGTH
        or "\0" in database
        or database.endswith(" ")
        or max(database) > "\uffff"
    ):
        raise ValueError(
            f"a database name must have 1 to {_MAX_NAME_LENGTH} characters, none of them NUL or beyond U+FFFF, and no "
            "space at its end"
        )
    return database


def quote_identifier(database: str) -> str:
    return "`" + database.replace("`", "``") + "`"


def text(database: str = DEFAULT_NAME, *, procedures: bool = True) -> str:
    """The script that creates or upgrades the schema, for the mysql client."""
    folder = files(__package__)
    parts = [(folder / part).read_text(encoding="utf-8") for part in _TABLES + (_PROCEDURES if procedures else ())]
    return "\n".join(parts).replace("`leasehold`", quote_identifier(database))


def statements(script: str) -> Iterator[str]:
    """The statements of such a script, for a server. In our scripts, only the last line of a statement ends with the
    delimiter."""
    end, lines = ";", list[str]()
    for line in script.splitlines():
        if line.startswith(_DELIMITER):
            end = line.removeprefix(_DELIMITER)
            continue
        lines.append(line)
        if line.endswith(end):
            yield "\n".join(lines).removesuffix(end)
            lines.clear()


def procedure_of(statement: str) -> str | None:
    """The name of the procedure that this statement of the script creates; None: it creates none."""
    _, found, rest = statement.partition(_CREATE_PROCEDURE)
    return rest.partition("(")[0] if found else None


def grants(role: str, schema: str = DEFAULT_NAME, *, operator: bool = True) -> str:
    """The statements that let an account use locks, and with `operator` inspect and break those of others and set
    limits of semaphores."""
    user, at, host = role.rpartition("@")
    account = f"{_literal(user)}@{_literal(host)}" if at else _literal(role)
    verbs = _LOCK_VERBS + (_OPERATOR_VERBS if operator else ())
    return "".join(
        f"grant execute on procedure {quote_identifier(schema)}.lh_{verb}_v1 to {account};\n" for verb in verbs
    )


def _literal(value: str) -> str:
    if not value or "\0" in value or "\\" in value:
        raise ValueError(f"{value!r} is not a valid account name")
    return "'" + value.replace("'", "''") + "'"
