"""Texts that other programs wrote, made safe to show.

A name, a label or a server's error text is any text: it could move the cursor, change the terminal's title, reverse the
line it is printed in, break a log line in two, or be megabytes long. Every engine's error mapping passes what a server
said through `server_text`, once, where the text arrives; so messages, log lines and events contain nothing else.
Names and labels stay as they are in fields; the texts of errors and log lines have them escaped.
"""

from __future__ import annotations

import re
from typing import Final

from leasehold.errors import escape

__all__ = ["MAX_SERVER_TEXT", "escape", "server_text", "shell_command", "without_credentials"]

MAX_SERVER_TEXT: Final = 200  # characters of a server's text that are shown

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]{0,30}://?", re.IGNORECASE)  # a path has only one of the slashes
_USER_AND_PASSWORD: Final = re.compile(r"[^/:\[]*:[^/0-9]")  # with a bracket, the host is an address of IPv6
_PASSWORD_WITH_SPACES: Final = re.compile(r"(:/{1,2})[^\s/:@\[]*:[^\s/@0-9][^/@\n]*@\S*")
_SECRET_OPTIONS: Final = ("pass", "secret", "token", "key")


def without_credentials(text: str) -> str:
    """The text of a message without URLs that have a password: an error repeats the value it refuses, and someone may
    have put an engine's URL into the variable of a file."""
    if ":/" not in text:
        return text
    return re.sub(r"\S+", _cut_credentials, _PASSWORD_WITH_SPACES.sub(r"\1***", text))


def _cut_credentials(word: re.Match[str]) -> str:
    """In a time that grows with the length of the word: it may be a text of a hostile server."""
    text = word[0]
    for number, scheme in enumerate(_SCHEME.finditer(text)):
        begin = scheme.end()
        # What is anywhere behind the first scheme is not looked for again behind the others.
        if (not number and _names_credentials(text[begin:])) or _USER_AND_PASSWORD.match(text, begin):
            return f"{text[:begin]}***"
    return text


def _names_credentials(text: str) -> bool:
    """Whether a part of a URL has a user's part, or an option for a password."""
    options = (part.lower().partition("=") for part in re.split("[?&]", text)[1:])
    return "@" in text or any(equals and any(word in name for word in _SECRET_OPTIONS) for name, equals, _ in options)


def server_text(text: object) -> str:
    """What a server said (or an exception that repeats it): on one line, escaped, at most `MAX_SERVER_TEXT` long."""
    said = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    said = escape(" ".join(said[: 4 * MAX_SERVER_TEXT].split()))
    return said if len(said) <= MAX_SERVER_TEXT else said[: MAX_SERVER_TEXT - 3] + "..."


def shell_command(verb: str, namespace: str, name: str, *options: str) -> str:
    """A `leasehold` command about a name, to copy into a shell. A name is any text, so it may look like an option."""
    where = ["--namespace", namespace] if namespace else []
    words = [*options, "--", name] if name.startswith("-") else [name, *options]
    return " ".join(map(_shell_word, ["leasehold", *where, verb, *words]))


def _shell_word(text: str) -> str:
    """Quoted. Controls, which could show another text than they are, are written as escapes."""
    if text.isprintable():
        import shlex  # only here: it would slow `import leasehold` down

        return shlex.quote(text)
    escaped = "".join(each if each.isprintable() and each not in "\\'" else f"\\U{ord(each):08x}" for each in text)
    return f"$'{escaped}'"
