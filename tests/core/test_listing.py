from __future__ import annotations

import pytest

from leasehold.core.listing import ListingBudget
from leasehold.errors import ListingTooLong


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
