"""Fence columns: taking from a stock, missing rows, unchanged values, and names that are not identifiers."""

from __future__ import annotations

import pytest

from leasehold import ConfigError, StaleToken, fences

DATABASES = ("sqlite", "postgresql", "mysql")


each_database = pytest.mark.parametrize("database", DATABASES)


@each_database
def test_take_never_oversells(database, stock):
    number = stock(database)
    fence = fences.SQLColumn(number.connection, number.stock, key="item")
    assert fence.take(5, "teapot", quantity=2)
    assert not fence.take(5, "teapot", quantity=2)  # one is left
    with pytest.raises(StaleToken, match=r"stock_\w+/teapot refused token 4: it has seen 5"):
        fence.take(4, "teapot", quantity=1)
    assert fence.take(6, "teapot", quantity=1)
    assert fence.read(6, "teapot", "quantity", "fence") == (0, 6)


@each_database
def test_failed_take_raises_the_highest_token(database, stock):
    number = stock(database)
    fence = fences.SQLColumn(number.connection, number.stock, key="item")
    assert not fence.take(9, "teapot", quantity=4)
    with pytest.raises(StaleToken):
        fence.write(8, "teapot", quantity=100)


@each_database
def test_sql_column_raises_lookup_error_for_missing_row(database, stock):
    number = stock(database)
    fence = fences.SQLColumn(number.connection, number.stock, key="item")
    for call in (
        lambda: fence.write(5, "cup", quantity=1),
        lambda: fence.read(5, "cup", "quantity"),
        lambda: fence.take(5, "cup", quantity=1),
        lambda: fence.claim(5, "cup"),
    ):
        with pytest.raises(LookupError, match=r"stock_\w+/cup does not exist"):
            call()


@each_database
def test_write_of_unchanged_value_succeeds(database, stock):
    """MySQL does not count rows whose values stay the same."""
    number = stock(database)
    fence = fences.SQLColumn(number.connection, number.stock, key="item")
    fence.write(5, "teapot", quantity=3)
    fence.write(5, "teapot", quantity=3)
    fence.claim(5, "teapot")
    fence.claim(5, "teapot")
    assert fence.read(5, "teapot", "quantity") == (3,)


def test_table_and_column_names_must_be_identifiers(resource):
    connection = resource("sqlite-row").connection
    for bad in ("stock; drop table x", "a b", "", "1a", "a.b.c", 'a"'):
        with pytest.raises(ConfigError, match="not a plain"):
            fences.SQLColumn(connection, bad)
        with pytest.raises(ConfigError, match="not a plain"):
            fences.SQLFence(connection, "a", table=bad)
    with pytest.raises(ConfigError, match="not a plain"):
        fences.SQLColumn(connection, "acct").write(5, 1, **{"v = 1 --": 2})
    with pytest.raises(ConfigError, match="columns"):
        fences.SQLColumn(connection, "acct").write(5, 1)


@each_database
@pytest.mark.parametrize("name", ["v = 9 --", "v, id", "v;drop table x", 'v"', "v`", "v\n", "(select 1)", "\uff56", ""])
def test_sql_fences_refuse_names_that_are_not_identifiers(database, name, resource):
    number = resource(f"{database}-column")
    for call in (
        lambda: number.fence.write(9, 1, **{name: 1}),
        lambda: number.fence.take(9, 1, **{name: 1}),
        lambda: number.fence.read(9, 1, name),
        lambda: fences.SQLColumn(number.connection, number.table, key=name),
        lambda: fences.SQLColumn(number.connection, number.table, fence=name),
        lambda: fences.sql_schema(database, name),
    ):
        with pytest.raises(ConfigError, match="not a plain"):
            call()
    with pytest.raises(ConfigError):
        fences.SQLColumn(number.connection, None)  # type: ignore[arg-type]
    assert (number.read_column("v"), number.read_column("fence")) == (0, None)


@each_database
@pytest.mark.parametrize("name", ["fence", "FENCE", "Fence"])
def test_sql_column_refuses_to_write_the_fence_column(database, name, resource):
    """If a column is set twice, the last value counts, which would lower the highest token."""
    number = resource(f"{database}-column")
    number.write(9, 1)
    for call in (
        lambda: number.fence.write(10, 1, **{"v": 2, name: 1}),
        lambda: number.fence.write(10, 1, **{name: 0}),
        lambda: number.fence.take(10, 1, **{name: 5}),
    ):
        with pytest.raises(ConfigError, match="fence column"):
            call()
    assert (number.read_column("fence"), number.read_column("v")) == (9, 1)


@each_database
def test_keys_and_resource_names_are_never_interpreted_as_sql(database, resource):
    number = resource(f"{database}-column")
    for key in ("1 or 1=1", "'; drop table x; --", "%s", "?", ":token"):
        with pytest.raises(Exception, match=r".+") as refused:  # PostgreSQL raises a type error
            number.fence.write(9, key, v=7)
        assert not isinstance(refused.value, StaleToken)
        number.connection.rollback()
        number.fence = fences.SQLColumn(number.connection, number.table)
    row = fences.SQLFence(number.connection, "'; drop table x; -- %s ? :slot", table=number.fence_table)
    row.write(9, f"update {number.table} set v = v")
    with pytest.raises(StaleToken):
        row.write(8, f"update {number.table} set v = 7")
    number.write(9, 1)
    assert number.peek() == 1


@each_database
def test_take_of_zero_succeeds(database, resource):
    """MySQL does not count rows whose values stay the same."""
    number = resource(f"{database}-column")
    number.write(9, 3)
    assert number.fence.take(9, 1, v=0)
    assert number.fence.take(9, 1, v=0)
    assert not number.fence.take(9, 1, v=4)
    assert number.fence.take(9, 1, v=3)
    assert number.fence.take(9, 1, v=0)
