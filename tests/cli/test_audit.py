"""`audit verify`, `audit show`, `history`, and the options that write audit files."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest

from leasehold.telemetry import AuditFile
from leasehold.telemetry.audit.history import past_grants

JSON_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture
def audited(shell, path):
    """The shell, with LEASEHOLD_AUDIT set."""
    shell.environment["LEASEHOLD_AUDIT"] = str(path)
    return shell


def json_keys(command: str) -> list[str]:
    """The keys that the page documents for a command."""
    section = JSON_PAGE.read_text().partition(f"\n## `{command}`\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.M)


# ------------------------------------------------------------------------ writing


def test_run_records_grant_and_release(shell, path):
    assert shell("run", "--audit", str(path), "--holder", "web-3", "job", "--", "true").returncode == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["action"] for record in records] == ["open", "grant", "release", "close"]
    assert records[1]["who"]["holder"] == "web-3"
    assert shell("audit", "verify", str(path)).returncode == 0


@pytest.mark.parametrize("file", ["none/audit.jsonl", "text"])
def test_run_without_a_usable_audit_file_is_78_and_runs_nothing(shell, tmp_path, file):
    (tmp_path / "text").write_text("hello\n")
    done = shell("run", "--audit", file, "job", "--", "touch", "ran")
    assert done.returncode == 78
    assert "audit" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "ran").exists()
    assert shell.json("ls") == []


def test_run_whose_audit_disk_fills_keeps_the_exit_code(shell, path):
    """A limit on the size of files, in blocks of 512 bytes, leaves room for `open`, and not for `grant`."""
    assert shell("run", "job", "--", "true").returncode == 0  # creates the database, which is smaller
    with AuditFile(path) as audit:
        while not 40 < path.stat().st_size % 512 < 100 or path.stat().st_size < 200_000:
            audit.write("config", why="x" * 37)
            audit.flush()
        audit.close = lambda: None
    blocks = path.stat().st_size // 512 + 1
    done = shell.sh(f"run --audit {path} job -- sh -c 'exit 3'", before=f"ulimit -f {blocks}; trap '' XFSZ")
    assert done.returncode == 3
    assert done.stderr.startswith(f"leasehold: the audit file {path} could not be written: ")
    assert len(done.stderr.splitlines()) == 1
    assert shell.json("ls") == []


def test_elect_records_its_term(audited, path):
    assert audited("elect", "job", "--", "true").returncode == 0
    assert [record["action"] for record in map(json.loads, path.read_text().splitlines())][1:3] == ["grant", "release"]


def test_break_records_who_and_why(audited, path):
    holder = audited.hold("job", "--holder", "web-3")
    assert audited("break", "job", "--yes", "--reason", "web-3 is suspended").returncode == 0
    holder.wait(60)
    (grant,) = audited.json("history", "job")
    assert (grant["end"], grant["reason"], grant["holder"]) == ("broken", "web-3 is suspended", "web-3")
    assert grant["broken_by"].startswith(os.uname().nodename)


def test_key_file_seals_what_run_writes(audited, path, tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    key.chmod(0o600)
    assert audited("run", "--audit-key-file", str(key), "job", "--", "true").returncode == 0
    assert audited("audit", "verify").returncode == 78
    assert audited("audit", "verify", "--key-file", str(key)).returncode == 0
    assert audited("audit", "verify", LEASEHOLD_AUDIT_KEY_FILE=str(key)).returncode == 0
    assert "sealed with another key or none" in audited("run", "job", "--", "true").stderr


# ------------------------------------------------------------------------ verifying


@pytest.fixture
def written(path):
    with AuditFile(path, server="here") as audit:
        for token, end in ((5, "release"), (6, "loss"), (7, None)):
            audit.write(
                "grant", namespace="", name="job", token=token, holder=f"web-{token}", waited=0.5, mode="exclusive"
            )
            if end == "loss":
                audit.write("loss", namespace="", name="job", token=token, why="stalled", held=9.0)
                audit.write("stale_token", namespace="", name="job", token=token, fence="sql", seen=7)
            elif end:
                audit.write("release", namespace="", name="job", token=token, held=61.0)
        audit.write("grant", namespace="shop", name="job", token=1)
        audit.flush()
    return path


def test_verify_of_genuine_file_names_its_last_record(shell, written):
    done = shell("audit", "verify", str(written))
    last = json.loads(written.read_text().splitlines()[-1])
    assert done.returncode == 0
    assert done.stdout == f"{written}: 9 records, complete and unchanged; the last is 9:{last['hash']}\n"
    assert shell("audit", "verify", str(written), "--anchor", f"9:{last['hash'][:8]}").returncode == 0


def test_verify_of_changed_file_is_1_and_names_the_line(shell, written):
    written.write_text(written.read_text().replace("web-6", "web-0"))
    done = shell("audit", "verify", str(written))
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == f"FAULT  {written}:4: record 4 was changed"
    (report,) = json.loads(shell("-o", "json", "audit", "verify", str(written)).stdout)
    assert list(report) == json_keys("audit verify")
    assert report["faults"] == [{"file": str(written), "line": 4, "text": "record 4 was changed"}]
    assert report["whole"] is False


def test_verify_with_an_anchor_finds_a_cut_tail(shell, written):
    last = json.loads(written.read_text().splitlines()[-1])
    written.write_text("".join(written.read_text().splitlines(keepends=True)[:-1]))
    assert shell("audit", "verify", str(written)).returncode == 0
    done = shell("audit", "verify", str(written), "--anchor", f"9:{last['hash']}")
    assert done.returncode == 1
    assert "record 9, whose hash you gave as" in done.stdout


def test_verify_says_what_a_crash_left(shell, written):
    with open(written, "ab") as file:
        file.write(b'{"action":"gr')
    assert shell("audit", "verify", str(written)).returncode == 1
    AuditFile(written).close()
    done = shell("audit", "verify", str(written))
    assert done.returncode == 0
    assert done.stdout.startswith(f"note   {written}:10: 13 bytes of a record that a crash or a full disk cut short")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["verify"], 64, "name the audit FILE, or set LEASEHOLD_AUDIT"),
        (["verify", "none.jsonl"], 78, "there is no file none.jsonl"),
        (["verify", "."], 78, "has no audit files"),
        (["verify", "x.jsonl", "--anchor", "8a4e"], 64, "an anchor is the number of a record and its hash"),
        (["verify", "x.jsonl", "--key-file", "none"], 78, "there is no key file"),
        (["show", "x.jsonl", "--since", "yesterday"], 64, "neither a duration such as 2h nor a time"),
        (["show", "x.jsonl", "--token", "x"], 64, "is not a valid"),
        (["list"], 64, "No such command 'list'"),
    ],
)
def test_bad_input_is_named_in_one_line(shell, arguments, code, text):
    done = shell("audit", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr.splitlines()[0]


# -------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], 9),
        (["--lock", "job"], 7),
        (["--lock", "job", "--namespace", "shop"], 1),
        (["--token", "6"], 3),
        (["--actor", "web-7"], 1),
        (["--action", "grant"], 4),
        (["--since", "1h"], 9),
        (["--since", "2999-01-01"], 0),
        (["--since", "2001-01-01T00:00Z"], 9),
    ],
)
def test_show_filters_records(shell, written, filters, expected):
    done = shell("-o", "json", "audit", "show", str(written), *filters)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == expected
    assert all(json.loads(line)["hash"] for line in lines)


def test_show_prints_a_table_and_escapes_names(shell, path):
    with AuditFile(path) as audit:
        audit.write("break", name="a\x1b[2J\nb", subject="mira", why="suspended", token=4)
        audit.flush()
    header, _, row, _ = shell("audit", "show", str(path)).stdout.splitlines()
    assert header.split() == ["TIME", "RECORD", "ACTION", "NAME", "TOKEN", "WHO", "DETAILS"]
    assert "\x1b" not in row
    assert re.search(r"2 +break +a\\x1b\[2J\\nb +4 +mira +suspended$", row)


def test_history_pairs_grants_with_their_ends(shell, written):
    grants = shell.json("history", "job", str(written))
    assert list(grants[0]) == json_keys("history")
    assert [(each["token"], each["end"], each["reason"], each["held"]) for each in grants] == [
        (5, "released", None, 61.0),
        (6, "lost", "stalled", 9.0),
        (7, None, None, None),
    ]
    assert [each["refused"] for each in grants] == [0, 1, 0]
    header, first, second, third = shell("history", "job", str(written)).stdout.splitlines()
    assert header.split() == ["TOKEN", "HOLDER", "GRANTED", "WAITED", "HELD", "END", "REASON", "REFUSED"]
    assert first.split()[3:] == ["0.5s", "1m01s", "released", "-", "-"]
    assert second.split()[3:] == ["0.5s", "9.0s", "lost", "stalled", "1"]
    assert third.split()[3:] == ["0.5s", "-", "-", "-", "-"]


def test_history_of_unknown_name_says_so(shell, written):
    done = shell("history", "none", str(written))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "leasehold: no grants of none in the audit files\n"


def test_history_reads_rotated_files_and_several_machines(shell, written, tmp_path):
    written.rename(tmp_path / "audit.jsonl.1")
    with AuditFile(written) as audit:
        audit.write("release", namespace="", name="job", token=7, held=1.0)
        audit.flush()
    other = tmp_path / "other.jsonl"
    with AuditFile(other) as audit:
        audit.write("grant", namespace="", name="job", token=4)
        audit.flush()
    grants = shell.json("history", "job", str(written), str(other))
    assert [(each["token"], each["end"]) for each in grants] == [
        (4, None),
        (5, "released"),
        (6, "lost"),
        (7, "released"),
    ]


def record(action, **fields):
    return {"action": action, "at": "2026-11-16T01:00:00Z", "lock": {"name": "a"}, **fields}


class FromServer:
    """Another source of the past, as a server will be."""

    def __init__(self, *records):
        self._records = records

    def records(self, namespace, name):
        return self._records


def test_history_takes_any_source_and_any_order_of_ends():
    (grant,) = past_grants(FromServer(record("loss", token=3, why="stalled"), record("grant", token=3)), "", "a")
    assert (grant.end, grant.reason, grant.granted_at) == ("lost", "stalled", "2026-11-16T01:00:00Z")
    (grant,) = past_grants(FromServer(record("loss", token=3, why="stalled"), record("release", token=3)), "", "a")
    assert (grant.end, grant.granted_at) == ("lost", None)
    (grant,) = past_grants(FromServer(record("stale_token", token=3)), "", "a")
    assert (grant.end, grant.refused) == (None, 1)


# --------------------------------------------------------------- hostile files


@pytest.mark.parametrize("command", ["audit show", "audit verify", "history job"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_file_that_may_never_end_is_refused(shell, tmp_path, command, kind):
    if kind == "pipe":
        os.mkfifo(tmp_path / "audit.jsonl")
    else:
        (tmp_path / "audit.jsonl").symlink_to("/dev/zero")
    done = shell(*command.split(), "audit.jsonl", seconds=20)
    assert (done.returncode, done.stderr) == (
        78,
        "leasehold: audit.jsonl is not a regular file: name an audit file\n",
    )


@pytest.mark.parametrize("command", ["audit show", "history job"])
@pytest.mark.parametrize("content", [b"text", gzip.compress(b"{}\n" * 100)[:-9]], ids=["other", "cut short"])
def test_damaged_packed_file_is_78_and_names_the_file(shell, tmp_path, command, content):
    (tmp_path / "audit.jsonl.gz").write_bytes(content)
    done = shell(*command.split(), "audit.jsonl.gz")
    assert (done.returncode, done.stdout) == (78, "")
    assert "audit.jsonl.gz cannot be read to its end" in done.stderr
