"""Two versions of Leasehold on one engine, as during a roll-out: what docs/operations/upgrades.md says.

tests/support/builds.py makes the other versions from this tree: one with another number, one with another format.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

import harness.rigs  # noqa: F401  # registers the rigs
from leasehold import Client, ConfigError
from leasehold.engines.mysql.schema import statements
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import builds
from tests.support.program import PROGRAM

pytestmark = pytest.mark.extended

ENGINES = ["sqlite", "redis", "redlock", "postgresql", "mysql", "etcd", "zookeeper", "http-memory"]
SHARE_TABLES = {"postgresql", "mysql"}  # functions of both versions work on the same tables
KEPT_APART = {"redis", "redlock", "etcd", "zookeeper"}


class OtherVersion:
    """The program `leasehold` of another installation."""

    def __init__(self, site: Path) -> None:
        self.environment = {**os.environ, "PYTHONPATH": str(site)}

    def __call__(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "leasehold", *arguments]
        environment = {**self.environment, **more}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def next_version():
    return OtherVersion(builds.next_version())


@pytest.fixture(scope="module")
def next_format():
    return OtherVersion(builds.next_format())


@pytest.fixture
def rig(request):
    made = rig_or_skip(rig_type(request.param))
    yield made
    made.close()


def test_other_installation_is_another_version(next_version, next_format):
    assert next_version("--version").stdout.startswith("leasehold 0.2.0.dev0")
    assert next_format("--version").stdout.startswith("leasehold 1.0.0.dev0")


@pytest.mark.parametrize("rig", ENGINES, indirect=True)
def test_versions_of_one_format_exclude_each_other(rig, next_version):
    url, namespace = rig.client_path().url, uuid4().hex
    place = ("-u", url, "--namespace", namespace)
    with Client(url, namespace=namespace, call_timeout=60) as client:
        with client.lock("a", wait=60) as ours:
            assert next_version(*place, "run", "-n", "a", "true").returncode == 75
        done = next_version(*place, "run", "-n", "a", "-c", "echo $LEASEHOLD_TOKEN")
        assert done.returncode == 0, done.stderr
        if client.traits.fencing:
            assert int(done.stdout) > ours.token
        with client.lock("a", wait=0) as after:
            assert after.token is None or int(done.stdout) < after.token


@pytest.mark.parametrize(
    "rig",
    [each if each in {"sqlite", "redis"} else pytest.param(each, marks=pytest.mark.faults) for each in ENGINES],
    indirect=True,
)
def test_lease_of_a_newer_version_excludes_this_one(rig, next_version):
    url, namespace = rig.client_path().url, uuid4().hex
    probe = f"import leasehold; c = leasehold.Client({url!r}, namespace={namespace!r}, call_timeout=60); "
    probe += "print(leasehold.__version__, c.lock('a').try_acquire()); c.close()"
    done = next_version(
        *("-u", url, "--namespace", namespace, "run", "-n", "a", "--"),
        *("env", "-u", "PYTHONPATH", sys.executable, "-c", probe),
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"0\.1\.\S+ None\n", done.stdout), done.stdout


@pytest.mark.parametrize("rig", ENGINES, indirect=True)
def test_other_format_is_refused_excluded_or_kept_apart(request, rig, next_format):
    """As docs/operations/upgrades.md says of each engine."""
    engine = request.node.callspec.params["rig"]
    url, namespace = rig.client_path().url, uuid4().hex
    place = ("-u", url, "--namespace", namespace)
    with Client(url, namespace=namespace, call_timeout=60) as client, client.lock("a", wait=60) as lease:
        if engine == "mysql":
            add_procedures(rig, next_format, place)
        done = next_format(*place, "run", "-n", "a", "true")
        if engine in SHARE_TABLES:
            assert done.returncode == 75, done.stderr
        elif engine in KEPT_APART:
            assert done.returncode == 0, done.stderr
            assert next_format("-o", "json", *place, "ls").stdout.strip() == "[]"
        elif engine == "sqlite":
            assert done.returncode == 78
            assert "was created by an older Leasehold (schema version 1, this one supports 2)" in done.stderr
        else:
            assert done.returncode in (69, 78)
            assert "refused the call: there is no '/v2/calls' here" in done.stderr
        lease.check()
        assert [each.name for each in client.inspect()] == ["a"]
        if engine in SHARE_TABLES:
            lease.release()
            done = next_format(*place, "run", "-n", "a", "-c", "echo $LEASEHOLD_TOKEN")
            assert int(done.stdout) > lease.token
            with client.lock("a", wait=0) as after:
                assert after.token > int(done.stdout)


def add_procedures(rig, next_format, place):
    """The account of MySQL's rig may not create them: it is refused until their owner has run `leasehold schema`."""
    done = next_format(*place, "run", "-n", "a", "true")
    assert done.returncode == 77
    assert "tables and procedures are missing" in done.stderr
    script = next_format("schema", "mysql", "--schema", rig.database, "--role", rig.user).stdout
    rig.server.run(*statements(script))


def test_sqlite_file_of_a_newer_format_is_refused(tmp_path, next_format):
    url = f"sqlite://{tmp_path}/locks.db"
    assert next_format("-u", url, "run", "-n", "a", "true").returncode == 0
    with Client(url) as client, pytest.raises(ConfigError, match="newer Leasehold"):
        client.lock("a").acquire()


def test_printed_lease_of_another_format_is_refused(tmp_path, next_version, next_format):
    url = f"sqlite://{tmp_path}/locks.db"
    printed = next_version("-u", url, "acquire", "a").stdout
    assert json.loads(printed)["format"] == "lh1"
    done = next_format("-u", url, "release", LEASEHOLD_LEASE=printed)
    assert done.returncode == 78
    assert "another format ('lh1', this one reads 'lh2')" in done.stderr
    environment = {**os.environ, "LEASEHOLD_LEASE": printed}
    assert subprocess.run([*PROGRAM, "-u", url, "release"], env=environment, check=False).returncode == 0
