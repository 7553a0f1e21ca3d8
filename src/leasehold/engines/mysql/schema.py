"""The schema as text: tables, the state machine, and the verbs, under any database name.

The files are what the mysql client reads, for a database called `leasehold`; another name is put in the place of that
identifier. Everything may be run again: what is there is kept. Procedures carry a version in their names: a newer
schema adds its own beside these, and both kinds of client work on the same tables while a roll-out lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Final

VERSION: Final = 1
USUAL: Final = "leasehold"

_TABLES: Final = ("tables.sql",)
_PROCEDURES: Final = ("line.sql", "alone.sql", "verbs.sql")
_LONGEST: Final = 64  # characters
_DELIMITER: Final = "delimiter "

# What an account that uses locks must be allowed to do, and nothing else. `inspect` and `break` are for operators.
_FOR_LOCKS: Final = ("attempt", "renew", "beat", "release", "listen", "check", "open")
_FOR_OPERATORS: Final = ("inspect", "break")


def checked(database: str) -> str:
    """A name that MySQL can have for a database."""
    if not 0 < len(database) <= _LONGEST or "\0" in database or database.endswith(" ") or max(database) > "\uffff":
        raise ValueError(f"a database's name has 1 to {_LONGEST} characters, none beyond U+FFFF, not {database[:80]!r}")
    return database


def quoted(database: str) -> str:
    return "`" + database.replace("`", "``") + "`"


def text(database: str = USUAL, *, procedures: bool = True) -> str:
    """The statements that make or upgrade the schema, as the mysql client reads them."""
    folder = files(__package__)
    parts = [(folder / part).read_text(encoding="utf-8") for part in _TABLES + (_PROCEDURES if procedures else ())]
    return "\n".join(parts).replace("`leasehold`", quoted(database))


def statements(script: str) -> Iterator[str]:
    """A script of ours one by one, as a server reads them. No line ends with the delimiter but a statement's last."""
    end, lines = ";", list[str]()
    for line in script.splitlines():
        if line.startswith(_DELIMITER):
            end = line.removeprefix(_DELIMITER)
            continue
        lines.append(line)
        if line.endswith(end):
            yield "\n".join(lines).removesuffix(end)
            lines.clear()


def grants(role: str, schema: str = USUAL, *, operator: bool = True) -> str:
    """The statements that let an account use locks; `operator`: also look at those of others and break them."""
    user, at, host = role.rpartition("@")
    account = f"{_literal(user)}@{_literal(host)}" if at else _literal(role)
    verbs = _FOR_LOCKS + (_FOR_OPERATORS if operator else ())
    return "".join(f"grant execute on procedure {quoted(schema)}.lh_{verb}_v1 to {account};\n" for verb in verbs)


def _literal(word: str) -> str:
    if not word or "\0" in word or "\\" in word:
        raise ValueError(f"{word!r} cannot be the name of an account")
    return "'" + word.replace("'", "''") + "'"
