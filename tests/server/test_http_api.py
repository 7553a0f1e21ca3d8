"""The HTTP API on real servers: what each request does, and what it answers."""

import json
import threading
import time

import pytest

from tests.support.running_server import poll
from tests.support.timing import check_seconds


def acquire(server, name, claim_id=None, **fields):
    body = {"name": name, "ttl": 60, **fields}
    return server.post("/v1/acquire", body if claim_id is None else {**body, "id": claim_id})


def holding(server, name):
    (found,) = server.get(f"/v1/locks?name={name}").json["holdings"]
    return found


def waiters(server, name):
    return [(each["holder"], each["position"]) for each in server.get(f"/v1/locks?name={name}").json["queue"]]


class InBackground:
    """A request whose answer comes later."""

    def __init__(self, call, *args, **named):
        self._thread = threading.Thread(target=self._run, args=(call, args, named))
        self._thread.start()

    def _run(self, call, args, named):
        self._answer = call(*args, **named)

    def answer(self):
        self._thread.join(60)
        return self._answer


# -- acquire, renew, release


def test_lease_has_id_token_ttl_and_fingerprint(server, name, new_id):
    claim_id = new_id()
    answer = acquire(server, name, claim_id)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    lease = answer.json
    assert {key: lease[key] for key in ("id", "name", "namespace", "slot", "ttl")} == {
        "id": claim_id,
        "name": name,
        "namespace": "",
        "slot": None,
        "ttl": 60.0,
    }
    assert 0 < lease["token"] < 2**53
    assert len(lease["fingerprint"]) == 16
    check_seconds(lease["waited"], 1)


def test_acquire_repeated_with_the_same_id_gives_the_same_grant(server, name, new_id):
    claim_id = new_id()
    assert acquire(server, name, claim_id).json["token"] == acquire(server, name, claim_id).json["token"]


def test_acquire_without_an_id_gets_one_that_releases(server, name):
    lease = acquire(server, name).json
    assert server.post("/v1/release", {"name": name, "id": lease["id"]}).json == {"released": True}
    assert acquire(server, name).status == 200


def test_busy_name_is_409_and_says_who_holds_it(server, name, new_id):
    token = acquire(server, name, new_id(), holder="web-3", purpose="nightly").json["token"]
    answer = acquire(server, name, new_id())
    assert (answer.status, answer.kind) == (409, "busy")
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json
    assert (problem["name"], problem["holder"], problem["purpose"], problem["token"]) == (
        name,
        "web-3",
        "nightly",
        token,
    )
    assert 50 < problem["left"] <= 60
    assert problem["status"] == 409


def test_renewal_extends_the_lease(server, name, new_id):
    lease = acquire(server, name, new_id(), ttl=30).json
    answer = server.post("/v1/renew", {"name": name, "id": lease["id"], "token": lease["token"], "ttl": 50})
    assert (answer.status, answer.json) == (200, {"ttl": 50.0})
    assert 40 < holding(server, name)["expires_in"] <= 50


@pytest.mark.parametrize("wrong", ["name", "namespace", "id", "token"])
def test_renewal_counts_only_if_everything_fits(server, name, new_id, wrong):
    lease = acquire(server, name, new_id()).json
    body = {"name": name, "id": lease["id"], "token": lease["token"]}
    body[wrong] = {"name": f"{name}x", "namespace": "other", "id": new_id(), "token": lease["token"] + 1}[wrong]
    answer = server.post("/v1/renew", body)
    assert (answer.status, answer.kind) == (410, "lost")
    assert answer.json["reason"] in ("expired", "broken", "unknown")


@pytest.mark.parametrize("wrong", ["name", "namespace", "id"])
def test_release_counts_only_if_name_and_id_fit(server, name, new_id, wrong):
    lease = acquire(server, name, new_id()).json
    body = {"name": name, "id": lease["id"]}
    body[wrong] = {"name": f"{name}x", "namespace": "other", "id": new_id()}[wrong]
    assert server.post("/v1/release", body).json == {"released": False}
    assert holding(server, name)["token"] == lease["token"]


