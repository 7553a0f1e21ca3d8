"""Reading and writing records for the recipes that decide by them: deadlines, and answers that were lost."""

from __future__ import annotations

from typing import Final

from leasehold.core import timing
from leasehold.core.names import encode
from leasehold.errors import Unavailable
from leasehold.recipes.desk import Desk
from leasehold.runtime.base import settle
from leasehold.store import Record, Store

_TRIES: Final = 3
_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 1.0


class Records:
    """One store, as the recipes of one client use it."""

    def __init__(self, desk: Desk, store: Store) -> None:
        self.desk, self.store = desk, store

    def key(self, kind: str, name: str) -> str:
        return f"{kind}:{encode(self.desk.options.namespace)}:{encode(name)}"

    @property
    def early(self) -> bool:
        """Whether a look may come before the key's lock is held. In a transaction of the caller's it would take the
        snapshot, and lock the row, of one who then waits for somebody who needs that row."""
        return not getattr(self.store, "joined", False)

    async def read(self, key: str) -> Record | None:
        """Asked once more if the connection turned out to be of yesterday."""
        seconds = self.desk.options.call_timeout
        began = self.desk.runtime.now()
        try:
            return await settle(self.store.read(key, seconds))
        except Unavailable:
            left = began + seconds - self.desk.runtime.now()
            if left < seconds / 2:
                raise
            return await settle(self.store.read(key, left))

    async def swap(
        self, key: str, data: bytes, was: Record | None, keep: float | None, what: str = ""
    ) -> Record | None:
        """The new record in the place of `was`; None: somebody else changed it (S1).

        After a lost answer the same write is repeated. It carries a new edition, so it cannot be done twice; and where
        the repetition is refused, the edition that is there tells whether the first had been carried out. Unless it has
        been replaced since: then nobody can tell, and `what` is unavailable, where a name for it is given.
        """
        runtime, seconds = self.desk.runtime, self.desk.options.call_timeout
        new = Record(runtime.entropy(16).hex(), data)
        for tries in range(_TRIES):
            try:
                if await settle(self.store.write(key, new, was.edition if was else "", keep, seconds)):
                    return new
                if tries == 0:
                    return None
                found = await settle(self.store.read(key, seconds))
                if found is not None and found.edition == new.edition:
                    return new
                break
            except Unavailable:
                if tries == _TRIES - 1:
                    raise
                await runtime.sleep(timing.backoff(tries, _PAUSE, _LONGEST_PAUSE, runtime.fraction()))
        if what:
            raise Unavailable(f"{what}: the answer was lost, and others went on since; whether it was done is unknown")
        return None
