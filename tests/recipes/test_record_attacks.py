"""Ways to have a record of `once` or of a status say less than what happened: odd texts, odd records, lost answers."""

from __future__ import annotations

import json

import pytest

from leasehold import Client, ConfigError, Conflict, RunFailed, Unavailable
from leasehold.core.once import packed, unpacked
from leasehold.runtime.threads import Threads
from leasehold.store import Record
from leasehold.stores.memory import MemoryStore


@pytest.fixture
def client():
    with Client("memory://") as client:
        yield client


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error that cannot say what it is")


@pytest.mark.parametrize("error", [Rude(), ValueError("a lone half: \ud800"), ValueError("\x00" * 2000)])
def test_a_failure_is_kept_whatever_its_text(client, error, counted):
    work = counted(error)
    with pytest.raises(type(error)) as raised:
        client.once("k", work, on_failure="keep")
    assert raised.value is error, "its caller gets the very error"
    with pytest.raises(RunFailed, match=type(error).__name__):
        client.once("k", work, on_failure="keep")
    assert work.runs == 1


@pytest.mark.parametrize("request_", ["\ud800", "x" * 201, 7])
def test_a_request_that_cannot_be_written_down_is_refused_before_anything_runs(client, request_, counted):
    work = counted(ValueError())
    with pytest.raises(ConfigError, match="request"):
        client.once("k", work, request=request_)
    assert work.runs == 0


@pytest.mark.parametrize("result", [{"a": "\ud800"}, "\udfff", {1: "\ud800"}])
def test_a_result_with_half_a_character_is_told_and_not_run_again(client, result):
    with pytest.raises(ConfigError, match="JSON"):
        client.once("k", lambda: result)
    with pytest.raises(RunFailed):
        client.once("k", lambda: "again")


def test_records_of_a_newer_version_are_understood_as_far_as_they_go():
    """In a roll-out two versions meet at one record."""
    run = unpacked(packed(unpacked(b'{"state":"done","token":1,"runs":1,"holder":"a","at":1.5,"result":7}')))
    assert (run.state, run.result) == ("done", 7)
    newer = {**run._asdict(), "colour": "red"}
    assert unpacked(json.dumps(newer).encode()) == run


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"7", b"{}", b'{"state": "done"}'])
def test_what_is_no_record_of_ours_is_said_to_be_none(client, data, counted):
    store = MemoryStore(Threads())
    key = client._records(store).key("once", "k")
    assert store.write(key, Record("0" * 32, data), "", None, 1.0)
    work = counted(ValueError())
    with pytest.raises(ConfigError, match="no record"):
        client.once("k", work, store=store)
    assert work.runs == 0


# ------------------------------------------------------------------ lost answers

MOVES = {"new": {"paid"}, "paid": {"shipped"}}


class Overtaken(MemoryStore):
    """The answer to the first write is lost, and before it is asked again somebody else goes on."""

    def __init__(self, then) -> None:
        super().__init__(Threads())
        self.then = then

    def write(self, *args):
        written = super().write(*args)
        if self.then is not None:
            then, self.then = self.then, None
            then()
            raise Unavailable("the answer was lost")
        return written


def test_a_step_that_was_made_is_never_said_not_to_have_been(client):
    """Ours was carried out, its answer lost; then it was moved on. Whether it was ours cannot be told any more."""
    store = Overtaken(lambda: client.status("order", MOVES, "new", store=store).move("shipped"))
    with pytest.raises(Unavailable, match="order"):
        client.status("order", MOVES, "new", store=store).move("paid")
    assert client.status("order", MOVES, "new", store=store).get() == "shipped"


def test_a_lost_answer_that_nobody_overtook_is_resolved(client):
    store = Overtaken(lambda: None)
    status = client.status("order", MOVES, "new", store=store)
    assert status.move("paid") == "new"
    with pytest.raises(Conflict):
        status.move("paid")
