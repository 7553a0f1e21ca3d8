"""Texts of other programs: shown on one line, escaped, and not too long."""

import pytest

from leasehold.core.texts import MAX_SERVER_TEXT, escape, server_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, \u00e4\u4e2d", "plain, \u00e4\u4e2d"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb", "a\\nb"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("\u2028", "\\u2028"),
        ("\ud800", "\\ud800"),
    ],
)
def test_unprintable_characters_are_escaped(text, shown) -> None:
    assert escape(text) == shown


@pytest.mark.parametrize("text", ["x" * 5000, "\x1b" * 5000, b"\xff" * 5000, "word \n" * 5000])
def test_server_text_is_cut_and_printable(text) -> None:
    shown = server_text(text)
    assert len(shown) == MAX_SERVER_TEXT
    assert shown.endswith("...")
    assert shown.isprintable()


def test_server_text_of_an_exception_is_its_message() -> None:
    assert server_text(ValueError("two\n lines")) == "two lines"
