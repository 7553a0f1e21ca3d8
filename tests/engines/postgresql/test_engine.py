"""What only PostgreSQL has: its URLs, several hosts, and hosts of the environment."""

from __future__ import annotations

import socket
from urllib.parse import quote

import pytest

from harness.servers.proxy import Proxy
from leasehold import Client, ConfigError
from leasehold.config import EngineConfig
from leasehold.engines.postgresql.url import parse_url
from leasehold.model import Busy, Grant


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://localhost/db?nope=1",
        "postgresql://localhost/db?create=maybe",
        "postgresql://localhost/db?listen=maybe",
        "postgresql://localhost/db?durable=maybe",
        "postgresql://localhost/db?connect_timeout=3",
        "postgresql://localhost/db?schema=",
        "postgresql://localhost/db?schema=" + "x" * 64,
        "postgresql://localhost/db?listen=no&listen_url=postgresql%3A%2F%2Fdirect",
        "postgresql://localhost/db?listen_url=mysql%3A%2F%2Fdirect",
        "postgresql://user:s3cret@[::1/db",
        "postgresql://user:s3cret%@host/db",
        "postgresql://a,b/db?port=1,2,3",
    ],
)
def test_invalid_url_is_refused_when_the_client_is_built(url) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert "s3cret" not in str(caught.value)


def test_url_is_parsed_into_connection_options() -> None:
    def options(url: str):
        return parse_url(EngineConfig.parse(url, 5.0))

    first = options("postgresql://u:p%40ss@h:7/d?schema=a%20b&sslmode=require&application_name=x")
    (host,) = first.target.hosts
    wanted = {"user": "u", "password": "p@ss", "host": "h", "port": "7", "dbname": "d", "sslmode": "require"}
    assert wanted.items() <= host.items()
    assert (first.schema, first.listen, first.pooled, host["application_name"]) == ("a b", first.target, False, "x")
    second = options("postgresql://a:1,b:2/d?listen_url=postgresql%3A%2F%2Fc%2Fd%3Fsslmode%3Ddisable&create=no")
    assert [(each["host"], each["port"]) for each in second.target.hosts] == [("a", "1"), ("b", "2")]
    assert second.target.hosts[0]["target_session_attrs"] == "read-write"
    assert second.listen is not None
    assert second.listen.hosts[0]["sslmode"] == "disable"
    assert (second.pooled, second.create) == (True, False)
    assert options("postgresql://h/d?listen=no").listen is None
    assert "p@ss" not in repr(first)


@pytest.mark.parametrize(
    ("options", "listen_options", "environment", "wanted"),
    [
        ("sslmode=verify-full&sslrootcert=ca.pem", "", "", {"sslmode": "verify-full", "sslrootcert": "ca.pem"}),
        ("sslmode=verify-full", "sslrootcert=b.pem", "prefer", {"sslmode": "verify-full", "sslrootcert": "b.pem"}),
        ("sslmode=verify-full&sslrootcert=ca.pem", "sslmode=require", "", {"sslmode": "require"}),
        ("sslmode=require", "", "verify-full", {}),
        ("sslmode=disable", "", "", {}),
        ("require_auth=scram-sha-256", "", "", {"require_auth": "scram-sha-256"}),
        ("require_auth=none", "require_auth=md5", "", {"require_auth": "md5"}),
    ],
)
def test_listen_url_is_protected_like_the_url(options, listen_options, environment, wanted, monkeypatch) -> None:
    """Its session gets the same password: without TLS that is verified, any host in between could ask for it."""
    monkeypatch.delenv("PGSSLMODE", raising=False)
    if environment:
        monkeypatch.setenv("PGSSLMODE", environment)
    direct = quote(f"postgresql://u@direct/d?{listen_options}", safe="")
    config = EngineConfig.parse(f"postgresql://u@pooler/d?{options}&listen_url={direct}", 5.0, password="secret")
    listen = parse_url(config).listen
    assert listen is not None
    (host,) = listen.hosts
    assert {name: value for name, value in host.items() if name.startswith(("ssl", "require"))} == wanted


