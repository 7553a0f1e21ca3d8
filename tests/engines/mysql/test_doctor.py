"""`leasehold doctor` on real MariaDB servers."""

from tests.support.doctor import examine, unsafe


def test_durable_server_has_nothing_unsafe(mysql):
    assert set(unsafe(mysql.named_url("root"))) <= {"hand-off"}  # as slow as this machine is


def test_commits_that_are_not_flushed_are_a_warning(mariadb):
    server = mariadb("innodb-flush-log-at-trx-commit=0")
    found = [each for each in examine(f"mysql://root@127.0.0.1:{server.port}/leasehold") if each.check == "settings"]
    assert [(each.severity, each.promise) for each in found] == [("warning", "E1")]
