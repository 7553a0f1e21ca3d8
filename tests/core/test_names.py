"""Names become engine keys without collisions, and bad ones are refused early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold import ConfigError
from leasehold.core import names

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60)


@given(text)
def test_decoding_gives_the_name_back(name: str) -> None:
    encoded = names.encode(name)
    assert names.decode(encoded) == name
    assert set(encoded) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-%")


@given(text, text, text, text)
def test_no_two_pairs_meet_in_one_key(ns1: str, name1: str, ns2: str, name2: str) -> None:
    assert (names.key(ns1, name1) == names.key(ns2, name2)) == ((ns1, name1) == (ns2, name2))


@pytest.mark.parametrize("name", [".", "..", "a/w", "{a}", "a:b", "%41", "ä" * 127, "x" * 255, "  ", "\n"])
def test_odd_names_are_names(name: str) -> None:
    assert names.check_name(name) == name
    assert names.decode(names.encode(name)) == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "at least one"),
        ("x" * 256, "255 bytes"),
        ("ä" * 128, "has 256"),
        ("a\0b", "NUL"),
        ("\ud800", "surrogate"),
        (7, "is text"),
        (None, "is text"),
    ],
)
def test_bad_names_are_refused_with_the_reason(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        names.check_name(name)


def test_an_empty_namespace_is_fine() -> None:
    assert names.check_namespace("") == ""


@given(text)
def test_a_bucket_is_one_of_a_fixed_number(name: str) -> None:
    assert 0 <= names.bucket(name) < names.BUCKETS == 1024


def test_the_mark_is_thirty_two_hex_digits_of_the_hash_of_the_id() -> None:
    assert names.mark("secret") == "2bb80d537b1da3e38bd30361aa855686"