def test_first_host_that_answers_is_used(database) -> None:
    dead = Proxy(1)
    dead.cut()
    try:
        url = database.url().replace("@127.0.0.1", f"@127.0.0.1:{dead.port},127.0.0.1")
        with Client(url, call_timeout=2) as client, client.lock("job") as lease:
            assert lease.held
    finally:
        dead.close()


def test_host_from_the_environment_is_resolved_by_the_client(database, monkeypatch) -> None:
    hosts, getaddrinfo = [], socket.getaddrinfo

    def recording_getaddrinfo(host, *args, **kwargs):
        hosts.append(host)
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(
        socket, "getaddrinfo", recording_getaddrinfo
    )  # libpq would resolve the host itself, without a deadline
    monkeypatch.setenv("PGHOST", "localhost")
    monkeypatch.setenv("PGPORT", str(database.server.port))
    with Client("postgresql://postgres@/postgres") as client:
        client.ping()
    assert "localhost" in hosts


def test_only_commits_that_promise_something_wait_for_the_disk(database, make_driver) -> None:
    """A deferred trigger records the setting of each transaction that changes a grant or a waiter, as it commits."""
    first, second, third = (make_driver(database.url()) for _ in range(3))
    held = first.acquire(first.claim())
    database.ask("create table {s}.seen (setting text)")
    database.ask(
        "create function {s}.see() returns trigger language plpgsql as "
        "$$ begin insert into {s}.seen values (current_setting('synchronous_commit')); return null; end $$"
    )
    for table in ("lh_grant", "lh_waiter"):
        trigger = f"create constraint trigger see after insert or update or delete on {{s}}.{table}"
        database.ask(f"{trigger} deferrable initially deferred for each row execute function {{s}}.see()")

    def settings_seen() -> set[str]:
        return {setting for (setting,) in database.ask("delete from {s}.seen returning setting")}

    waiting, behind = second.claim(queue=True), third.claim(queue=True)
    for driver, claim in ((second, waiting), (third, behind), (second, waiting)):  # joins, and stays
        assert isinstance(driver.attempt(claim), Busy)
        assert settings_seen() == {"off"}
    assert first.release(held)
    assert settings_seen() == {"on"}
    assert isinstance(second.attempt(waiting), Grant)
    assert settings_seen() == {"on"}


def test_durable_no_applies_to_all_commits_of_that_client_alone(database) -> None:
    """A trigger records the setting in each transaction that changes a grant or a waiter."""

    def settings_seen() -> set[str]:
        return {setting for (setting,) in database.ask("delete from {s}.seen returning setting")}

    with (
        Client(database.url(durable="no"), call_timeout=20) as client,
        Client(database.url(), call_timeout=20) as durable_client,
    ):
        assert (client.traits.survives, durable_client.traits.survives) == ("nothing", "restart")
        client.lock("job").acquire().release()
        assert (client.traits.survives, durable_client.traits.survives) == ("nothing", "restart")
        database.ask("create table {s}.seen (setting text)")
        database.ask(
            "create function {s}.see() returns trigger language plpgsql as "
            "$$ begin insert into {s}.seen values (current_setting('synchronous_commit')); return null; end $$"
        )
        for table in ("lh_grant", "lh_waiter"):
            trigger = f"create trigger see after insert or update or delete on {{s}}.{table} for each row"
            database.ask(f"{trigger} execute function {{s}}.see()")
        lease = client.lock("job").acquire()
        assert settings_seen() == {"off"}
        lease.renew()
        assert settings_seen() == {"off"}
        assert client.lock("job").try_acquire() is None
        assert settings_seen() == {"off"}
        lease.release()
        assert settings_seen() == {"off"}
        lease = client.lock("broken").acquire()
        client.break_lock("broken", token=lease.token)
        assert settings_seen() == {"off"}
        durable_client.lock("job").acquire().release()
        assert settings_seen() == {"on"}
