"""What a server refuses under load: by class of call, per key, and with what answer."""

import asyncio
import contextlib
import http.client
import json
import secrets
import threading
from datetime import UTC, datetime

import pytest

from leasehold.config import EngineConfig
from leasehold.core.breaker import MAX_UNANSWERED
from leasehold.errors import ListingTooLong
from leasehold.server import keys
from leasehold.server.app import App
from leasehold.server.auth import ANYONE, Authenticator
from leasehold.server.keys import Right
from leasehold.server.limits import MAX_BEGUN, MAX_LISTS, MAX_UNDER_WAY, Limits
from leasehold.server.messages import Request
from leasehold.server.service import Service
from leasehold.server.settings import LimitSettings
from tests.support.running_server import SECONDS, poll, running


class Server:
    """The application without sockets, over an engine in memory."""

    def __init__(self, url="memory://", **limits):
        self.limits = Limits(LimitSettings(**limits))
        self.service = Service(EngineConfig.parse(url, 5.0))
        self.app = App(self.service, Authenticator(None), self.limits)

    async def __aenter__(self):
        await self.service.start()
        return self

    async def __aexit__(self, *_):
        await self.service.stop()

    async def post(self, path, body):
        async def read_body():
            return json.dumps(body).encode()

        answer = await self.app.answer(Request("POST", path, [(b"leasehold-client", b"c1")], read_body=read_body))
        return answer.status, json.loads(answer.body), dict(answer.headers)

    def add_keys(self, path, right="lock,read::"):
        """The keys of two callers."""
        made = [keys.create(path, who, [Right.parse(right)], now=datetime.now(UTC)) for who in ("a", "b")]
        self.app.authenticator = Authenticator(path)
        return made

    def caller(self, key):
        return self.app.authenticator.find(b"Bearer " + key.encode(), ())

    async def post_with_key(self, key, path, body, *more_headers):
        async def read_body():
            return json.dumps(body).encode()

        headers = [(b"authorization", b"Bearer " + key.encode()), (b"leasehold-client", b"c1"), *more_headers]
        return await self.app.answer(Request("POST", path, headers, read_body=read_body))

    async def get_with_key(self, key, path):
        return await self.app.answer(Request("GET", path, [(b"authorization", b"Bearer " + key.encode())]))

    async def get(self, path, query=b""):
        answer = await self.app.answer(Request("GET", path, query=query))
        if hasattr(answer, "close"):
            answer.close()
            return 200, {}, {}
        return answer.status, json.loads(answer.body), dict(answer.headers)

    async def call(self, verb, **members):
        status, answers, _ = await self.post("/v1/calls", [{"do": verb, **members}])
        assert status == 200
        return answers[0]

    def fill(self, count):
        """As many renewals under way, which are never refused."""
        for _ in range(count):
            self.limits.call(ANYONE, "renew")


def claim(name="x", **more):
    return {"name": name, "id": secrets.token_hex(16), "ttl": 30, **more}


def is_refused(status, body):
    if status != 503:
        return False
    assert body["type"].endswith("/overloaded")
    assert body["done"] is False
    return True


