"""Which errors mean that another writer was faster, so that the caller may retry from its first read.

Errors are recognised by name and number, so no driver has to be imported or installed.
"""

from __future__ import annotations

from typing import Final

from leasehold.errors import Conflict

_ERROR_NAMES: Final = frozenset(
    {
        ("sqlalchemy.orm.exc", "StaleDataError"),  # the row's version is no longer the one that was read
        ("redis.exceptions", "WatchError"),
        ("kazoo.exceptions", "BadVersionError"),
    }
)
_SQLSTATES: Final = frozenset({"40001", "40P01"})  # serialization failure, deadlock: the transaction was rolled back
_MYSQL_CODES: Final = frozenset({1020, 1213})  # record has changed since last read, deadlock
_MYSQL_DRIVERS: Final = frozenset({"pymysql", "aiomysql", "MySQLdb"})


def is_conflict(error: BaseException) -> bool:
    """Whether an error, or the driver error that an ORM wrapped in it, is a conflict."""
    if isinstance(error, Conflict):
        return True
    inner = getattr(error, "orig", None)  # SQLAlchemy keeps the driver's error here
    return _is_known_conflict(error) or (isinstance(inner, BaseException) and _is_known_conflict(inner))


def _is_known_conflict(error: BaseException) -> bool:
    if any((kind.__module__, kind.__name__) in _ERROR_NAMES for kind in type(error).__mro__):
        return True
    if getattr(error, "sqlstate", None) in _SQLSTATES:
        return True
    code = error.args[0] if error.args else None
    return code in _MYSQL_CODES and type(error).__module__.partition(".")[0] in _MYSQL_DRIVERS
