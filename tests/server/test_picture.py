"""The picture: shared by its readers, honest about its age, and never part of a decision."""

import asyncio
import contextlib
import heapq

import pytest

from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.errors import Unavailable
from leasehold.model import Claim, Grant, Holder, Holding
from leasehold.runtime.loop import Loop
from leasehold.server import picture as pictures_module
from leasehold.server.app import App
from leasehold.server.auth import Authenticator
from leasehold.server.limits import Limits
from leasehold.server.messages import Request
from leasehold.server.picture import MAX_NAMESPACES, Pictures, Snapshot
from leasehold.server.service import Service
from leasehold.server.settings import LimitSettings
from tests.support import probe_server
from tests.support.running_server import Answer, in_loop


class VirtualTime:
    """A runtime whose clock only `advance` moves."""

    def __init__(self):
        self._now = 1000.0
        self._sleepers = []

    def now(self):
        return self._now

    def wall(self):
        return 1_700_000_000 + self._now

    async def sleep(self, seconds):
        if seconds > 0:
            woken = asyncio.get_running_loop().create_future()
            heapq.heappush(self._sleepers, (self._now + seconds, id(woken), woken))
            await woken

    async def advance(self, seconds):
        end = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self._now = end
        await settle()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


class Inspected:
    """A service that counts its inspects, and answers as a test wants it to."""

    call_timeout = 5.0

    def __init__(self):
        self.runtime = VirtualTime()
        self.asked_at = []
        self.holdings = []
        self.failure = None
        self.gate = None

    async def inspect(self, namespace, prefix, exact, deadline):
        self.asked_at.append(self.runtime.now())
        found = list(self.holdings)
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return found


def held(name, token=1, owner="", **fields):
    return Holding(
        "", name, "held", "exclusive", "lock", 1, f"{token:016}", Holder("web"), 1.0, 20.0, token, owner=owner
    )


@in_loop
async def test_picture_of_fifty_readers_costs_two_inspects_a_second():
    """Readers that accept a picture as it is, and others that want what was done through this server."""
    service = Inspected()
    pictures, seconds = Pictures(service), 10
    reads = []
    for step in range(seconds * 20):
        pictures.touch("")  # clients are busy all the time
        reads += [asyncio.ensure_future(pictures.get("", outdated=bool(n % 2))) for n in range(50)]
        await service.runtime.advance(0.05)
        del step
    await service.runtime.advance(1.0)
    assert all(read.done() for read in reads)
    assert len(service.asked_at) <= 2 * (seconds + 1) + 1
    assert min(after - before for before, after in zip(service.asked_at, service.asked_at[1:], strict=False)) >= 0.5
    assert sum(pictures.results.values()) == len(reads)
    assert pictures.results["miss"] == len(service.asked_at), "a reader that waits for another's inspect costs nothing"
    assert max(read.result().age for read in reads) <= pictures_module.MAX_AGE


@in_loop
async def test_picture_without_changes_is_shared_for_its_age():
    service = Inspected()
    pictures = Pictures(service)
    first = await pictures.get("")
    await service.runtime.advance(0.9)
    second = await pictures.get("")
    assert second.snapshot is first.snapshot
    assert (first.age, second.age, second.stale) == (0.0, pytest.approx(0.9), False)
    await service.runtime.advance(0.2)
    assert (await pictures.get("")).snapshot is not first.snapshot
    assert pictures.results == {"miss": 2, "hit": 1}


@in_loop
async def test_picture_after_a_change_shows_the_change():
    """Also if an inspect was under way that began before the change."""
    service = Inspected()
    pictures = Pictures(service)
    await pictures.get("")
    service.gate = asyncio.Event()
    await service.runtime.advance(2.0)
    early = asyncio.ensure_future(pictures.get(""))
    await settle()
    service.holdings = [held("orders/42")]
    pictures.touch("")
    late = asyncio.ensure_future(pictures.get(""))
    await settle()
    service.gate.set()
    await service.runtime.advance(1.0)
    assert not (await early).locks
    assert [lock.name for lock in (await late).locks] == ["orders/42"]


@in_loop
async def test_picture_that_may_be_outdated_comes_at_once():
    service = Inspected()
    pictures = Pictures(service)
    await pictures.get("")
    pictures.touch("")
    assert (await pictures.get("", outdated=True)).age == 0.0
    assert len(service.asked_at) == 1


@in_loop
async def test_fresh_picture_begins_after_the_call():
    service = Inspected()
    pictures = Pictures(service)
    await pictures.get("")
    await service.runtime.advance(0.1)
    reading = asyncio.ensure_future(pictures.get("", fresh=True))
    await service.runtime.advance(0.5)
    assert (await reading).as_of > 1_700_000_000 + 1000.1
    assert len(service.asked_at) == 2


