"""Every change of a byte, every line removed, moved, doubled or inserted is found."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold import ConfigError
from leasehold.telemetry import AuditFile
from leasehold.telemetry.audit.chain import NO_HASH, decode, encode
from leasehold.telemetry.audit.verify import find_files, sort_files, verify

NAMES = ["orders/42", "ä", '"', "x\n"]


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory):
    """The bytes of a file with ten records."""
    path = tmp_path_factory.mktemp("genuine") / "audit.jsonl"
    with AuditFile(path, server="s") as audit:
        for number, name in enumerate(NAMES):
            audit.write("grant", namespace="shop", name=name, token=number, holder=f"web-{number}")
            audit.write("release", namespace="shop", name=name, token=number, held=number / 3)
            audit.flush()
    return path.read_bytes()


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    path = tmp_path_factory.mktemp("changed") / "audit.jsonl"

    def faults(data: bytes) -> list[str]:
        path.write_bytes(data)
        return [fault.text for fault in verify([str(path)]).faults]

    return faults


def test_genuine_file_has_no_fault(genuine, check):
    assert check(genuine) == []


@pytest.fixture
def short(genuine):
    """The first three records, for what is done to every byte."""
    return b"".join(lines_of(genuine)[:3])


def test_every_changed_byte_is_found(short, check):
    random.seed(1)
    for position in range(len(short)):
        other = random.choice([byte for byte in b' \n"0aZ{},:\\\x00\xff' if byte != short[position]])
        assert check(short[:position] + bytes([other]) + short[position + 1 :]), position


def test_every_removed_byte_is_found(short, check):
    for position in range(len(short)):
        assert check(short[:position] + short[position + 1 :]), position


@pytest.mark.parametrize("inserted", [b" ", b"\n", b"\r", b"0", b"\x00", b"{}\n"])
def test_every_inserted_byte_is_found(short, check, inserted):
    for position in range(len(short) + 1):
        assert check(short[:position] + inserted + short[position:]), position


def test_line_removed_is_found_but_at_the_end(genuine, check):
    lines = lines_of(genuine)
    for number in range(len(lines) - 1):
        assert check(b"".join(lines[:number] + lines[number + 1 :])), number
    assert check(b"".join(lines[:-1])) == [], "only an anchor shows this"


def test_line_doubled_is_found(genuine, check):
    lines = lines_of(genuine)
    for number in range(len(lines)):
        for target in range(len(lines) + 1):
            assert check(b"".join([*lines[:target], lines[number], *lines[target:]])), (number, target)


@settings(max_examples=200)
@given(data=st.data())
def test_any_other_order_of_lines_is_found(genuine, check, data):
    lines = lines_of(genuine)
    order = data.draw(st.permutations(range(len(lines))))
    if order != list(range(len(lines))):
        assert check(b"".join(lines[number] for number in order))


def test_records_replaced_by_others_with_the_same_numbers_are_found(genuine, check, tmp_path):
    with AuditFile(tmp_path / "audit.jsonl", server="s") as audit:
        for _ in range(4):
            audit.write("grant", namespace="shop", name="forged")
        audit.flush()
    forged, lines = lines_of((tmp_path / "audit.jsonl").read_bytes()), lines_of(genuine)
    assert check(b"".join(forged)) == []
    (fault,) = check(b"".join(forged[:4] + lines[4:]))
    assert fault == "record 5 does not continue the chain: the records before it were replaced"


def test_key_order_and_duplicate_keys_are_found(genuine, check):
    lines = lines_of(genuine)
    fields = json.loads(lines[1])
    digest = fields.pop("hash")
    for changed in (
        json.dumps({**dict(reversed(fields.items())), "hash": digest}, separators=(",", ":")).encode() + b"\n",
        lines[1].replace(b'{"action":"grant",', b'{"action":"grant","action":"grant",'),
        lines[1].replace(b'"token":0', b'"token":0.0'),
    ):
        assert changed != lines[1]
        assert check(b"".join([lines[0], changed, *lines[2:]]))


def test_hash_is_what_the_docs_say(genuine):
    """As any other program can compute it: JSON with sorted keys, without blanks, in ASCII, less `hash`."""
    previous = "0" * 64
    for line in lines_of(genuine):
        record = json.loads(line)
        said = record.pop("hash")
        body = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        assert hashlib.sha256(body.encode()).hexdigest() == said
        assert record["prev"] == previous
        previous = said


def test_fault_names_file_line_and_record(genuine, tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(genuine.replace(b"web-1", b"web-9"))
    (fault,) = verify([str(path)]).faults
    assert str(fault) == f"{path}:4: record 4 was changed"


def test_compressed_file_is_read_and_damage_is_a_fault(genuine, tmp_path):
    path = tmp_path / "audit.jsonl.gz"
    path.write_bytes(gzip.compress(genuine))
    assert verify([str(path)]).faults == []
    path.write_bytes(gzip.compress(genuine)[:-20])
    assert verify([str(path)]).faults


def test_files_are_sorted_by_chain_and_first_record(tmp_path):
    for name, count in (("one", 3), ("two", 2)):
        for part in range(count):
            path = tmp_path / f"{name}.jsonl"
            AuditFile(path).close()
            if part < count - 1:
                path.rename(tmp_path / f"{name}.jsonl.{count - part}")
    chains = sort_files(find_files([str(tmp_path)]))
    names = [[path.rpartition("/")[2] for path in chain] for chain in chains]
    assert names == [["one.jsonl.3", "one.jsonl.2", "one.jsonl"], ["two.jsonl.2", "two.jsonl"]]
    assert [verify(chain).faults for chain in chains] == [[], []]


def test_chain_that_begins_later_is_a_note_and_no_fault(tmp_path):
    path = tmp_path / "audit.jsonl"
    AuditFile(path).close()
    path.rename(tmp_path / "audit.jsonl.1")
    AuditFile(path).close()
    report = verify([str(path)])
    assert report.faults == []
    assert [note.text for note in report.notes] == [
        "begins with record 3: the records before it are not in the files given"
    ]


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 3_000_000, b"[" * 100_000 + b"\n", b"\xff\n", b"null\n"])
def test_file_without_records_is_a_fault(tmp_path, content):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(content)
    assert "contains no audit record" in verify([str(path)]).faults[-1].text


def test_missing_file_and_empty_folder_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        find_files([str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="has no audit files"):
        find_files([str(tmp_path)])


# ------------------------------------------------------- files of an attacker


@pytest.mark.parametrize("line", [b"\n", b"x\n", b'{"action":' + b" " * 10_000 + b"\n"], ids=["empty", "text", "torn"])
def test_small_packed_file_with_very_many_lines_takes_little_memory(tmp_path, line):
    """A small file that gzip had packed took gigabytes: each of its lines was a fault."""
    path = tmp_path / "audit.jsonl.gz"
    path.write_bytes(gzip.compress(line * (30_000_000 // (len(line) + 30)), 1))
    tracemalloc.start()
    try:
        (chain,) = sort_files(find_files([str(path)]))
        report = verify(chain)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert report.faults[-2].text.startswith("not an audit record")
    assert report.faults[-1].text == "too many faults: the rest was not checked"


@pytest.mark.parametrize("name", ["audit.jsonl", "audit.jsonl.1"])
def test_link_in_a_folder_of_audit_files_is_not_read(tmp_path, genuine, name):
    """A stranger's link showed the first bytes of any file in the report of root."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "audit-1.jsonl").write_bytes(genuine)
    (tmp_path / "secret").write_text("secret")
    (folder / name).symlink_to(tmp_path / "secret")
    assert find_files([str(folder)]) == [str(folder / "audit-1.jsonl")]


@pytest.mark.parametrize(
    "fields",
    [
        {"token": []},
        {"token": "x"},
        {"fingerprint": [1]},
        {"who": "x"},
        {"who": {"host": 7}},
        {"lock": "n"},
        {"lock": {"name": ["n"]}},
        {"waited": "x"},
        {"held": {}},
        {"why": ["x"]},
    ],
    ids=str,
)
def test_record_with_another_type_is_not_read(fields):
    """Such a record ended `leasehold audit show` and `leasehold history` with a bug."""
    good = {"v": 1, "seq": 1, "prev": NO_HASH, "action": "grant", "at": "2026-11-16T01:13:02.118204Z"}
    assert decode(encode(good, None)[0].removesuffix(b"\n")) is not None
    assert decode(encode({**good, **fields}, None)[0].removesuffix(b"\n")) is None


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
def test_record_with_a_number_that_is_none_is_not_read(number):
    good = {"v": 1, "seq": 1, "prev": NO_HASH, "action": "grant", "at": "2026-11-16T01:13:02.118204Z", "waited": 0.5}
    assert decode(encode(good, None)[0].removesuffix(b"\n").replace(b"0.5", number)) is None
