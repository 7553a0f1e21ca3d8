"""What a waiter knows of the delays ahead of it: until when the name has to rest, and whose end nobody has told yet.

A holder with a `delay` whose key is taken away (deleted by hand, its lease revoked) may work on until it is told. The
key leaves no trace, so it is for those in line to know better. The rule: nobody takes its turn before `left` is 0, and
nobody whose end is not known is taken for one that released.

How one ahead ended is known from the note that it left: `released` says a clean release, and that it had its turn, so
that everything before it was waited out. `held` begins its delay. Whoever waits a delay out has it in its own note
(`rest`), and so hands it on when it leaves. A look that finds somebody gone whose end was not heard assumes the worst
from that moment on, until etcd's history says how it was; where that is forgotten, the worst stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from leasehold.book import every
from leasehold.engines.etcd.line import Seen


class Ahead(NamedTuple):
    """Somebody whose end may begin a delay, as last seen."""

    created: int
    delay: float  # at worst
    revision: int  # at which it was still there
    gone: float  # since when it is not, by this client's clock; 0: it is


class Delays:
    """Of one claim. Its owner looks (`see`), the watcher's thread hears (`ended`): each step leaves both safe."""

    __slots__ = ("_ahead", "until")

    def __init__(self) -> None:
        self._ahead: dict[bytes, Ahead] = {}
        self.until = 0.0  # known for certain; set by the watcher's thread alone

    @property
    def unknown(self) -> bool:
        """Somebody was ahead whose end is not known: to be told of another's is not enough."""
        return bool(self._ahead)

    def left(self, now: float) -> float:
        """Seconds for which the name has to rest, for all that is known."""
        guesses = [ahead.gone + ahead.delay for _, ahead in every(self._ahead) if ahead.gone]
        return max(0.0, max([self.until, *guesses]) - now)

    def see(self, found: Iterable[Seen], revision: int, now: float) -> list[tuple[bytes, int]]:
        """All that was found ahead, and cannot be stood beside. Gives whose end is to be asked for, and from which
        revision on: those that were there before and are gone."""
        there = {seen.key: seen for seen in found}
        missed = [(key, ahead) for key, ahead in every(self._ahead) if key not in there and not ahead.gone]
        for key, ahead in missed:
            self._ahead[key] = ahead._replace(gone=now)
        for key, seen in there.items():
            if worst := _worst(seen):
                self._ahead[key] = Ahead(seen.created, worst, revision, 0.0)
            else:
                self._ahead.pop(key, None)
        return [(key, ahead.revision) for key, ahead in missed]

    def ended(self, key: bytes, last: Seen | None, now: float) -> None:
        """It is gone. `last`: as it was then; None: nobody can say."""
        known = self._ahead.get(key)
        if known is not None and last is not None and last.created != known.created:
            known = None
        if last is not None:
            delay = last.note.delay if last.note.state == "held" else last.note.rest if _waits(last) else 0.0
        else:
            delay = known.delay if known is not None else 0.0
        if delay:  # first this, then forget it: in between the caller may ask what is left
            since = known.gone if known is not None and known.gone else now
            self.until = max(self.until, since + delay)
        if known is not None:
            self._ahead.pop(key, None)
        if last is not None and last.note.state == "released" and last.kind == "lock" and last.mode == "exclusive":
            for earlier, ahead in every(self._ahead):
                if ahead.created < last.created:
                    self._ahead.pop(earlier, None)


def _waits(seen: Seen) -> bool:
    return seen.note.state == "waiting"


def _worst(seen: Seen) -> float:
    """How long the name may have to rest when this one is found gone: one that waits may have had its turn by then."""
    if _waits(seen):
        return max(seen.note.delay, seen.note.rest)
    return seen.note.delay if seen.note.state == "held" else 0.0