@pytest.mark.parametrize(
    ("under_way", "refused"),
    [
        (7, set()),
        (8, {"attempt"}),
        (9, {"attempt", "read"}),
        (10, {"attempt", "read", "release"}),
        (500, {"attempt", "read", "release"}),
    ],
)
def test_every_route_and_verb_is_refused_in_the_order_of_its_class(under_way, refused):
    async def main():
        async with Server(calls=10) as server:
            lease = claim()
            _, granted, _ = await server.post("/v1/acquire", lease)
            server.fill(under_way)
            ids = {"name": "x", "id": lease["id"]}
            renewal = {**ids, "token": granted["token"]}
            assert {
                "/v1/acquire": is_refused(*(await server.post("/v1/acquire", claim("y")))[:2]),
                "/v1/locks": is_refused(*(await server.get("/v1/locks"))[:2]),
                "/v1/events": is_refused(*(await server.get("/v1/events"))[:2]),
                "/v1/release": is_refused(*(await server.post("/v1/release", {**ids, "id": "0" * 16}))[:2]),
                "/v1/break": is_refused(*(await server.post("/v1/break", {"name": "x", "token": 1}))[:2]),
                "/v1/renew": is_refused(*(await server.post("/v1/renew", renewal))[:2]),
                "/v1/renew-many": is_refused(*(await server.post("/v1/renew-many", {"leases": [renewal]}))[:2]),
            } == {
                "/v1/acquire": "attempt" in refused,
                "/v1/locks": "read" in refused,
                "/v1/events": "read" in refused,
                "/v1/release": "release" in refused,
                "/v1/break": "release" in refused,
                "/v1/renew": False,
                "/v1/renew-many": False,
            }
            verbs = {
                "attempt": ("attempt", {"claim": claim("z")}),
                "inspect": ("read", {"prefix": ""}),
                "ping": ("read", {}),
                "release": ("release", {"claim": claim()}),
                "break": ("release", {"name": "x", "token": 1}),
                "renew": ("renew", {"claims": [{**lease, "token": granted["token"]}]}),
            }
            for verb, (kind, members) in verbs.items():
                answer = await server.call(verb, **members)
                problem = answer.get("problem", {})
                assert is_refused(problem.get("status"), problem) is (kind in refused), verb
            assert server.limits.calls == under_way, "every call is counted until it ends, and no longer"

    asyncio.run(main())


def test_refusal_says_when_to_retry():
    async def main():
        async with Server(calls=1) as server:
            server.fill(1)
            status, _, headers = await server.post("/v1/acquire", claim())
            assert (status, headers[b"retry-after"]) == (503, b"1")
            problem = (await server.call("attempt", claim=claim()))["problem"]
            assert problem["retry_after"] == 1

    asyncio.run(main())


def test_refused_attempt_does_not_use_up_a_waiter():
    async def main():
        async with Server(calls=1, waiters=2) as server:
            await server.post("/v1/acquire", claim())
            server.fill(1)
            for _ in range(5):
                assert "problem" in await server.call("attempt", claim=claim(queue=True))
                assert (await server.post("/v1/acquire", claim(wait=1)))[0] == 503
            assert server.limits.waiters == 0

    asyncio.run(main())


def test_attempt_of_a_waiter_is_admitted_under_load():
    """It may have a reservation, which would otherwise be lost."""

    async def main():
        async with Server(calls=1) as server:
            holder = claim()
            await server.post("/v1/acquire", holder)
            waiter = claim(queue=True)
            assert "busy" in await server.call("attempt", claim=waiter)
            await server.post("/v1/release", {"name": "x", "id": holder["id"]})
            server.fill(1)
            assert "grant" in await server.call("attempt", claim=waiter)
            assert server.limits.waiters == 0

    asyncio.run(main())


def test_lists_that_are_too_long_do_not_open_the_breaker():
    """A key with thirty thousand locks could list them five times, and then no caller was granted a lock."""

    async def main():
        async with Server() as server:

            async def inspect(*_):
                raise ListingTooLong("more than 30,000 claims are live")

            server.service.engine.inspect = inspect
            for _ in range(2 * MAX_UNANSWERED):
                assert (await server.get("/v1/locks", b"fresh=1"))[0] == 503
            assert (await server.post("/v1/acquire", claim()))[0] == 200

    asyncio.run(main())