@in_loop
async def test_picture_is_stale_for_ten_seconds_then_missing():
    service = Inspected()
    pictures = Pictures(service)
    await pictures.get("")
    service.failure = Unavailable("no answer")
    shown_at = 0.0
    for age in (2.0, 9.0, 10.0):
        await service.runtime.advance(age - shown_at)
        shown, shown_at = await pictures.get(""), age
        assert (shown.stale, shown.age) == (True, pytest.approx(age))
    await service.runtime.advance(0.6)
    with pytest.raises(Unavailable):
        await pictures.get("")
    service.failure = None
    await service.runtime.advance(0.6)
    assert not (await pictures.get("")).stale
    assert pictures.results == {"miss": 3, "stale": 3}


@in_loop
async def test_picture_without_any_answer_raises_the_error():
    service = Inspected()
    service.failure = Unavailable("no answer")
    with pytest.raises(Unavailable, match="no answer"):
        await Pictures(service).get("")


@in_loop
async def test_reader_that_leaves_ends_no_inspect_of_others():
    service = Inspected()
    pictures = Pictures(service)
    service.gate = asyncio.Event()
    leaving, staying = (asyncio.ensure_future(pictures.get("")) for _ in range(2))
    await settle()
    leaving.cancel()
    await settle()
    service.gate.set()
    await staying
    assert len(service.asked_at) == 1


@in_loop
async def test_reader_of_a_silent_engine_is_shown_the_old_picture(monkeypatch):
    monkeypatch.setattr(pictures_module, "MIN_INTERVAL", 0.01)
    service = Inspected()
    pictures = Pictures(service, max_age=0.05)
    await pictures.get("")
    service.gate = asyncio.Event()  # never answers
    await service.runtime.advance(3.0)
    assert (await pictures.get("")).stale
    service.gate.set()


@in_loop
async def test_pictures_of_many_namespaces_are_bounded():
    service = Inspected()
    pictures = Pictures(service)
    for number in range(10_000):
        if number < 200:
            await pictures.get(f"looked-at-{number}")
        pictures.touch(f"used-{number}")
    assert len(pictures.ages()) == MAX_NAMESPACES
    assert len(pictures.namespaces()) == pictures_module.MAX_KNOWN
    assert not any(name.startswith("looked-at") for name in pictures.namespaces()), "a guess is no namespace in use"
    assert len(pictures.latest_namespaces()) == pictures_module.MAX_READ


@in_loop
async def test_picture_that_no_reader_looks_at_is_not_kept():
    service = Inspected()
    pictures = Pictures(service)
    await pictures.get("large")
    await service.runtime.advance(pictures_module.SHOWN_STALE + 1)
    await pictures.get("other")
    assert probe_server.kept_snapshot(pictures, "large") is None
    assert pictures.ages() == {"large": pytest.approx(11.0), "other": 0.0}
    assert (await pictures.get("large")).age == 0.0


def test_snapshot_has_one_view_for_each_name_in_order():
    def waiter(name, position):
        return Holding(
            "",
            name,
            "waiting",
            "exclusive",
            "lock",
            1,
            f"w{position}",
            Holder("w"),
            3.0 + position,
            9.0,
            position=position,
        )

    snapshot = Snapshot("", 5.0, [held("b"), waiter("b", 0), waiter("b", 1), held("a", 7), waiter("c", 0)])
    assert [(lock.name, lock.state, len(lock.holders), len(lock.queue)) for lock in snapshot.locks] == [
        ("a", "held", 1, 0),
        ("b", "held", 1, 2),
        ("c", "waiting", 0, 1),
    ]
    assert snapshot.by_name["b"].oldest_wait == 4.0
    assert [waiter.position for waiter in snapshot.by_name["b"].queue] == [0, 1]
    assert snapshot.states == {"held": 2, "waiting": 3}


# -- a whole application, without sockets


@contextlib.asynccontextmanager
async def application(runtime=None):
    service = Service(EngineConfig.parse("memory://", 60.0), runtime or Loop())
    await service.start()
    try:
        yield App(service, Authenticator(None), Limits(LimitSettings()))
    finally:
        await service.stop()


async def ask(app, method, path, body=None, headers=(), query=b""):
    async def read_body():
        import json

        return json.dumps(body).encode()

    answer = await app.answer(Request(method, path, headers, query, read_body))
    return Answer(answer.status, {}, answer.body)


def broken_pictures(*_, **__):
    raise AssertionError("a decision was made from a picture")


@in_loop
async def test_no_verb_reads_the_picture():
    async with application() as app:
        app.pictures.get = broken_pictures
        body = {"name": "orders/42", "id": "an-id-of-sixteen-or-more"}
        lease = (await ask(app, "POST", "/v1/acquire", body)).json
        renewal = {**body, "token": lease["token"]}
        assert (await ask(app, "POST", "/v1/renew", renewal)).status == 200
        assert (await ask(app, "POST", "/v1/renew-many", {"leases": [renewal]})).json["leases"][0]["ttl"]
        found = await ask(app, "GET", "/v1/locks", query=b"name=orders/42")
        assert found.json["holdings"][0]["token"] == lease["token"]
        breaking = {"name": "orders/42", "token": lease["token"]}
        assert (await ask(app, "POST", "/v1/break", breaking)).json == {"broken": True}
        assert (await ask(app, "POST", "/v1/release", body)).json == {"released": False}
        for verb in ("attempt", "release", "decline"):
            (answer,) = (await ask(app, "POST", "/v1/calls", [{"do": verb, "claim": {**body, "ttl": 60}}])).json
            assert "problem" not in answer
        with pytest.raises(AssertionError):
            await app.pictures.get("")