def test_release_twice_says_that_it_was_over(server, name, new_id):
    lease = acquire(server, name, new_id()).json
    released = [server.post("/v1/release", {"name": name, "id": lease["id"]}).json["released"] for _ in range(2)]
    assert released == [True, False]


def test_release_keeps_min_hold_without_being_told(server, name, new_id):
    lease = acquire(server, name, new_id(), min_hold=60).json
    assert server.post("/v1/release", {"name": name, "id": lease["id"]}).json == {"released": True}
    assert acquire(server, name, new_id()).status == 409
    assert holding(server, name)["state"] == "cooling"


def test_namespaces_are_independent(server, name, new_id):
    assert acquire(server, name, new_id()).status == 200
    assert acquire(server, name, new_id(), namespace="shop").status == 200


def test_shared_and_semaphore(server, name, new_id):
    assert [acquire(server, f"{name}/rw", new_id(), mode="shared").status for _ in range(2)] == [200, 200]
    assert acquire(server, f"{name}/rw", new_id()).status == 409
    answers = [acquire(server, f"{name}/sem", new_id(), limit=2) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 409]
    assert {answer.json["slot"] for answer in answers[:2]} == {0, 1}


def test_another_kind_of_lock_is_a_mismatch(server, name, new_id):
    acquire(server, name, new_id())
    answer = acquire(server, name, new_id(), limit=3)
    assert (answer.status, answer.kind) == (409, "mismatch")
    assert (answer.json["wanted"], answer.json["found"]) == ("semaphore of 3", "lock")


def test_renew_many_answers_in_order(server, name, new_id):
    leases = [acquire(server, f"{name}/{number}", new_id()).json for number in range(3)]
    server.post("/v1/release", {"name": f"{name}/1", "id": leases[1]["id"]})
    given = [{"name": each["name"], "id": each["id"], "token": each["token"], "ttl": 70} for each in leases]
    answer = server.post("/v1/renew-many", {"leases": given})
    assert answer.status == 200
    first, second, third = answer.json["leases"]
    assert first == third == {"ttl": 70.0}
    assert second["type"].endswith("/lost")
    assert second["status"] == 410


def test_renew_many_takes_500_leases_with_long_names(server, new_id):
    leases = [{"name": "n" * 200, "id": new_id(), "token": number + 1} for number in range(500)]
    answer = server.post("/v1/renew-many", {"leases": leases})
    assert [each["status"] for each in answer.json["leases"]] == [410] * 500
    assert server.post("/v1/renew-many", {"leases": [*leases, leases[0]]}).status == 422


def test_break_ends_the_lease_with_this_token(server, name, new_id):
    lease = acquire(server, name, new_id()).json
    wrong = {"name": name, "token": lease["token"] + 1, "reason": "it hangs"}
    assert server.post("/v1/break", wrong).json == {"broken": False}
    assert server.post("/v1/break", {**wrong, "token": lease["token"]}).json == {"broken": True}
    renewal = server.post("/v1/renew", {"name": name, "id": lease["id"], "token": lease["token"]})
    assert renewal.status == 410


def test_traits_say_what_the_engine_promises(server):
    traits = server.get("/v1/traits").json
    assert traits["liveness"] == "ttl"
    assert traits["fencing"] is True


# -- long-polls


def test_long_poll_is_granted_when_the_name_is_released(server, name, new_id):
    first, second = new_id(), new_id()
    acquire(server, name, first)
    waiting = InBackground(acquire, server, name, second, wait=50, holder="waiter")
    poll(lambda: waiters(server, name) == [("waiter", 0)])
    server.post("/v1/release", {"name": name, "id": first})
    answer = waiting.answer()
    assert answer.status == 200
    assert answer.json["waited"] > 0


