"""What a record of `once` may contain: errors and results that cannot be encoded, records of other versions."""

from __future__ import annotations

import json

import pytest

from leasehold import Client, ConfigError, RunFailed
from leasehold.core.once import dump, load


@pytest.fixture
def client():
    with Client("memory://") as client:
        yield client


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("an error that cannot say what it is")


@pytest.mark.parametrize("error", [UnprintableError(), ValueError("a lone half: \ud800"), ValueError("\x00" * 2000)])
def test_once_keeps_failure_with_unprintable_error(client, error, counting_function):
    work = counting_function(error)
    with pytest.raises(type(error)) as raised:
        client.once("k", work, on_failure="keep")
    assert raised.value is error, "the caller must get the original error"
    with pytest.raises(RunFailed, match=type(error).__name__):
        client.once("k", work, on_failure="keep")
    assert work.runs == 1


@pytest.mark.parametrize("request_", ["\ud800", "x" * 201, 7])
def test_once_refuses_unencodable_request_before_running(client, request_, counting_function):
    work = counting_function(ValueError())
    with pytest.raises(ConfigError, match="request"):
        client.once("k", work, request=request_)
    assert work.runs == 0


@pytest.mark.parametrize("result", [{"a": "\ud800"}, "\udfff", {1: "\ud800"}])
def test_once_result_with_lone_surrogate_fails_and_is_not_rerun(client, result):
    with pytest.raises(ConfigError, match="JSON"):
        client.once("k", lambda: result)
    with pytest.raises(RunFailed):
        client.once("k", lambda: "again")


def test_once_record_of_newer_version_ignores_unknown_fields():
    """During a roll-out two versions may use the same record."""
    run = load(dump(load(b'{"state":"done","token":1,"runs":1,"holder":"a","at":1.5,"result":7}')))
    assert (run.state, run.result) == ("done", 7)
    newer = {**run._asdict(), "colour": "red"}
    assert load(json.dumps(newer).encode()) == run
