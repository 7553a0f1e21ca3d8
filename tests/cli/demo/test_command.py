"""The demos, run from a shell: each fails without the fix and works with it, without privileges."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from harness.servers.process import descendants
from harness.servers.redis import RedisServer
from leasehold import ConfigError
from leasehold.cli.demo import NAMES, DemoResult, load_demo, race, thundering_herd
from leasehold.cli.demo.redis_server import DemoRedis, find_program
from leasehold.cli.demo.runner import DemoRunner, WorkerProcess
from leasehold.cli.program import leasehold
from tests.support import probe_cli

EXPECTED = {  # what each demo shows without the fix, and with it
    "zombie": (lambda facts: facts["sold"] == 2, lambda facts: facts["sold"] == 1 and facts["refused"]),
    "race": (lambda facts: facts["lost"] > 0 and facts["naively_lost"] > 0, lambda facts: facts["lost"] == 0),
    "deadlock": (lambda facts: facts["stuck"] == 2, lambda facts: facts["stuck"] == 0),
    "expired-lease": (
        lambda facts: facts["overlap"] > 0,
        lambda facts: facts["overlap"] == 0 and facts["why"] in ("unreachable", "stalled"),
    ),
    "thundering-herd": (
        lambda facts: facts["overtaken"] > 0,
        lambda facts: facts["overtaken"] == 0 and facts["served"] == 200,
    ),
    "failover": (
        lambda facts: facts["paid"] == 2 and not facts["refused"],
        lambda facts: facts["paid"] == 1 and facts["refused"] and not facts["granted"],
    ),
    "partition": (
        lambda facts: facts["overlap"] > 0,
        lambda facts: facts["overlap"] == 0 and facts["refused"] and facts["no_majority"],
    ),
}
SLOW = ("thundering-herd", "partition")


@pytest.fixture(autouse=True)
def own_engine(shell):
    """Without a URL, a demo uses an engine of its own."""
    del shell.environment["LEASEHOLD_URL"]


def run_demo(shell, name, *options):
    done = shell("-o", "json", "demo", *options, name, seconds=120)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extended if name in SLOW else ()) for name in NAMES],
)
def test_demo_shows_failure_and_fix(name, shell):
    code, report, errors = run_demo(shell, name)
    assert (code, report["demo"], report["as_expected"], errors) == (0, name, True, ""), report
    fails, cured = EXPECTED[name]
    assert fails(report["without"]), report
    assert cured(report["with"]), report


@pytest.mark.faults
@pytest.mark.parametrize("name", NAMES)
def test_demo_shows_failure_and_fix_in_twenty_runs(name, shell):
    runs = [run_demo(shell, name)[1] for _ in range(20)]
    fails, cured = EXPECTED[name]
    assert [report for report in runs if not fails(report["without"]) or not cured(report["with"])] == []


# Most of the time it is inside a transaction, and says when one begins.
TRANSACTIONS = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
while True:
    connection.execute("begin immediate")
    print(flush=True)
    time.sleep(0.2)
    connection.execute("commit")
    time.sleep(0.05)
"""


def test_paused_process_is_never_inside_a_transaction():
    with DemoRunner("zombie", None, lambda *_: None, size=None, verbose=False) as runner:
        command = [sys.executable, "-c", TRANSACTIONS, runner.path("locks.db")]
        worker = WorkerProcess(runner, "A", Popen(command, stdin=PIPE, stdout=PIPE, text=True))
        try:
            assert probe_cli.process_of(worker).stdout.readline()
            worker.pause()
            assert not runner.locks_are_in_a_transaction()
        finally:
            worker.end()


def test_demo_text_shows_timeline_without_and_with_the_fix(shell):
    done = shell("demo", "zombie")
    assert done.returncode == 0, done.stderr
    without, _, cured = done.stdout.partition(" with the fix")
    assert "2 sold of a stock of 1  (the failure, as expected)" in without
    assert "A is paused by SIGSTOP" in without
    assert "1 sold of a stock of 1  (no failure, as expected)" in cured
    assert "is refused: stock refused token" in cured
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_demo_list_names_every_demo(shell):
    listed = shell("demo", "--list").stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(NAMES)
    rows = [json.loads(line) for line in shell("-o", "json", "demo", "--list").stdout.splitlines()]
    assert rows[0].keys() == {"demo", "title", "fix"}
    for name in NAMES:
        assert load_demo(name).TITLE
        assert load_demo(name).FIX
    assert shell("demo", "nonsense").returncode == 64


def test_demo_on_given_engine_leaves_nothing_behind(shell, url):
    done = shell("-o", "json", "demo", "deadlock", LEASEHOLD_URL=url)
    assert (done.returncode, json.loads(done.stdout)["as_expected"]) == (0, True)
    assert shell("ls", LEASEHOLD_URL=url).stdout == ""  # the demo left nothing there


