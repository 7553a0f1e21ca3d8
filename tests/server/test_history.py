"""What a server remembers: grants, waits, incidents and an hour of statistics, bounded in memory."""

import tracemalloc

import pytest

from leasehold.core.names import hash_id
from leasehold.events import Event
from leasehold.model import Claim, Holder, Holding
from leasehold.server import history as limits
from leasehold.server import stats as statistics
from leasehold.server.history import History
from leasehold.server.picture import Picture, Snapshot
from leasehold.telemetry.metrics import ACQUIRE_BUCKETS
from tests.support import probe_server

NOW = 1_700_000_000.0


class Clock:
    now = NOW

    def __call__(self):
        return self.now


class Past(History):
    """A history, and events of one name in short."""

    def __init__(self):
        self.clock = Clock()
        super().__init__(self.clock)

    def on(self, kind, at, who="web", token=None, name="orders/42", namespace="shop", trace="", **fields):
        fields.setdefault("mode", "exclusive")
        fingerprint = None if kind == "broken" else f"{who:0>16}"
        holder = None if kind == "broken" else who
        self.clock.now = NOW + at
        event = Event(kind, "memory", namespace, name, NOW + at, token, fingerprint, holder, **fields)
        self(event, trace)

    def grant(self, at, who="web", token=1, ttl=30.0, seconds=0.0, **fields):
        self.on("granted", at, who, token, ttl=ttl, seconds=seconds, **fields)


@pytest.fixture
def past():
    return Past()


def seconds(at):
    return None if at is None else at - NOW


def test_grant_has_its_renewals_and_end(past):
    past.grant(0, token=41, queued=True, seconds=4.0, purpose="settle", trace="4bf9")
    for at in (10, 20):
        past.on("renewed", at, token=41, ttl=30.0)
    past.on("released", 25)
    (grant,) = past.grants("shop", "orders/42")
    assert (grant.token, grant.holder, grant.purpose, grant.waited, grant.trace) == (41, "web", "settle", 4.0, "4bf9")
    assert [(seconds(each.at), each.left) for each in grant.renewals] == [(10, 20.0), (20, 20.0)]
    assert (grant.end, seconds(grant.ended_at), grant.renewed) == ("released", 25, 2)
    (wait,) = past.waits("shop", "orders/42")
    assert (seconds(wait.began), seconds(wait.ended), wait.outcome, wait.token) == (-4, 0, "granted", 41)
    assert not past.incidents()


def test_repeated_grant_is_one(past):
    past.grant(0, token=41)
    past.grant(1, token=41)
    assert len(past.grants("shop", "orders/42")) == 1


def test_lost_lease_says_who_came_next_and_how_long_it_was_silent(past):
    """The story of a holder that was suspended."""
    past.grant(0, "settler-7", 48212)
    past.on("renewed", 10, "settler-7", 48212, ttl=30.0)
    past.grant(41, "settler-2", 48213, queued=True, seconds=35.0)
    past.on("lost", 62, "settler-7", 48212, reason="expired")
    past.on("stale_token", 63, "settler-7", 48212, fence="sql", seen=48213, reason="48212 is older than 48213")
    later, earlier = past.grants("shop", "orders/42")
    assert (earlier.end, earlier.reason, seconds(earlier.ended_at)) == ("lost", "expired", 40)
    assert [(seconds(each.at), each.fence, each.seen) for each in earlier.refused] == [(63, "sql", 48213)]
    assert later.end is None
    refused, lost = past.incidents("shop")
    assert (lost.kind, lost.token, lost.token_after, lost.holder) == ("lost", 48212, 48213, "settler-7")
    assert (lost.silent, lost.reason) == (52.0, "expired")
    assert (refused.kind, refused.token, refused.token_after, refused.fence) == ("stale_token", 48212, 48213, "sql")
    for incident in (refused, lost):
        assert incident.meaning.endswith(".")
        assert "lease.check()" in incident.advice


@pytest.mark.parametrize(("at", "reason"), [(29, "unknown"), (30, "expired")])
def test_loss_found_by_a_renewal_names_the_holder_and_the_expiry(past, at, reason):
    """The HTTP API knows only the caller of a renewal, and the engine no grant."""
    past.grant(0, "settler-7", 48212, ttl=30.0)
    past.clock.now = NOW + at
    event = Event("lost", "memory", "shop", "orders/42", NOW + at, 48212, f"{'settler-7':0>16}", "key-1")
    past(event._replace(reason="unknown", mode="exclusive"), "")
    (incident,) = past.incidents("shop")
    assert (incident.holder, incident.reason) == ("settler-7", reason)
    (grant,) = past.grants("shop", "orders/42")
    assert (grant.end, grant.reason) == ("lost", reason)


