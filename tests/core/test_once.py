"""The records of `once`, and which record may follow another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.core.once import RunRecord, dump, failed_run, json_round_trip, load, next_run
from leasehold.errors import ConfigError

FIRST = next_run(None, token=7, holder="web-1", at=1.0, request="r")


def test_first_run_has_given_token_and_is_unfinished():
    assert RunRecord("running", 7, 1, "web-1", 1.0, "r") == FIRST
    assert not FIRST.finished


@pytest.mark.parametrize(("token", "given"), [(9, 9), (8, 8), (7, 8), (3, 8)])
def test_token_rises_with_every_take_over(token, given):
    taken = next_run(FIRST, token=token, holder="web-2", at=2.0, request="r")
    assert (taken.token, taken.runs, taken.holder, taken.state) == (given, 2, "web-2", "running")


def test_run_is_finished_when_done_or_finally_failed():
    error = ValueError("x" * 1000)
    assert not failed_run(FIRST, error, final=False).finished
    assert failed_run(FIRST, error, final=True).finished
    assert len(failed_run(FIRST, error, final=True).error) == 500
    assert FIRST._replace(state="done").finished


def test_failure_leaves_no_trace_in_next_run():
    again = next_run(failed_run(FIRST, ValueError("x"), final=False), token=8, holder="b", at=2.0, request="r")
    assert again == RunRecord("running", 8, 2, "b", 2.0, "r")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_results_survive_dump_and_load(value):
    try:
        kept = json_round_trip(value, 10_000)
    except ConfigError:
        return  # a lone surrogate
    run = FIRST._replace(state="done", result=kept)
    assert load(dump(run)) == run
    assert json_round_trip(kept, 10_000) == kept