def test_long_poll_whose_wait_is_over_keeps_its_position(server, name, new_id):
    first, second, third = new_id(), new_id(), new_id()
    acquire(server, name, first)
    assert acquire(server, name, second, wait=0.05, holder="second").json["position"] == 0
    last = InBackground(acquire, server, name, third, wait=50, holder="third")
    poll(lambda: waiters(server, name) == [("second", 0), ("third", 1)])
    again = InBackground(acquire, server, name, second, wait=50, holder="second")
    poll(lambda: 'kind="parked"} 2' in server.get("/metrics").body.decode())
    server.post("/v1/release", {"name": name, "id": first})
    tokens = []
    for answered, claim_id in ((again, second), (last, third)):
        lease = answered.answer()
        assert lease.status == 200
        tokens.append(lease.json["token"])
        server.post("/v1/release", {"name": name, "id": claim_id})
    assert len(tokens) == 2


def test_long_poll_without_an_id_leaves_nothing_behind(server, name, new_id):
    acquire(server, name, new_id())
    answer = acquire(server, name, wait=0.05)
    assert (answer.status, answer.kind) == (409, "busy")
    poll(lambda: waiters(server, name) == [])


def test_wait_longer_than_the_limit_is_shortened(memory_server, name, new_id):
    acquire(memory_server, name, new_id())
    body = {"name": name, "wait": 1e8}
    answer = memory_server.post("/v1/acquire", body, headers={"Leasehold-Within": "0.2"})
    assert (answer.status, answer.kind) == (409, "busy")
    assert answer.json["waited"] < 60


# -- listing


def test_holding_says_who_holds_since_when_and_for_how_long(server, name, new_id):
    before = time.time()
    lease = acquire(server, name, new_id(), holder="web-3", purpose="nightly").json
    found = holding(server, name)
    assert {key: found[key] for key in ("name", "holder", "purpose", "token", "state", "kind", "mode")} == {
        "name": name,
        "holder": "web-3",
        "purpose": "nightly",
        "token": lease["token"],
        "state": "held",
        "kind": "lock",
        "mode": "exclusive",
    }
    assert before - 60 < found["acquired_at"] < time.time() + 60  # computed from an age, some time after the reply
    assert 30 < found["expires_in"] <= 60
    assert found["queue"] == []
    assert lease["id"] not in json.dumps(found)


def test_waiters_stand_under_queue_with_holder_and_position(server, name, new_id):
    first = new_id()
    acquire(server, name, first)
    polls = []
    for number in range(2):
        polls.append(InBackground(acquire, server, name, new_id(), wait=50, holder=f"waiter-{number}", ttl=0.5))
        poll(lambda: len(waiters(server, name)) == len(polls))
    found = holding(server, name)
    assert [(each["holder"], each["position"]) for each in found["queue"]] == [("waiter-0", 0), ("waiter-1", 1)]
    assert waiters(server, name) == [("waiter-0", 0), ("waiter-1", 1)]
    server.post("/v1/release", {"name": name, "id": first})
    assert [each.answer().status for each in polls] == [200, 200]


def test_pages_follow_each_other_by_their_cursor(server, name, new_id):
    names = sorted(f"{name}/{number}" for number in range(5))
    for each in names:
        acquire(server, each, new_id())
    acquire(server, f"{name}/sem", new_id(), limit=3)
    acquire(server, f"{name}/sem", new_id(), limit=3)
    found, cursor, sizes = [], "", []
    while cursor is not None:
        page = server.get(f"/v1/locks?prefix={name}/&limit=2" + (f"&cursor={cursor}" if cursor else "")).json
        found += [each["name"] for each in page["holdings"]]
        sizes.append(len(page["holdings"]))
        cursor = page["cursor"]
    assert found == [*names, f"{name}/sem", f"{name}/sem"]
    assert sizes == [2, 2, 2, 1]


def test_request_may_inspect_once(memory_server):
    """A short request must not cause an answer of gigabytes, or hold up the callers of other names for minutes."""
    inspect = {"do": "inspect", "namespace": "empty"}
    answer = memory_server.post("/v1/calls", [inspect, {"do": "ping"}, inspect])
    assert (answer.status, answer.kind) == (422, "invalid")
    assert memory_server.post("/v1/calls", [inspect, {"do": "ping"}]).json[0] == {"value": []}


def test_empty_query_parameters_are_as_if_left_out(memory_server, name, new_id):
    acquire(memory_server, name, new_id())
    for query in (f"namespace=&prefix=&name={name}", f"namespace=&prefix={name}&limit=&cursor="):
        answer = memory_server.get(f"/v1/locks?{query}")
        assert [each["name"] for each in answer.json["holdings"]] == [name]


