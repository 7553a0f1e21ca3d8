"""No claim id and no password appears in an error, a server's log or its list of sessions.

An id proves who holds a lease; engines send only its hash. These tests record every value that a client draws and
search for it in all that real servers log: statements with their parameters, errors, connections.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from harness.servers.proxy import Proxy
from leasehold import Client, ConfigError, LeaseLost, Mismatch, NotAcquired, Unavailable, Unsupported
from tests.support import probe

PASSWORD, WRONG_PASSWORD = "pass-w0rd-of-the-role", "another-w0rd"


class StatementLog:
    """Make a server log all it can, and record the statements of its sessions meanwhile."""

    def __init__(self, database: Any, role: str) -> None:
        self.database, self.server, self.role = database, database.server, role
        self.seen_queries: set[str] = set()
        self._done = threading.Event()
        self._start_offset = os.path.getsize(self.server.log)

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def sessions(self) -> list[tuple[str | None]]:
        """The current statement of each session."""
        raise NotImplementedError

    def read_log(self) -> str:
        with open(self.server.log, "rb") as log:
            log.seek(self._start_offset)
            return log.read().decode(errors="replace")

    @contextmanager
    def recording(self) -> Iterator[None]:
        def watch() -> None:
            while not self._done.wait(0.002):
                self.seen_queries.update(query for (query,) in self.sessions() if query)

        thread = threading.Thread(target=watch)
        self.start()
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join(30)
            self.stop()


class PostgresqlLog(StatementLog):
    settings = ("log_statement = 'all'", "log_min_duration_statement = 0", "log_min_messages = 'debug1'")
    parameter_settings = (
        "log_parameter_max_length = -1",
        "log_parameter_max_length_on_error = -1",
        "log_connections = on",
    )

    def start(self) -> None:
        self.server.ask(f"create role \"{self.role}\" superuser login password '{PASSWORD}'")
        self._hba_path = os.path.join(self.server.data, "pg_hba.conf")
        with open(self._hba_path, encoding="utf-8") as rules:
            self._hba_before = rules.read()
        self._rewrite_hba(f'host all "{self.role}" 127.0.0.1/32 scram-sha-256\n{self._hba_before}')
        for setting in (*self.settings, *self.parameter_settings):
            self.server.ask(f"alter system set {setting}")
        self.server.ask("select pg_reload_conf()")

    def _rewrite_hba(self, rules: str) -> None:
        with open(self._hba_path, "r+", encoding="utf-8") as file:
            file.truncate()
            file.write(rules)

    def stop(self) -> None:
        self._rewrite_hba(self._hba_before)
        self.server.ask("alter system reset all")
        self.server.ask("select pg_reload_conf()")
        self.database.drop()
        self.database.drop_role(self.role)

    def sessions(self) -> list[tuple[str | None]]:
        return self.server.ask("select query from pg_stat_activity where usename = %s", self.role)


class MysqlLog(StatementLog):
    def start(self) -> None:
        self.server.run(
            f"create user '{self.role}' identified by '{PASSWORD}'",
            f"grant all on *.* to '{self.role}'",
            "set global log_output = 'TABLE'",
            "truncate mysql.general_log",
            "truncate mysql.slow_log",
            "set global general_log = 1",
            "set global long_query_time = 0",
            "set global slow_query_log = 1",
        )

    def stop(self) -> None:
        self.server.run(
            "set global general_log = 0", "set global slow_query_log = 0", "set global long_query_time = default"
        )
        self.database.drop_role(self.role)

    def sessions(self) -> list[tuple[str | None]]:
        return self.server.ask("select info from information_schema.processlist where id <> connection_id()")

    def read_log(self) -> str:
        statements = self.server.ask("select argument from mysql.general_log union select sql_text from mysql.slow_log")
        return "\n".join(text for (text,) in statements) + super().read_log()


def call_every_verb(database, url: str, wait_until) -> list[str]:
    """Call every verb, and make calls fail. Returns id hashes that were sent to the server."""
    id_hashes = []
    with ExitStack() as stack:
        first_client, second_client = (stack.enter_context(Client(url, ttl=30, call_timeout=5)) for _ in range(2))
        lease = first_client.lock("job").acquire()  # also creates the missing schema
        id_hashes.append(probe.claim(lease).id_hash)
        lease.renew()
        second_client.inspect()
        with pytest.raises(NotAcquired):
            second_client.lock("job", wait=0.3).acquire()
        with pytest.raises((Mismatch, Unsupported)):
            second_client.semaphore("job", 3).try_acquire()
        granted = []
        waiter = threading.Thread(target=lambda: granted.append(second_client.lock("job", wait=30).acquire()))
        waiter.start()
        lease.release()
        waiter.join(60)
        id_hashes.append(probe.claim(granted[0]).id_hash)
        assert first_client.break_lock("job", token=granted[0].token)
        with pytest.raises(LeaseLost):
            granted[0].renew()
        granted[0].release()
        impatient = stack.enter_context(Client(url, ttl=30, call_timeout=1.2))
        impatient.inspect()
        with database.lock_all_buckets(), pytest.raises(Unavailable):
            impatient.lock("job").acquire()
        wait_until(lambda: not first_client.inspect())
    with Client(url.replace(PASSWORD, WRONG_PASSWORD)) as wrong, pytest.raises(ConfigError):
        wrong.ping()
    return id_hashes


def contains(text: str, haystack: str) -> bool:
    """Whether the text occurs as it is or as a hexadecimal literal."""
    return text in haystack or text.encode().hex() in haystack.lower()


def assert_no_secret_logged(statement_log: StatementLog, drawn_secrets: list[str], wait_until, **options: str) -> None:
    with statement_log.recording():
        url = statement_log.database.url(f"{statement_log.role}:{PASSWORD}", **options)
        id_hashes = call_every_verb(statement_log.database, url, wait_until)
        wait_until(
            lambda: all(contains(id_hash, statement_log.read_log()) for id_hash in id_hashes), every=0.5
        )  # the log has what clients send
        log_text, session_queries = statement_log.read_log(), "\n".join(statement_log.seen_queries)
    assert "lh_" in session_queries
    assert len(drawn_secrets) >= 4
    for secret in (*drawn_secrets, PASSWORD, WRONG_PASSWORD):
        assert not contains(secret, log_text), "a secret is in the server's log"
        assert not contains(secret, session_queries), "a secret is in the server's list of sessions"


def test_statement_log_contains_no_secret_on_postgresql(database, drawn_secrets, wait_until) -> None:
    assert_no_secret_logged(PostgresqlLog(database, f"app-{database.schema}"), drawn_secrets, wait_until)


@pytest.mark.parametrize("procedures", ["yes", "no"])
def test_statement_log_contains_no_secret_on_mysql(mysql, drawn_secrets, wait_until, procedures) -> None:
    assert_no_secret_logged(MysqlLog(mysql, f"app-{mysql.schema}"), drawn_secrets, wait_until, procedures=procedures)


def test_secrets_appear_in_no_error_log_or_inspection(sql, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    proxy = Proxy(sql.server.port)
    url = sql.url(user="nobody:s3cret", port=proxy.port)
    try:
        with Client(url, call_timeout=2) as client:
            with pytest.raises(ConfigError) as missing:
                client.ping()
            assert "nobody" in str(missing.value)
            proxy.cut()
            with pytest.raises(Unavailable) as silent:
                client.ping()
            assert "s3cret" not in f"{client!r} {missing.value!r} {silent.value!r} {caplog.text}"
    finally:
        proxy.close()
    with Client(sql.url()) as client:
        lease = client.lock("job").acquire()
        rows = sql.ask("select * from {s}.lh_grant")
        assert probe.claim(lease).id not in str(rows)
        assert probe.claim(lease).id_hash not in str(sql.ask(sql.inspect_query))
        lease.release()
