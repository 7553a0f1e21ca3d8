from __future__ import annotations

import json
import os

import pytest

from leasehold.cli.render import holding_as_json, holding_row
from leasehold.core.listing import ListingBudget, listed_seconds
from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import HELD, QueueEntry
from leasehold.errors import ListingTooLong
from leasehold.model import Holder


def test_thirty_thousand_claims_with_short_texts_can_be_listed() -> None:
    budget = ListingBudget("redis")
    for number in range(30_000):
        budget.spend(f"orders/{number}", "web-3", "web-3.example", "invoice")


def test_list_without_end_is_unavailable_and_names_the_way_out() -> None:
    budget = ListingBudget("redis")
    with pytest.raises(
        ListingTooLong, match=r"more than .*,.* claims are live: ask for the names with one prefix"
    ) as caught:
        for number in range(10**6):
            budget.spend(str(number))
    assert caught.value.engine == "redis"


def test_long_texts_count_as_much_as_they_may_take() -> None:
    budget = ListingBudget("redis")
    with pytest.raises(ListingTooLong):
        for _ in range(7):
            budget.spend("x" * 1_000_000)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf"), 1e300, -1e300, 9.2e12, -9.2e12])
def test_times_that_no_date_has_are_listed_as_ones_that_have_one(seconds) -> None:
    """`leasehold ls` ended with an OverflowError, and showed none of the other claims."""
    assert 0 <= listed_seconds(seconds) < 4e9
    lock_state = LockState(1e9, "lock", 1)
    holder = Holder("me", os.uname().nodename, 2**40)
    lock_state.holders[1] = QueueEntry(
        "ab", "client", holder, "exclusive", 0.0, 0, 1e9 - seconds, 0.0, HELD, 1e9 + seconds, 1
    )
    (holding,) = lock_state.holdings("", "job", 1e9)
    shown = holding._replace(acquired_at=1e9 - holding.age)
    assert len(holding_row(shown)) == 9
    assert json.dumps(holding_as_json(shown), allow_nan=False)


def test_times_of_claims_are_listed_as_they_are() -> None:
    assert [listed_seconds(seconds) for seconds in (-0.5, 0.0, 12.5, 3e9)] == [0.0, 0.0, 12.5, 3e9]
