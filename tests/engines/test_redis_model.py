"""The scripts beside the pure line: the same verbs at the same times give the same answers and wake-ups.

The clock of the scripts is the one line of their source that is replaced here; keys are expired by hand as it moves on.
Who can be told is decided by real subscriptions, and what is told is read from them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from copy import deepcopy

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.core.admission import Line
from leasehold.core.party import HELD, PASSED, WAITING, Counter, Moment, Word
from leasehold.core.timing import BEAT
from leasehold.engines.redis import requests, scripts
from leasehold.engines.redis.requests import Requests, Scripts, keys
from leasehold.engines.redis.scripts import MICROS, Publishing, Script
from leasehold.engines.redis.server import pack
from leasehold.errors import Mismatch
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.testing.rig import rig_type
from leasehold.testing.suite import made

TRUE_CLOCK = "redis.call('TIME')"
FALSE_CLOCK = "redis.call('HMGET', 'clock', 's', 'us')"
MARKS = [letter * 32 for letter in "abcde"]
KEYS = keys("ns", "name")


class Link:
    """A bare connection to the server."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.reader = hiredis.Reader()

    def ask(self, *words):
        return self.send(pack(*words))

    def send(self, packed: bytes):
        self.sock.sendall(packed)
        return self.read()

    def read(self):
        while (reply := self.reader.gets()) is False:
            self.reader.feed(self.sock.recv(65536))
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply


class PureLine(Line):
    """With keys, lapsed places are looked for from the first waiter on."""

    def _join(self, now, claim, client):
        if not any(party.state in (WAITING, PASSED) for party in self.parties.values()):
            self._scan_at = now + BEAT
        return super()._join(now, claim, client)


class World:
    """One clock, clients that can be told or not, and the same name kept in two ways."""

    def __init__(self, port: int) -> None:
        self.link, self.ears = Link(port), Link(port)
        self.requests = Requests(Publishing(), "")
        self.requests.scripts = Scripts(*map(self.on_a_false_clock, self.requests.scripts))
        self.requests.moved("")  # they are packed anew
        self.name = self.requests.name("ns", "name")
        self.restart()

    def on_a_false_clock(self, script: Script) -> Script:
        text = script.text.decode()
        assert text.count(TRUE_CLOCK) == 1
        false = scripts.made(script.name, text.replace(TRUE_CLOCK, FALSE_CLOCK))
        self.link.ask("SCRIPT", "LOAD", false.text)
        return false

    def request(self, claim: Claim) -> Requests:
        """As its own client would make it."""
        self.requests.moved(claim.mark)
        return self.requests

    def restart(self) -> None:
        self.link.ask("FLUSHALL")
        self.now, self.counter, self.line = 4_000_000_000.0, Counter(), None  # the server itself expires nothing
        self.tell_clock()
        self.deaf = set(MARKS)
        self.ears.sock.sendall(pack("UNSUBSCRIBE"))
        while self.ears.read()[2]:  # how many are left
            continue
        for mark in MARKS:
            self.hears(mark)

    def tell_clock(self) -> None:
        self.link.ask("HSET", "clock", "s", int(self.now), "us", round(self.now % 1 * MICROS))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tell_clock()
        for key in KEYS[1:]:
            end = self.link.ask("PEXPIRETIME", key)
            assert end != -1, f"{key} would stay for ever"
            if 0 < end <= self.now * 1000:
                self.link.ask("DEL", key)

    def hears(self, mark: str) -> None:
        if mark in self.deaf:
            self.deaf.discard(mark)
            self.ears.ask("SUBSCRIBE", f"lh1:c:{mark}")

    def goes_deaf(self, mark: str) -> None:
        if mark not in self.deaf:
            self.deaf.add(mark)
            self.ears.sock.sendall(pack("UNSUBSCRIBE", f"lh1:c:{mark}"))
            assert self.ears.read()[0] == b"unsubscribe"

    def drained(self):
        """What was told since last asked; None: more to read before the answer to the question."""
        words: list[Word] = []
        self.ears.sock.sendall(pack("PING", "drained"))
        while True:
            said = self.ears.read()
            if said in ([b"pong", b"drained"], b"drained"):
                return words
            if said[0] == b"message":
                kind, after, key, mark = said[2].split(b" ", 3)
                assert requests.named(key.decode()) == ("ns", "name")
                client = said[1].decode().removeprefix("lh1:c:")
                words.append(Word(client, kind.decode(), mark.hex(), int(after) / MICROS))

    def pure(self, verb, kind="lock", limit=1):
        at = Moment(
            self.now, lambda: self.counter.next(round(self.now * MICROS)), lambda client: client not in self.deaf
        )
        line = self.line or PureLine(self.now, kind, limit)
        try:
            answer = verb(line, at)
        except Mismatch as error:
            answer = str(error), []
        self.line = None if line.idle else line
        return answer

    def attempt(self, claim: Claim):
        try:
            return requests.granted(claim, self.link.send(self.request(claim).attempt(self.name, claim)))
        except Mismatch as error:
            return str(error)

    def shown(self) -> None:
        """What a look at the name shows, the same from both, nothing changed."""
        found = requests.holdings("ns", "name", self.link.send(self.requests.inspect(self.name)))
        line = deepcopy(self.line) or Line(self.now)
        line.tidy(self.now)
        assert rounded(found) == rounded(list(line.holdings("ns", "name", self.now)))


