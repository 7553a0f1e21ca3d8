"""The label `group`: a lock's name without its ids, so that `orders/42` and `orders/43` are one time series.

A monitoring system keeps every combination of labels it has ever seen. Names are chosen by programs, often one for
each order or user, so no name is ever a label, and the number of groups has a cap that no choice of names exceeds.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from leasehold.errors import ConfigError

OTHER: Final = "other"  # the namespace and group of all that came after the cap was reached

_MAX_PARTS, _MAX_LENGTH = 4, 80
_MAX_NAMES = 8192  # remembered with their group
_SEPARATOR = re.compile(r"([/:.|#@\s])")
_IDS = (
    r"\d+",
    r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}",  # a UUID
    r"[0-9a-hjkmnp-tv-z]{26}",  # a ULID
    r"\d{4}-\d{2}(?:-\d{2})?(?:t[\d+z-]*)?",  # a date, or the beginning of a time
    r"(?=[a-f]*\d)[0-9a-f]{8,}",  # hex with a digit: deadbeef is a word
)
_ID = re.compile("|".join(_IDS), re.IGNORECASE)
_ID_AT_END = re.compile(rf"([-_])(?:{'|'.join(_IDS)})\Z", re.IGNORECASE)
_LONG_WITH_DIGIT = re.compile(r"(?=\D*\d)[\w-]{16,}")  # such as pod names and base64


def group_of(name: str) -> str:
    """The name with its ids replaced by `*`, at most four parts of it, at most 80 characters."""
    found, parts = "", 0
    for piece in _SEPARATOR.split(name):
        if not piece or _SEPARATOR.fullmatch(piece):
            found += piece
            continue
        parts += 1
        if parts > _MAX_PARTS:
            return (found + "*")[:_MAX_LENGTH]
        found += _group_of_part(piece)
    return found[:_MAX_LENGTH]


def _group_of_part(part: str) -> str:
    if _ID.fullmatch(part):
        return "*"
    part = _ID_AT_END.sub(r"\1*", part)
    return "*" if _LONG_WITH_DIGIT.fullmatch(part) else part


def group_rule(rules: Sequence[str]) -> Callable[[str], str]:
    """A rule from texts `REGEX=GROUP`: the first whose REGEX matches the whole name decides; after that, `group_of`.
    `GROUP` alone is for all names."""
    parsed = []
    for rule in rules:
        pattern, _, group = rule.rpartition("=")
        if not group or len(group) > _MAX_LENGTH or not group.isprintable():
            raise ConfigError(f"a group for metrics is written REGEX=GROUP, with up to 80 characters, not {rule!r}")
        try:
            parsed.append((re.compile(pattern or ".*", re.DOTALL), group))
        except re.error as error:
            raise ConfigError(f"{pattern!r} is not a regular expression: {error}") from None

    def find(name: str) -> str:
        return next((group for pattern, group in parsed if pattern.fullmatch(name)), None) or group_of(name)

    return find


class Group(NamedTuple):
    """The labels of a lock."""

    namespace: str
    group: str


class Groups:
    """The groups seen so far: at most `limit`, in order of appearance; the rest share one that is named `other`.
    `per_namespace`: how many a namespace has, so that one of many leaves room for others; the rest of its names are the
    group `other` of that namespace."""

    def __init__(
        self, rule: Callable[[str], str] = group_of, limit: int = 30, per_namespace: int | None = None
    ) -> None:
        self._rule, self._limit, self._per_namespace = rule, limit, per_namespace
        self._known: set[Group] = set()
        self._by_name: dict[tuple[str, str, str | None], Group] = {}
        self.overflowed = 0  # names that were put into `other`
        self._mutex = threading.RLock()  # reentrant: a signal handler may acquire a lock

    def find(self, namespace: str, name: str, given: str | None = None) -> Group:
        """The group of a name; it never changes. `given`: the one that the lock was built with."""
        found = self._by_name.get((namespace, name, given))
        if found is None:
            found = self._choose(Group(namespace, self._rule(name) if given is None else given))
            if len(self._by_name) >= _MAX_NAMES:  # very many names: forget them, and keep the groups
                self._by_name.clear()
            self._by_name[namespace, name, given] = found
        return found

    def remember(self, groups: Iterable[Group]) -> None:
        with self._mutex:
            self._known.update(group for group in groups if group != (OTHER, OTHER))

    def _choose(self, wanted: Group) -> Group:
        with self._mutex:
            if wanted in self._known:
                return wanted
            if self._per_namespace is not None:
                same = sum(group.namespace == wanted.namespace for group in self._known)
                if same >= self._per_namespace:
                    self.overflowed += 1
                    return Group(wanted.namespace, OTHER)
            if len(self._known) >= self._limit:
                self.overflowed += 1
                return Group(OTHER, OTHER)
            self._known.add(wanted)
            return wanted