@in_loop
async def test_break_of_a_seen_token_ends_no_later_grant():
    """A person decides by a picture. What is broken is decided at the engine, with the token that the person saw."""
    async with application() as app:
        body = {"name": "orders/42", "id": "an-id-of-sixteen-or-more"}
        seen = (await ask(app, "POST", "/v1/acquire", body)).json["token"]
        assert (await app.pictures.get("")).locks[0].holders[0].token == seen
        await ask(app, "POST", "/v1/release", body)
        current = (await ask(app, "POST", "/v1/acquire", {**body, "id": "another-id-of-sixteen"})).json["token"]
        assert (await app.pictures.get("")).locks[0].holders[0].token == current
        breaking = {"name": "orders/42", "token": seen}
        refused = await ask(app, "POST", "/v1/break", breaking, [(b"if-match", b'"%d"' % seen)])
        assert (refused.status, refused.kind) == (412, "moved-on")
        assert refused.json["token"] == seen
        assert (await ask(app, "POST", "/v1/break", breaking)).json == {"broken": False}
        assert (await ask(app, "GET", "/v1/locks", query=b"fresh=1")).json["holdings"][0]["token"] == current
        assert not app.history.incidents(), "what was not broken is no incident"
        breaking = {"name": "orders/42", "token": current}
        wrong = await ask(app, "POST", "/v1/break", breaking, [(b"if-match", b'"%d"' % seen)])
        assert (wrong.status, wrong.kind) == (400, "invalid")
        done = await ask(app, "POST", "/v1/break", breaking, [(b"if-match", b'"%d"' % current)])
        assert (done.status, done.json) == (200, {"broken": True})


@in_loop
async def test_caller_that_lists_locks_sees_its_own_grant_and_release():
    async with application() as app:
        body = {"name": "orders/42", "id": "an-id-of-sixteen-or-more"}
        for _ in range(2):
            await ask(app, "POST", "/v1/acquire", body)
            assert len((await ask(app, "GET", "/v1/locks")).json["holdings"]) == 1
            await ask(app, "POST", "/v1/release", body)
            assert not (await ask(app, "GET", "/v1/locks")).json["holdings"]


@in_loop
async def test_refusal_that_a_fence_reports_is_shown_and_changes_nothing():
    async with application() as app:
        body = {"name": "orders/42", "id": "an-id-of-sixteen-or-more"}
        token = (await ask(app, "POST", "/v1/acquire", body)).json["token"]
        report = {"name": "orders/42", "token": token, "seen": token + 1, "fence": "sql", "reason": "table settlements"}
        assert (await ask(app, "POST", "/v1/refusals", report)).json == {"noted": True}
        (grant,) = (await ask(app, "GET", "/v1/history", query=b"name=orders/42")).json["grants"]
        assert [each[1:] for each in grant["refused"]] == [["sql", token + 1]]
        assert grant["end"] is None
        (incident,) = (await ask(app, "GET", "/v1/incidents")).json["incidents"]
        assert (incident["kind"], incident["holder"], incident["reason"]) == (
            "stale_token",
            "anyone",
            "table settlements",
        )
        assert b'leasehold_stale_tokens_total{engine="memory",fence="sql"' in (await ask(app, "GET", "/metrics")).body
        bad = await ask(app, "POST", "/v1/refusals", {**report, "fence": "wooden"})
        assert (bad.status, bad.kind) == (422, "invalid")


@in_loop
async def test_failure_of_the_history_harms_no_verb(caplog):
    async with application() as app:
        app.history = broken_pictures
        lease = await ask(app, "POST", "/v1/acquire", {"name": "orders/42"})
        assert lease.status == 200
        assert "is missing in the history" in caplog.text


@in_loop
async def test_large_picture_is_inspected_once_for_many_pages():
    """1,000 held locks with 10,000 waiters. The clock stands still: waiters expire otherwise on a slow machine."""
    async with application(Loop(lambda: 1000.0)) as app:
        engine, deadline = app.service.engine, app.service.runtime.now() + 60
        for number in range(11_000):
            claim_id = f"id-{number:020}"
            name, first = f"stock/{number % 1000}", number < 1000
            claim = Claim("", name, claim_id, hash_id(claim_id), Holder(f"web-{number}"), 600.0, queue=not first)
            assert isinstance(await engine.attempt(claim, deadline), Grant) is first
        asked = []
        inspect = engine.inspect

        async def counted(*args):
            asked.append(args)
            return await inspect(*args)

        engine.inspect = counted
        for _ in range(10):
            picture = await app.pictures.get("", outdated=True)
            assert len(picture.locks) == 1000
            assert not picture.snapshot.deadlocks
        assert len(app.history.owners(picture)) == 11_000
        assert len(asked) == 1