def test_names_of_any_text_are_listed(server, new_id):
    odd = 'ä/"%2F ? & \u2028\U0001f512'
    acquire(server, odd, new_id(), namespace="odd")
    from urllib.parse import quote

    answer = server.get(f"/v1/locks?namespace=odd&name={quote(odd, safe='')}")
    assert [each["name"] for each in answer.json["holdings"]] == [odd]


# -- headers


def test_request_id_and_traceparent_are_echoed(memory_server):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    answer = memory_server.get("/v1/traits", headers={"X-Request-Id": "abc-1", "traceparent": trace})
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("abc-1", trace)
    answer = memory_server.get("/v1/traits", headers={"X-Request-Id": "a b", "traceparent": "nonsense"})
    assert answer.headers["x-request-id"] != "a b"
    assert "traceparent" not in answer.headers


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e99"])
def test_within_that_is_no_time_is_invalid(memory_server, value):
    answer = memory_server.get("/v1/traits", headers={"Leasehold-Within": value})
    assert (answer.status, answer.kind) == (400, "invalid")


# -- what is refused

NAME = "orders/invalid"
ID = "0123456789abcdef"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"name": "a", "ttl": NaN}',
        b'{"name": "a", "ttl": Infinity}',
        b'{"name": "a", "ttl": 1e999}',
        b"[" * 60_000,
        b'{"name": ' + b"[" * 50_000,
        b'{"a":' * 10_000,
        b'{"name": "\xff"}',
        b'{"name": "\\ud800"}',
        b"null",
        b"[]",
        b"7",
        b'"text"',
    ],
)
@pytest.mark.parametrize("path", ["acquire", "renew", "renew-many", "release", "break", "calls"])
def test_body_that_is_no_request_is_invalid(memory_server, path, body):
    answer = memory_server.post(f"/v1/{path}", body)
    assert answer.status in (400, 422)
    assert answer.kind == "invalid"


@pytest.mark.parametrize(
    "fields",
    [
        {"ttl": 0},
        {"ttl": -1},
        {"ttl": 0.001},
        {"ttl": 86_401},
        {"ttl": "30"},
        {"ttl": True},
        {"ttl": None},
        {"ttl": [30]},
        {"wait": -1},
        {"wait": "long"},
        {"name": ""},
        {"name": 7},
        {"name": None},
        {"name": "n" * 256},
        {"name": "ä" * 128},
        {"name": "a\0b"},
        {"namespace": "n" * 256},
        {"namespace": 7},
        {"id": ""},
        {"id": "short"},
        {"id": "x" * 129},
        {"id": "x" * 20 + "\n"},
        {"id": "x y" * 10},
        {"id": 7},
        {"limit": 0},
        {"limit": 1.5},
        {"limit": 2**31},
        {"limit": 10**40},
        {"limit": 2, "mode": "shared"},
        {"mode": "both"},
        {"holder": 7},
        {"holder": "h" * 201},
        {"holder": "a\nb"},
        {"purpose": "\u202e"},
        {"delay": -1},
        {"min_hold": "1s"},
        {"min_hold": 1e9},
        {"tttl": 30},
        {"token": 7},
    ],
)
def test_acquire_with_a_bad_member_is_invalid(memory_server, fields):
    answer = memory_server.post("/v1/acquire", {"name": NAME, "ttl": 30, **fields})
    assert answer.status in (400, 422)
    assert answer.kind == "invalid"
    assert memory_server.get(f"/v1/locks?name={NAME}").json["holdings"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("renew", {"name": NAME, "id": ID}),
        ("renew", {"name": NAME, "id": ID, "token": 0}),
        ("renew", {"name": NAME, "id": ID, "token": 2**63}),
        ("renew", {"name": NAME, "id": ID, "token": "7"}),
        ("renew", {"name": NAME, "id": ID, "token": 7, "ttl": 0}),
        ("renew", {"id": ID, "token": 7}),
        ("renew-many", {"leases": []}),
        ("renew-many", {"leases": {}}),
        ("renew-many", {"leases": [7]}),
        ("release", {"name": NAME}),
        ("release", {"id": ID}),
        ("release", {"name": NAME, "id": ID, "min_hold": 3}),
        ("break", {"name": NAME}),
        ("break", {"name": NAME, "token": 0}),
        ("break", {"name": NAME, "token": 7, "reason": 7}),
    ],
)
def test_other_requests_with_a_bad_member_are_invalid(memory_server, path, body):
    answer = memory_server.post(f"/v1/{path}", body)
    assert (answer.status, answer.kind) == (422, "invalid")


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=-1",
        "limit=x",
        "limit=²",
        "limit=" + "9" * 5000,
        "cursor=x",
        "cursor=W10",
        "cursor=eyI",
        "cursor=é",
        "name=",
        "name=a&prefix=b",
        "name=a&name=b",
        "prefix=" + "p" * 256,
        "prefix=%ff",
        "prefix=%00",
        "unknown=1",
        "&".join(f"a{number}=1" for number in range(50)),
    ],
)
def test_query_that_makes_no_sense_is_invalid(memory_server, query):
    from urllib.parse import quote

    answer = memory_server.get(f"/v1/locks?{quote(query, safe='=&%')}")
    assert answer.status in (400, 422)
    assert answer.kind == "invalid"


