"""`ls`, `get` and `watch`: the JSON that docs/reference/json.md documents, and the tables."""

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from leasehold.cli import render
from leasehold.model import Holder, Holding

HOLDING = {
    "namespace": str,
    "name": str,
    "state": str,
    "mode": str,
    "kind": str,
    "limit": int,
    "token": int | None,
    "slot": int | None,
    "position": int | None,
    "holder": str,
    "host": str | None,
    "pid": int | None,
    "purpose": str | None,
    "process": str | None,
    "acquired_at": str | None,
    "age": float,
    "left": float,
    "fingerprint": str,
    "owner": str,
}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"


def check(holding):
    assert list(holding) == list(HOLDING)
    for key, kind in HOLDING.items():
        assert isinstance(holding[key], kind), key
    assert re.fullmatch("[0-9a-f]{16}", holding["fingerprint"])
    return holding


@pytest.fixture
def busy(shell, wait_until):
    """A holder and a waiter of orders/42, a holder of other."""
    holder = shell.hold("orders/42", "--purpose", "nightly", "--holder", "web-3")
    shell.start("run", "orders/42", "--", "true")
    shell.hold("other", "--slots", "2")
    wait_until(lambda: len(shell.json("ls")) == 3)
    return holder


def test_ls_prints_json(shell, busy):
    first, second, third = map(check, shell.json("ls"))
    assert (first["name"], first["state"], first["position"]) == ("orders/42", "held", None)
    assert (first["holder"], first["purpose"], first["pid"]) == ("web-3", "nightly", busy.pid)
    assert (first["mode"], first["kind"], first["limit"], first["slot"]) == ("exclusive", "lock", 1, None)
    assert 0 < first["left"] <= 30
    assert first["age"] >= 0
    assert (second["name"], second["state"], second["position"], second["token"]) == ("orders/42", "waiting", 0, None)
    assert (third["name"], third["kind"], third["limit"], third["slot"]) == ("other", "semaphore", 2, 0)


def test_ls_says_when_a_lock_was_acquired(shell, wait_until):
    before = datetime.now(UTC)
    shell.hold("j")
    after = datetime.now(UTC)
    shell.start("run", "j", "--", "true")
    wait_until(lambda: len(shell.json("ls")) == 2)
    held, waiting = shell.json("ls")
    margin = timedelta(seconds=60)  # the time between the engine's answer and the reading of the clock
    assert before - margin <= datetime.fromisoformat(held["acquired_at"]) <= after + margin
    assert waiting["acquired_at"] is None


def test_ls_marks_a_holder_whose_process_is_gone(shell, wait_until, is_alive):
    holder = shell.hold("j", "--ttl", "600")
    assert shell.json("ls")[0]["process"] == "exists"
    assert f"  {holder.pid}  " in shell("ls").stdout
    holder.kill()
    holder.wait()
    assert shell.json("ls")[0]["process"] == "gone"
    assert f"  {holder.pid} (gone)  " in shell("ls").stdout


def test_process_of_another_host_is_not_known():
    assert render.process_state(Holder("x", "elsewhere", 2**22)) is None
    assert render.process_state(Holder("x", os.uname().nodename, 0)) is None
    assert render.process_state(Holder("x", os.uname().nodename, 1)) == "exists"  # of another user, unless root asks


def test_pid_that_no_process_can_have_is_listed():
    """Any client can claim to have it: `leasehold ls` of all others ended with exit code 70."""
    for pid in (-1, 2**31, 2**62, -(2**62), 10**400):
        holder = Holder("x", os.uname().nodename, pid)
        assert render.process_state(holder) is None
        holding = Holding("", "a", "held", "exclusive", "lock", 1, "0" * 16, holder, 1, 1)
        assert render.holding_as_json(holding)["pid"] == pid
        assert str(pid) in "".join(render.holdings_table([holding]))


def test_ls_with_prefix_lists_only_matching_names(shell, busy):
    assert {holding["name"] for holding in shell.json("ls", "ord")} == {"orders/42"}
    assert shell.json("ls", "no such") == []
    assert json.loads(shell("ls", "-o", "json", "other").stdout)[0]["name"] == "other"


def test_ls_prints_table(shell, busy):
    done = shell("ls")
    assert done.returncode == 0
    head, first, second, third = done.stdout.splitlines()
    columns = ["NAME", "STATE", "TOKEN", "HOLDER", "PID", "ACQUIRED", "AGE", "TTL LEFT", "PURPOSE"]
    assert re.split(r"  +", head) == columns
    acquired = r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d"
    assert re.match(rf"orders/42  held +\d+  web-3 +{busy.pid} +{acquired}  \d+\.\ds  \d\d\.\ds +nightly$", first)
    assert second.startswith("orders/42  waiting 0 ")
    assert "held (slot 0 of 2)" in third
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_ls_of_empty_namespace_succeeds(shell):
    done = shell("ls")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no holders or waiters" in done.stderr
    assert shell("-q", "ls").stderr == ""


