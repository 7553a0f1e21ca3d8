"""Every route and every verb, for every set of rights: what is not permitted is refused, and changes nothing."""

import itertools
import secrets
import threading
from datetime import UTC, datetime

import pytest

from leasehold.core.names import hash_id
from leasehold.server import keys
from leasehold.server.app import ROUTES
from leasehold.server.keys import Right
from tests.support import probe_server
from tests.support.running_server import poll, running

NAMESPACE, PREFIX = "shop", "orders/"
SETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(keys.VERBS, size)]
# Where the rights of a key are, and whether they cover NAMESPACE and names that begin with PREFIX.
SCOPES = {
    f"{NAMESPACE}:{PREFIX}": True,
    f"{NAMESPACE}:": True,
    "*:": True,
    f":{PREFIX}": False,
    f"other:{PREFIX}": False,
    f"{NAMESPACE}:orders/x": False,
    f"{NAMESPACE}:invoices/": False,
}


class Tenant:
    """A server, its operator's key, and a lease that another caller may or may not touch."""

    def __init__(self, server, path):
        self.server, self.path = server, path
        self.operator = self.create("operator", "read,lock,break:*:")

    def create(self, who, *allow):
        return keys.create(self.path, who, [Right.parse(text) for text in allow], now=datetime.now(UTC))

    def hold(self, namespace=NAMESPACE):
        """A new lease of the operator's, under a name of its own."""
        body = {"namespace": namespace, "name": PREFIX + secrets.token_hex(8), "id": secrets.token_hex(16), "ttl": 300}
        answer = self.server.post("/v1/acquire", body, key=self.operator)
        assert answer.status == 200, answer
        return {**body, "token": answer.json["token"]}

    def token(self, lease):
        """Of the current holder; None if there is none."""
        path = f"/v1/locks?namespace={lease['namespace']}&name={lease['name']}"
        holdings = self.server.get(path, key=self.operator).json["holdings"]
        return holdings[0]["token"] if holdings else None

    def call(self, key, verb, **members):
        """The answer of one verb, as a remote engine calls it."""
        answer = self.server.post("/v1/calls", [{"do": verb, **members}], key=key, headers={"Leasehold-Client": "c1"})
        assert answer.status == 200, answer
        (found,) = answer.json
        return found


