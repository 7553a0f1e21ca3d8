"""Connections on which every statement is its own transaction: a fence refuses them before it writes anything, or
begins a transaction of its own."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from leasehold import ConfigError, fences

DATABASES = ("sqlite", "postgresql", "mysql")
each_database = pytest.mark.parametrize("database", DATABASES)


def autocommit_engines(number: Any) -> list[Any]:
    """SQLAlchemy's ways to ask for autocommit: for some connections, or for the whole engine."""
    return [
        number.engine.execution_options(isolation_level="AUTOCOMMIT"),
        sa.create_engine(number.engine.url, isolation_level="AUTOCOMMIT"),
    ]


@each_database
def test_alchemy_column_refuses_autocommit_before_it_writes(database, resource):
    """`execute` once wrote the rows with lower tokens and then raised StaleToken."""
    number = resource(f"alchemy-{database}-column")
    acct = number.acct
    with Session(number.engine) as session, session.begin():
        session.add(acct(id=2, v=10, fence=20))
    calls = (
        lambda column: column.execute(8, sa.update(acct).values(v=99)),  # row 1 has a lower token, row 2 a higher one
        lambda column: column.execute(8, sa.delete(acct)),
        lambda column: column.write(8, 1, v=99),
        lambda column: column.take(8, 1, v=0),
        lambda column: column.claim(8, 1),
        lambda column: column.read(8, 1, "v"),
    )
    for engine in autocommit_engines(number):
        for call in calls:
            with engine.connect() as connection, pytest.raises(ConfigError, match="AUTOCOMMIT"):
                call(fences.AlchemyColumn(connection, acct.__table__))
            with Session(engine) as session, pytest.raises(ConfigError, match="AUTOCOMMIT"):
                call(fences.AlchemyColumn(session, acct))
        engine.dispose()
    with number.engine.connect() as connection:
        rows = connection.execute(sa.select(acct.id, acct.v, acct.fence).order_by(acct.id)).all()
    assert rows == [(1, 0, None), (2, 10, 20)]


@each_database
def test_async_alchemy_column_refuses_autocommit_before_it_writes(database, resource):
    from sqlalchemy.ext.asyncio import AsyncSession

    number = resource(f"alchemy-{database}-column-async")
    acct = number.acct
    engine = number.engine.execution_options(isolation_level="AUTOCOMMIT")

    async def main() -> None:
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigError, match="AUTOCOMMIT"):
                await fences.AsyncAlchemyColumn(session, acct).execute(8, sa.update(acct).values(v=99))
        async with engine.connect() as connection:
            column = fences.AsyncAlchemyColumn(connection, acct.__table__)
            for call in (
                lambda: column.execute(8, sa.update(acct).values(v=99)),
                lambda: column.write(8, 1, v=99),
                lambda: column.take(8, 1, v=0),
                lambda: column.claim(8, 1),
                lambda: column.read(8, 1, "v"),
            ):
                with pytest.raises(ConfigError, match="AUTOCOMMIT"):
                    await call()

    number.loop.run_until_complete(main())
    assert number.peek() == 0


def test_alchemy_fences_accept_sqlite_that_begins_by_event(resource):
    """SQLAlchemy's recipe for SQLite: the driver never begins by itself, an event of SQLAlchemy does."""
    number = resource("alchemy-sqlite-column")

    @sa.event.listens_for(number.engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(number.engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("begin immediate")

    with number.engine.connect() as connection:
        fences.AlchemyColumn(connection, number.acct.__table__).write(5, 1, v=7)
        connection.commit()
    with number.engine.connect() as connection:
        fences.AlchemyFence(connection, "acct/1", table=number.fence_table).claim(5)
        connection.rollback()
    assert number.peek() == 7