@pytest.mark.parametrize("path", ["/v1", "/v1/acquire/", "/v2/acquire", "/v1/%61cquire/x", "/openapi"])
def test_unknown_path_is_404(memory_server, path):
    answer = memory_server.get(path)
    assert (answer.status, answer.kind) == (404, "not-found")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/acquire"), ("PUT", "/v1/release"), ("POST", "/v1/locks")])
def test_wrong_method_is_405_and_says_the_right_one(memory_server, method, path):
    answer = memory_server.request(method, path, b"{}" if method != "GET" else None)
    assert (answer.status, answer.kind) == (405, "method-not-allowed")
    assert answer.headers["allow"] == {"/v1/locks": "GET"}.get(path, "POST")


@pytest.mark.parametrize("path", ["/v1/events", "/v1/stream"])
def test_head_of_a_stream_is_405_and_does_not_stay_open(memory_server, path):
    answer = memory_server.request("HEAD", path, headers={"Leasehold-Client": "c1"})
    assert (answer.status, answer.headers["allow"]) == (405, "GET")
    assert memory_server.request("HEAD", "/v1/locks").status == 200


@pytest.mark.parametrize(
    "call",
    [
        7,
        None,
        [],
        {},
        {"do": 7},
        {"do": "steal"},
        {"do": []},
        {"do": "attempt"},
        {"do": "attempt", "claim": 7},
        {"do": "attempt", "claim": {"name": NAME, "id": ID, "ttl": 0}},
        {"do": "attempt", "claim": {"name": NAME, "id": ID, "ttl": 30, "limit": "x"}},
        {"do": "attempt", "claim": {"name": NAME, "id_hash": "0" * 32, "ttl": 30}},
        {"do": "attempt", "claim": {"name": NAME, "id": ID, "ttl": 30}, "within": "x"},
        {"do": "attempt", "claim": {"name": NAME, "id": ID, "ttl": 30}, "within": -1},
        {"do": "renew"},
        {"do": "renew", "claims": 7},
        {"do": "renew", "claims": [7]},
        {"do": "renew", "claims": [{"name": NAME, "id_hash": "0" * 32, "ttl": 30, "token": 7}]},
        {"do": "release", "claim": {}},
        {"do": "break", "name": NAME},
        {"do": "break", "name": NAME, "token": -1},
        {"do": "inspect", "prefix": 7},
        {"do": "inspect", "namespace": None},
    ],
)
def test_bad_call_is_a_problem_of_its_own(memory_server, call):
    answer = memory_server.post("/v1/calls", [{"do": "ping"}, call])
    assert answer.status == 200
    good, bad = answer.json
    assert good["value"]["liveness"] == "ttl"
    assert bad["problem"]["type"].endswith("/invalid")
    assert bad["problem"]["status"] in (400, 422)