@pytest.fixture(scope="module")
def tenant(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.create(path, "first", [Right.parse("read::")], now=datetime.now(UTC))
    with running("--keys", str(path)) as server:
        tenant = Tenant(server, path)
        tenant.by_rights = {
            (verbs, scope): tenant.create(f"k{n}", f"{','.join(verbs)}:{scope}")
            for n, (verbs, scope) in enumerate(itertools.product(SETS, SCOPES))
        }
        last = list(tenant.by_rights.values())[-1]
        poll(lambda: server.get("/v1/traits", key=last).status == 200)  # the file has been read again
        yield tenant


def select(lease, *members):
    return {member: lease[member] for member in members}


def claim(lease, **more):
    return {**select(lease, "namespace", "name", "id", "ttl"), **more}


# What each route and verb needs. Each function returns whether it was permitted.


def acquire(tenant, key, lease):
    answer = tenant.server.post("/v1/acquire", select(lease, "namespace", "name"), key=key)
    return permitted(answer, 409)


def renew(tenant, key, lease):
    answer = tenant.server.post("/v1/renew", select(lease, "namespace", "name", "id", "token"), key=key)
    return permitted(answer, 200)


def renew_many(tenant, key, lease):
    body = {"leases": [select(lease, "namespace", "name", "id", "token")]}
    answer = tenant.server.post("/v1/renew-many", body, key=key)
    assert answer.status == 200
    (found,) = answer.json["leases"]
    if "ttl" in found:
        return True
    assert found["type"].endswith("/forbidden"), found
    return False


def release(tenant, key, lease):
    answer = tenant.server.post("/v1/release", select(lease, "namespace", "name", "id"), key=key)
    return permitted(answer, 200) and answer.json == {"released": True}


def break_(tenant, key, lease):
    answer = tenant.server.post("/v1/break", select(lease, "namespace", "name", "token"), key=key)
    return permitted(answer, 200) and answer.json == {"broken": True}


def limit(tenant, key, lease):
    answer = tenant.server.post("/v1/limit", {**select(lease, "namespace", "name"), "limit": 2}, key=key)
    return permitted(answer, 409)  # it is in use as a lock


def locks(tenant, key, lease):
    answer = tenant.server.get(f"/v1/locks?namespace={lease['namespace']}&prefix={lease['name']}", key=key)
    if answer.status == 403:
        assert lease["name"].encode() not in answer.body
    return permitted(answer, 200)


def exact_locks(tenant, key, lease):
    return permitted(tenant.server.get(f"/v1/locks?namespace={lease['namespace']}&name={lease['name']}", key=key), 200)


def owners(tenant, key, lease):
    return permitted(
        tenant.server.get(f"/v1/owners?namespace={lease['namespace']}&prefix={lease['name']}", key=key), 200
    )


def history(tenant, key, lease):
    answer = tenant.server.get(f"/v1/history?namespace={lease['namespace']}&name={lease['name']}", key=key)
    return permitted(answer, 200) and answer.json["grants"][0]["token"] == lease["token"]


def incidents(tenant, key, lease):
    path = f"/v1/incidents?namespace={lease['namespace']}&prefix={lease['name']}"
    return permitted(tenant.server.get(path, key=key), 200)


def refusals(tenant, key, lease):
    return permitted(tenant.server.post("/v1/refusals", select(lease, "namespace", "name", "token"), key=key), 200)


def events(tenant, key, lease):
    return permitted(tenant.server.open(f"/v1/events?namespace={lease['namespace']}&prefix={PREFIX}", key=key), 200)


def verb(name, /, **members):
    def run(tenant, key, lease):
        given = {member: value(lease) for member, value in members.items()}
        answer = tenant.call(key, name, **given)
        inner = answer["renewed"][0] if "renewed" in answer else answer
        if "problem" not in inner:
            return True
        assert inner["problem"]["type"].endswith("/forbidden"), inner
        return False

    return run


ROUTE_CASES = {
    "/v1/acquire": [("lock", acquire)],
    "/v1/renew": [("lock", renew)],
    "/v1/renew-many": [("lock", renew_many)],
    "/v1/release": [("lock", release)],
    "/v1/break": [("break", break_)],
    "/v1/limit": [("break", limit)],
    "/v1/locks": [("read", locks), ("read", exact_locks)],
    "/v1/refusals": [("lock", refusals)],
    "/v1/owners": [("read", owners)],
    "/v1/history": [("read", history)],
    "/v1/incidents": [("read", incidents)],
    "/v1/events": [("read", events)],
}
WHOLE_NAMESPACE = {"/v1/stats"}  # these need the right for all names: see test_statistics_need_the_whole_namespace
VERB_CASES = {
    "attempt": [("lock", verb("attempt", claim=claim))],
    "renew": [("lock", verb("renew", claims=lambda lease: [claim(lease, token=lease["token"])]))],
    "release": [("lock", verb("release", claim=claim))],
    "decline": [("lock", verb("decline", claim=claim))],
    "break": [
        (
            "break",
            verb(
                "break",
                namespace=lambda lease: lease["namespace"],
                name=lambda lease: lease["name"],
                token=lambda lease: lease["token"],
            ),
        )
    ],
    "set_limit": [
        (
            "break",
            verb("set_limit", namespace=lambda lease: lease["namespace"], name=lambda lease: lease["name"]),
        )
    ],
    "inspect": [
        (
            "read",
            verb("inspect", namespace=lambda lease: lease["namespace"], prefix=lambda lease: lease["name"]),
        ),
    ],
    "report": [("lock", verb("report", refusal=lambda lease: select(lease, "namespace", "name", "token")))],
}
WITHOUT_RIGHTS = {"/v1/traits", "/v1/calls", "/v1/stream", "/metrics"}  # any key; /v1/calls checks each verb
WITHOUT_KEY = {"/healthz", "/readyz", "/openapi.json"}
CASES = [
    pytest.param(needed, run, id=f"{name.removeprefix('/v1/')}-{number}")
    for table in (
        ROUTE_CASES,
        {f"calls-{name}": case for name, case in VERB_CASES.items() if name in probe_server.verbs_of_calls},
    )
    for name, cases in table.items()
    for number, (needed, run) in enumerate(cases)
]


def permitted(answer, success):
    if answer.status == 403:
        assert answer.kind == "forbidden"
        return False
    assert answer.status == success, answer
    return True


@pytest.mark.parametrize(("needed", "run"), CASES)
def test_only_a_right_that_covers_verb_and_name_permits(tenant, needed, run):
    for (verbs, scope), key in tenant.by_rights.items():
        lease = tenant.hold()
        expected = needed in verbs and SCOPES[scope]
        assert run(tenant, key, lease) is expected, (verbs, scope)
        if not expected:
            assert tenant.token(lease) == lease["token"], "a refused call changes nothing"
        tenant.server.post("/v1/release", select(lease, "namespace", "name", "id"), key=tenant.operator)


def test_every_route_and_verb_has_its_case():
    assert set(ROUTES) == set(ROUTE_CASES) | WHOLE_NAMESPACE | WITHOUT_RIGHTS | WITHOUT_KEY
    assert set(probe_server.verbs_of_calls) - {"ping"} <= set(VERB_CASES)


def test_statistics_need_the_whole_namespace(tenant):
    for (verbs, scope), key in tenant.by_rights.items():
        answer = tenant.server.get(f"/v1/stats?namespace={NAMESPACE}", key=key)
        assert permitted(answer, 200) is ("read" in verbs and scope in (f"{NAMESPACE}:", "*:")), (verbs, scope)


def test_incidents_of_all_namespaces_are_those_that_the_key_may_read(tenant):
    lease = tenant.hold()
    broken = tenant.server.post("/v1/break", select(lease, "namespace", "name", "token"), key=tenant.operator)
    assert broken.json == {"broken": True}
    for (verbs, scope), key in tenant.by_rights.items():
        found = tenant.server.get("/v1/incidents", key=key).json["incidents"]
        seen = [each for each in found if each["name"] == lease["name"]]
        assert bool(seen) is ("read" in verbs and SCOPES[scope]), (verbs, scope)


@pytest.mark.parametrize(("namespace", "prefix"), [("flood", "orders/"), (NAMESPACE, "flood/")])
@pytest.mark.parametrize("query", ["", f"?namespace={NAMESPACE}&prefix={PREFIX}"])
def test_incidents_of_another_tenant_leave_room_for_those_of_others(tenant, namespace, prefix, query):
    """The latest hundred of all tenants were taken before those that the key may read."""
    lease, flooder = tenant.hold(), tenant.create(f"flooder-{secrets.token_hex(4)}", f"lock:{namespace}:{prefix}")
    broken = tenant.server.post("/v1/break", select(lease, "namespace", "name", "token"), key=tenant.operator)
    assert broken.json == {"broken": True}
    refusal = {"namespace": namespace, "name": f"{prefix}1", "token": 1}
    poll(lambda: tenant.server.post("/v1/refusals", refusal, key=flooder).status == 200)  # the file has been read again
    for _ in range(110):
        assert tenant.server.post("/v1/refusals", refusal, key=flooder).status == 200
    found = tenant.server.get(f"/v1/incidents{query}", key=tenant.by_rights[("read",), f"{NAMESPACE}:{PREFIX}"])
    assert lease["name"] in [each["name"] for each in found.json["incidents"]]


@pytest.mark.parametrize("path", sorted(set(ROUTES) - WITHOUT_KEY))
def test_route_without_a_key_is_refused_before_its_body_is_read(tenant, path):
    method = next(iter(ROUTES[path]))
    for key in (None, "x", "lh_operator_" + "0" * 64, tenant.operator[:-1]):
        answer = tenant.server.request(method, path, b"not json" if method == "POST" else None, key=key)
        assert (answer.status, answer.kind) == (401, "unauthorized")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert set(answer.json) == {"type", "title", "status", "detail"}, "it says nothing about what is known"


@pytest.mark.parametrize("path", sorted(WITHOUT_KEY))
def test_probe_needs_no_key(tenant, path):
    assert tenant.server.get(path).status == 200


@pytest.mark.parametrize("path", sorted(WITHOUT_RIGHTS - {"/v1/calls", "/v1/stream"}))
def test_key_without_rights_here_reads_what_names_no_lock(tenant, path):
    lease = tenant.hold()
    key = tenant.by_rights[("lock",), ":orders/"]
    answer = tenant.server.get(path, key=key)
    assert answer.status == 200
    assert lease["name"].encode() not in answer.body


def test_batch_is_permitted_call_by_call(tenant):
    mine, other = tenant.hold(), tenant.hold("other")
    key = tenant.by_rights[("lock",), "shop:orders/"]
    batch = [{"do": "release", "claim": claim(lease)} for lease in (other, mine, other)]
    batch.append({"do": "renew", "claims": [claim(lease, token=lease["token"]) for lease in (other, mine)]})
    answers = tenant.server.post("/v1/calls", batch, key=key).json
    assert [answer.get("problem", {}).get("status") for answer in answers[:3]] == [403, None, 403]
    assert answers[1] == {"value": True}
    assert answers[3]["renewed"][0]["problem"]["status"] == 403
    assert "problem" not in answers[3]["renewed"][1]
    assert tenant.token(other) == other["token"]


def test_renewal_of_many_is_permitted_lease_by_lease(tenant):
    mine, other = tenant.hold(), tenant.hold("other")
    key = tenant.by_rights[("lock",), "shop:orders/"]
    leases = [select(lease, "namespace", "name", "id", "token") for lease in (mine, other, mine)]
    found = tenant.server.post("/v1/renew-many", {"leases": leases}, key=key).json["leases"]
    assert ["ttl" in each for each in found] == [True, False, True]
    assert found[1]["type"].endswith("/forbidden")


@pytest.mark.parametrize("namespace", [NAMESPACE, "other", ""])
def test_id_of_another_lease_under_a_permitted_name_is_no_way_in(tenant, namespace):
    """A key for one name must not renew or release the lease of another name by its id."""
    victim, mine = tenant.hold(namespace), tenant.hold()
    key = tenant.by_rights[("lock",), "shop:orders/"]
    body = {**select(mine, "namespace", "name"), "id": victim["id"]}
    renewed = tenant.server.post("/v1/renew", {**body, "token": victim["token"]}, key=key)
    assert (renewed.status, renewed.kind) == (410, "lost")
    assert tenant.server.post("/v1/release", body, key=key).json == {"released": False}
    renewed = tenant.call(key, "renew", claims=[{**body, "ttl": 300, "token": victim["token"]}])
    assert "gone" in renewed["renewed"][0]
    assert tenant.call(key, "release", claim={**body, "ttl": 300})["value"] is not True
    assert tenant.token(victim) == victim["token"]


@pytest.mark.parametrize("path", ["/v1/acquire", "/v1/release", "/v1/renew"])
@pytest.mark.parametrize("waits", ["long-poll", "stream"])
def test_id_of_a_waiter_under_a_permitted_name_does_not_end_its_wait(tenant, path, waits):
    """A key for one name must not take a waiter of another name out of its queue by its id."""
    lease, mine = tenant.hold("other"), PREFIX + secrets.token_hex(8)
    waiting = {**select(lease, "namespace", "name"), "id": secrets.token_hex(16), "ttl": 30}
    where = f"/v1/locks?namespace=other&name={lease['name']}"
    granted = []

    def wait():
        granted.append(tenant.server.post("/v1/acquire", {**waiting, "wait": 50}, key=tenant.operator).status)

    with tenant.server.stream("/v1/stream", key=tenant.operator, headers={"Leasehold-Client": "c1"}) as wakeups:
        wakeups.wait_for("hello")
        long_poll = threading.Thread(target=wait)
        if waits == "long-poll":
            long_poll.start()
        else:
            assert "busy" in tenant.call(tenant.operator, "attempt", claim={**waiting, "queue": True})
        poll(lambda: tenant.server.get(where, key=tenant.operator).json["queue"])
        body = {"namespace": NAMESPACE, "name": mine, "id": waiting["id"]}
        body |= {"token": 7} if path == "/v1/renew" else {}
        status = tenant.server.post(path, body, key=tenant.by_rights[("lock",), "shop:orders/"]).status
        assert status == {"/v1/acquire": 422, "/v1/release": 200, "/v1/renew": 410}[path]  # nothing was released
        tenant.server.post("/v1/release", select(lease, "namespace", "name", "id"), key=tenant.operator)
        if waits == "long-poll":
            long_poll.join()
            assert granted == [200]
        else:
            wakeups.wait_for("wakeup")
    tenant.server.post("/v1/release", select(waiting, "namespace", "name", "id"), key=tenant.operator)


def test_hash_of_an_id_neither_acquires_renews_nor_releases(tenant):
    """`inspect` shows most digits of the hash, so it must not do what needs the id."""
    lease = tenant.hold()
    key = tenant.by_rights[("lock",), "shop:orders/"]
    hashed = {**select(lease, "namespace", "name", "ttl"), "id_hash": hash_id(lease["id"])}
    for queue in (False, True):
        answer = tenant.call(key, "attempt", claim={**hashed, "queue": queue})
        assert answer.get("problem", {}).get("type", "").endswith("/invalid"), answer
    renewed = tenant.call(key, "renew", claims=[{**hashed, "token": lease["token"]}])
    assert "alive" not in str(renewed)
    tenant.call(key, "release", claim=hashed)
    assert tenant.token(lease) == lease["token"]


def test_wake_ups_are_not_sent_to_another_caller_with_the_client_id(tenant):
    a, b = tenant.by_rights[("lock",), "shop:"], tenant.by_rights[("lock",), "shop:orders/"]
    lease = tenant.hold()
    waiting = {**select(lease, "namespace", "name"), "id": secrets.token_hex(16), "ttl": 30, "queue": True}
    with tenant.server.stream("/v1/stream", key=b, headers={"Leasehold-Client": "c1"}) as spying:
        spying.wait_for("hello")
        with tenant.server.stream("/v1/stream", key=a, headers={"Leasehold-Client": "c1"}) as own:
            own.wait_for("hello")
            assert tenant.call(a, "attempt", claim=waiting)["heard"] is True
            tenant.server.post("/v1/release", select(lease, "namespace", "name", "id"), key=tenant.operator)
            own.wait_for("wakeup")
        assert "wakeup" not in spying.text
    tenant.call(a, "release", claim=waiting)


def test_revoked_key_is_refused_within_six_seconds_and_its_streams_end(tenant):
    key = tenant.create("leaver", "lock,read:shop:")
    poll(lambda: tenant.server.get("/v1/traits", key=key).status == 200)
    with (
        tenant.server.stream("/v1/stream", key=key, headers={"Leasehold-Client": "c2"}) as wakeups,
        tenant.server.stream("/v1/events?namespace=shop", key=key) as watching,
    ):
        wakeups.wait_for("hello")
        keys.revoke(tenant.path, "leaver")
        poll(lambda: tenant.server.get("/v1/traits", key=key).status == 401)
        lease = tenant.hold()  # an event: a stream that is never silent must end, too
        assert lease["name"] not in watching.read_to_end()
        wakeups.read_to_end()


def test_streams_of_a_revoked_key_end_even_if_its_name_has_a_new_one(tenant):
    """A leaked key that was replaced at once, under the same name, went on to show events."""
    key = tenant.create("rotated", "lock,read:shop:")
    poll(lambda: tenant.server.get("/v1/traits", key=key).status == 200)
    with tenant.server.stream("/v1/events?namespace=shop", key=key) as watching:
        keys.revoke(tenant.path, "rotated")
        new = tenant.create("rotated", "lock,read:shop:")
        poll(lambda: tenant.server.get("/v1/traits", key=key).status == 401)
        assert tenant.server.get("/v1/traits", key=new).status == 200
        assert tenant.hold()["name"] not in watching.read_to_end()
