"""What a waiter knows about the delays ahead of it: until when the name must not be granted, and which earlier entries
ended in a way that is not known yet.

If the key of a holder with a `delay` is removed (deleted by hand, its lease revoked), the holder may keep working until
it is notified. The key leaves no trace, so the waiters must remember it. The rule: no waiter becomes the holder before
`left` is 0, and no waiter treats an entry as released while its end is unknown.

The last value of an earlier entry shows how it ended. `released` means a clean release; it also means that the entry
was granted, so every delay before it was waited out. `held` starts the entry's delay. A waiter that waits out a delay
publishes it in its own value (`remaining_delay`), and so passes it on if it leaves. If a waiter reads the queue and
finds an entry gone without a notification, it assumes the worst from that moment until etcd's history shows how the
entry ended. If that history is compacted, the worst case stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from leasehold.engines.etcd.queue import Entry
from leasehold.engines.registry import snapshot_items


class EarlierEntry(NamedTuple):
    """An entry ahead whose end may start a delay, as last seen."""

    create_revision: int
    max_delay: float  # the worst case
    seen_revision: int  # the last revision at which the entry existed
    gone_at: float  # when a read first found it gone, by this client's clock; 0: it still exists


class DelayTracker:
    """The delays ahead of one claim. The claim's caller reads the queue (`observe`) while the watcher's thread gets
    notifications (`entry_ended`): every single step leaves a state that is safe for both."""

    __slots__ = ("_earlier", "known_end")

    def __init__(self) -> None:
        self._earlier: dict[bytes, EarlierEntry] = {}
        self.known_end = 0.0  # of the delays known for certain; only the watcher's thread sets it

    @property
    def has_unknown_ends(self) -> bool:
        """Whether the end of an earlier entry is unknown: a notification about another entry is then not enough."""
        return bool(self._earlier)

    def left(self, now: float) -> float:
        """Seconds for which the name must not be granted, as far as this client knows."""
        guesses = [
            earlier_entry.gone_at + earlier_entry.max_delay
            for _, earlier_entry in snapshot_items(self._earlier)
            if earlier_entry.gone_at
        ]
        return max(0.0, max([self.known_end, *guesses]) - now)

    def observe(self, found: Iterable[Entry], revision: int, now: float) -> list[tuple[bytes, int]]:
        """Record the conflicting entries that a read found ahead. Returns the entries that have gone since the last
        read, each with the revision from which etcd's history is to be read."""
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
        """Record that an entry is gone. `last_entry`: its last state; None: unknown.

        | last state | the delay that starts                  | earlier entries                                  |
        |------------|----------------------------------------|--------------------------------------------------|
        | held       | the entry's own                        | as before                                        |
        | waiting    | what it showed of an earlier one       | as before                                        |
        | released   | none                                   | of an exclusive lock: their delays were waited out |
        | cooling    | none: the key was kept for the delay   | as before                                        |
        | unknown    | the longest that the entry allows      | as before                                        |
        """
        tracked = self._earlier.get(key)
        if tracked is not None and last_entry is not None and last_entry.create_revision != tracked.create_revision:
            tracked = None
        max_delay = tracked.max_delay if tracked is not None else 0.0
        # Set before the entry is removed: the caller may read `left` in between.
        if delay := _started_delay(last_entry, max_delay):
            since = tracked.gone_at if tracked is not None and tracked.gone_at else now
            self.known_end = max(self.known_end, since + delay)
        if tracked is not None:
            self._earlier.pop(key, None)
        if last_entry is not None and last_entry.value.state == "released" and last_entry.is_exclusive:
            for earlier_key, earlier_entry in snapshot_items(self._earlier):
                if earlier_entry.create_revision < last_entry.create_revision:
                    self._earlier.pop(earlier_key, None)


def _started_delay(last_entry: Entry | None, max_delay: float) -> float:
    if last_entry is None:
        return max_delay
    match last_entry.value.state:
        case "held":
            return last_entry.value.delay
        case "waiting":
            return last_entry.value.remaining_delay
        case "released" | "cooling":
            return 0.0


def _max_delay(entry: Entry) -> float:
    """The longest delay that may apply if this entry is found gone: a waiting one may have become the holder before."""
    if entry.value.state == "waiting":
        return max(entry.value.delay, entry.value.remaining_delay)
    return _started_delay(entry, 0.0)
