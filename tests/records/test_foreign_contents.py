"""Records whose data another program has written: `once`, schedules and statuses refuse them with a clear error, run
nothing and leave them as they are."""

from __future__ import annotations

import json

import pytest

from leasehold import Client, ConfigError
from leasehold.core.once import RunRecord, dump
from leasehold.records.access import open_records
from leasehold.records.store import MAX_DATA, Record
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.threads import Threads

VERSION = "0" * 32
MOVES = {"new": {"paid"}, "paid": {"new"}}
RUN = json.loads(dump(RunRecord("running", 7, 1, "web-1", 1.5)))
NESTED = b"[" * 100_000 + b"]" * 100_000
GARBAGE = [
    b"",
    b"\xff\xfe",
    b"\x00",
    b"null",
    b"7",
    b"[]",
    b"{}",
    b"NaN",
    b'"state"',
    NESTED,
    b'{"state":' + NESTED + b"}",
]
BAD_RUNS = [
    {"state": "paused"},  # of a version to come
    {"state": 7},
    {"state": []},
    {"token": "7"},
    {"token": True},
    {"token": -1},
    {"token": 2**63},
    {"token": 1.0},
    {"runs": None},
    {"holder": 7},
    {"holder": "\ud800"},
    {"at": "now"},
    {"at": 1e300},
    {"request": None},
    {"error": {}},
    {"final": 1},
]
BAD_COMPLETED = [
    {"settled": "7"},
    {"settled": None},
    {"settled": 2**70},
    {"settled": 1.5},
    {"settled": True},
    {"settled": 7, "time": "now"},
    {"settled": 7, "time": 1e300},
    {"settled": 7, "time": True},
    {"time": 7},
]
BAD_STATUSES = [
    {"state": 7, "steps": 1},
    {"state": "\ud800", "steps": 1},
    {"state": "new"},
    {"state": "new", "steps": "1"},
    {"state": "new", "steps": True},
    {"state": "new", "steps": -1},
    {"steps": 1},
]


@pytest.fixture
def client():
    with Client("memory://") as client:
        yield client


@pytest.fixture
def plant(client):
    """A store in which a record of this kind has the data."""

    def make(kind: str, data: bytes) -> MemoryStore:
        store = MemoryStore(Threads())
        assert store.write(open_records(client, store).key(kind, "k"), Record(VERSION, data), "", None, 1.0)
        return store

    return make


def encode(*cases):
    return [json.dumps(case).encode() for case in cases]


def check_kept(client, store, kind, data):
    assert store.read(open_records(client, store).key(kind, "k"), 1.0) == Record(VERSION, data)


NOT_FINITE = dump(RunRecord("done", 7, 1, "web-1", 1.5, result=0.5)).replace(b"0.5", b"NaN")


@pytest.mark.parametrize("data", [*GARBAGE, NOT_FINITE, *encode(*(RUN | bad for bad in BAD_RUNS))])
def test_once_runs_nothing_over_a_foreign_record(client, plant, data, counting_function):
    store, work = plant("once", data), counting_function(1)
    with pytest.raises(ConfigError, match="not a `once` record"):
        client.once("k", work, store=store)
    assert work.runs == 0
    check_kept(client, store, "once", data)


@pytest.mark.parametrize("data", [*GARBAGE, *encode(*BAD_COMPLETED)])
def test_schedule_runs_nothing_over_a_foreign_record(client, plant, data):
    store = plant("schedule", data)
    for options in ({"every": 60}, {"cron": "* * * * *"}):
        with pytest.raises(ConfigError, match="not the record of a schedule"):
            client.schedule("k", **options, missed="all", store=store).run_due(lambda: pytest.fail("it ran"))
    check_kept(client, store, "schedule", data)


@pytest.mark.parametrize("data", [*GARBAGE, *encode(*BAD_STATUSES)])
def test_status_is_not_read_from_a_foreign_record(client, plant, data):
    store = plant("status", data)
    status = client.status("k", MOVES, "new", store=store)
    for call in (status.get, lambda: status.move("paid")):
        with pytest.raises(ConfigError, match="not the record of a status"):
            call()
    check_kept(client, store, "status", data)


def test_value_larger_than_any_store_keeps_is_refused_at_once(client):
    from leasehold.versioned import Value

    value = Value(client, "k")
    with pytest.raises(ConfigError, match="8,000,001"):
        value.write(b"x" * (MAX_DATA + 1), "")
    assert value.read().value is None
