"""Servers whose defaults no application would choose: the engine's sessions set their own."""

from __future__ import annotations

import pytest

from harness.servers.mysql import MariaDB
from leasehold import Client


@pytest.fixture(scope="module")
def unusual_server():
    """A server on which tests set defaults that no application would choose."""
    server = MariaDB("innodb-flush-method=nosync").start()
    with Client(f"mysql://root@127.0.0.1:{server.port}/leasehold", call_timeout=30) as client:
        client.inspect()
    yield server
    server.kill()


@pytest.mark.parametrize("procedures", ["yes", "no"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("completion_type", "'CHAIN'"),
        ("completion_type", "'RELEASE'"),
        ("sql_select_limit", "1"),
        ("max_join_size", "1"),
        ("tx_read_only", "1"),
        ("tx_isolation", "'SERIALIZABLE'"),
        ("sql_mode", "'ORACLE,NO_BACKSLASH_ESCAPES'"),
        ("autocommit", "0"),
        ("max_statement_time", "0.001"),
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
