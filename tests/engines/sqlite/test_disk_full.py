"""If the database file cannot grow, no lease is lost, new claims are Unavailable, and the engine recovers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from leasehold import Client, Unavailable


def test_file_at_its_page_limit_is_unavailable_then_recovers(path) -> None:
    with Client(f"sqlite://{path}?durable=no", call_timeout=1) as client:
        kept = client.lock("kept").acquire()
        db = client._core._engine._connection._db
        (used,) = db.execute("pragma page_count").fetchone()
        db.execute(f"pragma max_page_count = {used + 20}")
        leases = []
        with pytest.raises(Unavailable, match="full"):
            for number in range(2000):
                leases.append(client.lock(f"{number:0200}").acquire(wait=0))
        kept.renew()
        assert {holding.name for holding in client.inspect()} == {"kept", *(lease.name for lease in leases)}
        db.execute("pragma max_page_count = 1000000")
        with client.lock("more", wait=0) as new_lease:
            assert new_lease.token > leases[-1].token


def test_file_size_limit_is_unavailable_then_recovers(path, url, child) -> None:
    process = child("limit", url, path)
    full = process.read_message()
    assert full["error"] == "Unavailable", full
    assert full["held"]
    healed = process.read_message()
    assert healed["kept"]
    assert healed["verified"]
    assert healed["token"] > healed["before"]


FULL_DISK = """
set -e
mount -t tmpfs -o size=400k none "$1"
exec "$2" -c '
import os, sys
from leasehold import Client, Unavailable
folder = sys.argv[1]
with Client(f"sqlite://{folder}/locks.db", call_timeout=1) as client:
    kept = client.lock("kept").acquire()
    with open(f"{folder}/filler", "wb", buffering=0) as filler:
        try:
            while True: filler.write(b"x" * 1024)
        except OSError: pass
    leases = []
    try:
        while len(leases) < 5000: leases.append(client.lock(f"n{len(leases)}").acquire(wait=0))
    except Unavailable as error: print("unavailable:", error)
    assert kept.held
    os.unlink(f"{folder}/filler")
    after = client.lock("after").acquire(wait=0)
    kept.renew()
    assert after.token > kept.token
    assert {one.name for one in client.inspect()} == {"kept", "after", *(one.name for one in leases)}
    print("healed")
' "$1"
"""


def test_full_disk_is_unavailable_loses_nothing_and_recovers(tmp_path) -> None:
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root for a small file system of its own; RLIMIT_FSIZE is the rootless form")
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", FULL_DISK, "sh", str(small), sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "unavailable: " in done.stdout
    assert done.stdout.endswith("healed\n")