def test_get_prints_json(shell, busy):
    found = shell.json("get", "orders/42")
    assert list(found) == ["namespace", "name", "locked", "holders", "waiters"]
    assert (found["namespace"], found["name"], found["locked"]) == ("", "orders/42", True)
    assert check(found["holders"][0])["state"] == "held"
    assert check(found["waiters"][0])["state"] == "waiting"


def test_get_of_free_name_succeeds(shell):
    assert shell.json("get", "j") == {"namespace": "", "name": "j", "locked": False, "holders": [], "waiters": []}
    done = shell("get", "j")
    assert (done.returncode, done.stdout) == (0, "")
    assert "j is free" in done.stderr


def test_control_characters_in_a_name_are_escaped(shell):
    shell.hold("evil\x1b[2J\nname")
    assert r"evil\x1b[2J\nname" in shell("ls").stdout
    assert r"evil\x1b[2J\nname is held by" in shell("run", "-n", "evil\x1b[2J\nname", "true").stderr


def test_colours_are_printed_only_on_terminals_without_no_color(shell):
    shell.hold("j")
    screen = shell.terminal("ls")
    assert screen.wait() == 0
    assert "\x1b[" in screen.seen
    shell.environment["NO_COLOR"] = "1"
    screen = shell.terminal("ls")
    assert screen.wait() == 0
    assert "\x1b[" not in screen.seen
    assert "held" in screen.seen


@pytest.mark.parametrize("command", [("ls",), ("get", "j"), ("watch", "--for", "0.2")])
def test_table_that_is_wider_than_the_terminal_loses_columns(shell, command):
    shell.hold("j", "--holder", "web-3", "--purpose", "thirty columns of explanations")
    shell.environment |= {"NO_COLOR": "1", "COLUMNS": "80"}
    screen = shell.terminal(*command)
    assert screen.wait() == 0
    assert "web-3" in screen.seen
    assert "ACQUIRED" not in screen.seen
    assert "PURPOSE" not in screen.seen
    shell.environment["COLUMNS"] = "200"
    wide = shell.terminal(*command)
    assert wide.wait() == 0
    assert "ACQUIRED" in wide.seen
    assert "thirty columns" in wide.seen
    shell.environment["COLUMNS"] = "20"
    assert "thirty columns" in shell("ls").stdout  # a pipe has no width


def test_ls_into_closed_pipe_is_141_without_message(shell, busy):
    reader, writer = os.pipe()
    os.close(reader)
    process = shell.start("ls", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141
    assert err == ""


# ------------------------------------------------------------------------- watch


def test_watch_prints_changes_as_json_lines(shell):
    first = shell.hold("j")
    watch = shell.start("-o", "json", "watch", "--interval", "0.05")
    present = json.loads(watch.stdout.readline())
    assert list(present) == ["at", "change", *HOLDING]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", present.pop("at"))
    assert present.pop("change") == "present"
    check(present)

    first.stdin.close()
    gone = json.loads(watch.stdout.readline())
    assert (gone["change"], gone["token"]) == ("gone", present["token"])

    shell.hold("j")
    appeared = json.loads(watch.stdout.readline())
    assert (appeared["change"], appeared["state"]) == ("appeared", "held")
    assert appeared["token"] > gone["token"]


def test_watch_reports_granted_waiter_as_changed(shell, wait_until):
    first = shell.hold("j")
    shell.start("run", "j", "--", "cat")
    wait_until(lambda: shell.json("get", "j")["waiters"])
    watch = shell.start("-o", "json", "watch", "j", "--interval", "0.02")
    assert [json.loads(watch.stdout.readline())["state"] for _ in range(2)] == ["held", "waiting"]
    first.stdin.close()
    changes = [json.loads(watch.stdout.readline()) for _ in range(2)]
    assert [change["change"] for change in changes] == ["gone", "changed"]
    assert changes[1]["token"] > changes[0]["token"]


def test_watch_prints_text_lines(shell):
    shell.hold("j")
    done = shell("watch", "--for", "0.05")
    assert done.returncode == 0
    assert re.fullmatch(r"\d\d:\d\d:\d\d  present   j  held  token \d+  .+:\d+\n", done.stdout)


def test_watch_on_terminal_redraws_table(shell):
    shell.hold("j")
    screen = shell.terminal("watch", "--interval", "0.05")
    screen.read("NAME")
    screen.read("held")
    screen.type("\x03")
    assert screen.wait() == 130


# ---------------------------------------------------------------------- the page


def test_json_reference_page_names_every_field():
    page = PAGE.read_text()
    described = re.findall(r"^\| `(\w+)` \|", page, re.M)
    for field in HOLDING:
        assert field in described, field


def test_name_outside_of_the_output_encoding_is_escaped(shell):
    shell.hold("日本")
    for command in (["ls"], ["get", "日本"], ["watch", "--for", "0"]):
        done = shell(*command, PYTHONIOENCODING="latin-1")
        assert done.returncode == 0, done.stderr
        assert "\\u65e5\\u672c" in done.stdout


@pytest.mark.parametrize("command", ["ls", "watch", "get"])
def test_name_that_is_not_utf8_is_64(shell, command):
    done = subprocess.run(
        [sys.executable, "-m", "leasehold", command, b"\xff"],
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 64
    assert "UTF-8" in done.stderr
