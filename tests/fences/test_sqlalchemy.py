"""Fences for SQLAlchemy, of sessions and connections."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from leasehold import ConfigError, StaleToken, fences

DATABASES = ("sqlite", "postgresql", "mysql")


each_database = pytest.mark.parametrize("database", DATABASES)


@each_database
def test_alchemy_column_executes_updates_and_deletes_if_token_is_current(database, resource):
    number = resource(f"alchemy-{database}-column")
    acct = number.acct
    with Session(number.engine) as session, session.begin():
        session.add_all([acct(id=2, v=10, fence=20), acct(id=3, v=10, fence=0)])
    with Session(number.engine) as session, session.begin():
        column = fences.AlchemyColumn(session, acct)
        account = session.get_one(acct, 3)
        assert column.execute(7, sa.update(acct).where(acct.id == 3, acct.v >= 4).values(v=acct.v - 4)) == 1
        assert column.execute(7, sa.update(acct).where(acct.id == 3, acct.v >= 100).values(v=0)) == 0
        assert (account.v, account.fence) == (6, 7)  # the session's objects are updated
        assert column.take(7, 3, v=6)
        assert not column.take(7, 3, v=1)
    with pytest.raises(StaleToken) as refused, Session(number.engine) as session, session.begin():
        fences.AlchemyColumn(session, acct).execute(8, sa.update(acct).values(v=99))  # one of three rows has seen 20
    assert refused.value.highest == 20
    with Session(number.engine) as session, session.begin():
        assert session.scalars(sa.select(acct.v).order_by(acct.id)).all() == [0, 10, 0]
        column = fences.AlchemyColumn(session, acct)
        with pytest.raises(StaleToken):
            column.execute(8, sa.delete(acct).where(acct.id == 2))
        assert column.execute(21, sa.delete(acct).where(acct.id == 2)) == 1
        with pytest.raises(LookupError):
            column.write(21, 2, v=1)


@each_database
def test_alchemy_fences_work_with_core_tables_and_connections(database, resource):
    number = resource(f"alchemy-{database}-core")
    table = number.acct.__table__
    with number.engine.begin() as connection:
        column = fences.AlchemyColumn(connection, table)
        column.write(5, 1, v=4)
        assert column.read(5, 1, "v", "fence") == (4, 5)
        assert column.take(5, 1, v=3)
        row = fences.AlchemyFence(connection, "other", table=number.fence_table)
        row.claim(5)
        assert row.write(5, sa.update(table).values(v=9)).rowcount == 1
    with pytest.raises(StaleToken), number.engine.begin() as connection:
        fences.AlchemyFence(connection, "other", table=number.fence_table).write(4, sa.update(table).values(v=0))
    assert number.peek() == 9


@each_database
def test_fence_table_can_be_created_from_metadata(database, resource):
    number = resource(f"alchemy-{database}-core")
    metadata = sa.MetaData()
    fences.fence_table(metadata, f"meta_{number.spec['run']}")
    metadata.create_all(number.engine)
    with number.engine.begin() as connection:
        for index, name in enumerate(("a", "A", "a ")):
            fences.AlchemyFence(connection, name, table=f"meta_{number.spec['run']}").claim(9 - index)
    with pytest.raises(StaleToken), number.engine.begin() as connection:
        fences.AlchemyFence(connection, "a", table=f"meta_{number.spec['run']}").claim(8)


def test_alchemy_column_refuses_composite_primary_key():
    metadata = sa.MetaData()
    table = sa.Table("t", metadata, sa.Column("a", sa.Integer, primary_key=True), sa.Column("b", sa.Integer))
    fences.AlchemyColumn(None, table, fence="b")
    composite = sa.Table("u", metadata, *(sa.Column(name, sa.Integer, primary_key=True) for name in "ab"))
    with pytest.raises(ConfigError, match="one column"):
        fences.AlchemyColumn(None, composite)


@each_database
def test_alchemy_column_never_lowers_the_fence_column(database, resource):
    number = resource(f"alchemy-{database}-column")
    number.write(9, 1)
    acct = number.acct
    for call in (
        lambda column: column.write(10, 1, v=2, fence=1),
        lambda column: column.take(10, 1, fence=5),
    ):
        with pytest.raises(ConfigError, match="fence column"), Session(number.engine) as session, session.begin():
            call(fences.AlchemyColumn(session, acct))
    assert (number.read_column("fence"), number.read_column("v")) == (9, 1)
    for token, values in enumerate(({"v": 2, "fence": 1}, {acct.fence: 1}, {"fence": acct.fence - 5}), 10):
        with Session(number.engine) as session, session.begin():
            assert fences.AlchemyColumn(session, acct).execute(token, sa.update(acct).values(values)) == 1
        assert number.read_column("fence") == token  # the value given for it is ignored


@each_database
def test_alchemy_column_executes_only_updates_and_deletes_of_its_entity(database, resource):
    number = resource(f"alchemy-{database}-column")
    other = sa.Table("other", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    for statement in (
        sa.insert(number.acct).values(id=2, v=1),
        sa.select(number.acct),
        sa.text(f"update {number.table} set v = 9"),
        sa.update(other).values(id=1),
    ):
        with pytest.raises(ConfigError, match=r"update\(\) or delete\(\)"), Session(number.engine) as session:
            fences.AlchemyColumn(session, number.acct).execute(9, statement)
    assert number.peek() == 0


def test_alchemy_column_refuses_stale_token_despite_old_mysql_snapshot(resource):
    """At repeatable read a plain query shows the old token: the update matches no row, without any error."""
    number = resource("alchemy-mysql-column")
    acct = number.acct
    number.write(5, 1)
    with Session(number.engine) as session, session.begin():
        assert session.get_one(acct, 1).fence == 5  # the snapshot
        number.write(9, 2)
        with pytest.raises(StaleToken):
            fences.AlchemyColumn(session, acct).execute(8, sa.update(acct).where(acct.id == 1).values(v=99))
    assert number.peek() == 2
