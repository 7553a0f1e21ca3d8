"""The audit file: what a client's events become, several writers, crashes, full disks, rotation, forks."""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from types import SimpleNamespace

import pytest

from leasehold import Client, ConfigError, Event
from leasehold.telemetry import AuditFile, metrics_text
from leasehold.telemetry.audit import file as audit_file
from leasehold.telemetry.audit.verify import find_files, sort_files, verify
from tests.support import probe, probe_telemetry
from tests.support.paths import SUPPORT, child_environment

SECONDS = 60.0


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "audit.jsonl"


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def actions(path):
    return [record["action"] for record in read(path)]


def faults(*paths, **options):
    (chain,) = sort_files(find_files(map(str, paths)))
    return [str(fault) for fault in verify(chain, **options).faults]


def grant(audit, name="orders/42", **fields):
    audit.write("grant", namespace="shop", name=name, **fields)
    audit.flush()


# ------------------------------------------------------------------ what is written


def test_client_events_become_records_without_ids(path):
    with AuditFile(path, server="web-1") as audit, Client("memory://", namespace="shop", on_event=audit) as client:
        with client.lock("orders/42", holder="web-1:7", purpose="settle") as lease:
            client.lock("orders/42").try_acquire()
            secret = probe.claim(lease).id
        client.break_lock("orders/42", token=1, why="not held by anyone")
    opened, granted, released, closed = read(path)
    assert (opened["action"], opened["seal"], opened["seq"], opened["prev"]) == ("open", "sha256", 1, "0" * 64)
    assert granted["action"] == "grant"
    assert granted["lock"] == {"namespace": "shop", "name": "orders/42", "mode": "exclusive", "purpose": "settle"}
    assert granted["who"] == {"holder": "web-1:7", "host": os.uname().nodename, "pid": os.getpid()}
    assert (granted["server"], granted["token"], granted["ttl"]) == ("web-1", lease.token, 30.0)
    assert granted["fingerprint"] == released["fingerprint"] == lease.fingerprint
    assert (released["action"], released["held"] >= granted["waited"] >= 0) == ("release", True)
    assert closed["action"] == "close"
    assert secret not in path.read_text()
    assert faults(path) == []


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"kind": "lost", "reason": "stalled", "seconds": 4.0}, {"action": "loss", "why": "stalled", "held": 4.0}),
        ({"kind": "renew_failed", "reason": "no answer"}, {"action": "renew_failed", "why": "no answer"}),
        ({"kind": "unguaranteed", "reason": "no answer"}, {"action": "grant", "result": "unguaranteed"}),
        (
            {"kind": "broken", "actor": "mira", "why": "OPS-1182 says so"},
            {"action": "break", "why": "OPS-1182 says so"},
        ),
        ({"kind": "stale_token", "fence": "sql", "seen": 9}, {"action": "stale_token", "fence": "sql", "seen": 9}),
    ],
)
def test_event_becomes_record_of_its_action(path, event, expected):
    with AuditFile(path) as audit:
        audit(Event(**{"engine": "etcd", "namespace": "shop", "name": "orders/42", "at": 0.0, "token": 7, **event}))
    record = read(path)[1]
    assert expected.items() <= record.items()
    assert record["token"] == 7
    assert event["kind"] != "broken" or record["who"]["subject"] == "mira"


@pytest.mark.parametrize("kind", ["attempted", "busy", "renewed", "waited", "at_risk", "breaker_opened"])
def test_event_without_consequences_is_not_recorded(path, kind):
    with AuditFile(path) as audit:
        audit(Event(kind, "etcd", "shop", "orders/42", 0.0))
    assert actions(path) == ["open", "close"]


def test_server_fields_are_grouped_and_in_the_chain(path):
    with AuditFile(path, server="locks-1") as audit:
        audit.write("denied", namespace="shop", name="a", subject="svc:web", scopes=["read"], address="10.0.3.17")
        audit.write("grant", namespace="shop", name="b", kind="semaphore", limit=3, slot=0, done=True, request="01HZ")
        assert actions(path) == ["open"]
        audit.flush()
    _, denied, granted, _ = read(path)
    assert denied["who"] == {"subject": "svc:web", "scopes": ["read"], "address": "10.0.3.17"}
    assert granted["lock"] == {"namespace": "shop", "name": "b", "kind": "semaphore", "limit": 3, "slot": 0}
    assert (granted["done"], granted["request"]) == (True, "01HZ")


