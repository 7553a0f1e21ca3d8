"""Servers whose defaults no application would choose: the engine's sessions set their own."""

from __future__ import annotations

import time

import pytest

from harness.servers.mysql import MariaDB
from leasehold import Client
from leasehold.runtime.base import run_sync
from tests.support import probe_sql


@pytest.fixture(scope="module")
def unusual_server():
    """A server on which tests set defaults that no application would choose."""
    latin1 = ("character-set-server=latin1", "skip-character-set-client-handshake")
    server = MariaDB("innodb-flush-method=nosync", *latin1).start()
    with Client(f"mysql://root@127.0.0.1:{server.port}/leasehold", call_timeout=30) as client:
        client.inspect()
    yield server
    server.kill()


SETTINGS = [
    ("completion_type", "'CHAIN'"),
    ("completion_type", "'RELEASE'"),
    ("sql_select_limit", "1"),
    ("max_join_size", "1"),
    ("tx_read_only", "1"),
    ("tx_isolation", "'SERIALIZABLE'"),
    ("sql_mode", "'ORACLE,NO_BACKSLASH_ESCAPES'"),
    ("autocommit", "0"),
    ("max_statement_time", "0.001"),
]


# A session sets its own values before it knows whether it will use procedures, so one of both is enough for a setting.
@pytest.mark.parametrize(
    ("setting", "value", "procedures"),
    [
        pytest.param(*setting, procedures, marks=() if number % 2 == turn else pytest.mark.faults)
        for number, setting in enumerate(SETTINGS)
        for turn, procedures in enumerate(["yes", "no"])
    ],
)
def test_server_defaults_do_not_apply_to_our_sessions(unusual_server, setting, value, procedures) -> None:
    ((before,),) = unusual_server.ask(f"select @@global.{setting}")
    url = f"mysql://root@127.0.0.1:{unusual_server.port}/leasehold?procedures={procedures}"
    with unusual_server.connect() as operator, operator.cursor() as cursor:
        cursor.execute(f"set global {setting} = {value}")
        try:
            with Client(url, ttl=60) as client:
                leases = [client.lock(name).acquire() for name in "abc"]
                assert len(client.inspect()) == 3
                for lease in leases:
                    lease.renew()
                    assert lease.release()
        finally:
            cursor.execute(f"set global {setting} = %s", (before,))


def test_record_is_found_if_the_server_limits_the_rows_of_queries(unusual_server) -> None:
    runs: list[int] = []
    with unusual_server.connect() as operator, operator.cursor() as cursor:
        cursor.execute("set global sql_select_limit = 0")
        try:
            with Client(f"mysql://root@127.0.0.1:{unusual_server.port}/leasehold") as client:
                for _ in range(2):
                    client.once("paid", runs.append, 1, wait=0)
        finally:
            cursor.execute("set global sql_select_limit = default")
    assert runs == [1]


def test_session_has_our_character_set_if_login_does_not_set_it(unusual_server) -> None:
    with Client(f"mysql://root@127.0.0.1:{unusual_server.port}/leasehold", call_timeout=30) as client:
        client.ping()
        session = probe_sql.session(client)
        query = b"select @@character_set_client, @@character_set_results, @@collation_connection"
        ((sent, received, collation),) = run_sync(session.execute(query, (), time.monotonic() + 30))
    assert (sent, received) == ("utf8mb4", "utf8mb4")
    assert collation.startswith("utf8mb4")
