"""What a role without rights can learn about the claims of others, and what a hostile server can make libpq keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
import sqlalchemy

from leasehold import Client, StaleToken, transaction
from leasehold.engines.postgresql import schema
from leasehold.engines.postgresql.relay import MIN_LEFT
from leasehold.fences import AlchemyFence, SQLFence
from tests.support import health, probe_sql

# Functions with the names and for the types of calls that PostgreSQL resolves to functions for more general types, and
# operators, which are calls of them. PostgreSQL prefers an exact match, in whatever schema.
TRAPS = {
    "oid || text": ("text", "pg_catalog.concat($1, $2)"),
    "text || numeric": ("text", "pg_catalog.concat($1, $2)"),
    "name || text": ("text", "pg_catalog.concat($1, $2)"),
    "text || bigint": ("text", "pg_catalog.concat($1, $2)"),
    "name ~~ name": ("boolean", "$1::text ~~ $2::text"),
    "name ~ name": ("boolean", "$1::text ~ $2::text"),
    "float8 + smallint": ("float8", "'inf'::float8"),
    "float8 + integer": ("float8", "'inf'::float8"),
    "varchar = varchar": ("boolean", "false"),
    "varchar = text": ("boolean", "false"),
    "text = varchar": ("boolean", "false"),
    "sha256(text)": ("bytea", "pg_catalog.sha256($1::bytea)"),
    "format(text, regprocedure)": ("text", "pg_catalog.format($1, $2)"),
    "format(text, regprocedure, text)": ("text", "pg_catalog.format($1, $2, $3)"),
    "unnest(text[])": ("setof text", "pg_catalog.unnest($1)"),
    "concat(oid, text, numeric)": ("text", "''"),
    "concat_ws(text, name, bigint, bigint)": ("text", "''"),
    "json_build_array(text, text, integer, integer, bigint, text, text, text, bigint, text, text, bigint, bigint, "
    "bigint, bigint, bigint, integer, bigint)": ("json", "'[]'"),
}


@pytest.fixture
def search_path(database) -> Iterator[str]:
    """A search_path with a schema in which another role has functions that fit better than PostgreSQL's own, as every
    role may have in `public` up to PostgreSQL 14."""
    schema_name = f"planted-{database.schema}"
    database.ask(f'create schema "{schema_name}"')
    database.ask(f'create table "{schema_name}".called (role text, call text)')
    for number, (call, (returned, result)) in enumerate(TRAPS.items()):
        name, _, types = call.partition("(")
        operands = call.split(" ") if not types else []
        name, types = (f"trap{number}", f"{operands[0]}, {operands[2]})") if operands else (name, types)
        how = "query select" if returned.startswith("setof") else ""
        database.ask(
            f'create function "{schema_name}".{name}({types} returns {returned} language plpgsql as $$ begin '
            f"insert into \"{schema_name}\".called values (current_user, '{call}'); return {how} {result}; end $$"
        )
        if operands:
            database.ask(
                f'create operator "{schema_name}".{operands[1]} (leftarg = {operands[0]}, rightarg = {operands[2]}, '
                f'function = "{schema_name}".{name})'
            )
    database.ask(f'grant all on schema "{schema_name}" to public')
    database.ask(f'grant all on table "{schema_name}".called to public')
    yield schema_name
    database.ask(f'drop schema "{schema_name}" cascade')


def planted_calls(database: Any, search_path: str) -> list[Any]:
    return database.ask(f'select distinct role, call from "{search_path}".called order by 1, 2')


def test_unprivileged_role_cannot_listen_for_id_hashes(database, make_driver) -> None:
    """Every role may read pg_locks, and a role that knows an id hash could release its claim."""
    database.ask("create role nosy login")
    try:
        driver = make_driver(database.url())
        held = driver.acquire(driver.claim())
        driver.attempt(driver.claim(queue=True))
        with psycopg.connect(database.server.url(user="nosy"), autocommit=True) as nosy:
            seen = nosy.execute(
                "select to_hex(classid::bigint), to_hex(objid::bigint) from pg_locks where locktype = 'advisory'"
            ).fetchall()
            assert seen
            for high, low in seen:
                nosy.execute(f"listen lh_{high.zfill(8)}{low.zfill(8)}".encode())
            driver.release(held)
            assert [note.payload for note in nosy.notifies(timeout=1)] == []
    finally:
        database.ask("drop role nosy")


MUCH = 2**63 - 2**55


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("delay", MUCH),  # a sweep of any client computes with it
        ("ttl", MUCH),
        ("ttl", -MUCH),
        ("min_hold", MUCH),
        ("client", "a" * 64),  # longer than the name of a channel may be
        ("name", "n" * 8000),  # longer than a notification may be
        ("purpose", "p" * 5000),  # `inspect` of any client returns it
    ],
)
def test_values_of_a_role_cannot_make_calls_of_others_fail(database, column, value) -> None:
    role = f"odd-{database.schema}"
    values = {"name": "odd", "client": "", "purpose": "", "ttl": 1, "delay": 0, "min_hold": 0} | {column: value}
    call = (
        f"select \"{database.schema}\".lh_attempt_v1('', 1, %(name)s, 'h', %(client)s, '', '', 1, %(purpose)s, "
        "'exclusive', 'lock', 1, %(ttl)s, %(delay)s, %(min_hold)s, false, 0, 1000)"
    )
    with Client(database.url()) as client:
        client.inspect()
        database.create_granted_role(role)
        with (
            psycopg.connect(database.server.url(user=role), autocommit=True) as session,
            pytest.raises(psycopg.errors.CheckViolation),
        ):
            session.execute(call.encode(), values)
        for _ in range(10):  # of which at least one sweeps
            client.lock("job").acquire().release()
        assert client.inspect() == []
    database.drop_role(role)


def test_session_is_replaced_when_libpq_may_keep_much(database) -> None:
    with Client(database.url()) as client, client.lock("held") as lease:
        session = probe_sql.session(client)
        session.relay.bytes_left = MIN_LEFT + 1
        lease.renew()  # the bytes that are not a part of a value are not given back
        assert probe_sql.session(client) is session
        assert session.relay.bytes_left < MIN_LEFT
        lease.renew()
        assert probe_sql.session(client) is not session
        assert lease.held


def test_replies_of_an_honest_server_replace_no_session(database) -> None:
    pairs = 50
    with Client(database.url()) as client:
        for _ in range(2):  # the first calls also prepare the statements
            with client.lock("job"):
                pass
        client.inspect()
        session = probe_sql.session(client)
        before = session.relay.bytes_left
        for _ in range(pairs):
            with client.lock("job") as lease:
                lease.renew()
        client.inspect()
        assert probe_sql.session(client) is session
        assert before - session.relay.bytes_left < 100 * pairs


def test_planted_functions_are_not_called_as_the_schemas_owner(database, search_path) -> None:
    """Else another role could run what it likes as the owner, often a superuser, when it creates or upgrades the
    schema, or grants rights."""
    with database.server.connect(options=f"-c search_path={search_path}") as owner:
        for script in (schema.text(database.schema), schema.grants("postgres", database.schema)):
            owner.execute(script.encode())
    assert planted_calls(database, search_path) == []


def test_planted_functions_are_not_called_by_a_client(database, search_path, background_waiter, wait_until) -> None:
    database.ask(schema.text(database.schema).replace("%", "%%"))
    url = database.url(options=f"-c search_path={search_path}")
    with Client(url) as client, Client(url) as other:
        with client.lock("job") as lease:
            lease.renew()
            with background_waiter(other, "job") as got:
                wait_until(lambda: [holding.state for holding in client.inspect()] == ["held", "waiting"])
                with psycopg.connect(database.server.url(), options=f"-c search_path={search_path}") as connection:
                    transaction.check(lease, connection)
                    transaction.release_on_commit(lease, connection)
        got[0].release()
        assert probe_sql.session(client).server.direct
    assert health.probe(url).up
    assert planted_calls(database, search_path) == []


def test_planted_operators_are_not_called_by_a_store(database, search_path) -> None:
    with Client("memory://") as client:
        store = f"{database.server.url()}?{urlencode({'options': f'-c search_path={search_path}'}, quote_via=quote)}"
        for key in ("small", "large"):
            assert client.once(key, lambda: 1, keep=60 if key == "small" else 100_000, store=store) == 1
    assert planted_calls(database, search_path) == []


def test_planted_operators_let_no_stale_token_pass(database, search_path) -> None:
    url = f"{database.server.url()}?options={quote(f'-c search_path={search_path}')}"
    engine = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with psycopg.connect(url) as connection, engine.connect() as alchemy:
        SQLFence(connection, "stock").create()
        SQLFence(connection, "stock").write(7, "select 1")
        with pytest.raises(StaleToken):
            SQLFence(connection, "stock").write(6, "select 1")
        with pytest.raises(StaleToken):
            AlchemyFence(alchemy, "stock").claim(6)
    engine.dispose()
    assert planted_calls(database, search_path) == []
