"""What docs/platforms.md says of Windows, with a Python that lacks what Python on Windows lacks."""

import subprocess
import sys
from uuid import uuid4

import pytest

import harness.rigs  # noqa: F401  # registers the rigs
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.paths import SUPPORT

LOCKS = """
import asyncio, logging, sys, leasehold
assert sys.platform == "win32"
logging.getLogger("leasehold").setLevel(logging.ERROR)  # Redlock warns of servers without an AOF
url, namespace = {url!r}, {namespace!r}
with leasehold.Client(url, namespace=namespace, call_timeout=60) as client:
    with client.lock("a") as lease:
        print(lease.held, client.lock("a").try_acquire())
async def main():
    async with leasehold.AsyncClient(url, namespace=namespace, call_timeout=60) as client:
        async with client.lock("a", wait=60) as lease:
            print(lease.held)
asyncio.run(main())
"""
REFUSALS = """
import leasehold
from leasehold.cli import main
for url in ("sqlite://", "postgresql://host", "mysql://host/db"):
    try:
        leasehold.Client(url).lock("a").acquire()
    except leasehold.ConfigError as error:
        print(error)
try:
    main()
except SystemExit as end:
    print(end)
"""


def run_on_windows(program: str) -> str:
    command = [sys.executable, SUPPORT / "windows.py", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_locks_in_memory_need_nothing_that_windows_lacks():
    assert run_on_windows(LOCKS.format(url="memory://", namespace="")) == "True None\nTrue\n"


def test_windows_is_refused_with_what_works_there():
    sqlite, postgresql, mysql, program = run_on_windows(REFUSALS).splitlines()
    for line, scheme in ((sqlite, "sqlite"), (postgresql, "postgresql"), (mysql, "mysql")):
        assert line.startswith(f"{scheme}:// does not work on Windows: use memory://")
    assert program.startswith("leasehold: this program needs Linux or macOS.")


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["redis", "redlock", "etcd", "zookeeper", "http-memory"])
def test_network_engine_needs_nothing_that_windows_lacks(engine):
    rig = rig_or_skip(rig_type(engine))
    try:
        program = LOCKS.format(url=rig.client_path().url, namespace=uuid4().hex)
        assert run_on_windows(program) == "True None\nTrue\n"
    finally:
        rig.close()
