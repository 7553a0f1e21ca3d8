"""SQL through any driver: parameter styles, and which database and transaction a connection has."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from leasehold import dbapi
from leasehold.runtime.base import run_sync


@pytest.mark.parametrize(
    ("statement", "placeholder", "text", "names"),
    [
        ("a :x b :y c :x", "?", "a ? b ? c ?", ["x", "y", "x"]),
        ("a :x b :y_2", "%s", "a %s b %s", ["x", "y_2"]),
        ("select :x::bigint, now()::date", "%s", "select %s::bigint, now()::date", ["x"]),
        ("""':x' ":x" `:x` 'it''s :x' :x""", "%s", """':x' ":x" `:x` 'it''s :x' %s""", ["x"]),
        ("a like '5%' and b % :x", "%s", "a like '5%%' and b %% %s", ["x"]),
        ("a like '5%' and b % :x", "?", "a like '5%' and b % ?", ["x"]),
    ],
)
def test_render_replaces_parameters_but_not_quotes_and_casts(statement, placeholder, text, names):
    assert dbapi.render(statement, placeholder) == (text, names)


def test_database_is_that_of_the_driver_or_of_a_base_class():
    class Connection(sqlite3.Connection): ...

    with sqlite3.connect(":memory:", factory=Connection) as connection:
        assert dbapi.database_of(connection) is dbapi.SQLITE
    connection.close()
    assert dbapi.database_of(object()) is None
    assert dbapi.database_by_name("mariadb") is dbapi.MYSQL


@pytest.mark.parametrize(
    ("autocommit", "isolation_level", "in_transaction", "commits"),
    [
        *((None, "", False, False), (None, None, False, True), (None, None, True, False)),  # before Python 3.12
        *((-1, "", False, False), (-1, None, False, True), (-1, None, True, False)),  # LEGACY_TRANSACTION_CONTROL
        *((True, "", False, True), (True, "", True, False), (False, None, True, False)),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_sqlite_autocommit_of_every_python(autocommit, isolation_level, in_transaction, commits, wrapped):
    """aiosqlite has the connection of sqlite3 inside, and does not show its `autocommit`."""
    state = {"isolation_level": isolation_level, "in_transaction": in_transaction}
    inner = SimpleNamespace(**state, **({} if autocommit is None else {"autocommit": autocommit}))
    connection = SimpleNamespace(**state, _conn=inner) if wrapped else inner
    assert dbapi.SQLITE.is_autocommit(connection) is commits


def test_sqlalchemy_gets_parameters_but_no_colons_in_quotes():
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        statement = """select ':x' || :x as ":x" """
        assert run_sync(dbapi.run_alchemy(connection, statement, {"x": "1"})).rows == [(":x1",)]
        assert dbapi.is_alchemy(connection)
        assert dbapi.alchemy_database(connection) is dbapi.SQLITE
    engine.dispose()