@pytest.mark.parametrize("by", ["acquire", "calls"])
def test_leases_of_one_key_are_limited(tmp_path, by):
    """A key could fill the memory of the server with leases of a day."""

    async def main():
        async with Server(leases_per_key=2) as server:
            keys = dict(zip("ab", server.add_keys(tmp_path / "keys.toml"), strict=True))

            async def acquire(who, wanted):
                if by == "acquire":
                    answer = await server.post_with_key(keys[who], "/v1/acquire", wanted)
                    return answer.status
                body = [{"do": "attempt", "claim": wanted}]
                (found,) = json.loads((await server.post_with_key(keys[who], "/v1/calls", body)).body)
                return found["problem"]["status"] if "problem" in found else 200

            first, second, third = (claim(name) for name in ("x", "y", "z"))
            assert [await acquire("a", each) for each in (first, second, third)] == [200, 200, 429]
            assert await acquire("a", second) == 200, "the same claim again"
            assert await acquire("b", third) == 200
            assert server.limits.refused == {"leases_per_key": 1}
            released = {"name": "x", "id": first["id"]}
            assert (await server.post_with_key(keys["a"], "/v1/release", released)).status == 200
            assert await acquire("a", first) == 200
            for who, lease in (("a", first), ("a", second), ("b", third)):
                released = {"name": lease["name"], "id": lease["id"]}
                assert (await server.post_with_key(keys[who], "/v1/release", released)).status == 200
            assert server.service.grants.leases == {}

    asyncio.run(main())


@pytest.mark.parametrize("by", ["limit", "calls"])
def test_names_whose_limit_one_key_sets_are_limited(tmp_path, by):
    """The engine keeps each of them until its limit is removed."""

    async def main():
        async with Server(leases_per_key=2) as server:
            keys = dict(zip("ab", server.add_keys(tmp_path / "keys.toml", "lock,break::"), strict=True))

            async def resize(who, name, limit):
                body = {"name": name, "limit": limit}
                if by == "limit":
                    return (await server.post_with_key(keys[who], "/v1/limit", body)).status
                answer = await server.post_with_key(keys[who], "/v1/calls", [{"do": "set_limit", **body}])
                (found,) = json.loads(answer.body)
                return found["problem"]["status"] if "problem" in found else 200

            assert [await resize("a", name, 3) for name in "xyz"] == [200, 200, 429]
            assert [await resize("a", "x", 5), await resize("b", "z", 3), await resize("a", "z", None)] == [200] * 3
            assert server.limits.refused == {"resized_per_key": 1}
            assert [await resize("a", "x", None), await resize("a", "w", 3)] == [200, 200]
            assert server.service.grants.leases == {}

    asyncio.run(main())


