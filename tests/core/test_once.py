"""What a record of `once` says, and what may follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.core.once import Run, as_json, begun, failed, packed, unpacked
from leasehold.errors import ConfigError

FIRST = begun(None, token=7, holder="web-1", at=1.0, request="r")


def test_a_first_run():
    assert Run("running", 7, 1, "web-1", 1.0, "r") == FIRST
    assert not FIRST.settled


@pytest.mark.parametrize(("token", "given"), [(9, 9), (8, 8), (7, 8), (3, 8)])
def test_tokens_rise_with_every_take_over_also_where_the_locks_do_not(token, given):
    taken = begun(FIRST, token=token, holder="web-2", at=2.0, request="r")
    assert (taken.token, taken.runs, taken.holder, taken.state) == (given, 2, "web-2", "running")


def test_what_is_settled():
    error = ValueError("x" * 1000)
    assert not failed(FIRST, error, final=False).settled
    assert failed(FIRST, error, final=True).settled
    assert len(failed(FIRST, error, final=True).error) == 500
    assert FIRST._replace(state="done").settled


def test_a_failure_leaves_no_trace_in_the_next_run():
    again = begun(failed(FIRST, ValueError("x"), final=False), token=8, holder="b", at=2.0, request="r")
    assert again == Run("running", 8, 2, "b", 2.0, "r")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_results_come_back_as_they_were_kept(value):
    try:
        kept = as_json(value, 10_000)
    except ConfigError:
        return  # a lone surrogate
    run = FIRST._replace(state="done", result=kept)
    assert unpacked(packed(run)) == run
    assert as_json(kept, 10_000) == kept
