"""Texts of other programs: shown on one line, escaped, and not too long."""

import pickle
import subprocess

import pytest

from leasehold.cli.break_ import break_
from leasehold.core.texts import MAX_SERVER_TEXT, escape, server_text, shell_command, without_credentials
from leasehold.errors import ConfigError, NotAcquired
from leasehold.events import Event
from leasehold.log_lines import log_event
from leasehold.model import Holder


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


def test_errors_and_log_lines_escape_names_and_holders_that_others_chose(caplog) -> None:
    name = "order:\x1b[2J\nERROR all is lost"
    error = NotAcquired(name, Holder("\x1b]0;title\x07", "host", 7, "a\u202eb"), 5, 9.0)
    assert str(error).isprintable()
    assert (error.name, error.holder) == (name, "\x1b]0;title\x07"), "fields are as they are"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(ConfigError("a\nb")) == "a\\nb"
    log_event(Event("lost", "memory", "", name, 0.0, 5, fingerprint="f", reason="\x1b[2J"))
    assert caplog.messages[-1].isprintable()
    assert caplog.records[-1].leasehold["lock"] == name


@pytest.mark.parametrize("text", ["x" * 5000, "\x1b" * 5000, b"\xff" * 5000, "word \n" * 5000])
def test_server_text_is_cut_and_printable(text) -> None:
    shown = server_text(text)
    assert len(shown) == MAX_SERVER_TEXT
    assert shown.endswith("...")
    assert shown.isprintable()


def test_server_text_of_an_exception_is_its_message() -> None:
    assert server_text(ValueError("two\n lines")) == "two lines"


@pytest.mark.parametrize("namespace", ["", "shop", "-x", "a b"])
@pytest.mark.parametrize(
    "name", ["orders/42", "--url=http://evil", "-h", "--", "a'b \\", "$(id)`id`", "\x1b[31m\u202e'\\"]
)
def test_shell_command_passes_namespace_and_name_unchanged(namespace, name) -> None:
    """Through a real shell, and the parser of the program."""
    command = shell_command("break", namespace, name, "--token", "41")
    assert command.isprintable()
    shell = ["bash", "-c", f"leasehold() {{ printf '%s\\0' \"$@\"; }}; {command}"]
    done = subprocess.run(shell, capture_output=True, check=True, text=True, env={"LC_ALL": "C.UTF-8"})
    arguments = done.stdout.split("\0")[:-1]
    if namespace:
        assert arguments[:2] == ["--namespace", namespace]
    context = break_.make_context("break", arguments[3 if namespace else 1 :])
    assert (context.params["name"], context.params["token"]) == (name, 41)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("not 'redis://u:pw@host/0'", "not 'redis://***"),
        ("a redis:/u:pw@host b", "a redis:/*** b"),
        ("postgresql://h/d?sslpassword=pw", "postgresql://***"),
        ("http://h?wait=5&API_KEY=pw and http://h?wait=5", "http://*** and http://h?wait=5"),
        ("redis://user:secret", "redis://***"),
        ("not 'redis://user:a b c@host/0' or 'x@y'", "not 'redis://*** or 'x@y'"),
        ("redis://[::1]:6379/0 and http://[fe80::1] of a@b", "redis://[::1]:6379/0 and http://[fe80::1] of a@b"),
        ("redis://u:pw@[::1]:6379", "redis://***"),
        ("x=sqlite:/1,redis://u:pw", "x=sqlite:/1,redis://***"),
        ("redis://host:6379/0, /tmp/a:/b, sqlite:/c", "redis://host:6379/0, /tmp/a:/b, sqlite:/c"),
    ],
)
def test_urls_with_credentials_are_cut_from_messages(text, shown) -> None:
    assert without_credentials(text) == shown


@pytest.mark.parametrize("piece", ["a", "?", "?key", ":/", "a:/", "a://b?c&", "a:/:b ", ": "])
def test_credentials_are_looked_for_in_linear_time(piece) -> None:
    """It may be a text of a hostile server. A pattern with nested repetitions took hours for this."""
    text = f"a:/{piece * 50_000}"
    assert without_credentials(text).startswith("a:/")
