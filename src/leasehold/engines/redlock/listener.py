"""Wake-ups from all nodes: a subscription at each, heard by one thread.

A turn is one when all nodes gave it, or a majority did and the others are late: a waiter that one of them told to go
would find the others busy. One that fewer told looks all the same, a little later: when several came at once, the
nodes may have given the turn to different ones, and looking is what makes them agree (`engine.py`). When to look is
what a majority says likewise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import hiredis

from leasehold.book import Book, every
from leasehold.core.timing import BEAT, BEAT_EVERY, backoff
from leasehold.engines.redis.listener import Listener
from leasehold.engines.redis.requests import named
from leasehold.engines.redis.scripts import MICROS, Publishing
from leasehold.engines.redis.server import pack
from leasehold.engines.redlock.agreement import majority
from leasehold.engines.redlock.node import Node
from leasehold.errors import ConfigError
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Runtime
from leasehold.runtime.scatter import Bundle, Limit, Questions

_log = logging.getLogger("leasehold.redlock")

_SPLIT: Final = 0.05  # seconds that a turn given by too few nodes is left to become one
_REST: Final = 0.005  # that a majority waits for the others: the release that they tell of is on its way to those
_SOON: Final = 0.2  # that a node is left to be itself again before it is told what it missed
_LOOK: Final = 1.0  # the longest sleep: whether the client is still there is seen by then


class _Ear:
    """What is known of the subscription at one node."""

    def __init__(self) -> None:
        self.on = self.told = self.doubted = False  # told: something was sent that has not been answered
        self.due, self.misses = 0.0, 0  # when to do something about it


class Ears(Listener):
    """Of one client: on the shelf of its book, shared by both twins."""

    def __init__(self, nodes: Sequence[Node], runtime: Runtime, book: Book, patience: float) -> None:
        self._nodes, self._quorum = nodes, majority(len(nodes))
        super().__init__(nodes[0], Publishing(), runtime, book, patience)

    def after_fork(self) -> None:
        if (bundle := getattr(self, "_bundle", None)) is not None:
            bundle.after_fork()
        super().after_fork()
        self._bundle: Bundle | None = None
        self._ears = [_Ear() for _ in self._nodes]
        self._turns: dict[str, set[int]] = {}  # by mark: the nodes that gave it its turn
        self._ends: dict[str, dict[int, float]] = {}  # by mark: when to look, as each node says

    def close(self) -> None:
        self._ended.append(True)
        if self._bundle is not None:
            self._bundle.shut()

    # -------------------------------------------------------- of one waiter

    def asks(self, mark: str) -> None:
        """It is about to ask: what was told before is out of date."""
        self._turns[mark], self._ends[mark] = set(), {}

    def leaves(self, mark: str) -> None:
        self._turns.pop(mark, None)
        self._ends.pop(mark, None)

    def turn(self, mark: str, number: int) -> None:
        """A node gave it its turn."""
        book, turns = self._book(), self._turns.get(mark)
        if book is None or turns is None:
            return
        turns.add(number)
        if len(turns) >= max(self._quorum, sum(ear.on for ear in self._ears)):
            book.deliver("go", mark, 0.0, None)
        else:
            book.deliver("head", mark, _SPLIT if len(turns) < self._quorum else _REST, None)

    def counted(self, number: int, heard: bool) -> None:
        """Told by a reply whether the node counts this client among its subscribers. If not, though it should, the
        connection is dead and nobody said so. One made anew that is not counted either is no reason to try for ever:
        some proxies hide the count."""
        ear = self._ears[number]
        if heard:
            ear.doubted = False
        elif ear.on and not ear.doubted:
            ear.doubted, ear.misses, ear.due = True, 1, 0.0

    def owed(self, number: int) -> None:
        """A node has missed a release: it is asked soon whether it is there, and told (`_tell_missed`)."""
        ear = self._ears[number]
        if ear.on and not ear.told:
            ear.due = min(ear.due, self._runtime.now() + _SOON)

    # --------------------------------------------------------- on its thread

    async def _listen(self, runtime: Runtime, ended: list[bool]) -> None:
        bundle = self._bundle = Bundle(self._nodes, hiredis.Reader, runtime.now)
        try:
            while not ended and (book := self._book()) is not None:
                now = runtime.now()
                for number, ear in enumerate(self._ears):
                    if ear.due <= now:
                        self._tend(bundle, number, ear, book.client, runtime)
                del book
                due = min(ear.due for ear in self._ears)
                for number, said in bundle.hear(min(max(due - runtime.now(), 0.0), _LOOK)):
                    self._note(number, said, runtime)
        finally:
            self._bundle = None
            bundle.close()

    def _tend(self, bundle: Bundle, number: int, ear: _Ear, client: str, runtime: Runtime) -> None:
        """Subscribe; ask one that was quiet for long whether it is there; give up one that does not say so."""
        now = runtime.now()
        if ear.told or (ear.on and ear.misses):
            bundle.drop(number)
            self._deaf(ear, runtime)
            return
        said = pack("PING") if ear.on else pack(self._publishing.subscribe, f"{self._publishing.channel('')}{client}")
        ear.told, ear.due = True, now + self._patience
        try:
            bundle.tell(number, said)
        except OSError as error:
            _log.debug("no wake-ups from %s: %s", self._nodes[number], error)
            bundle.drop(number)
            self._deaf(ear, runtime)

    def _deaf(self, ear: _Ear, runtime: Runtime) -> None:
        ear.on, ear.told, ear.misses = False, False, ear.misses + 1
        ear.due = runtime.now() + backoff(ear.misses, 0.02, 1.0, 0.5 + runtime.fraction() / 2)
        self._count()

    def _note(self, number: int, said: Any, runtime: Runtime) -> None:
        ear, book = self._ears[number], self._book()
        if isinstance(said, Exception):
            level = (
                logging.WARNING
                if isinstance(said, ConfigError | hiredis.ReplyError) and not ear.misses
                else logging.DEBUG
            )
            _log.log(level, "no wake-ups from %s, so waiters look now and then: %s", self._nodes[number], said)
            if isinstance(said, hiredis.ReplyError) and self._bundle is not None:
                self._bundle.drop(number)
            self._deaf(ear, runtime)
            return
        ear.told, ear.due = False, runtime.now() + BEAT_EVERY
        if self._nodes[number].missed:
            self._tell_missed(number, runtime)
        if book is None or not isinstance(said, list) or len(said) < 2:
            return
        if said[0] == self._publishing.subscribe.lower().encode():
            ear.on, ear.misses = True, 0
            self._count()
            for mark, _ in every(book.waiting):  # their turn may have come while nobody could tell them
                book.deliver("head", mark, 0.0, None)
        elif said[0] == b"message" and len(said) == 3 and isinstance(said[2], bytes):
            self._deliver(book, number, said[2], runtime.now())

    def _tell_missed(self, number: int, runtime: Runtime) -> None:
        """It is there, and has missed releases: a new connection begins with them. Nobody else may ask it for long."""
        bundle, until = Bundle(self._nodes, hiredis.Reader, runtime.now), runtime.now() + self._patience
        try:
            bundle.ask(Questions({number: pack("PING")}), 1, Limit(until, until, bool))
        finally:
            bundle.close()

    def _count(self) -> None:
        """Wake-ups reach this client when those of a majority do."""
        count = sum(ear.on for ear in self._ears)
        self.on = count >= self._quorum
        if self.on:
            self._heard, self._failing = True, False
            self.wake()
        elif all(ear.on or ear.misses for ear in self._ears):
            self._failing = True
            self.wake()

    def _deliver(self, book: Book, number: int, message: bytes, now: float) -> None:
        """A message of a script's: kind, microseconds, key, mark."""
        with suppress(ValueError, OverflowError):  # not ours
            kind, after, key, raw = message.split(b" ", 3)
            mark, seconds, whose = raw.hex(), int(after) / MICROS, named(key.decode())
            if kind == b"go" and whose is not None and not book.knows(mark):
                book.deliver("go", mark, 0.0, Claim(*whose, "", mark, Holder("stray"), BEAT))
            elif kind == b"go":
                self.turn(mark, number)
            elif kind == b"head":
                self._look(book, mark, number, now + seconds, now)
            elif kind == b"lost":
                book.deliver("lost", mark, 0.0, None)

    def _look(self, book: Book, mark: str, number: int, at: float, now: float) -> None:
        ends = self._ends.get(mark)
        if ends is not None:
            ends[number] = at
            if self._turns.get(mark):  # it looks soon, whatever the others say: the turn is given for a moment only
                return
            if len(ends) >= self._quorum:
                book.deliver("head", mark, max(0.0, sorted(ends.values())[self._quorum - 1] - now), None)