def test_broken_lease_is_one_incident(past):
    past.grant(0, token=7)
    past.on("broken", 5, token=7, actor="mira", why="web hangs")
    past.on("lost", 10, token=7, reason="broken")
    (grant,) = past.grants("shop", "orders/42")
    assert (grant.end, grant.actor, grant.reason, seconds(grant.ended_at)) == ("broken", "mira", "web hangs", 5)
    (incident,) = past.incidents()
    assert (incident.kind, incident.actor, incident.reason, incident.holder) == ("broken", "mira", "web hangs", "web")


def test_end_that_was_not_seen_is_not_invented(past):
    """The release may have gone through another server."""
    past.grant(0, "web", 1)
    past.grant(5, "batch", 2)
    past.grant(90, "cron", 3)
    cron, batch, web = past.grants("shop", "orders/42")
    assert (web.end, seconds(web.ended_at)) == ("unseen", 5)
    assert (batch.end, seconds(batch.ended_at)) == ("unseen", 35)
    assert cron.end is None
    assert not past.incidents()
    past.on("renewed", 91, "batch", 2, ttl=30.0)
    assert past.grants("shop", "orders/42")[1].end is None, "a renewal proves that it lives"


def test_shared_grants_do_not_end_each_other(past):
    past.grant(0, "one", 1, mode="shared")
    past.grant(1, "two", 2, mode="shared")
    assert [grant.end for grant in past.grants("shop", "orders/42")] == [None, None]


def test_failed_renewals_are_a_time_at_risk(past):
    past.grant(0, token=1)
    past.on("renew_failed", 10, token=1, error="Unavailable")
    past.on("renew_failed", 12, token=1, error="Unavailable")
    past.on("renewed", 14, token=1, ttl=30.0)
    past.on("renew_failed", 24, token=1, error="Unavailable")
    past.on("lost", 44, token=1, reason="expired")
    (grant,) = past.grants("shop", "orders/42")
    assert [(seconds(each.began), seconds(each.ended)) for each in grant.at_risk] == [(10, 14), (24, 44)]


def test_waiter_that_gave_up_is_remembered(past):
    past.on("busy", 10, "batch", queued=True, seconds=7.0)
    past.on("busy", 11, "cron", queued=False)
    (wait,) = past.waits("shop", "orders/42")
    assert (wait.holder, seconds(wait.began), wait.outcome) == ("batch", 3, "gave up")


@pytest.mark.parametrize(
    ("at", "ended", "token"),
    [(31.0, False, 41), (29.0, False, None), (31.0, True, None)],
    ids=["over", "still-trusted", "ended-before"],
)
def test_release_of_an_expired_lease_finds_its_token(past, at, ended, token):
    claim = Claim("shop", "orders/42", "an-id", hash_id("an-id"), Holder("web"), 30.0)
    event = Event(
        "granted", "memory", "shop", "orders/42", NOW, 41, claim.fingerprint, "web", ttl=30.0, mode="exclusive"
    )
    past(event)
    if ended:
        past(event._replace(kind="released"))
    past.clock.now = NOW + at
    assert past.expired_token(claim) == token


def test_outage_is_one_incident_with_its_end(past):
    """Each worker of a server has a breaker."""
    for at, kind in [(0, "opened"), (1, "opened"), (5, "closed"), (6, "opened"), (8, "closed"), (60, "opened")]:
        past.on(f"breaker_{kind}", at, name="", namespace="")
    second, first = past.incidents("any")
    assert (first.kind, seconds(first.at), seconds(first.ended_at)) == ("engine_down", 0, 8)
    assert (seconds(second.at), second.ended_at) == (60, None)


def test_engine_without_a_leader_is_an_incident(past):
    for at, has_leader in [(0, None), (1, True), (2, False), (3, False), (4, None), (5, True)]:
        past.record_leader(has_leader, NOW + at)
    (incident,) = past.incidents()
    assert (incident.kind, seconds(incident.at), seconds(incident.ended_at)) == ("no_leader", 2, 5)


# -- bounds