@pytest.mark.parametrize("text", ["new\nline", '"},{"', "\u202e\x00\x1b[2J", "\udc80", "x" * 100_000])
def test_hostile_text_stays_within_its_record(path, text):
    with AuditFile(path) as audit:
        grant(audit, holder=text)
    assert read(path)[1]["who"]["holder"] == text[:1000]
    assert path.read_bytes().isascii()
    assert faults(path) == []


def test_metrics_count_records_and_failures(path, monkeypatch):
    audit = AuditFile(path, sync="none")
    monkeypatch.setattr(audit_file.os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        grant(audit)
    lines = [line for line in metrics_text(audit).splitlines() if not line.startswith("#")]
    assert lines == ["leasehold_audit_records_total 1.0", "leasehold_audit_errors_total 1.0", "leasehold_audit_seq 1.0"]


# -------------------------------------------------------------------- the file itself


def test_new_file_is_for_its_user_only(path):
    umask = os.umask(0)
    try:
        AuditFile(path).close()
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_symbolic_link_is_refused(path, tmp_path):
    (tmp_path / "target").touch()
    path.symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="symbolic link"):
        AuditFile(path)
    assert (tmp_path / "target").read_bytes() == b""


@pytest.mark.parametrize("content", [b"root:x:0:0\n", b"{}\n", b'{"action":"grant"}\n', b"\n", b"\xff\xfe"])
def test_file_of_another_kind_is_refused_and_kept(path, content):
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not an audit record"):
        AuditFile(path)
    assert path.read_bytes() == content


def test_missing_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"none/audit.jsonl cannot be written: No such file"):
        AuditFile(tmp_path / "none" / "audit.jsonl")


def test_sync_of_unknown_kind_is_refused(path):
    with pytest.raises(ConfigError, match="sync must be"):
        AuditFile(path, sync="often")


def test_second_process_continues_the_chain(path):
    AuditFile(path, server="first").close()
    AuditFile(path, server="second").close()
    assert [(record["seq"], record["server"]) for record in read(path)] == [
        (1, "first"),
        (2, "first"),
        (3, "second"),
        (4, "second"),
    ]
    assert faults(path) == []


@pytest.mark.parametrize("mode", ["batch", "always", "none"])
def test_records_reach_the_disk_as_sync_says(path, mode, monkeypatch):
    synced = threading.Event()
    monkeypatch.setattr(audit_file.os, "fsync", lambda fd: synced.set())
    audit = AuditFile(path, sync=mode)
    synced.clear()
    grant(audit)
    if mode == "batch":
        assert synced.wait(SECONDS)
    else:
        assert synced.is_set() == (mode == "always")
    audit.close()


# -------------------------------------------------------------------------- writers


