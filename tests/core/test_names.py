"""Names become engine keys without collisions, and invalid names are refused early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold import ConfigError
from leasehold.core import names

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60)


@given(text)
def test_decode_reverses_encode(name: str) -> None:
    encoded = names.encode(name)
    assert names.decode(encoded) == name
    assert set(encoded) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-%")


@given(text, text, text, text)
def test_engine_keys_of_distinct_names_never_collide(ns1: str, name1: str, ns2: str, name2: str) -> None:
    assert (names.engine_key(ns1, name1) == names.engine_key(ns2, name2)) == ((ns1, name1) == (ns2, name2))


@pytest.mark.parametrize("name", [".", "..", "a/w", "{a}", "a:b", "%41", "ä" * 127, "x" * 255, "  ", "\n"])
def test_unusual_names_are_accepted(name: str) -> None:
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
        (7, "must be text"),
        (None, "must be text"),
    ],
)
def test_invalid_names_are_refused_with_the_reason(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        names.check_name(name)


def test_empty_namespace_is_accepted() -> None:
    assert names.check_namespace("") == ""


@given(text)
def test_bucket_is_below_the_bucket_count(name: str) -> None:
    assert 0 <= names.bucket(name) < names.BUCKETS == 1024


def test_id_hash_is_thirty_two_hex_digits() -> None:
    assert names.hash_id("secret") == "2bb80d537b1da3e38bd30361aa855686"
