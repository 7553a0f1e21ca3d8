"""The label `group`: ids are taken out of names, and no choice of names exceeds the cap."""

from __future__ import annotations

import random
import string
import threading
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.telemetry.groups import OTHER, Group, Groups, group_of, group_rule
from tests.support import probe_telemetry


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("orders/42", "orders/*"),
        ("tenant/acme/invoice/2026-11-16", "tenant/acme/invoice/*"),
        ("nightly-report", "nightly-report"),
        ("nightly-report-2026-11-16", "nightly-report-*"),
        ("order-42", "order-*"),
        ("shard_7", "shard_*"),
        ("user:550e8400-e29b-41d4-a716-446655440000", "user:*"),
        ("user-550e8400-e29b-41d4-a716-446655440000", "user-*"),
        ("job.01HZX3V9K8Q2W7M4N5P6R7S8T9", "job.*"),
        ("blob#9f2c4b1e77aa0031", "blob#*"),
        ("mail|a1b2c3d4@example", "mail|*@example"),
        ("pod/web-worker-7f9c6d5b4-x2k9p", "pod/*"),
        ("upload dXNlcjE6cGFzcw0K", "upload *"),
        ("cafe/deadbeef", "cafe/deadbeef"),  # words
        ("backup/2026-11-16T01:12:44", "backup/*:*:*"),
        ("v2/ledger", "v2/ledger"),
        ("a/b/c/d/e/f", "a/b/c/d/*"),
        ("/leading//slashes/", "/leading//slashes/"),
        ("x" * 300, "x" * 80),
        ("", ""),
    ],
)
def test_group_of_name_has_stars_for_ids(name, group):
    assert group_of(name) == group


ids = st.one_of(
    st.integers(0, 10**30).map(str),
    st.uuids().map(str),
    st.dates().map(str),
    st.binary(min_size=8, max_size=32).map(bytes.hex).filter(lambda text: any(map(str.isdigit, text))),
)
words = st.text(string.ascii_lowercase, min_size=1, max_size=12)


@given(words, ids, ids, st.sampled_from("/:.|#@ "))
def test_names_that_differ_by_an_id_have_one_group(word, first, second, separator):
    assert group_of(f"{word}{separator}{first}") == group_of(f"{word}{separator}{second}") == f"{word}{separator}*"
    assert group_of(f"{first}{separator}{word}") == group_of(f"{second}{separator}{word}")
    assert group_of(f"{word}-{first}") == group_of(f"{word}-{second}")


@given(st.text(max_size=300))
def test_group_of_any_name_is_short(name):
    assert len(group_of(name)) <= 80


@given(st.lists(words, min_size=1, max_size=4).map("/".join))
def test_name_of_words_is_its_own_group(name):
    assert group_of(name) == name


def test_groups_beyond_the_limit_are_other_and_counted():
    groups = Groups(limit=2)
    assert groups.find("shop", "orders/1") == groups.find("shop", "orders/2") == Group("shop", "orders/*")
    assert groups.find("blog", "orders/1") == Group("blog", "orders/*")  # a pair of its own
    assert groups.find("shop", "carts/1") == groups.find("news", "orders/1") == Group(OTHER, OTHER)
    assert groups.find("shop", "carts/1") == Group(OTHER, OTHER)
    assert groups.overflowed == 2
    assert groups.find("shop", "orders/3") == Group("shop", "orders/*")


def test_groups_of_one_namespace_leave_room_for_those_of_others():
    groups = Groups(limit=4, per_namespace=2)
    found = [groups.find("a", name) for name in ("one", "two", "three", "four", "one")]
    assert found == [("a", "one"), ("a", "two"), ("a", "other"), ("a", "other"), ("a", "one")]
    assert [groups.find(each, "x") for each in ("b", "c", "d")] == [("b", "x"), ("c", "x"), ("other", "other")]
    assert groups.overflowed == 3


def test_threads_that_find_new_groups_do_not_exceed_the_limit():
    groups, found = Groups(lambda name: name, limit=10), set()

    def find() -> None:
        found.update(groups.find("", uuid.uuid4().hex) for _ in range(200))

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 11
    assert Group(OTHER, OTHER) in found


def test_group_is_the_same_after_many_names_were_seen():
    groups, rng = Groups(limit=3), random.Random(7)
    before = [groups.find("", name) for name in ("a", "b/1", "c")]
    for _ in range(20_000):
        groups.find("", "".join(rng.choices(string.ascii_lowercase, k=10)))
    assert [groups.find("", name) for name in ("a", "b/1", "c")] == before
    assert probe_telemetry.cached_names(groups) <= 8192


def test_group_rule_falls_back_to_the_name_without_ids():
    rule = group_rule(["orders/.*=checkout", "a=b=c"])
    assert [rule(name) for name in ("orders/1", "a=b", "invoices/7")] == ["checkout", "c", "invoices/*"]
