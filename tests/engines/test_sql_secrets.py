"""A server that logs all it is told learns no claim id and no password, nor does whoever looks at its sessions.

An id proves who holds a lease; engines are told its mark, a hash. Here every value a client has drawn is remembered,
and looked for in all that the real servers write down: statements with their parameters, errors, connections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from leasehold import Client, ConfigError, LeaseLost, Mismatch, NotAcquired, Unavailable, Unsupported

PASSWORD, WRONG = "pass-w0rd-of-the-role", "another-w0rd"


class Listening:
    """Have a server log whatever it can, and watch its sessions meanwhile."""

    def __init__(self, database: Any, role: str) -> None:
        self.database, self.server, self.role = database, database.server, role
        self.shown: set[str] = set()
        self._done = threading.Event()
        self._from = os.path.getsize(self.server.log)

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def sessions(self) -> list[tuple[str | None]]:
        """What each is doing."""
        raise NotImplementedError

    def written(self) -> str:
        with open(self.server.log, "rb") as log:
            log.seek(self._from)
            return log.read().decode(errors="replace")

    @contextmanager
    def watched(self) -> Iterator[None]:
        def watch() -> None:
            while not self._done.wait(0.002):
                self.shown.update(query for (query,) in self.sessions() if query)

        thread = threading.Thread(target=watch)
        self.start()
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join(30)
            self.stop()


class OnPostgresql(Listening):
    settings = ("log_statement = 'all'", "log_min_duration_statement = 0", "log_min_messages = 'debug1'")
    further = ("log_parameter_max_length = -1", "log_parameter_max_length_on_error = -1", "log_connections = on")

    def start(self) -> None:
        self.server.ask(f"create role \"{self.role}\" superuser login password '{PASSWORD}'")
        self._rules = os.path.join(self.server.data, "pg_hba.conf")
        with open(self._rules, encoding="utf-8") as rules:
            self._before = rules.read()
        self._rewrite(f'host all "{self.role}" 127.0.0.1/32 scram-sha-256\n{self._before}')
        for setting in (*self.settings, *self.further):
            self.server.ask(f"alter system set {setting}")
        self.server.ask("select pg_reload_conf()")

    def _rewrite(self, rules: str) -> None:
        with open(self._rules, "r+", encoding="utf-8") as file:
            file.truncate()
            file.write(rules)

    def stop(self) -> None:
        self._rewrite(self._before)
        self.server.ask("alter system reset all")
        self.server.ask("select pg_reload_conf()")
        self.database.drop()
        self.database.drop_role(self.role)

    def sessions(self) -> list[tuple[str | None]]:
        return self.server.ask("select query from pg_stat_activity where usename = %s", self.role)


class OnMysql(Listening):
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

    def written(self) -> str:
        statements = self.server.ask("select argument from mysql.general_log union select sql_text from mysql.slow_log")
        return "\n".join(text for (text,) in statements) + super().written()


@pytest.fixture
def drawn(monkeypatch) -> list[str]:
    """Every secret that a client draws."""
    found: list[str] = []
    urandom = os.urandom

    def remembered(size: int) -> bytes:
        value = urandom(size)
        if size == 16:
            found.append(value.hex())
        return value

    monkeypatch.setattr(os, "urandom", remembered)
    return found


def everything(database, url: str, until) -> list[str]:
    """Every verb, and ways in which they fail. Gives the marks of claims that were told."""
    marks = []
    with ExitStack() as stack:
        one, two = (stack.enter_context(Client(url, ttl=30, call_timeout=5)) for _ in range(2))
        lease = one.lock("job").acquire()  # and the schema is found missing, and made
        marks.append(lease._claim.mark)
        lease.renew()
        two.inspect()
        with pytest.raises(NotAcquired):
            two.lock("job", wait=0.3).acquire()
        with pytest.raises((Mismatch, Unsupported)):
            two.semaphore("job", 3).try_acquire()
        granted = []
        waiter = threading.Thread(target=lambda: granted.append(two.lock("job", wait=30).acquire()))
        waiter.start()
        lease.release()
        waiter.join(60)
        marks.append(granted[0]._claim.mark)
        assert one.break_lock("job", token=granted[0].token)
        with pytest.raises(LeaseLost):
            granted[0].renew()
        granted[0].release()
        hurt = stack.enter_context(Client(url, ttl=30, call_timeout=1.2))
        hurt.inspect()
        with database.frozen(), pytest.raises(Unavailable):
            hurt.lock("job").acquire()
        until(lambda: not one.inspect())
    with Client(url.replace(PASSWORD, WRONG)) as wrong, pytest.raises(ConfigError):
        wrong.ping()
    return marks


def stands(text: str, where: str) -> bool:
    """As it is, or as the bytes of a literal."""
    return text in where or text.encode().hex() in where.lower()


def learnt(listening: Listening, drawn: list[str], until, **options: str) -> None:
    with listening.watched():
        url = listening.database.url(f"{listening.role}:{PASSWORD}", **options)
        marks = everything(listening.database, url, until)
        until(lambda: all(stands(mark, listening.written()) for mark in marks), every=0.5)  # it shows what was told
        written, shown = listening.written(), "\n".join(listening.shown)
    assert "lh_" in shown
    assert len(drawn) >= 4
    for secret in (*drawn, PASSWORD, WRONG):
        assert not stands(secret, written), "in the server's log"
        assert not stands(secret, shown), "in its list of sessions"


def test_a_log_of_all_statements_holds_no_secret_on_postgresql(database, drawn, until) -> None:
    learnt(OnPostgresql(database, f"app-{database.schema}"), drawn, until)


@pytest.mark.parametrize("procedures", ["yes", "no"])
def test_a_log_of_all_statements_holds_no_secret_on_mysql(mysql, drawn, until, procedures) -> None:
    learnt(OnMysql(mysql, f"app-{mysql.schema}"), drawn, until, procedures=procedures)