def rounded(thing):
    """Times as whole microseconds: the pure line computes with seconds."""
    if isinstance(thing, float):
        return round(thing * MICROS / 10)
    if isinstance(thing, Grant | Busy | Alive | Gone | Word):
        return type(thing).__name__, [rounded(each) for each in thing]
    if isinstance(thing, list | tuple):
        return [rounded(each) for each in thing]
    if hasattr(thing, "fingerprint"):
        return [rounded(getattr(thing, name)) for name in thing.__dataclass_fields__]
    return thing


def claim(mark: str, **more) -> Claim:
    more = {"ttl": 10.0, "queue": True} | more
    return Claim("ns", "name", f"secret {mark}", mark, Holder(f"holder {mark}", "h", 1, "p"), **more)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(made(rig_type("redis")).server.port)
    yield world
    for link in (world.link, world.ears):
        link.sock.close()


marks = st.sampled_from(MARKS)
shapes = st.sampled_from(
    [{}, {}, {"mode": "shared"}, {"mode": "shared"}, {"delay": 2.0}, {"delay": 2.0}, {"min_hold": 4.0}]
)
semaphores = st.sampled_from([{}, {"delay": 2.0}]).map(lambda more: {"kind": "semaphore", "limit": 2, **more})
attempts = st.tuples(st.just("attempt"), marks, st.just(True), shapes, st.sampled_from([1.0, 10.0]))
renewal = st.tuples(marks, st.sampled_from([True, True, False]), st.sampled_from([1.0, 10.0, 10.0]))
renewals = st.tuples(st.just("renew"), st.one_of(st.tuples(renewal), st.lists(renewal, min_size=1, max_size=3)))
passing = st.tuples(st.just("pass"), st.sampled_from([0.5, 0.5, 1.0, 2.5, 3.0, 4.0, 8.0, 14.5, 16.0]))
steps = st.lists(
    st.one_of(
        attempts,
        attempts,
        st.tuples(st.just("attempt"), marks, st.just(False), shapes, st.sampled_from([1.0, 10.0])),
        renewals,
        renewals,
        st.tuples(st.just("release"), marks, st.sampled_from([0.0, 4.0]), st.sampled_from([True, True, False])),
        st.tuples(st.just("break"), marks),
        passing,
        passing,
        st.tuples(st.just("deaf"), marks),
        st.tuples(st.just("hears"), marks),
    ),
    min_size=15,
    max_size=60,
)


@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_scripts_and_the_pure_line_agree(kind: str, data, world: World) -> None:
    agree(kind, data, world)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=3000, deadline=None)
def test_scripts_and_the_pure_line_agree_for_long(kind: str, data, world: World) -> None:
    agree(kind, data, world)


def agree(kind: str, data, world: World) -> None:
    world.restart()
    tokens: dict[str, int] = {}
    for step in data.draw(steps):
        both(world, step, tokens, kind, data)
        world.shown()
    # Nobody asks any more: nothing stays but the counter.
    world.pass_time(1000.0)
    assert set(world.link.ask("KEYS", "*")) <= {b"clock", KEYS[0].encode()}


