"""What the twins of a client share: its claims at etcd, its leases, its watches, and what it knows of the cluster."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import Final, Literal
from weakref import ref

from leasehold.book import Book, every
from leasehold.engines.etcd import line, wire
from leasehold.engines.etcd.address import Address
from leasehold.engines.etcd.calls import Login
from leasehold.engines.etcd.delays import Delays
from leasehold.engines.etcd.leases import Lease, Leases
from leasehold.engines.etcd.watch import Following, Heard, Watcher
from leasehold.errors import ConfigError
from leasehold.model import Claim
from leasehold.runtime.base import Runtime

_MOST: Final = (1 << 53) - (1 << 40)  # of a base, so that tokens stay below 2^53 for a million million changes


class Party:
    """One claim of this client as etcd has it, so far as this client knows."""

    __slots__ = (
        "base",
        "chair",
        "created",
        "delays",
        "lease",
        "next",
        "noted",
        "place",
        "since",
        "spot",
        "state",
        "unsure",
    )

    def __init__(self, spot: line.Spot, chair: int) -> None:
        self.spot, self.chair = spot, chair
        self.created = 0  # the revision that created its key: its place in line
        self.state: Literal["waiting", "held"] = "waiting"
        self.lease: Lease | None = None  # what the key hangs on
        self.next: Lease | None = None  # what it may be about to hang on
        self.base = 0
        self.since = 0.0
        self.place: int | None = None  # in line, when it last looked
        self.delays = Delays()  # of those ahead
        self.noted = 0.0  # until when the name rests, as its own note says
        self.unsure = False  # something was sent for it that may be carried out after all that follows

    @property
    def token(self) -> int:
        return self.base + self.created

    @property
    def blank(self) -> bool:
        """It has nothing at etcd, and nothing is on its way there."""
        return not self.created and not self.unsure and self.lease is None and self.next is None


class Shared:
    def __init__(self, address: Address, runtime: Runtime, book: Book) -> None:
        self.address = address
        self.parties: dict[str, Party] = {}  # by mark
        self._chairs: list[int] = []  # that are free
        self._new_chairs = count()
        self._runtime, self._guard = runtime, runtime.guard()
        self.leases = Leases(runtime)
        self.login = Login()
        self.base = b""  # as it stands at etcd; empty: not read yet
        self.members = len(address.endpoints)
        self._now, self._book = runtime.now, ref(book)
        self._revision = self._cluster = 0
        self._fallen = ""
        self.watcher = Watcher(address, runtime, self.login, _weakly(ref(self)))

    def party(self, claim: Claim) -> Party:
        found = self.parties.get(claim.mark)
        if found is None:
            found = self.parties[claim.mark] = Party(*self._seat(claim))
        return found

    def reseat(self, claim: Claim, party: Party) -> None:
        """Something of an earlier claim still stands on its chair: cooling, most likely."""
        party.spot, party.chair = self._seat(claim)

    def _seat(self, claim: Claim) -> tuple[line.Spot, int]:
        book = self._book()
        assert book is not None, "whoever attempts has one"
        with self._guard:
            chair = heappop(self._chairs) if self._chairs else next(self._new_chairs)
        return line.spot(self.address.root, claim, f"{book.client}{chair:x}"), chair

    def leave(self, claim: Claim) -> None:
        """Nothing is known of it any more. Its chair is free, unless something may yet be written on it."""
        party = self.parties.pop(claim.mark, None)
        if party is not None:
            self.watcher.unfollow(claim.mark)
            if not party.unsure:
                with self._guard:
                    heappush(self._chairs, party.chair)

    def crowded(self, claim: Claim) -> bool:
        """Somebody of this client waits for that name already."""
        if (book := self._book()) is None:
            return False
        others = (waiter.claim for _, waiter in every(book.waiting) if waiter.claim.mark != claim.mark)
        return any(other.name == claim.name and other.namespace == claim.namespace for other in others)

    def after_fork(self) -> None:
        self.parties.clear()
        self._guard = self._runtime.guard()
        self.leases.after_fork()
        self.watcher.after_fork()

    # ------------------------------------------------ what etcd has shown

    def number(self, base: bytes) -> int:
        """The base as a number."""
        if not (base.isdigit() and 0 < int(base) < _MOST):
            raise ConfigError(
                f"{line.base_key(self.address.root).decode()} in etcd must hold the number that tokens begin at: "
                "`leasehold rebase` mends it"
            )
        return int(base)

    def revision(self) -> int:
        """To be read before a request is sent: no answer to it may be of an earlier time."""
        return self._revision

    def check(self, header: wire.Header | None, before: int) -> None:
        """Data that went back in time were restored from a snapshot: tokens would fall, and grants are forgotten."""
        if header is None:
            return
        if header.revision < before or self._cluster not in (0, header.cluster_id):
            self._fallen = (
                f"the data of this etcd were replaced: revision {before} was seen, now it is {header.revision}. Run "
                "`leasehold rebase` if they were restored without --bump-revision, then make a new client"
            )
        self._cluster = header.cluster_id
        self._revision = max(self._revision, header.revision)

    @property
    def fallen(self) -> bool:
        return bool(self._fallen)

    def sound(self) -> None:
        """Raises once this client has seen time go back: it issues no token any more."""
        if self._fallen:
            raise ConfigError(self._fallen)

    def heard(self, following: Following, event: wire.Event | None, seconds: float) -> None:
        """On the watcher's thread."""
        mark = following.mark
        party, book = self.parties.get(mark), self._book()
        if party is None or book is None:
            return
        if following.why == "own":
            if event is not None and (event.type == wire.DELETED or _taken(event.kv)):
                book.deliver("lost", mark, 0.0, None)
            return
        if event is not None and event.type == wire.DELETED:
            self._ended(party, event.kv.key if event.kv is not None else following.key, event.prev_kv)
        elif event is None and following.why == "past":
            self._ended(party, following.key, None)
        if following.why == "past" and party.place:
            return  # good to know; others are ahead, and it is told when they go
        if event is None:
            book.deliver("head", mark, seconds, None)
        else:
            book.deliver("go", mark, 0.0, None)

    def _ended(self, party: Party, key: bytes, before: wire.KeyValue | None) -> None:
        last = None if before is None else line.seen(self.address.root, before)
        if last is None or last.created < party.created:  # else its chair is another's by now, behind this claim
            party.delays.ended(key, last, self._now())


def _taken(kv: wire.KeyValue | None) -> bool:
    return kv is not None and line.note_of(kv.value).state == "cooling"


def _weakly(shared: ref[Shared]) -> Heard:
    def heard(following: Following, event: wire.Event | None, seconds: float) -> None:
        if (known := shared()) is not None:
            known.heard(following, event, seconds)

    return heard