def test_expired_lease_demo_uses_its_own_engine_whatever_the_url(shell):
    done = shell("-o", "json", "demo", "expired-lease", LEASEHOLD_URL="redis://127.0.0.1:1")
    assert (done.returncode, json.loads(done.stdout)["as_expected"]) == (0, True)


@pytest.mark.parametrize("name", ["zombie", "thundering-herd"])
def test_demo_on_unreachable_engine_is_69(shell, name):
    done = shell("-u", "redis://127.0.0.1:1", "demo", name)
    assert done.returncode == 69
    assert "127.0.0.1:1" in done.stderr
    assert "Connection refused" in done.stderr


def test_demo_with_empty_url_is_refused(shell):
    done = shell("-u", "", "demo", "zombie")
    assert done.returncode == 78
    assert "is empty" in done.stderr


@pytest.mark.extended
def test_thundering_herd_has_exactly_as_many_callers_as_told(shell):
    _, report, _ = run_demo(shell, "thundering-herd", "--size", "53")  # whether it succeeds depends on the machine
    assert (report["without"]["served"], report["with"]["served"]) == (53, 53)


@pytest.mark.extended
def test_partition_demo_runs_on_the_engine_of_the_url(shell):
    redis = RedisServer().start()
    try:
        done = shell("-o", "json", "demo", "partition", LEASEHOLD_URL=f"redis://127.0.0.1:{redis.port}", seconds=120)
    finally:
        redis.kill()
    report = json.loads(done.stdout)
    assert (done.returncode, report["as_expected"]) == (0, True), report
    assert not report["with"]["no_majority"], "no server answered, so it cannot be known"


def test_partition_demo_refuses_an_engine_without_a_network(shell, url):
    done = shell("demo", "partition", LEASEHOLD_URL=url)
    assert done.returncode == 78
    assert "use one of redis://" in done.stderr


def test_failover_demo_text_mentions_no_internals(shell):
    done = shell("demo", "failover")
    assert done.returncode == 0
    assert "could not confirm that 1 of its replicas have this write" in done.stdout
    assert "NOSCRIPT" not in done.stdout


@pytest.mark.extended  # it runs all demos
def test_demo_without_name_runs_what_it_can_on_a_base_install(shell, hide_redis):
    done = shell("-o", "json", "demo", seconds=240, **hide_redis)
    reports = {report["demo"]: report for report in map(json.loads, done.stdout.splitlines())}
    for needs_redis in ("failover", "partition"):
        skipped = reports.pop(needs_redis)
        assert skipped["as_expected"] is None
        assert 'pip install "leasehold[redis]"' in skipped["skipped"]
    assert done.returncode == 0
    assert {name: report["as_expected"] for name, report in reports.items()} == dict.fromkeys(reports, True)
    assert reports.keys() == set(NAMES) - {"failover", "partition"}


@pytest.mark.extended
@pytest.mark.parametrize("size", [50, pytest.param(500, marks=pytest.mark.faults)])
def test_herd_of_smallest_and_largest_size_behaves_as_expected(shell, size):
    code, report, errors = run_demo(shell, "thundering-herd", "--size", str(size))
    assert (code, report["as_expected"], errors) == (0, True, ""), report
    assert (report["without"]["served"], report["with"]["served"]) == (size, size)


def test_size_of_a_demo_without_one_is_refused(shell):
    done = shell("demo", "race", "--size", "100")
    assert done.returncode == 64
    assert "thundering-herd" in done.stderr


@pytest.mark.parametrize("size", ["49", "501"])
def test_herd_of_another_size_is_refused(shell, size):
    done = shell("demo", "thundering-herd", "--size", size)
    assert (done.returncode, done.stdout) == (64, "")
    assert "50<=x<=500" in done.stderr


def test_herd_starts_again_when_no_caller_was_overtaken_by_chance(monkeypatch):
    """In one of a hundred runs of 50 pollers, the order of arrival is also the order in which they are served."""
    results = iter([DemoResult(False, "", {"overtaken": 0}), DemoResult(True, "", {"overtaken": 3})])
    monkeypatch.setattr(*probe_cli.RUN_HERD_ONCE, lambda *_: (next(results), 0.0))
    with DemoRunner("thundering-herd", None, lambda *_: None, size=50, verbose=False) as runner:
        assert thundering_herd.run(runner, fixed=False).as_expected


