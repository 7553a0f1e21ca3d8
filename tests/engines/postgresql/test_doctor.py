"""`leasehold doctor` on real PostgreSQL servers."""

from tests.support.doctor import examine, unsafe


def test_durable_server_has_nothing_unsafe(database):
    assert set(unsafe(database.server.url())) <= {"hand-off"}  # as slow as this machine is


def test_role_without_tables_is_told_that_it_may_not_lock(database):
    server = database.server
    server.ask("create role doctor_reader login")
    found = {each.check: each for each in examine(f"postgresql://doctor_reader@127.0.0.1:{server.port}/postgres")}
    assert found["rights"].severity == "danger"
    assert "leasehold docs security" in found["rights"].fix