def fill(past, names):
    for number in range(names):
        name, who = f"orders/{number}", f"web-{number}"
        past.grant(number, who, 1, name=name, queued=True)
        past.on("renewed", number, who, 1, name=name, ttl=30.0)
        past.on("lost", number, who, 1, name=name, reason="expired")


def test_history_of_ten_thousand_names_is_bounded(past):
    fill(past, 10_000)
    known = [number for number in range(10_000) if past.grants("shop", f"orders/{number}")]
    assert known == list(range(10_000 - limits.MAX_NAMES, 10_000)), "the latest are kept"
    assert len(past.incidents()) == limits.MAX_INCIDENTS
    assert len(probe_server.remembered_lives(past)) <= limits.MAX_GRANTS
    assert probe_server.remembered_losses(past) <= limits.MAX_HOLDERS


@pytest.mark.extended
def test_history_of_many_names_stays_below_ten_mebibytes(past):
    tracemalloc.start()
    try:
        fill(past, 10_000)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 10 * 2**20


def test_history_of_a_busy_tenant_pushes_out_none_of_another(past, monkeypatch):
    """More names, grants, holders and groups than the server keeps, each of which a quiet tenant has ten."""
    monkeypatch.setattr(statistics, "MAX_ROWS", 50)
    for number in range(10):
        name = f"kind-{'y' * number}"
        past.grant(0, f"quiet-{number}", 1, ttl=1e6, namespace="quiet", name=name)
        past.on("lost", 0, f"quiet-{number}", 1, namespace="quiet", name=name, reason="expired")
    for number in range(10_000):
        name = f"kind-{'x' * (number % 200)}/{number}"
        past.grant(1, f"busy-{number}", 1, namespace="busy", name=name)
        if number < limits.MAX_HOLDERS + 10:
            past.on("lost", 1, f"busy-{number}", 1, namespace="busy", name=name, reason="expired")
    past.on("granted", 1, "late", 1, namespace="late", seconds=0.0)
    kept = [past.grants("quiet", f"kind-{'y' * number}") for number in range(10)]
    assert all(kept)
    assert [past.losses("quiet", f"quiet-{number}") for number in range(10)] == [1] * 10
    assert probe_server.remembered_names(past) == limits.MAX_NAMES
    assert len(probe_server.remembered_lives(past)) == limits.MAX_GRANTS
    assert probe_server.remembered_lives(past).get("quiet", f"{'quiet-0':0>16}")
    assert len(past.stats("quiet", 60.0).groups) == 10
    assert sum(past.stats("late", 60.0).total.activity) == 1, "a tenant that comes later is counted, too"
    rows = probe_server.counted_rows(past)
    assert len(rows) == statistics.MAX_ROWS


def test_grants_of_a_busy_name_push_out_none_of_another_tenant(past, monkeypatch):
    monkeypatch.setattr(limits, "MAX_GRANTS", 100)
    for number in range(30):
        past.grant(number, f"quiet-{number}", 1 + number, namespace="quiet")
    for number in range(1000):
        past.grant(number, f"busy-{number}", 1 + number, namespace="busy", name=f"orders/{number % 7}")
    assert len(past.grants("quiet", "orders/42")) == 30
    counted = sum(len(past.grants("busy", f"orders/{number}")) for number in range(7))
    assert counted == 70 == probe_server.remembered_grants(past, "busy")


def test_incidents_of_one_namespace_push_out_none_of_another(past):
    past.on("lost", 0, namespace="quiet", token=1, reason="expired")
    past.on("breaker_opened", 0, name="", namespace="")
    for number in range(1000):
        past.on("lost", number, namespace="noisy", token=1, reason="expired")
    assert [each.kind for each in past.incidents("quiet")] == ["lost", "engine_down"]
    assert len(past.incidents()) == limits.MAX_INCIDENTS + 2
    for number in range(200):
        past.on("lost", 1000, namespace=f"tenant-{number}", token=1, reason="expired")
    assert probe_server.incident_namespaces(past) == limits.MAX_INCIDENT_NAMESPACES


def test_history_of_one_busy_name_is_bounded(past):
    for token in range(1, 1000):
        past.grant(token, f"web-{token}", token, queued=True)
    past.grant(1000, "last", 1000, queued=True)
    for at in range(1001, 1200):
        past.on("renewed", at, "last", 1000, ttl=30.0)
        past.on("renew_failed", at, "last", 1000)
        past.on("stale_token", at, "last", 1000, fence="sql", seen=1001)
    grants = past.grants("shop", "orders/42")
    assert len(grants) == limits.MAX_GRANTS_PER_NAME
    assert len(past.waits("shop", "orders/42")) == limits.MAX_WAITS
    assert (len(grants[0].renewals), grants[0].renewed) == (limits.MAX_RENEWALS, 199)
    assert len(grants[0].at_risk) == len(grants[0].refused) == limits.MAX_MARKS


