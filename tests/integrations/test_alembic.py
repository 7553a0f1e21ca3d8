"""Alembic: of many processes that upgrade at once, one migrates and the others find nothing to do."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic.config import Config

from leasehold import Client, ConfigError, NotAcquired, current_lease
from leasehold.integrations.alembic import locked
from leasehold.testing.conformance.rig import Absent
from tests.support import probe_integrations
from tests.support.client_fixtures import poll_until
from tests.support.migrating_child import write_project
from tests.support.paths import SUPPORT, child_environment


class Project:
    def __init__(self, folder: Path, database: str, lock: str = "") -> None:
        write_project(folder)
        self.folder, self._database, self._lock = folder, database, lock

    def start(self, count: int, ttl: float = 60) -> subprocess.Popen[str]:
        script = [sys.executable, str(SUPPORT / "migrating_child.py"), str(self.folder)]
        return subprocess.Popen(
            [*script, self._database, self._lock, str(count), str(ttl)],
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def upgrade(self, count: int, ttl: float = 60) -> tuple[list[int], str]:
        with self.start(count, ttl) as process:
            printed, errors = process.communicate(timeout=120)
        return [int(code) for code in printed.split()], errors

    def ran(self) -> list[tuple[str, int]]:
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(revision, int(pid)) for revision, pid in map(str.split, lines)]


@pytest.fixture
def sqlite_project(tmp_path) -> Project:
    return Project(tmp_path, f"sqlite:///{tmp_path}/shop.db", f"sqlite://{tmp_path}/locks.db")


@pytest.fixture(params=["direct", "pgbouncer"])
def postgresql_project(tmp_path, request):
    """The database and its locks, direct or behind a pooler in transaction mode."""
    from harness.rigs import postgresql

    try:
        server = postgresql.server.own()
        port = server.port if request.param == "direct" else postgresql.pooler(own=True).port
    except Absent as absent:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(absent))
    name = f"migrated_{uuid.uuid4().hex[:8]}"
    server.ask(f"create database {name}")
    address = server.url().rpartition("/")[0].rpartition(":")[0].replace("postgresql://", "postgresql+psycopg://")
    yield Project(tmp_path, f"{address}:{port}/{name}")
    server.ask(f"drop database {name} with (force)")


def check_ten_processes(project: Project) -> None:
    codes, errors = project.upgrade(10)
    assert codes == [0] * 10, errors
    assert [revision for revision, _ in project.ran()] == ["first", "second"]
    assert len({pid for _, pid in project.ran()}) == 1


def check_killed_migrator(project: Project) -> None:
    (project.folder / "hang").touch()
    ttl = 6  # only of the process that is killed: on a busy machine the others could lose their lease
    with project.start(1, ttl) as migrator:
        poll_until(lambda: len(project.ran()) == 2, 60)
        os.kill(project.ran()[-1][1], signal.SIGKILL)
        assert migrator.communicate(timeout=60)[0].split() == ["-9"]
    codes, errors = project.upgrade(3)
    assert codes == [0] * 3, errors
    revisions = [revision for revision, _ in project.ran()]
    assert revisions[-1] == "second"
    assert revisions.count("second") == 2  # that of the killed process, and one more


@pytest.mark.extended
def test_ten_processes_migrate_once(sqlite_project) -> None:
    check_ten_processes(sqlite_project)


@pytest.mark.extended
def test_next_process_migrates_after_the_migrator_was_killed(sqlite_project) -> None:
    check_killed_migrator(sqlite_project)


@pytest.mark.faults  # a race: not every run has it
def test_ten_processes_without_the_lock_do_not_all_succeed(sqlite_project) -> None:
    codes, _ = sqlite_project.upgrade(10, ttl=0)
    assert 1 in codes  # the checks above can fail


@pytest.mark.extended
def test_ten_processes_migrate_postgresql_once(postgresql_project) -> None:
    check_ten_processes(postgresql_project)


@pytest.mark.extended
def test_next_process_migrates_postgresql_after_a_kill(postgresql_project) -> None:
    check_killed_migrator(postgresql_project)


def context(offline: bool = False, **options: str) -> SimpleNamespace:
    config = Config()
    for name, value in options.items():
        config.set_main_option(name.replace("_", "."), value)
    return SimpleNamespace(config=config, is_offline_mode=lambda: offline)


def test_lock_is_kept_by_the_migrated_database_unless_told(monkeypatch) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    database = "postgresql+psycopg2://app:p%%40ss@db:5433/shop?sslmode=require"
    expected = "postgresql://app:p%40ss@db:5433/shop?sslmode=require"
    assert probe_integrations.alembic_lock_url(context(sqlalchemy_url=database), None) == expected
    assert (
        probe_integrations.alembic_lock_url(context(sqlalchemy_url="mariadb+pymysql://app@db/shop"), None)
        == "mysql://app@db/shop"
    )
    assert probe_integrations.alembic_lock_url(context(sqlalchemy_url="sqlite:///shop.db"), None) is None
    with pytest.raises(ConfigError, match=r"oracle does not say where .* set leasehold.url"):
        probe_integrations.alembic_lock_url(context(sqlalchemy_url="oracle://db/shop"), None)
    with pytest.raises(ConfigError, match=r"has no sqlalchemy.url"):
        probe_integrations.alembic_lock_url(context(), None)
    monkeypatch.setenv("LEASEHOLD_URL", "redis://environment")
    assert probe_integrations.alembic_lock_url(context(sqlalchemy_url=database), None) == "redis://environment"
    named = context(sqlalchemy_url=database, leasehold_url="redis://ini")
    assert probe_integrations.alembic_lock_url(named, None) == "redis://ini"
    assert probe_integrations.alembic_lock_url(named, "redis://argument") == "redis://argument"


def test_locked_waits_no_longer_than_its_wait() -> None:
    with Client("memory://alembic") as client:
        with client.lock("alembic"), pytest.raises(NotAcquired), locked(context(), url="memory://alembic", wait=0):
            pytest.fail("migrated")
        with locked(context(), url="memory://alembic") as lease:
            assert current_lease() is lease
            assert client.inspect()[0].holder.purpose == "migrations"


def test_offline_migrations_take_no_lock() -> None:
    with locked(context(offline=True)) as lease:
        assert lease is None


@pytest.mark.parametrize(
    "url", ["s3cr3tMARK", "postgresql://u:s3cr3tMARK/x", "postgresql://u:12@s3cr3tMARK:s3cr3tMARK/x"]
)
def test_database_url_that_cannot_be_parsed_is_not_shown(url, monkeypatch) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    config = Config()
    config.set_main_option("sqlalchemy.url", url)
    with pytest.raises(ConfigError, match="cannot be parsed") as failure:
        probe_integrations.alembic_lock_url(SimpleNamespace(config=config), None)
    assert "s3cr3tMARK" not in str(failure.value)


@pytest.mark.parametrize("option", ["leasehold.url", "sqlalchemy.url"])
def test_url_with_a_single_percent_sign_is_not_shown(option, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    file = tmp_path / "alembic.ini"
    file.write_text(f"[alembic]\n{option} = postgresql://u:p%40s3cr3tMARK@db/x\n")
    with pytest.raises(ConfigError, match=rf"the {option} of alembic.ini .* %%") as failure:
        probe_integrations.alembic_lock_url(SimpleNamespace(config=Config(str(file))), None)
    assert "s3cr3tMARK" not in str(failure.value)
    assert failure.value.__suppress_context__
