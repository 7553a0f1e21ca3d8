"""The protocol of MySQL: what the client sends, errors, and replies that make no sense."""

from __future__ import annotations

from harness.servers.proxy import Proxy
from leasehold import Client
from leasehold.engines.mysql.errors import MyServerError
from leasehold.engines.mysql.session import literals, packet
from tests.support import probe_mysql, probe_sql


def test_values_are_encoded_as_literals_and_packets() -> None:
    assert literals(["a'b", 7, True, None, ""]) == [b"x'612762'", b"7", b"1", b"null", b"x''"]
    assert literals([["a", "b"], [1, 2], 5]) == [b"""'[["61",1],["62",2]]'""", b"5"]
    assert packet(b"call p", [1]) == b"\x0a\0\0\0\x03call p(1)"
    long = packet(b"x" * 0xFFFFFF, [])  # continues in a second packet
    assert long[:4] == b"\xff\xff\xff\0"
    assert long[4 + 0xFFFFFF :] == b"\x01\0\0\x01x"


def test_statement_based_logging_is_named_in_the_error(mysql) -> None:
    assert "binlog_format" in str(MyServerError(1665, "Cannot execute statement").classify())


def test_bytes_behind_a_reply_are_no_part_of_the_next(mysql) -> None:
    """The client opens another session."""
    proxy = Proxy(mysql.server.port)
    with Client(mysql.url()) as first:
        first.inspect()
    try:
        with Client(mysql.url(port=proxy.port), call_timeout=8) as client:
            client.ping()
            session = probe_sql.session(client)
            probe_mysql.pretend_received(session, b"\x05\0\0\x01\x01\xfc\xff")  # as if the server had sent it earlier
            with client.lock("job") as lease:
                assert lease.held
            assert probe_sql.session(client) is not session
    finally:
        proxy.close()
