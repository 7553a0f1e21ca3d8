"""The schema on PostgreSQL alone: a role with incomplete grants, and databases that are refused.

Tests for every SQL server are in ../sql/test_schema.py.
"""

from __future__ import annotations

import pytest

from harness.servers.postgresql import PostgreSQL
from leasehold import Client, ConfigError
from leasehold.engines.postgresql import schema


def test_role_without_grants_is_told_the_command_that_grants(database) -> None:
    role = f"app {database.schema}"
    url = database.create_login_role(role)
    database.ask(schema.text(database.schema).replace("%", "%%"))
    database.ask(f'grant usage on schema {{s}} to "{role}"')
    with Client(url) as client, pytest.raises(ConfigError, match="--role ROLE"):
        client.lock("job").try_acquire()
    database.drop_role(role)


def test_database_in_another_encoding_is_refused(database) -> None:
    server: PostgreSQL = database.server
    server.ask("create database latin encoding latin1 template template0 locale 'C'")
    try:
        with Client(server.url("latin")) as client, pytest.raises(ConfigError, match="UTF8"):
            client.ping()
    finally:
        server.ask("drop database latin with (force)")


def test_missing_database_is_a_config_error(database) -> None:
    with Client(database.server.url("nowhere")) as client, pytest.raises(ConfigError, match="does not exist"):
        client.ping()
