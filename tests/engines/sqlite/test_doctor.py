"""`leasehold doctor` on real files."""

import json
import os
import subprocess
import sys

from leasehold import Client
from tests.support.doctor import SPEED, examine


def doctor(url: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "leasehold", *options, "doctor", url], capture_output=True, text=True, timeout=60
    )


def test_healthy_file_has_nothing_above_a_note(path):
    result = doctor(f"sqlite://{path}", "-o", "json")
    report = json.loads(result.stdout)
    found = {finding["check"]: finding["severity"] for finding in report["findings"]}
    slow = {check for check in SPEED if found.get(check) == "warning"}
    assert (result.returncode, result.stderr, report["engine"]) == (1 if slow else 0, "", "sqlite")
    assert {severity for check, severity in found.items() if check not in slow} <= {"ok", "note"}
    assert found.keys() - {"disk", "host clock"} == {
        "reachable",
        "settings",
        "file system",
        "round trip",
        "hand-off",
        "rights",
        "lock",
        "promises",
    }


def test_doctor_leaves_no_claims(path):
    with Client(f"sqlite://{path}") as client:
        doctor(f"sqlite://{path}")
        assert client.inspect() == []


def test_file_that_is_not_synced_is_a_warning(path):
    result = doctor(f"sqlite://{path}?durable=no")
    assert result.returncode == 1
    assert "remove durable=no" in result.stdout


def test_file_that_is_no_database_is_a_danger(path):
    with open(path, "wb") as file:
        file.write(b"not a database" * 1000)
    os.chmod(path, 0o600)
    result = doctor(f"sqlite://{path}")
    assert result.returncode == 2
    assert "not a valid SQLite file" in result.stdout


def test_folder_for_every_user_is_a_danger_with_the_whole_remedy(path):
    os.chmod(os.path.dirname(path), 0o777)
    found = {each.check: each for each in examine(f"sqlite://{path}")}["reachable"]
    assert found.severity == "danger"
    assert found.found.endswith("add ?trust_folder=yes to the URL")


def test_lock_that_expires_in_hours_is_the_red_flag_of_no_ttl(path):
    with Client(f"sqlite://{path}", ttl=7200) as client, client.lock("job"):
        result = doctor(f"sqlite://{path}")
    assert result.returncode == 1
    assert "[no-ttl]" in result.stdout


def test_memory_engine_is_refused():
    result = doctor("memory://")
    assert (result.returncode, result.stdout) == (78, "")
