"""The Redlock engine where one thing overtakes another: offers and releases, interrupts and answers, turns."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress

import pytest

from leasehold import Client, LeaseLost
from leasehold.core.timing import BEAT_EVERY
from leasehold.model import Busy
from leasehold.runtime.base import step
from leasehold.testing.redlock_rig import RedlockRig
from leasehold.testing.servers.redlock import Nodes, kept
from leasehold.testing.suite import made


@pytest.fixture
def nodes():
    made(RedlockRig)  # a skip where there is no Redis
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.fixture
def way(nodes):
    url, proxies = nodes.proxied()
    yield url, proxies
    for proxy in proxies:
        proxy.close()


def before(engine, script, do, monkeypatch) -> None:
    """Have something else happen just before an engine asks a script, once."""
    ask, done = engine._asking.round, []

    async def round_(asked, *given, **more):
        if asked is script and not done:
            done.append(True)
            do()
        return await ask(asked, *given, **more)

    monkeypatch.setattr(engine._asking, "round", round_)


# ------------------------------------------------------------------ interrupts


def test_an_answer_that_comes_after_an_interrupt_is_nobody_elses(nodes, bare, monkeypatch) -> None:
    """Ctrl-C while the nodes that did not answer are given up: what they still say is about another claim, and name."""
    seat, other = bare(nodes.url), bare(nodes.url)
    seat.engine._numbers._lead = 1_000_000  # whenever they carry it out, they agree to the token proposed
    assert seat.release(seat.takes(seat.claim("first")))  # connected
    other.takes(other.claim("second"))
    nodes.pause(0, 1, 2)

    def torn(*_given: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(seat.engine._requests, "give_back", torn)
        with pytest.raises(KeyboardInterrupt):
            step(seat.engine.attempt(seat.claim("first"), seat.by(0.3)))
    nodes.resume()
    for node in seat.engine._nodes:
        node.answered()  # none of them rests
    assert isinstance(seat.attempt(seat.claim("second")), Busy)


# ---------------------------------------------------------- offers and releases


def test_a_grant_offered_again_during_its_release_does_not_stay(nodes, until, monkeypatch) -> None:
    """The release of another thread overtakes the offer to a node that forgot."""
    with Client(nodes.url) as client:
        lease = client.lock("job", ttl=60).acquire()
        engine, released = client._desk._engine, []
        nodes.all[0].ask("FLUSHALL")
        before(engine, engine._scripts.retake, lambda: released.append(lease.release()), monkeypatch)
        with suppress(LeaseLost):
            lease.renew()
        assert released == [True]
        until(lambda: nodes.left() == [], 8)


def hold_back(proxy, script) -> list:
    """Keep what a connection sends from a request of the script on, until what is put into the list is called."""
    held, passing = [], proxy._pass

    def pass_(link, side) -> None:
        if side is link.near and not held and script.sha in side.recv(65_536, socket.MSG_PEEK):
            proxy._selector.unregister(side)
            held.append(lambda: proxy._selector.register(side, selectors.EVENT_READ, link))
        else:
            passing(link, side)

    proxy._pass = pass_
    return held


def in_line_at_all_and_free_at_most(nodes, seat, other):
    """Nodes that heard of the last release later than others still have the winner in line."""
    before = other.takes(other.claim(ttl=2.0))
    claim = seat.claim(queue=True, ttl=60.0)
    assert isinstance(seat.attempt(claim), Busy)
    packs = other.engine._requests
    asked = {n: [packs.release(packs.name("", "job"), before)] for n in range(1, len(nodes.all))}
    heard = step(other.engine._asking.round(packs.scripts.release, asked, other.by(), 2.0, lambda _: False))
    assert list(heard.replies.values()) == [[1]] * 4
    return claim


def test_an_offer_that_comes_late_after_the_release_does_not_stay(nodes, way, bare, until) -> None:
    """The winner offers its part to a node that was late. The offer is on its way until all is over."""
    url, proxies = way
    seat, other = bare(url), bare(nodes.url)
    claim = in_line_at_all_and_free_at_most(nodes, seat, other)
    nodes.all[0].ask("SCRIPT", "LOAD", seat.engine._scripts.retake.text)
    held = hold_back(proxies[0], seat.engine._scripts.retake)
    claim = seat.takes(claim)
    assert held
    assert seat.release(claim)
    until(lambda: nodes.left() == [], 10)  # also what the first holder had there, by its ttl
    before = nodes.all[0].calls()["evalsha"]
    held[0]()
    until(lambda: nodes.all[0].calls()["evalsha"] > before)
    until(lambda: nodes.left() == [], 3)


# ------------------------------------------------------------ answers that are lost


def test_one_that_tries_once_leaves_nothing_where_its_answer_was_lost(nodes, way, bare, until) -> None:
    """The node took it, and the connection broke: nobody knows, and the claim is answered by the others."""
    url, proxies = way
    seat, other = bare(url), bare(nodes.url)
    nodes.pause(0)
    other.takes(other.claim(ttl=60.0))  # of the other four
    nodes.resume()
    until(lambda: not kept(nodes.all[0]))
    step(seat.engine.ping(seat.by()))

    def cut(outward: bool, data: bytes) -> None:
        if not outward and data.startswith(b"*2"):
            proxies[0].reset()
            proxies[0]._target = ("127.0.0.1", 1)  # nobody there

    proxies[0].watch = cut
    assert isinstance(seat.attempt(seat.claim(ttl=60.0)), Busy)
    assert kept(nodes.all[0])
    proxies[0].watch, proxies[0]._target = None, ("127.0.0.1", nodes.all[0].port)
    until(lambda: not kept(nodes.all[0]), BEAT_EVERY + 5)


def test_a_node_that_was_down_for_long_is_told_in_few_words(nodes, until) -> None:
    """What it missed is sent on every new connection until it answers: with the script in each, that took 120 MB."""
    with Client(nodes.url) as client:
        client.ping()
        nodes.all[0].kill()
        for _ in range(200):
            client.lock("job").acquire().release()
        node = client._desk._engine._nodes[0]
        said, _, _ = node.greeting()
        assert len(node.missed) >= 200
        assert len(said) < 20_000 + 400 * len(node.missed)
        nodes.all[0].start()
        until(lambda: not node.missed, 10)


# -------------------------------------------------------------------------- turns


def test_a_turn_is_not_put_off_by_when_to_look_later(nodes, bare) -> None:
    """A majority gave it its turn. What the others say, and what was said before, is no reason to sleep on."""
    seat, other = bare(nodes.url), bare(nodes.url)
    other.takes(other.claim())
    claim = seat.claim(queue=True)
    assert isinstance(seat.attempt(claim), Busy)
    ears, waiter = seat.engine._listener, seat.book.waiting[claim.mark]
    now = seat.runtime.now()
    for number in range(3):
        ears._look(seat.book, claim.mark, number, now + 20, now)
    for number in range(3):
        ears.turn(claim.mark, number)
    ears._look(seat.book, claim.mark, 3, now + 20, now)
    assert waiter.look_at is not None
    assert waiter.look_at - now < 1
