"""A lease that moves to another process: `hand_over` and `take_over`. One text never gives two holders."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from types import CodeType, FrameType
from typing import Any

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, LeaseState, Unavailable, Unsupported
from leasehold.client import lease_document
from leasehold.engines.memory import MemoryEngine
from leasehold.errors import NotAcquired
from leasehold.events import Event
from leasehold.runtime.base import run_sync
from tests.support import probe
from tests.support.client_fixtures import InterruptedSet

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")
OUTLIVES = {"outlives"}


def hand_over(client: Client, **options: object) -> str:
    return client.lock("job", require=OUTLIVES, **options).acquire().hand_over()  # type: ignore[arg-type]


def test_taken_over_lease_goes_on_with_the_same_token(bench, wait_until) -> None:
    first, second = bench.client(), bench.client()
    lease = first.lock("job", ttl=30, require=OUTLIVES).acquire()
    text = lease.hand_over()
    assert (lease.state, lease.remaining, lease.release()) == (LeaseState.RELEASED, 0.0, False)
    with pytest.raises(LeaseLost):
        lease.check()
    taken = second.take_over(text)
    assert (taken.token, taken.name, taken.ttl, taken.state) == (lease.token, "job", 30, LeaseState.HELD)
    bench.clock.advance(11)  # the watchdog of the second client renews it
    wait_until(lambda: probe.renewed_at(taken) == bench.clock.at)
    assert taken.release()
    assert bench.held_names() == []


def test_take_over_that_ctrl_c_ended_can_be_repeated(bench) -> None:
    text, second = hand_over(bench.client()), bench.client()
    probe.core(second).in_flight = InterruptedSet()
    with pytest.raises(KeyboardInterrupt):
        second.take_over(text)
    probe.core(second).in_flight = set(probe.core(second).in_flight)
    assert second.take_over(text).release()


def test_with_block_that_hands_over_is_left_without_error(bench) -> None:
    client = bench.client()
    with client.lock("job", require=OUTLIVES) as lease:
        text = lease.hand_over()
    assert "job" in bench.held_names()
    with pytest.raises(NotAcquired):  # and not SelfDeadlock: this thread does not hold it any more
        client.lock("job").acquire(wait=0)
    assert bench.client().take_over(text).release()


def test_text_can_be_taken_over_once(bench) -> None:
    text = hand_over(bench.client())
    taken = bench.client().take_over(text)
    for client in (bench.client(), bench.clients[0]):
        with pytest.raises(LeaseLost, match="another process took it over") as caught:
            client.take_over(text)
        assert caught.value.reason == "taken_over"
    with pytest.raises(ConfigError, match="already taken over"):
        bench.clients[1].take_over(text)
    assert taken.held
    assert taken.release()
    with pytest.raises(LeaseLost):
        bench.client().take_over(text)


def test_lease_can_be_handed_over_again(bench) -> None:
    clients = [bench.client() for _ in range(3)]
    text, texts = hand_over(clients[0], max_hold=100, strict=True), list[str]()
    for client in clients:
        taken = client.take_over(text)
        assert taken.remaining == pytest.approx(20)  # strict
        bench.clock.at += 5
        text = taken.hand_over()
        texts.append(text)
    with pytest.raises(LeaseLost):
        clients[0].take_over(texts[0])
    taken = clients[0].take_over(text)
    assert probe.max_hold_ends_at(taken) - bench.clock.at == pytest.approx(85)


def test_taken_over_lease_is_trusted_less_the_drift_of_its_new_client(bench) -> None:
    taken = bench.client(drift=0.1).take_over(hand_over(bench.client(), ttl=30))
    assert taken.remaining == pytest.approx(27)
    assert taken.release()


def test_taken_over_lease_keeps_the_name_for_its_min_hold(bench) -> None:
    taken = bench.client().take_over(hand_over(bench.client(), min_hold=60, delay=7))
    assert (probe.claim(taken).min_hold, probe.claim(taken).delay) == (60, 7)
    assert taken.release()
    assert bench.client().lock("job").try_acquire() is None
    bench.clock.at += 60
    assert bench.client().lock("job").acquire(wait=0).release()


def test_lease_expires_if_it_is_not_taken_over_in_time(bench) -> None:
    text = hand_over(bench.client(), ttl=30)
    assert json.loads(text)["left"] == pytest.approx(29.7)
    bench.clock.at += 31
    with pytest.raises(LeaseLost):
        bench.client().take_over(text)
    assert bench.client().lock("job").try_acquire()


def test_taken_over_lease_counts_from_before_it_asked(bench) -> None:
    text = hand_over(bench.client(), ttl=30)
    original = bench.transport.call

    def slow(verb, args, deadline):
        answer = original(verb, args, deadline)
        bench.clock.at += 0.8  # not so slow that the watchdog renews at once
        return answer

    bench.transport.call = slow
    assert bench.client().take_over(text).remaining == pytest.approx(29.7 - 1.6)


def test_answer_that_comes_too_late_gives_no_lease(bench) -> None:
    text = hand_over(bench.client(), ttl=30)
    original = bench.transport.call

    def slow(verb, args, deadline):
        answer = original(verb, args, deadline)
        bench.clock.at += 20
        return answer

    bench.transport.call = slow
    with pytest.raises(LeaseLost):
        bench.client().take_over(text)


def test_unanswered_hand_over_leaves_the_lease_held(bench, wait_until) -> None:
    lease = bench.client().lock("job", require=OUTLIVES).acquire()
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        lease.hand_over()
    assert lease.state is LeaseState.HELD
    bench.transport.silent = False
    text = lease.hand_over()
    assert bench.client().take_over(text).held


@pytest.mark.parametrize("verb", ["renew", "release"])
def test_take_over_with_a_lost_answer_never_gives_two_holders(bench, verb) -> None:
    """The request is carried out, and its answer is lost: then this client has no lease."""
    text = hand_over(bench.client())
    original, lost = bench.transport.call, []

    def lossy(name, args, deadline):
        answer = original(name, args, deadline)
        if name == verb and not lost:
            lost.append(True)
            if verb == "renew":
                return [Unavailable("lost")]
            raise Unavailable("lost")
        return answer

    bench.transport.call = lossy
    with pytest.raises(Unavailable):
        bench.client().take_over(text)
    taken = bench.client().take_over(text) if verb == "renew" else None  # then nothing was used up
    with pytest.raises(LeaseLost) as caught:
        bench.client().take_over(text)
    assert caught.value.reason == "taken_over"
    assert taken is None or taken.held


def test_cancelled_take_over_never_gives_two_holders() -> None:
    """At every await of hand_over and take_over: at most one lease of a text is held, and none is left behind."""

    async def run(steps: int, url: str) -> tuple[bool, int]:
        async with AsyncClient(url) as first, AsyncClient(url) as second, AsyncClient(url) as third:
            lease = await first.lock("job", ttl=30, require=OUTLIVES).acquire()
            handing = asyncio.ensure_future(lease.hand_over())
            await spin(steps)
            handing.cancel()
            (text,) = await asyncio.gather(handing, return_exceptions=True)
            if not isinstance(text, str):
                assert lease.held
                text = await lease.hand_over()
            assert not lease.held
            takes = [asyncio.ensure_future(client.take_over(text)) for client in (second, third)]
            await spin(steps)
            finished = not takes[0].cancel()
            results = await asyncio.gather(*takes, return_exceptions=True)
            return finished, sum(not isinstance(result, BaseException) and result.held for result in results)

    async def spin(steps: int) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)

    found = [asyncio.run(run(steps, f"memory://cancelled-{steps}-{os.urandom(4).hex()}")) for steps in range(12)]
    assert all(holders <= 1 for _, holders in found)
    assert any(finished and holders == 1 for finished, holders in found)


def test_ctrl_c_at_every_line_of_hand_over_leaves_it_held_or_free(bench, wait_until) -> None:
    client, texts = bench.client(ttl=600), list[str]()
    lock = client.lock("job", require=OUTLIVES)
    previous, line, uninterrupted = sys.gettrace(), 0, 0
    while uninterrupted < 3:
        lease, line = lock.acquire(wait=0), line + 1
        sys.settrace(InterruptedLine(line, lease_document.hand_over.__code__))
        try:
            texts.append(lease.hand_over())
            uninterrupted += 1
        except KeyboardInterrupt:
            uninterrupted = 0
        finally:
            sys.settrace(previous)
        if texts:
            assert client.take_over(texts.pop()).release()
        elif lease.held:
            assert lease.release()
        probe.wake_watchdog(client)
        wait_until(lambda: bench.held_names() == [], 30)
    assert line > 20


class InterruptedLine:
    """Raises KeyboardInterrupt before the nth line that a function runs."""

    def __init__(self, number: int, code: CodeType) -> None:
        self._remaining, self._code = number, code

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        if frame.f_code is not self._code:
            return None
        if event == "line":
            self._remaining -= 1
            if self._remaining == 0:
                raise KeyboardInterrupt
        return self


def test_client_closed_during_take_over_leaves_nothing_held() -> None:
    async def run(steps: int, url: str) -> None:
        async with AsyncClient(url) as first, AsyncClient(url) as other:
            lease = await first.lock("job", ttl=30, require=OUTLIVES).acquire()
            text, second = await lease.hand_over(), AsyncClient(url)
            take = asyncio.ensure_future(second.take_over(text))
            for _ in range(steps):
                await asyncio.sleep(0)
            await second.close()
            (result,) = await asyncio.gather(take, return_exceptions=True)
            assert isinstance(result, ConfigError) or not result.held
            holdings = await other.inspect()
            if holdings:  # it was closed before the text was used up
                assert (await other.take_over(text)).held

    for steps in range(6):
        asyncio.run(run(steps, f"memory://closed-{steps}-{os.urandom(4).hex()}"))


def test_same_client_takes_a_lease_over_once_at_a_time() -> None:
    """Also what `leasehold acquire` printed, which has no ticket."""

    async def run(url: str) -> list[object]:
        async with AsyncClient(url) as client:
            lease = await client.lock("job", require=OUTLIVES).acquire()
            text = json.dumps(lease_document.dump(lease))
            lease_document.detach(lease)
            return await asyncio.gather(client.take_over(text), client.take_over(text), return_exceptions=True)

    results = asyncio.run(run(f"memory://twice-{os.urandom(4).hex()}"))
    assert sum(isinstance(result, ConfigError) for result in results) == 1


def test_hand_over_needs_a_lock_that_outlives_its_process(bench) -> None:
    lease = bench.client().lock("job").acquire()
    with pytest.raises(ConfigError, match="outlives"):
        lease.hand_over()
    assert lease.held


def test_hand_over_of_a_reentered_lease_is_refused(bench) -> None:
    lock = bench.client().lock("job", reentrant=True, require=OUTLIVES)
    with lock, lock as lease, pytest.raises(ConfigError, match="entered 2 times"):
        lease.hand_over()


def test_hand_over_of_a_lost_lease_raises(bench) -> None:
    lease = bench.client().lock("job", require=OUTLIVES).acquire()
    bench.client().break_lock("job", token=lease.token)
    with pytest.raises(LeaseLost):
        lease.hand_over()
    assert bench.held_names() == []


@pytest.mark.parametrize("kind", ["read", "semaphore"])
def test_every_kind_can_be_handed_over(bench, kind) -> None:
    client, other = bench.client(), bench.client()
    locks = {
        "read": client.rwlock("job").read(require=OUTLIVES),
        "semaphore": client.semaphore("job", 3, require=OUTLIVES),
    }
    lease = locks[kind].acquire()
    taken = other.take_over(lease.hand_over())
    assert (taken.slot, taken.shared, taken.token) == (lease.slot, lease.shared, lease.token)
    assert taken.release()


def test_name_of_255_bytes_can_be_handed_over(bench) -> None:
    lease = bench.client().lock("ä" * 127 + "x", require=OUTLIVES).acquire()
    assert bench.client().take_over(lease.hand_over()).release()


def test_secret_is_never_shown(bench, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    events: list[Event] = []
    client = bench.client(on_event=events.append)
    text = hand_over(client)
    document = json.loads(text)
    loaded = lease_document.load(text)
    taken = bench.client(on_event=events.append).take_over(text)
    shown = repr([loaded, taken, events, loaded.ticket]) + caplog.text
    assert document["id"] not in shown
    assert document["ticket"]["id"] not in shown
    assert [event.reason for event in events if event.kind in ("released", "granted")] == [
        None,
        "handed over",
        "taken over",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: "garbage", "not the JSON"),
        (lambda _: None, "not the JSON"),
        (lambda text: text[:-20], "not the JSON"),
        (lambda _: "[]", "one JSON object"),
        (lambda text: json.dumps({**json.loads(text), "format": "lh2"}), "another format"),
        (lambda text: json.dumps({**json.loads(text), "engine": "redis"}), "is on redis"),
        (lambda text: json.dumps({**json.loads(text), "engine": "\x1b[2J"}), "has no valid 'engine'"),
        (lambda text: json.dumps({**json.loads(text), "namespace": "other"}), "the namespace 'other'"),
        (lambda text: json.dumps({**json.loads(text), "ticket": {"id": "x"}}), "no valid 'ticket'"),
        (lambda text: json.dumps({**json.loads(text), "strict": 1}), "no valid 'strict'"),
        (lambda text: json.dumps({**json.loads(text), "id": ""}), "no valid 'id'"),
    ],
)
def test_damaged_text_is_refused_without_showing_it(bench, change, words) -> None:
    text = hand_over(bench.client())
    with pytest.raises(ConfigError, match=words) as caught:
        bench.client().take_over(change(text))
    assert json.loads(text)["id"] not in str(caught.value)
    assert bench.client().take_over(text).held


def test_text_with_another_name_gives_no_lease(bench) -> None:
    text = hand_over(bench.client())
    with pytest.raises(LeaseLost):
        bench.client().take_over(json.dumps({**json.loads(text), "name": "other"}))


def test_engine_whose_grants_die_with_the_client_refuses(bench, monkeypatch) -> None:
    text = hand_over(bench.client())
    monkeypatch.setattr(MemoryEngine, "traits", bench.clients[0].traits._replace(outlives=False))
    with pytest.raises(Unsupported):
        bench.client().take_over(text)
    with pytest.raises(Unsupported):
        bench.client().lock("job", require=OUTLIVES)


def test_text_works_with_the_functions_of_the_command_line(bench) -> None:
    client = bench.client()
    document = lease_document.load(hand_over(client, ttl=30))
    bench.clock.at += 20
    assert run_sync(lease_document.renew(probe.core(client), document, 60)) > 59
    bench.clock.at += 40
    assert run_sync(lease_document.release(probe.core(client), document))
    assert bench.held_names() == []


def test_lease_of_the_command_line_is_taken_over(bench) -> None:
    client = bench.client()
    lease = client.lock("job", require=OUTLIVES).acquire()
    text = json.dumps(lease_document.dump(lease))
    lease_document.detach(lease)
    assert bench.client().take_over(text).token == lease.token


HOLDER = """
import sys, leasehold
client = leasehold.Client(sys.argv[1])
lease = client.lock("job", ttl=30, require={"outlives"}).acquire()
print(lease.token, flush=True)
print(lease.hand_over(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_lease_outlives_the_killed_process_that_handed_it_over(tmp_path) -> None:
    url = f"sqlite:///{tmp_path}/locks.db"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        token, text = int(holder.stdout.readline()), holder.stdout.readline()
        holder.kill()
    with Client(url) as client, Client(url) as other:
        assert client.lock("job").try_acquire() is None
        lease = client.take_over(text)
        assert (lease.token, lease.held) == (token, True)
        with pytest.raises(LeaseLost):
            other.take_over(text)
        assert lease.release()