def both(world: World, step, tokens: dict[str, int], kind: str, data) -> None:
    what, *args = step
    if what == "pass":
        world.pass_time(args[0])
        return
    if what == "deaf":
        world.goes_deaf(args[0])
        return
    if what == "hears":
        world.hears(args[0])
        return
    if what == "attempt":
        mark, queue, shape, ttl = args
        if kind == "semaphore" or (kind == "either" and data.draw(st.booleans())):
            shape = data.draw(semaphores)
        one = claim(mark, queue=queue, ttl=ttl, **shape)
        got = world.attempt(one)
        want, words = world.pure(lambda line, at: line.attempt(at, one, mark), one.kind, one.limit)
        if isinstance(got, Grant):
            tokens[mark] = got.token
    elif what == "renew":
        claims = [claim(mark, token=tokens.get(mark, 7) if held else 0, ttl=ttl) for mark, held, ttl in args[0]]
        expired = not world.link.ask("EXISTS", KEYS[1])  # nothing is left that could say it was there
        flat = world.link.send(world.requests.renew(world.name, claims))
        got = requests.renewed(claims, flat)
        want, words = [], []
        lapsed = {} if world.line is None else world.line.parties
        lapsed = {p.mark for p in lapsed.values() if p.state == 2 and p.until <= world.now}
        for one in claims:
            answer, more = world.pure(lambda line, at, one=one: line.renew(at, one))
            # Asked for together, all are answered as of the same moment.
            party = world.line and world.line.parties.get(one.mark)
            if isinstance(answer, Alive) and party.state == HELD and not one.token:
                answer = answer._replace(place=got[len(want)].place)  # of no meaning: it holds
            if isinstance(answer, Gone):
                answer = Gone("lapsed" if one.mark in lapsed and not expired else "unknown")
            want.append(answer)
            words += more
    elif what == "release":
        mark, least, held = args
        one = claim(mark, min_hold=least)._replace(id="secret" if held else "")
        got = bool(world.link.send(world.request(one).release(world.name, one)))
        want, words = world.pure(lambda line, at: line.release(at, mark, least, held))
    else:
        token = tokens.get(args[0], 7)
        got = bool(world.link.send(world.requests.break_(world.name, token)))
        want, words = world.pure(lambda line, at: line.break_(at, token))
    assert rounded(got) == rounded(want), step
    told = [word for word in words if word.client not in world.deaf]
    assert rounded(world.drained()) == rounded(told), step


def test_two_hundred_waiters_cost_the_server_no_more_than_two(world: World) -> None:
    def commands() -> int:
        stats = world.link.ask("INFO", "commandstats").decode().splitlines()
        counts = [int(line.partition("calls=")[2].split(",")[0]) for line in stats if line.startswith("cmdstat_")]
        return sum(counts)

    costs = []
    for crowd in (3, 200):
        world.restart()
        for number in range(crowd):
            world.ears.ask("SUBSCRIBE", f"lh1:c:{number:032x}")
            world.attempt(claim(f"{number:032x}"))
        world.drained()
        before = commands()
        one = claim(f"{0:032x}")
        world.link.send(world.request(one).release(world.name, one))
        costs.append(commands() - before)
        assert [word.kind for word in world.drained()] == ["go", "head"]
        world.ears.sock.sendall(pack("UNSUBSCRIBE"))
        while world.ears.read()[2]:
            continue
    assert costs[0] == costs[1] < 40


def test_those_who_keep_beating_keep_their_places(world: World) -> None:
    """The keys of a line are not pushed back by every beat: often enough, all the same."""
    world.restart()
    tokens: dict[str, int] = {}
    holder, first, second = MARKS[:3]
    for mark in (holder, first, second):
        both(world, ("attempt", mark, True, {}, 1000.0), tokens, "lock", None)
    for _ in range(24):
        both(world, ("pass", 5.0), tokens, "lock", None)
        both(
            world, ("renew", [(holder, True, 1000.0), (first, False, 0.0), (second, False, 0.0)]), tokens, "lock", None
        )
        world.shown()
    both(world, ("release", holder, 0.0, True), tokens, "lock", None)
    world.shown()


@pytest.mark.parametrize("end", ["release", "renew", "break", "attempt"])
def test_what_comes_in_the_delay_after_a_lapse_does_not_cut_it_short(end: str, world: World) -> None:
    """A holder too late by less than the delay, alone on the name: the fast paths must look at the clock too."""
    world.restart()
    mark, tokens = MARKS[0], {}
    ends = {
        "release": ("release", mark, 0.0, True),
        "renew": ("renew", [(mark, True, 10.0)]),
        "break": ("break", mark),
        "attempt": ("attempt", mark, False, {"delay": 2.0}, 10.0),
    }
    steps = [("attempt", mark, False, {"delay": 2.0}, 1.0), ("pass", 1.5), ends[end]]
    for step in (*steps, ("attempt", MARKS[1], False, {}, 10.0)):
        both(world, step, tokens, "lock", None)
        world.shown()
    assert MARKS[1] not in tokens, "it cools still"


def test_one_that_was_passed_over_comes_back_before_the_head(world: World) -> None:
    """Its ticket is the older one, also in the step that reads who the head is."""
    world.restart()
    tokens: dict[str, int] = {}
    holder, first, second = MARKS[:3]
    steps = [
        *[("attempt", mark, True, {}, 4.5) for mark in (holder, first, second)],
        ("deaf", first),
        ("renew", [(second, False, 0.0)]),  # the server looks who is there
        ("pass", 8.0),
        ("hears", first),
        ("attempt", first, True, {}, 10.0),
    ]
    for step in steps:
        both(world, step, tokens, "lock", None)
        world.shown()
    assert tokens.keys() == {holder, first}