def test_many_threads_and_processes_write_one_chain(path):
    children = [
        subprocess.Popen(
            [sys.executable, SUPPORT / "audit_child.py", path, f"child-{number}", "200"],
            env=child_environment(),
            stdout=subprocess.DEVNULL,
        )
        for number in range(3)
    ]
    with AuditFile(path, server="here", sync="none") as audit:
        threads = [threading.Thread(target=lambda: [grant(audit) for _ in range(100)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [child.wait(SECONDS) for child in children] == [0, 0, 0]
    assert actions(path).count("grant") == 3 * 200 + 4 * 100
    assert faults(path) == []


def test_signal_handler_that_writes_during_a_write_keeps_the_chain(path, monkeypatch):
    audit = AuditFile(path, sync="none")
    real, nested = os.write, []

    def interrupted(fd, data):
        if not nested:
            nested.append(True)
            grant(audit, "nested")  # as a signal handler would, on the same thread
        return real(fd, data)

    monkeypatch.setattr(audit_file.os, "write", interrupted)
    grant(audit, "outer")
    audit.close()
    assert [record["lock"]["name"] for record in read(path) if "lock" in record] == ["outer", "nested"]
    assert faults(path) == []


def test_forked_child_writes_to_the_same_chain(path):
    audit = AuditFile(path, sync="none")
    grant(audit, "parent-1")
    pid = os.fork()
    if pid == 0:
        try:
            for _ in range(50):
                grant(audit, "child")
        finally:
            os._exit(0)
    for _ in range(50):
        grant(audit, "parent-2")
    os.waitpid(pid, 0)
    audit.close()
    assert actions(path).count("grant") == 101
    assert faults(path) == []


def test_forked_child_has_a_lock_of_its_own(path, monkeypatch):
    """The lock on a file belongs to all who share its descriptor: parent and child must not share one."""
    monkeypatch.setattr(*probe_telemetry.AUDIT_LOCK_SECONDS, 0.1)
    audit = AuditFile(path, sync="none")
    inside, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            real = os.write

            def write(fd, data):
                real(inside[1], b"x")
                os.read(go_on[0], 1)
                return real(fd, data)

            monkeypatch.setattr(audit_file.os, "write", write)
            grant(audit, "child")
        finally:
            os._exit(0)
    try:
        os.read(inside[0], 1)  # the child is about to write, and has the file locked
        with pytest.raises(TimeoutError):
            grant(audit, "parent")
    finally:
        os.write(go_on[1], b"x")
        os.waitpid(pid, 0)
        for fd in (*inside, *go_on):
            os.close(fd)
    audit.close()
    assert actions(path) == ["open", "grant", "gap", "close"]
    assert faults(path) == []


def test_suspended_writer_does_not_hold_up_others_for_ever(path, monkeypatch, caplog):
    """Another process is stopped while it has the file locked: records are missed, and that is told."""
    monkeypatch.setattr(*probe_telemetry.AUDIT_LOCK_SECONDS, 0.1)
    audit = AuditFile(path)
    code = "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print(1, flush=True)"
    other = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(600)", path], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"1\n"
        with pytest.raises(TimeoutError, match="another process keeps the file locked"):
            grant(audit, "missed")
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    grant(audit, "told")
    audit.close()
    assert actions(path) == ["open", "gap", "grant", "close"]
    assert (audit.errors, read(path)[1]["missed"]) == (1, 1)
    assert "another process keeps the file locked" in caplog.text


# ------------------------------------------------------------------ crashes, full disks


def test_kill_while_writing_leaves_a_chain_that_goes_on(path):
    """Torn lines or not: after each kill -9 the next writer continues, and all that was reported written is there."""
    for number in range(5):
        child = subprocess.Popen(
            [sys.executable, SUPPORT / "audit_child.py", path, f"child-{number}", "0"],
            env=child_environment(),
            stdout=subprocess.PIPE,
        )
        child.stdout.readline()
        end, size = time.monotonic() + SECONDS, path.stat().st_size
        while path.stat().st_size < size + 20_000:
            assert time.monotonic() < end
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    AuditFile(path).close()
    last_lines = path.read_text().splitlines()[-2:]  # a line before them may be torn
    assert [json.loads(line)["action"] for line in last_lines] == ["open", "close"]
    assert faults(path) == []


@pytest.mark.parametrize("left", [1, 9, 10, 11, 200, -2, -1])
def test_torn_last_line_is_kept_and_told_by_the_next_record(path, left):
    with AuditFile(path) as audit:
        grant(audit)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:left])  # of `close`
    assert len(faults(path)) == 1
    AuditFile(path, server="next").close()
    (chain,) = sort_files([str(path)])
    report = verify(chain)
    assert report.faults == []
    whole = left == -1  # only the line end is missing: the record is there
    assert [note.line for note in report.notes] == ([] if whole else [3])
    assert report.records == (5 if whole else 4)
    if not whole:
        assert report.notes[0].text.startswith(f"{len(lines[2][:left])} bytes of a record that a crash")
        path.write_bytes(path.read_bytes().replace(lines[2][:left] + b"\n", lines[2][: left - 1] + b"\n", 1))
        assert faults(path) != []


def test_file_torn_in_its_first_record_is_usable(path):
    AuditFile(path).close()
    path.write_bytes(path.read_bytes()[:100])
    AuditFile(path).close()
    assert [record["seq"] for record in map(json.loads, path.read_bytes().splitlines()[1:])] == [1, 2]
    assert faults(path) == []


def test_full_disk_drops_records_and_tells_how_many(path):
    """The system writes a part of a record and refuses the rest, as on a full disk. Then there is room again."""
    child = subprocess.Popen(
        [sys.executable, SUPPORT / "audit_child.py", path, "child", "60", "20000"],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, log = child.communicate("\n", timeout=SECONDS)
    assert child.returncode == 0
    assert "could not be written" in log
    (chain,) = sort_files([str(path)])
    report = verify(chain)
    assert report.faults == []
    assert len(report.notes) == 1
    records = [json.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    (gap,) = [record for record in records if record["action"] == "gap"]
    assert gap["missed"] == 60 - sum(record["action"] == "grant" for record in records) == 1
    assert gap["torn"]["bytes"] > 0


FULL_DISK = """
set -e
mount -t tmpfs -o size=40k,mode=700 none "$1"
exec "$2" - "$1" <<'CODE'
import errno, os, sys
from leasehold.telemetry import AuditFile
from leasehold.telemetry.audit.verify import verify
path = sys.argv[1] + "/audit.jsonl"
audit = AuditFile(path, sync="none")
with open(sys.argv[1] + "/ballast", "wb") as ballast:
    ballast.write(bytes(30_000))
missed = 0
for number in range(100):
    try:
        audit.check()
        audit.write("grant", name=str(number), purpose="x" * 500)
        audit.flush()
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        missed += 1
assert missed and audit.errors >= missed, (missed, audit.errors)
os.unlink(sys.argv[1] + "/ballast")
audit.check()
audit.close()
report = verify([path])
assert not report.faults, report.faults
print("gap" in open(path).read())
CODE
"""


def test_real_full_file_system_is_survived(tmp_path):
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    command = ["unshare", "-m", "sh", "-c", FULL_DISK, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=SECONDS)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_check_raises_until_a_record_can_be_written_again(path, monkeypatch):
    audit = AuditFile(path, sync="none")
    audit.check()
    with monkeypatch.context() as broken:
        broken.setattr(audit_file.os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            grant(audit)
        with pytest.raises(OSError, match="No space left"):
            audit.check()
    audit.check()
    audit.check()
    audit.close()
    assert actions(path) == ["open", "gap", "close"]
    gap = read(path)[1]
    assert (gap["missed"], gap["why"]) == (1, "No space left")


def test_hook_that_cannot_write_never_breaks_a_lock(path, monkeypatch, caplog):
    audit = AuditFile(path, sync="none")
    monkeypatch.setattr(audit_file.os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left")))
    with caplog.at_level(logging.ERROR), Client("memory://", on_event=audit) as client:
        for _ in range(5):
            with client.lock("a"):
                pass
    assert audit.errors == 10
    lines = [record for record in caplog.records if "No space left" in record.getMessage()]
    assert len(lines) == 1, "one line in ten seconds is enough"


def test_lines_cut_off_behind_a_live_writer_are_found(path):
    """A tail that is cut off leaves no trace in a file: but the process that wrote it knows better."""
    audit = AuditFile(path)
    for _ in range(3):
        grant(audit)
    lines = path.read_bytes().splitlines(keepends=True)
    os.truncate(path, len(b"".join(lines[:2])))
    assert faults(path) == []
    grant(audit)
    audit.close()
    (fault,) = faults(path)
    assert "records 3 to 4 are missing" in fault


# ------------------------------------------------------------------------ rotation


@pytest.fixture
def rotating(monkeypatch):
    """Files are rotated at 2,000 bytes, or when `today` changes."""
    state = SimpleNamespace(now=1_800_000_000.0)
    monkeypatch.setattr(*probe_telemetry.MAX_AUDIT_FILE, 2000)
    monkeypatch.setattr(audit_file.time, "time", lambda: state.now)
    monkeypatch.setattr(audit_file.time, "gmtime", lambda: time.struct_time((2027, 1, 15, 8, 0, 0, 0, 0, 0)))
    return state


def test_file_is_rotated_at_its_size_and_chain_goes_on(path, rotating):
    with AuditFile(path) as audit:
        for _ in range(20):
            grant(audit)
    old = sorted(path.parent.glob("audit-*.jsonl"))
    assert len(old) >= 2
    assert all(read(each)[-1]["action"] == "close" and read(each)[0]["action"] == "open" for each in old)
    assert old[0].name == f"audit-20270115T080000Z-{read(old[0])[-1]['seq']:08}.jsonl"
    assert sum(actions(each).count("grant") for each in [*old, path]) == 20
    assert faults(path.parent) == []
    old[-1].unlink()
    assert any("are missing" in fault for fault in faults(path.parent))


def test_file_is_rotated_on_a_new_day(path, rotating):
    with AuditFile(path) as audit:
        grant(audit)
        rotating.now += 86_400
        grant(audit)
    assert len(list(path.parent.glob("audit-*.jsonl"))) == 1
    assert actions(path) == ["open", "grant", "close"]
    assert faults(path.parent) == []


def test_next_process_continues_after_rotation_without_a_current_file(path, rotating):
    with AuditFile(path) as audit:
        grant(audit)
    path.rename(path.parent / "audit-20270115T080000Z-00000003.jsonl")
    AuditFile(path).close()
    assert [record["seq"] for record in read(path)] == [4, 5]
    assert faults(path.parent) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to act as a second user")
def test_file_that_another_user_planted_is_no_predecessor(path):
    """In a folder that every user may write, a stranger's file with a later number kept root's jobs from starting."""
    planted = path.parent / "audit-20991231T000000Z-99999999.jsonl"
    planted.write_text("{}")
    os.chown(planted, 65533, 65533)
    AuditFile(path).close()
    assert [record["seq"] for record in read(path)] == [1, 2]


@pytest.mark.parametrize("content", ["one line", "damaged"])
def test_packed_predecessor_of_any_content_is_refused_in_little_memory(path, content):
    """Its only line was read as a whole: 20 kB took 20 MB. Damaged gzip was an error of another kind."""
    packed = gzip.compress(b"x" * 20_000_000, 1)
    (path.parent / "audit.jsonl.1.gz").write_bytes(packed if content == "one line" else packed[:-20])
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"is not an audit record|cannot be written: .*end-of-stream"):
            AuditFile(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", [False, True])
def test_file_renamed_by_logrotate_is_let_go_by_every_writer(path, packed):
    first, second = AuditFile(path, server="first"), AuditFile(path, server="second")
    grant(first)
    rotated = path.parent / "audit.jsonl.1"
    path.rename(rotated)
    if packed:
        (path.parent / "audit.jsonl.1.gz").write_bytes(gzip.compress(rotated.read_bytes()))
        (path.parent / "audit.jsonl.1.gz").chmod(0o600)
        rotated.unlink()
    grant(second)
    first.reopen()
    grant(first)
    first.close()
    second.close()
    assert [record["server"] for record in read(path)] == ["second", "second", "first", "first", "second"]
    assert faults(path.parent) == []


def test_file_that_may_not_be_renamed_goes_on(path, rotating, monkeypatch, caplog):
    def refuse(*_args, **_options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(audit_file.os, "rename", refuse)
    with AuditFile(path) as audit:
        for _ in range(20):
            grant(audit)
    assert actions(path).count("grant") == 20
    assert caplog.text.count("could not be rotated") == 1


def test_anchors_are_logged_every_thousand_records_and_at_the_end(path, caplog):
    with caplog.at_level(logging.INFO, "leasehold.audit"), AuditFile(path, sync="none") as audit:
        for _ in range(1100):
            audit.write("grant", name="a")
        audit.flush()
    anchors = [record.message.rpartition(" ")[2] for record in caplog.records]
    assert [anchor.partition(":")[0] for anchor in anchors] == ["1101", "1102"]
    seq, _, digest = anchors[0].partition(":")
    assert faults(path, anchors={int(seq): digest}) == []
    assert faults(path, anchors={int(seq): "0" * 64}) != []
    assert faults(path, anchors={5000: digest}) != []


# ---------------------------------------------------------------------------- keys


@pytest.fixture
def key(tmp_path):
    found = tmp_path / "key"
    found.write_text("a secret of more than sixteen bytes\n")
    found.chmod(0o600)
    return found


def test_sealed_file_verifies_with_its_key_only(path, key):
    with AuditFile(path, key_file=key) as audit:
        grant(audit)
    secret = key.read_bytes().strip()
    assert faults(path, key=secret) == []
    assert len(faults(path, key=b"another secret")) == 3
    with pytest.raises(ConfigError, match="sealed with a key: pass --key-file"):
        faults(path)


def test_records_without_the_key_are_found_although_hashed_well(path, key):
    """A chain alone can be written anew by everyone; with a key only by its owner."""
    AuditFile(path, key_file=key).close()
    path.unlink()
    AuditFile(path).close()
    assert len(faults(path, key=key.read_bytes().strip())) == 2


def test_writer_with_another_key_is_refused(path, key):
    AuditFile(path, key_file=key).close()
    with pytest.raises(ConfigError, match="sealed with another key or none"):
        AuditFile(path)


@pytest.mark.parametrize(
    ("mode", "content", "expected"),
    [(0o644, "x" * 32, "chmod 600"), (0o600, "short", "shorter than 16 bytes"), (None, "", "no key file")],
)
def test_key_file_that_protects_nothing_is_refused(path, tmp_path, mode, content, expected):
    key = tmp_path / "key"
    if mode is not None:
        key.write_text(content)
        key.chmod(mode)
    with pytest.raises(ConfigError, match=expected):
        AuditFile(path, key_file=key)
    assert not path.exists()


@pytest.mark.parametrize("name", ["file/key", "folder"])
def test_key_file_that_cannot_be_read_is_refused(path, tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"key file .* cannot be read|is not a regular file"):
        AuditFile(path, key_file=tmp_path / name)


def test_audit_file_that_cannot_be_opened_leaves_no_descriptor(path, tmp_path):
    """A server that tries again and again ran out of them."""
    folder = tmp_path / "audit-folder"
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(path)
    path.write_text("no audit record\n")
    path.chmod(0o600)
    before = os.listdir("/proc/self/fd")
    for bad in (folder, link, path):
        with pytest.raises(ConfigError):
            AuditFile(bad)
    assert os.listdir("/proc/self/fd") == before