def test_herd_starts_again_if_a_process_stood_still_for_too_long(monkeypatch):
    """50 callers arrive within half a second: a process that stood still for 0.3 s has sent its calls late itself."""
    results = iter([(DemoResult(False, "", {"overtaken": 2}), 0.3), (DemoResult(True, "", {"overtaken": 0}), 0.0)])
    monkeypatch.setattr(*probe_cli.RUN_HERD_ONCE, lambda *_: next(results))
    with DemoRunner("thundering-herd", None, lambda *_: None, size=50, verbose=False) as runner:
        assert thundering_herd.run(runner, fixed=True).as_expected


def test_demo_whose_fix_does_not_work_exits_with_1(monkeypatch, capsys):
    monkeypatch.setattr(race, "run", lambda runner, fixed: DemoResult(not fixed, "", {}))
    assert leasehold.main(["demo", "race"], standalone_mode=False) == 1
    assert capsys.readouterr().out.count("NOT as expected") == 1


def test_engine_of_one_process_is_refused_because_demos_have_several(shell):
    done = shell("-u", "memory://x", "demo", "race")
    assert (done.returncode, done.stdout) == (78, "")
    assert "one process only" in done.stderr


@pytest.mark.parametrize("name", ["zombie", "failover"])
def test_demo_leaves_no_process_and_no_folder(name, shell, tmp_path):
    assert shell("demo", name, TMPDIR=str(tmp_path)).returncode == 0
    assert [name for name in os.listdir(tmp_path) if name.startswith("leasehold-demo")] == []
    assert [pid for pid in os.listdir("/proc") if str(tmp_path) in command_line_of(pid)] == []


def command_line_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def state_of(pid: int) -> str:
    """The state of a process; T: stopped, empty: ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", "")
    except OSError:
        return ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
@pytest.mark.parametrize("name", ["zombie", "failover"])
def test_demo_that_is_killed_leaves_no_process(name, shell, wait_until, tmp_path):
    """A process that the demo has paused would stay paused for ever."""
    shell.environment["TMPDIR"] = str(tmp_path)  # the directory does stay behind
    demo = shell.start("demo", name)
    is_under_way = {
        "zombie": lambda pids: any(state_of(pid) == "T" for pid in pids),
        "failover": lambda pids: len(pids) > 2,
    }
    wait_until(lambda: is_under_way[name](descendants(demo.pid)))
    pids = descendants(demo.pid)
    demo.kill()
    demo.wait(30)
    wait_until(lambda: not any(map(state_of, pids)), 60)


def test_demo_without_redis_server_says_how_to_install_it(shell, tmp_path):
    if shutil.which("redis-server", path="/usr/sbin:/usr/local/sbin"):
        pytest.skip("redis-server is in a folder where it is always looked for")
    done = shell("demo", "failover", PATH=str(tmp_path))
    assert done.returncode == 78
    assert "redis-server is not installed: apt-get install redis-server" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def hide_redis(tmp_path):
    """The environment of a program that cannot import the packages of Redis."""
    for package in ("redis", "hiredis"):
        text = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
        (tmp_path / f"{package}.py").write_text(text)
    return {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}


def test_demo_without_redis_package_says_how_to_install_it(shell, hide_redis):
    done = shell("demo", "failover", **hide_redis)
    assert done.returncode == 78
    assert 'pip install "leasehold[redis]"' in done.stderr


def test_server_of_a_demo_does_nothing_without_its_password():
    """Every user of the machine can connect to it. Old servers then write files where they are told to."""
    with DemoRunner("failover", None, lambda *_: None, size=None, verbose=False) as runner:
        before = set(descendants(os.getpid()))  # other tests' servers
        server = DemoRedis(runner, "primary")
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"CONFIG GET dir\r\n")
            assert connection.recv(100).startswith(b"-NOAUTH")
        started = set(descendants(os.getpid())) - before
        (pid,) = [pid for pid in started if b"redis-server" in command_line(pid)]
        assert runner.password.encode() not in command_line(pid)


def command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_processes_of_a_demo_take_no_module_from_the_working_directory(planted_modules):
    """Another user may have put it there: /tmp is a usual place to try something."""
    with DemoRunner("race", None, lambda *_: None, size=None, verbose=False) as runner:
        worker = runner.start("adder", "A", file=runner.path("counter"), rounds=0, lock="no lock")
        runner.wait_for_all([worker], "ready")
    assert not planted_modules.exists()


@pytest.mark.parametrize("search_path", ["", ".", ":/nowhere"])
def test_demo_takes_no_server_from_the_working_directory(monkeypatch, tmp_path, search_path):
    planted = tmp_path / "redis-server"
    planted.write_text("#!/bin/sh\n")
    planted.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", search_path)
    try:
        found = find_program()
    except ConfigError:  # it is not installed
        return
    assert os.path.isabs(found)
    assert not planted.samefile(found)
