"""`leasehold doctor` on real PostgreSQL servers."""

import os
import shutil
from pathlib import Path

import pytest

from harness.servers.folders import scratch
from leasehold import Client
from leasehold.cli.doctor import servers
from leasehold.cli.doctor.findings import Finding
from tests.support import probe_cli
from tests.support.certificates import Authority
from tests.support.doctor import encryption_from_afar, examine, unsafe
from tests.support.health import RUNTIMES, probe


def test_durable_server_has_nothing_unsafe(database):
    assert unsafe(database.server.url()) == {}


def test_role_without_tables_is_told_that_it_may_not_lock(database):
    server = database.server
    server.ask("create role doctor_reader login")
    found = {each.check: each for each in examine(f"postgresql://doctor_reader@127.0.0.1:{server.port}/postgres")}
    assert found["rights"].severity == "danger"
    assert "leasehold docs security" in found["rights"].fix


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_server_without_tls_on_the_network_is_a_warning(database, runtime):
    health = probe(database.server.url(), runtime=runtime)
    assert health.members[0].encryption == "none"
    ((severity, found),) = encryption_from_afar(health)
    assert severity == "warning"
    assert "unencrypted" in found


def test_socket_of_this_machine_needs_no_encryption(database):
    server = database.server
    health = probe(f"postgresql://postgres@/postgres?host={os.path.dirname(server.data)}&port={server.port}")
    assert (health.up, health.members[0].encryption) == (True, None)


def test_tls_is_judged_by_what_the_url_verifies(start_postgresql):
    folder = Path(scratch())
    authority = Authority(folder)
    cert, key = authority.issue("server", "IP:127.0.0.1")
    cert.chmod(0o644)
    key.chmod(0o600)
    if os.getuid() == 0:
        shutil.chown(key, "postgres")
    server = start_postgresql("ssl=on", f"ssl_cert_file={cert}", f"ssl_key_file={key}")
    expected = {
        "sslmode=disable": ("none", "warning"),
        f"sslmode=prefer&sslrootcert={folder}/absent": ("unverified", "warning"),
        f"sslmode=require&sslrootcert={folder}/absent": ("unverified", "warning"),
        f"sslmode=require&sslrootcert={authority.cert}": ("authority", "note"),
        f"sslmode=verify-ca&sslrootcert={authority.cert}": ("authority", "note"),
        f"sslmode=verify-full&sslrootcert={authority.cert}": ("verified", "ok"),
    }
    for options, (encryption, severity) in expected.items():
        health = probe(f"{server.url()}?{options}")
        assert (health.error, health.members[0].encryption) == (None, encryption), options
        assert [each[0] for each in encryption_from_afar(health)] == [severity], options
    assert unsafe(f"{server.url()}?sslmode=verify-full&sslrootcert={authority.cert}") == {}


_COPIES = """
insert into {s}.lh_grant
    select (jsonb_populate_record(one, jsonb_build_object('name', 'copy-' || number))).*
    from {s}.lh_grant as one, generate_series(1, 600) as number where name = 'job'
"""


def test_table_that_is_not_vacuumed_is_a_note(database, create_schema, monkeypatch, wait_until):
    monkeypatch.setattr(*probe_cli.DEAD_ROWS_NOTE, 600)
    url = database.url()
    create_schema(url)
    database.ask("alter table {s}.lh_grant set (autovacuum_enabled = off)")
    assert bloat(url) == []
    with Client(url, call_timeout=20) as client, client.lock("job"):
        database.ask(_COPIES)
    database.ask("delete from {s}.lh_grant where name <> 'job'")
    reader = database.create_login_role(f"reader-{database.schema}")  # may not read the tables
    try:
        wait_until(lambda: dead_rows(reader) >= 600, every=0.1)  # the server counts with a delay
    finally:
        database.drop_role(f"reader-{database.schema}")
    (found,) = bloat(url)
    assert (found.severity, found.promise) == ("note", "E5")
    assert "VACUUM" in found.fix


def bloat(url: str) -> list[Finding]:
    return [each for each in servers.check_servers(probe(url), "postgresql") if each.check == "bloat"]


def dead_rows(url: str) -> int:
    return max((each.dead for each in probe(url).members[0].tables if each.name == "lh_grant"), default=0)