# -- waiters, over HTTP


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """A server for three waiters, two per key, and the keys of two callers."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    made = [keys.create(path, who, [Right.parse("lock,read::")], now=datetime.now(UTC)) for who in ("web", "cron")]
    flags = ["--limits-waiters", "3", "--limits-waiters-per-key", "2", "--limits-wait", "30"]
    with running("--keys", str(path), *flags) as server:
        yield server, *made


def wait_in_background(server, key, name):
    """A long-poll of a thread; returns what ends it."""
    body = {"name": name, "id": secrets.token_hex(16), "wait": 30}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/acquire", body, key=key)))
    thread.start()

    def end():
        server.post("/v1/release", {"name": name, "id": body["id"]}, key=key)
        thread.join()
        return answers[0]

    return end


def queue_of(server, key, name):
    return len(server.get(f"/v1/locks?name={name}", key=key).json["holdings"][0]["queue"])


@pytest.mark.parametrize("by", ["long-poll", "calls"])
def test_waiters_beyond_the_limits_are_told_which(limited, by):
    server, web, cron = limited
    name = f"limits-{by}"
    assert server.post("/v1/acquire", {"name": name, "id": "0" * 32, "ttl": 300}, key=web).status == 200

    def queue_up(key):
        if by == "long-poll":
            return server.post("/v1/acquire", {"name": name, "wait": 30}, key=key)
        body = [{"do": "attempt", "claim": claim(name, queue=True)}]
        answer = server.post("/v1/calls", body, key=key)
        return answer.json[0]["problem"]

    ends = [wait_in_background(server, web, name) for _ in range(2)]
    try:
        poll(lambda: queue_of(server, web, name) == 2)
        refused = queue_up(web)
        assert_problem(refused, 429, "too-many")
        ends.append(wait_in_background(server, cron, name))
        poll(lambda: queue_of(server, web, name) == 3)
        refused = queue_up(cron)
        assert_problem(refused, 503, "overloaded")
        assert queue_of(server, web, name) == 3, "a refused waiter leaves nothing in the queue"
    finally:
        for end in ends:
            end()
    poll(lambda: b'kind="parked"} 0.0\n' in server.get("/metrics", key=web).body)


def test_connections_beyond_the_limit_of_a_key_are_not_kept(tmp_path):
    """What may last is refused on them. Anything else, above all a renewal, is answered before they are closed."""
    path = tmp_path / "keys.toml"
    web, cron = [keys.create(path, who, [Right.parse("lock,read::")], now=datetime.now(UTC)) for who in ("web", "cron")]
    body = {"name": "job", "id": "0" * 32, "ttl": 300}
    with running("--keys", str(path), "--limits-connections-per-key", "2") as server, contextlib.ExitStack() as stack:

        def connect():
            made = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
            return stack.enter_context(contextlib.closing(made))

        def ask(connection, path, body=None, key=web):
            """Status, and whether the connection stays open."""
            headers = {"Authorization": f"Bearer {key}", "Leasehold-Client": "c1"}
            connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200 or "event-stream" not in response.headers["content-type"]:
                response.read()
            return response.status, response.headers["connection"] != "close"

        first, second = connect(), connect()
        assert [ask(each, "/v1/acquire", body) for each in (first, second, first)] == [(200, True)] * 3
        token = server.get("/v1/locks?name=job", key=cron).json["holdings"][0]["token"]
        assert ask(connect(), "/v1/acquire", body) == (429, False)
        assert ask(connect(), "/v1/stream") == (429, False)
        assert ask(connect(), "/v1/renew", {**body, "token": token}) == (200, False)
        assert ask(connect(), "/v1/acquire", {**body, "name": "other"}, key=cron) == (200, True)
        assert ask(second, "/v1/traits", key=cron) == (200, True), "now it is a connection of that key"
        assert ask(connect(), "/v1/stream") == (200, True)
        first.close()
        poll(lambda: ask(connect(), "/v1/acquire", body)[0] == 200)
        assert b'shed_total{reason="connections_per_key"} ' in server.get("/metrics", key=cron).body


def assert_problem(refused, status, kind):
    document = refused if isinstance(refused, dict) else refused.json
    assert document["status"] == status
    assert document["type"].endswith(f"/{kind}")
    assert document["done"] is False
    if isinstance(refused, dict):
        assert refused["retry_after"] >= 1
    else:
        assert int(refused.headers["retry-after"]) >= 1


def test_wait_is_shortened_to_the_limit():
    with running("--limits-wait", "0.2") as server:
        assert server.post("/v1/acquire", {"name": "x"}).status == 200
        answer = server.post("/v1/acquire", {"name": "x", "wait": 50})
        assert answer.status == 409
        assert answer.json["waited"] < 40


@pytest.mark.parametrize(
    ("path", "batch"),
    [
        ("/v1/calls", [{"do": "release", "claim": claim(f"a/{number}")} for number in range(512)]),
        ("/v1/calls", [{"do": "ping"}] * 512),
        ("/v1/calls", [{"do": "renew", "claims": [claim(f"a/{number}", token=1) for number in range(128)]}] * 4),
        ("/v1/renew-many", {"leases": [claim(f"a/{number}", token=1) for number in range(500)]}),
    ],
    ids=["release", "ping", "renew", "renew-many"],
)
def test_batches_of_one_caller_do_not_hold_up_renewals_of_others(tmp_path, path, batch):
    """One key with a hundred connections held up the renewals of all others for ten seconds and more."""
    batches = 40

    async def main():
        async with Server() as server:
            flooder, other = server.add_keys(tmp_path / "keys.toml")
            post = server.post_with_key
            lease = claim("b/1")
            granted = await post(other, "/v1/acquire", lease)
            begun = 0

            def counted(verb, claims):
                def begin(*arguments):
                    nonlocal begun
                    begun += claims(*arguments)
                    return verb(*arguments)

                return begin

            service = server.service
            service.release = counted(service.release, lambda _claim, _deadline: 1)
            service.ping = counted(service.ping, lambda _deadline: 1)
            service.renew = counted(service.renew, lambda claims, _client, _deadline: len(claims))
            flood = [asyncio.create_task(post(flooder, path, batch)) for _ in range(batches)]
            for _ in range(5):  # while the batches begin, and the renewal arrives
                await asyncio.sleep(0)
            renewal = {"name": "b/1", "id": lease["id"], "token": json.loads(granted.body)["token"]}
            renewed = await post(other, "/v1/renew", renewal)
            assert renewed.status == 200
            assert begun < 500 * batches / 4, "of the claims in all batches"
            for each in flood:
                assert (await each).status in (200, 429), "429: on a slow machine"

    asyncio.run(main())


def test_renewals_of_one_caller_do_not_hold_up_those_of_others_in_sqlite(tmp_path):
    """They waited in the order of arrival for the thread that calls SQLite: sixteen thousand took twenty seconds."""

    async def main():
        async with Server(f"sqlite://{tmp_path}/locks.db") as server:
            flooder, other = server.add_keys(tmp_path / "keys.toml")
            leases = {}
            for key, name in ((flooder, "a/1"), (other, "b/1")):
                lease = claim(name)
                granted = await server.post_with_key(key, "/v1/acquire", lease)
                leases[name] = {**lease, "token": json.loads(granted.body)["token"]}
            renewed, renew = 0, server.service.engine.renew

            async def counted(claims, deadline):
                nonlocal renewed
                replies = await renew(claims, deadline)
                renewed += 1
                return replies

            server.service.engine.renew = counted
            batch = [{"do": "renew", "claims": [leases["a/1"]]}] * 500
            flood = [asyncio.create_task(server.post_with_key(flooder, "/v1/calls", batch)) for _ in range(4)]
            while not renewed:
                await asyncio.sleep(0)
            for number in range(1, 4):
                before = renewed
                answer = await server.post_with_key(other, "/v1/calls", [{"do": "renew", "claims": [leases["b/1"]]}])
                assert "alive" in json.loads(answer.body)[0]["renewed"][0], number
                assert renewed - before < 50, "of two thousand"
            assert not all(each.done() for each in flood)
            for each in flood:
                each.cancel()
            await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(main())


def test_calls_that_cannot_begin_in_time_are_refused_one_by_one(tmp_path):
    async def main():
        async with Server() as server:
            key, _ = server.add_keys(tmp_path / "keys.toml")
            renew, answering = server.service.engine.renew, asyncio.Event()

            async def renew_later(claims, _deadline):
                await answering.wait()
                return await renew(claims, server.service.runtime.now() + 60)

            server.service.engine.renew = renew_later
            many = {"do": "renew", "claims": [claim(f"a/{number}", token=1) for number in range(128)]}
            full = MAX_UNDER_WAY // 128
            batch = [many] * full + [{"do": "ping"}] * 2
            sent = asyncio.create_task(server.post_with_key(key, "/v1/calls", batch, (b"leasehold-within", b"0.1")))
            while "batches_per_key" not in server.limits.refused:
                await asyncio.sleep(0.01)
            answering.set()
            answers = json.loads((await sent).body)
            assert [len(each["renewed"]) for each in answers[:full]] == [128] * full
            assert [each["problem"]["status"] for each in answers[full:]] == [429, 429]
            assert answers[-1]["problem"]["done"] is False
            assert json.loads((await server.post_with_key(key, "/v1/calls", [{"do": "ping"}] * 2)).body)[0]["value"]

    asyncio.run(main())


def test_attempt_that_cannot_begin_in_time_is_not_made(tmp_path):
    """Its sender has given up, and may have released it at another server: the lock would be taken until its ttl is
    over."""

    async def main():
        async with Server() as server:
            key, _ = server.add_keys(tmp_path / "keys.toml")
            answering = asyncio.Event()

            async def ping_later(_deadline):
                await answering.wait()

            server.service.engine.ping = ping_later
            batch = [{"do": "ping"}] * 10
            server.limits.begun(server.caller(key), MAX_UNDER_WAY - 1)
            sent = asyncio.create_task(server.post_with_key(key, "/v1/calls", batch, (b"leasehold-within", b"60")))
            attempt = [{"do": "attempt", "claim": claim("a/1")}]
            late = asyncio.create_task(server.post_with_key(key, "/v1/calls", attempt, (b"leasehold-within", b"0.1")))
            await asyncio.wait({late}, timeout=SECONDS)
            answering.set()
            server.limits.ended(server.caller(key), MAX_UNDER_WAY - 1)
            assert (await late).status == 429
            assert (await sent).status == 200
            assert not await server.service.inspect("", "a/1", True, server.service.runtime.now() + 60)

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(3, 7))
@pytest.mark.parametrize("begins_each_turn", [False, True])
def test_release_does_not_overtake_an_attempt_in_an_earlier_batch(tmp_path, turns, begins_each_turn):
    """Its name would then be taken until the ttl is over, although the caller has released it (E6)."""

    async def main():
        async with Server() as server:
            key, _ = server.add_keys(tmp_path / "keys.toml")
            lease = claim("a/1")
            batch = [{"do": "ping"}] * 300 + [{"do": "attempt", "claim": lease}]

            async def release():
                for _ in range(turns):
                    await asyncio.sleep(0)
                return await server.post_with_key(key, "/v1/calls", [{"do": "release", "claim": lease}])

            released = asyncio.create_task(release()) if begins_each_turn else None
            batches = [asyncio.create_task(server.post_with_key(key, "/v1/calls", batch)) for _ in range(3)]
            released = released or asyncio.create_task(release())
            assert json.loads((await released).body) == [{"value": True}]
            for each in batches:
                assert (await each).status == 200
            assert not await server.service.inspect("", "a/1", True, server.service.runtime.now() + 60)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "body", "at_once"),
    [
        ("GET", "/metrics", None, MAX_LISTS),
        ("GET", "/v1/stats", None, MAX_LISTS),
        ("GET", "/v1/traits", None, MAX_BEGUN),
        ("POST", "/v1/release", {"name": "a/1", "id": "0" * 32}, MAX_BEGUN),
        ("POST", "/v1/calls", [{"do": "ping"}], MAX_BEGUN),
    ],
)
def test_requests_of_one_caller_do_not_hold_up_renewals_of_others(tmp_path, method, path, body, at_once):
    """A key may have five thousand connections: the requests of all of them began at once."""

    async def main():
        async with Server() as server:
            flooder, other = server.add_keys(tmp_path / "keys.toml")
            lease = claim("b/1")
            granted = await server.post_with_key(other, "/v1/acquire", lease)

            def send():
                return server.post_with_key(flooder, path, body) if body else server.get_with_key(flooder, path)

            flood = [asyncio.create_task(send()) for _ in range(50 * at_once)]
            for _ in range(5):
                await asyncio.sleep(0)
            renewal = {"name": "b/1", "id": lease["id"], "token": json.loads(granted.body)["token"]}
            assert (await server.post_with_key(other, "/v1/renew", renewal)).status == 200
            assert sum(each.done() for each in flood) < 25 * at_once
            for each in flood:
                assert (await each).status in (200, 429), "429: on a slow machine"

    asyncio.run(main())