def test_history_of_all_grants_is_bounded(past, monkeypatch):
    monkeypatch.setattr(limits, "MAX_GRANTS", 100)
    for number in range(400):
        past.grant(number, f"web-{number}", 1 + number // 20, name=f"orders/{number % 20}")
    assert 0 < sum(len(past.grants("shop", f"orders/{number}")) for number in range(20)) <= 100


# -- owners


def holding(name, who, left, token=1, state="held", **fields):
    position = 0 if state == "waiting" else None
    return Holding(
        "shop", name, state, "exclusive", "lock", 1, f"{who + name:0>16}", Holder(who), 5.0, left, token, None, position
    )


def picture(*holdings, at=0.0):
    return Picture(Snapshot("shop", NOW + at, holdings), 0.0, False)


def test_owner_that_missed_its_renewals_comes_first(past):
    """Also one that went around this server: pictures show that it stopped renewing."""
    past.observe(picture(holding("a", "direct", 30.0), holding("b", "lively", 30.0)).snapshot)
    event = Event("granted", "memory", "shop", "c", NOW, 1, f"{'suspendedc':0>16}", "suspended", ttl=30.0)
    past(event)
    now = picture(
        holding("a", "direct", 9.0),
        holding("b", "lively", 21.0),
        holding("b", "queued", 15.0, state="waiting"),
        holding("c", "suspended", 4.0),
        holding("c", "waiter", 15.0, state="waiting"),
        at=21.0,
    )
    owners = {owner.holder: owner for owner in past.owners(now)}
    assert list(owners)[:2] == ["suspended", "direct"], "the one that blocks a waiter first"
    assert [owner.quiet for owner in owners.values()] == [True, True, False, False, False]
    suspended = owners["suspended"]
    assert (suspended.holds, suspended.blocks, seconds(suspended.expires_at)) == (["c"], 1, 25.0)
    assert seconds(suspended.heard_at) == pytest.approx(-5.0)
    assert owners["queued"].waits == ["b"]
    assert owners["queued"].heard_at is None


@pytest.mark.parametrize("most", [1, 7, 20, 200])
@pytest.mark.parametrize("wanted", ["", "web-1", "none of these"])
def test_first_owners_are_those_of_the_whole_list(past, monkeypatch, most, wanted):
    """20 owners hold, three of them quietly, and 1,000 only wait: of these no more are made than are shown."""
    held = [holding(f"a/{number}", f"web-{number}", 1.0 if number % 8 == 0 else 9.0) for number in range(20)]
    past.observe(picture(*(each._replace(left=10.0) for each in held), at=0).snapshot)
    waiting = [holding(f"a/{number % 30}", f"web-{number}", 9.0, state="waiting") for number in range(1000)]
    now = picture(*held, *waiting, at=9)
    all_owners = [owner for owner in past.owners(now) if wanted in owner.holder]
    made, make = [], getattr(*probe_server.NEW_OWNER)
    monkeypatch.setattr(*probe_server.NEW_OWNER, lambda *args: made.append(args) or make(*args))
    first = past.owners(now, most, (lambda who: wanted in who[0]) if wanted else None)
    assert first == all_owners[:most]
    assert len(made) <= max(most, 20)
    if not wanted:
        assert [owner.holder for owner in first[:3]] == ["web-0", "web-8", "web-16"][:most]


def test_owner_that_shortened_its_ttl_is_not_quiet(past):
    """It went around this server: a life left that falls faster than the clock was set anew."""
    past.observe(picture(holding("a", "direct", 60.0)).snapshot)
    past.observe(picture(holding("a", "direct", 57.0), at=3.0).snapshot)
    past.observe(picture(holding("a", "direct", 9.0), at=4.0).snapshot)
    assert not past.owners(picture(holding("a", "direct", 7.0), at=6.0))[0].quiet
    assert past.owners(picture(holding("a", "direct", 2.0), at=11.0))[0].quiet


def test_owner_shows_how_many_leases_it_lost(past):
    past.grant(0, "web", 1)
    past.on("lost", 50, "web", 1, reason="expired")
    (owner,) = past.owners(picture(holding("b", "web", 30.0)))
    assert owner.lost == 1


# -- statistics


def test_statistics_count_by_outcome_path_and_group(past):
    for number in range(95):
        past.grant(number * 0.1, f"w{number}", number + 1, name=f"orders/{number}", seconds=0.002)
        past.on("released", number * 0.1 + 0.05, f"w{number}", name=f"orders/{number}")
    for number in range(5):
        past.grant(9, f"q{number}", 1, name=f"stock/{number}", queued=True, seconds=20.0)
    past.on("busy", 9, "late", name="stock/1", queued=False)
    past.on("busy", 9, "later", name="stock/1", queued=True)
    past.on("failed", 9, "unlucky", name="stock/1", error="Unavailable")
    past.on("lost", 9, "q0", 1, name="stock/0", reason="expired")
    past.clock.now = NOW + 10
    found = past.stats("shop", 60.0)
    assert found.total.counts.acquires == {
        "granted direct": 95,
        "granted queued": 5,
        "busy direct": 1,
        "timeout queued": 1,
        "unavailable direct": 1,
    }
    assert found.total.rate == pytest.approx(103 / (found.until - found.since))
    assert found.total.errors == pytest.approx(1 / 103)
    assert found.total.contention == pytest.approx(7 / 103)
    assert 0.001 < found.total.direct[1] <= 0.0025
    assert 10 < found.total.queued[0] <= 30
    assert 0.01 < found.total.held[0] <= 0.1
    assert found.total.counts.lost == {"expired": 1}
    assert [(group.group, sum(group.activity)) for group in found.groups] == [("orders/*", 95), ("stock/*", 8)]
    assert len(found.buckets) == len(found.total.activity) == 6
    assert past.stats("other", 60.0).total.counts.acquires == {}


def test_statistics_keep_an_hour(past):
    for minute in range(120):
        past.grant(minute * 60, f"w{minute}", minute + 1)
    found = past.stats("shop", 7200.0)
    assert sum(found.total.activity) == 60
    assert len(found.buckets) == statistics.BUCKETS
    assert sum(past.stats("shop", 300.0).total.activity) == 5


def test_statistics_go_on_after_the_clock_was_set_back(past):
    """They were empty until the time to which the clock had been set for a moment."""
    past.grant(86_400, "ahead", 1)
    past.grant(20, "back", 2)
    past.grant(30, "later", 3)
    found = past.stats("shop", 300.0)
    assert (sum(found.total.activity), found.total.counts.acquires) == (2, {"granted direct": 2})


def test_late_event_counts_when_it_happened(past):
    past.grant(100, "now", 2)
    past.grant(5, "late", 1)
    past.clock.now = NOW + 105
    assert [number for number, count in enumerate(past.stats("shop", 110.0).total.activity) if count] == [0, 10]


def test_statistics_of_many_groups_and_namespaces_are_bounded(past):
    for number in range(1000):
        past.grant(0, f"w{number}", 1, namespace=f"tenant-{number % 300}", name=f"kind-{'x' * (number % 50)}")
    rows = probe_server.counted_rows(past)
    assert len(rows) <= statistics.MAX_ROWS
    assert len(past.stats("tenant-1", 60.0).groups) <= statistics.MAX_GROUPS
    past.grant(2 * 3600, "new", 1, namespace="late")
    assert sum(past.stats("late", 60.0).total.activity) == 1, "what is over makes room"


def test_statistics_show_what_pictures_saw(past):
    past.observe(picture(holding("a", "one", 9.0), holding("a", "two", 9.0, state="waiting"), at=5).snapshot)
    past.clock.now = NOW + 25
    assert [(each.holding, each.waiting) for each in past.stats("shop", 30.0).buckets] == [
        (1, 1),
        (None, None),
        (None, None),
    ]


def test_quantiles_are_within_their_bucket():
    histogram = [0] * (len(ACQUIRE_BUCKETS) + 1)
    assert statistics.quantiles(histogram, ACQUIRE_BUCKETS) is None
    histogram[-1] = 1
    assert statistics.quantiles(histogram, ACQUIRE_BUCKETS) == [300.0] * 3, "above the last bound: at least that"
    histogram = [100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]
    low, high, highest = statistics.quantiles(histogram, ACQUIRE_BUCKETS)
    assert 0 < low < high <= ACQUIRE_BUCKETS[0]
    assert ACQUIRE_BUCKETS[9] < highest <= ACQUIRE_BUCKETS[10]
