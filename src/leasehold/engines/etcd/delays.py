"""What a waiter knows of the delays ahead of it: until when the name has to rest, and whose end nobody has told yet.

A holder with a `delay` whose key is taken away (deleted by hand, its lease revoked) may work on until it is told. The
key leaves no trace, so it is for those in line to know better. The rule: nobody takes its turn before `left` is 0, and
nobody whose end is not known is taken for one that released.

How one ahead ended is known from the note that it left: `released` says a clean release, and that it had its turn, so
that everything before it was waited out. `held` begins its delay. Whoever waits a delay out has it in its own note
(`remaining_delay`), and so hands it on when it leaves. A look that finds somebody gone whose end was not heard assumes
the worst
from that moment on, until etcd's history says how it was; where that is forgotten, the worst stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from leasehold.engines.etcd.queue import Entry
from leasehold.engines.registry import snapshot_items


class EarlierEntry(NamedTuple):
    """Somebody whose end may begin a delay, as last seen."""

    create_revision: int
    max_delay: float  # at worst
    seen_revision: int  # at which it was still there
    gone_at: float  # since when it is not, by this client's clock; 0: it is


class DelayTracker:
    """Of one claim. Its owner looks (`observe`), the watcher's thread hears (`entry_ended`): each step leaves both
    safe."""

    __slots__ = ("_earlier", "until")

    def __init__(self) -> None:
        self._earlier: dict[bytes, EarlierEntry] = {}
        self.until = 0.0  # known for certain; set by the watcher's thread alone

    @property
    def has_unknown_ends(self) -> bool:
        """Somebody was ahead whose end is not known: to be told of another's is not enough."""
        return bool(self._earlier)

    def left(self, now: float) -> float:
        """Seconds for which the name has to rest, for all that is known."""
        guesses = [
            earlier_entry.gone_at + earlier_entry.max_delay
            for _, earlier_entry in snapshot_items(self._earlier)
            if earlier_entry.gone_at
        ]
        return max(0.0, max([self.until, *guesses]) - now)

    def observe(self, found: Iterable[Entry], revision: int, now: float) -> list[tuple[bytes, int]]:
        """All that was found ahead, and cannot be stood beside. Gives whose end is to be asked for, and from which
        revision on: those that were there before and are gone."""
        present = {entry.key: entry for entry in found}
        missing = [
            (key, earlier_entry)
            for key, earlier_entry in snapshot_items(self._earlier)
            if key not in present and not earlier_entry.gone_at
        ]
        for key, earlier_entry in missing:
            self._earlier[key] = earlier_entry._replace(gone_at=now)
        for key, entry in present.items():
            if max_delay := _max_delay(entry):
                self._earlier[key] = EarlierEntry(entry.create_revision, max_delay, revision, 0.0)
            else:
                self._earlier.pop(key, None)
        return [(key, earlier_entry.seen_revision) for key, earlier_entry in missing]

    def entry_ended(self, key: bytes, last_entry: Entry | None, now: float) -> None:
        """It is gone. `last_entry`: as it was then; None: nobody can say."""
        tracked = self._earlier.get(key)
        if tracked is not None and last_entry is not None and last_entry.create_revision != tracked.create_revision:
            tracked = None
        if last_entry is not None:
            delay = (
                last_entry.value.delay
                if last_entry.value.state == "held"
                else last_entry.value.remaining_delay
                if _is_waiting(last_entry)
                else 0.0
            )
        else:
            delay = tracked.max_delay if tracked is not None else 0.0
        if delay:  # first this, then forget it: in between the caller may ask what is left
            since = tracked.gone_at if tracked is not None and tracked.gone_at else now
            self.until = max(self.until, since + delay)
        if tracked is not None:
            self._earlier.pop(key, None)
        if (
            last_entry is not None
            and last_entry.value.state == "released"
            and last_entry.kind == "lock"
            and last_entry.mode == "exclusive"
        ):
            for earlier_key, earlier_entry in snapshot_items(self._earlier):
                if earlier_entry.create_revision < last_entry.create_revision:
                    self._earlier.pop(earlier_key, None)


def _is_waiting(entry: Entry) -> bool:
    return entry.value.state == "waiting"


def _max_delay(entry: Entry) -> float:
    """How long the name may have to rest when this one is found gone: one that waits may have had its turn by then."""
    if _is_waiting(entry):
        return max(entry.value.delay, entry.value.remaining_delay)
    return entry.value.delay if entry.value.state == "held" else 0.0
