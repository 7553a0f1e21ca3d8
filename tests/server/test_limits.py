"""What a server refuses under load, and in which order."""

import asyncio

import pytest

from leasehold.server.auth import ANYONE, Caller
from leasehold.server.limits import MAX_BEGUN, MAX_LISTS, MAX_UNDER_WAY, Bodies, CountedConnection, Limits
from leasehold.server.problems import ServerOverloaded, TooMany
from leasehold.server.settings import LimitSettings
from tests.support import probe_server

WEB, CRON = Caller("web", ()), Caller("cron", ())


def fill(limits, count, kind="renew"):
    return [limits.call(ANYONE, kind) for _ in range(count)]


@pytest.mark.parametrize(
    ("under_way", "refused"),
    [
        (7, set()),
        (8, {"attempt"}),
        (9, {"attempt", "read"}),
        (10, {"attempt", "read", "release"}),
        (1000, {"attempt", "read", "release"}),
    ],
)
def test_attempts_are_refused_first_and_renewals_never(under_way, refused):
    limits = Limits(LimitSettings(calls=10))
    fill(limits, under_way)
    for kind in ("attempt", "read", "release", "renew"):
        if kind in refused:
            with pytest.raises(ServerOverloaded) as error:
                limits.call(WEB, kind)
            assert error.value.status == 503
            assert error.value.fields["done"] is False
            assert error.value.retry_after
        else:
            limits.call(WEB, kind).end()
    assert limits.calls == under_way


def test_renewals_of_one_key_do_not_have_the_attempts_of_others_refused():
    """Any key could keep all others from new locks, and from releases, with renewals of leases that it did not have."""
    limits = Limits(LimitSettings(calls=10, calls_per_key=5))
    renewals = [limits.call(WEB, "renew") for _ in range(1000)]
    limits.call(CRON, "release").end()
    attempts = [limits.call(CRON, "attempt") for _ in range(3)]
    with pytest.raises(ServerOverloaded):
        limits.call(CRON, "attempt")
    for each in renewals[:996]:
        each.end()
    attempts.append(limits.call(CRON, "attempt"))
    with pytest.raises(ServerOverloaded):
        limits.call(CRON, "attempt")
    for each in (*renewals, *attempts):
        each.end()
    assert (limits.calls, probe_server.shared_calls(limits)) == (0, (0, {}))


def test_one_call_is_admitted_when_the_limit_is_one():
    limits = Limits(LimitSettings(calls=1))
    with limits.call(WEB, "attempt"), pytest.raises(ServerOverloaded):
        limits.call(CRON, "attempt")
    limits.call(CRON, "attempt").end()


def test_call_that_fails_is_no_longer_counted():
    limits = Limits(LimitSettings())
    with pytest.raises(ZeroDivisionError), limits.call(WEB, "attempt", "shop", "x"):
        raise ZeroDivisionError
    assert limits.calls == 0
    assert probe_server.counted_calls(limits) == 0, "nothing is kept for a name without calls"


def test_connection_is_counted_for_the_key_that_uses_it():
    limits = Limits(LimitSettings(connections_per_key=1))
    first, second = CountedConnection(), CountedConnection()
    assert [limits.connection(WEB, first), limits.connection(WEB, first)] == [True, True]
    assert limits.connection(WEB, second) is False
    assert limits.connection(CRON, first), "a proxy may use it for another caller"
    assert limits.connection(WEB, second)
    for connection in (first, second, second):
        connection.end()
    assert probe_server.counted_connections(limits) == {}, "nothing is kept for a key without connections"
    assert all(limits.connection(ANYONE, CountedConnection()) for _ in range(3))
    assert limits.refused == {"connections_per_key": 1}


def test_connection_above_the_limit_of_its_key_is_not_admitted():
    """Else its key could keep it with a body that never ends. It may have been counted for another key before."""
    limits = Limits(LimitSettings(connections_per_key=1))
    first, second, third = CountedConnection(), CountedConnection(), CountedConnection()
    assert limits.connection(WEB, first)
    assert not limits.connection(WEB, second)
    assert limits.connection(CRON, third)
    assert not limits.connection(WEB, third)
    assert [each.is_admitted for each in (first, second, third)] == [True, False, True]
    assert third.who == "cron", "it stays open, so it still counts for a key"
    assert not limits.connection(CRON, second)


def test_waiters_of_all_callers_are_limited():
    limits = Limits(LimitSettings(waiters=2))
    first, _ = limits.waiter(WEB), limits.waiter(CRON)
    with pytest.raises(ServerOverloaded) as error:
        limits.waiter(ANYONE)
    assert (error.value.status, error.value.kind, error.value.fields) == (503, "overloaded", {"done": False})
    first.end()
    first.end()
    assert limits.waiters == 1, "an end that is repeated counts once"
    limits.waiter(ANYONE)
    with pytest.raises(ServerOverloaded):
        limits.waiter(ANYONE)


def test_waiters_per_key_leave_room_for_other_keys():
    limits = Limits(LimitSettings(waiters_per_key=2))
    waiting = [limits.waiter(WEB, "", str(n)) for n in range(2)]
    with pytest.raises(TooMany) as error:
        limits.waiter(WEB, "", "x")
    assert (error.value.status, error.value.kind) == (429, "too-many")
    assert error.value.retry_after
    limits.waiter(CRON)
    waiting[0].end()
    limits.waiter(WEB)


def test_waiters_of_anyone_have_no_limit_per_key():
    limits = Limits(LimitSettings(waiters_per_key=1))
    for n in range(5):
        limits.waiter(ANYONE, "", str(n))


def test_limit_per_key_is_reported_before_the_limit_of_all():
    limits = Limits(LimitSettings(waiters=1, waiters_per_key=1))
    limits.waiter(WEB)
    with pytest.raises(TooMany):
        limits.waiter(WEB)
    with pytest.raises(ServerOverloaded):
        limits.waiter(CRON)


@pytest.mark.parametrize("what", ["calls", "waiters"])
@pytest.mark.parametrize(
    ("per", "same", "other"), [("name", ("s", "a"), ("s", "b")), ("namespace", ("s", "c"), ("t", "a"))]
)
def test_bulkhead_of_name_and_namespace_leaves_room_for_others(what, per, same, other):
    limits = Limits(LimitSettings(**{f"{what}_per_{per}": 2}))

    def enter(namespace, name):
        return limits.call(WEB, "attempt", namespace, name) if what == "calls" else limits.waiter(WEB, namespace, name)

    entered = [enter("s", "a") for _ in range(2)]
    with pytest.raises(ServerOverloaded, match=f"this {per} has 2 {what}"):
        enter(*same)
    enter(*other).end()
    entered[0].end()
    enter(*same).end()
    assert limits.refused == {f"{what}_per_{per}": 1}


def test_bulkhead_of_key_applies_to_attempts_and_reads_only():
    limits = Limits(LimitSettings(calls_per_key=1))
    limits.call(WEB, "attempt", "", "x")
    for kind in ("attempt", "read"):
        with pytest.raises(TooMany):
            limits.call(WEB, kind, "", "y")
    for kind in ("release", "renew"):
        limits.call(WEB, kind, "", "x").end()
    limits.call(CRON, "attempt", "", "x").end()


def test_call_about_no_namespace_counts_for_its_key_only():
    """A key without rights in the default namespace must not use up the calls of that namespace."""
    limits = Limits(LimitSettings(calls_per_key=2, calls_per_namespace=2))
    for _ in range(2):
        limits.call(WEB, "read")
    with pytest.raises(TooMany):
        limits.call(WEB, "read")
    limits.call(CRON, "attempt", "", "orders/42")


def test_zero_means_no_bulkhead():
    zero = {f"{what}_per_{per}": 0 for what in ("calls", "waiters") for per in ("key", "name", "namespace")}
    limits = Limits(LimitSettings(**zero))
    for _ in range(1500):
        limits.call(WEB, "attempt", "", "x")
        limits.waiter(WEB, "", "x")
    assert (limits.calls, limits.waiters) == (1500, 1500)


def test_refused_waiter_leaves_no_count_behind():
    limits = Limits(LimitSettings(waiters=0))
    with pytest.raises(ServerOverloaded):
        limits.waiter(WEB, "s", "x")
    assert probe_server.counted_waiters(limits) == 0
    assert limits.waiters == 0


# -- bodies


def test_bodies_of_one_caller_leave_room_for_those_of_others():
    """Else one key, or a stranger without one, could have the renewals of all others refused."""
    limits, bodies = Limits(LimitSettings()), Bodies(100, 40, 0)
    strangers, web, cron = CountedConnection(bodies), CountedConnection(bodies), CountedConnection(bodies)
    strangers.keep_body(40)
    assert not CountedConnection(bodies).has_room(1), "all callers that are not known yet count together"
    limits.connection(WEB, web)
    web.keep_body(40)
    limits.connection(CRON, cron)
    assert (web.has_room(1), cron.has_room(20), cron.has_room(21)) == (False, True, False)
    strangers.drop_bodies()
    assert cron.has_room(40)
    web.drop_bodies()
    assert (bodies.bytes, probe_server.bytes_by_caller(bodies)) == (0, {})


def test_bodies_of_many_callers_leave_room_for_the_renewals_of_others():
    """Four keys of one team could have the renewals of all others refused."""
    limits, bodies = Limits(LimitSettings()), Bodies(100, 25, 10)
    team = [CountedConnection(bodies) for _ in range(4)]
    for number, each in enumerate(team):
        limits.connection(Caller(f"team-{number}", ()), each)
        each.keep_body(25)
    cron, new = CountedConnection(bodies), CountedConnection(bodies)
    limits.connection(CRON, cron)
    assert (cron.has_room(10), cron.has_room(11), team[0].has_room(1)) == (True, False, False)
    cron.keep_body(10)
    assert not cron.has_room(1)
    assert (new.has_room(25), new.has_room(26)) == (True, False), "a new connection has shown no key yet"
    anyone = CountedConnection(bodies)
    limits.connection(ANYONE, anyone)
    assert not anyone.has_room(1)


def test_body_that_came_before_its_caller_was_known_counts_for_the_caller():
    limits, bodies = Limits(LimitSettings(connections_per_key=0)), Bodies(100, 40)
    web, anyone = CountedConnection(bodies), CountedConnection(bodies)
    web.keep_body(40)
    limits.connection(WEB, web)
    anyone.keep_body(40)
    limits.connection(ANYONE, anyone)
    assert CountedConnection(bodies).has_room(20)
    assert not web.has_room(1)
    assert anyone.has_room(20), "without authentication there are no limits per caller"
    anyone.drop_bodies()
    assert bodies.bytes == 40


# -- lists of locks


def test_lists_of_one_caller_wait_for_each_other_and_not_those_of_others():
    limits = Limits(LimitSettings())
    under_way = {WEB: 0, CRON: 0}
    most = dict(under_way)

    async def list_locks(caller):
        async with limits.listing(caller, 60):
            under_way[caller] += 1
            most[caller] = max(most[caller], under_way[caller])
            await asyncio.sleep(0)
            under_way[caller] -= 1

    async def many():
        await asyncio.gather(*(list_locks(caller) for caller in [WEB] * 10 + [CRON]))

    asyncio.run(many())
    assert most == {WEB: MAX_LISTS, CRON: 1}
    assert not probe_server.has_list(limits, WEB.who), "nothing is kept for a caller without lists"


def test_list_that_does_not_get_its_turn_in_time_is_too_many():
    limits = Limits(LimitSettings())

    async def one_too_many():
        async with limits.listing(WEB, 60), limits.listing(WEB, 60):
            with pytest.raises(TooMany):
                async with limits.listing(WEB, 0.01):
                    pass
            async with limits.listing(CRON, 0.01):
                pass

    asyncio.run(one_too_many())
    assert limits.refused == {"lists_per_key": 1}
    assert not probe_server.has_list(limits, WEB.who)


# -- batches of calls


def test_few_calls_of_one_caller_begin_in_one_turn_of_the_loop():
    limits = Limits(LimitSettings())
    begun = {WEB: 0, CRON: 0}

    async def send(caller, calls, claims):
        async with limits.batch(caller, 60) as begin:
            for _ in range(calls):
                await begin(claims)
                begun[caller] += 1

    async def many():
        batches = asyncio.gather(*[send(WEB, 500, 1) for _ in range(10)], send(CRON, 10, 500))
        turns = 0
        while not batches.done():
            before, turns = dict(begun), turns + 1
            await asyncio.sleep(0)
            assert begun[WEB] - before[WEB] <= 2 * MAX_BEGUN, "this test counts turns of its own"
            assert begun[CRON] - before[CRON] <= 2, "a call with many claims has a turn of its own"
        return turns

    assert asyncio.run(many()) > 5000 / (2 * MAX_BEGUN)
    assert begun == {WEB: 5000, CRON: 10}
    assert not probe_server.has_batch(limits, WEB.who), "nothing is kept for a caller without batches"


def test_batch_that_does_not_begin_in_time_is_too_many():
    limits = Limits(LimitSettings())

    async def one_too_many():
        async with limits.batch(WEB, 60):
            with pytest.raises(TooMany):
                async with limits.batch(WEB, 0.01):
                    pass
            async with limits.batch(CRON, 60) as begin:
                await begin(1)

    asyncio.run(one_too_many())
    assert limits.refused == {"batches_per_key": 1}


def test_claims_of_one_caller_under_way_are_bounded():
    """One key's batches took gigabytes while an engine did not answer."""
    limits = Limits(LimitSettings())
    begun = {WEB: 0, CRON: 0, ANYONE: 0}

    async def send(caller, seconds, claims):
        for _ in range(10):
            async with limits.batch(caller, seconds) as begin:
                await begin(claims)
            limits.begun(caller, claims)
            begun[caller] += claims

    async def many():
        waiting = asyncio.create_task(send(WEB, None, MAX_UNDER_WAY // 2))
        with pytest.raises(TooMany):
            await asyncio.create_task(send(CRON, 0.01, MAX_UNDER_WAY))
        await send(ANYONE, 0.01, MAX_UNDER_WAY)
        assert begun == {WEB: MAX_UNDER_WAY, CRON: MAX_UNDER_WAY, ANYONE: 10 * MAX_UNDER_WAY}
        limits.ended(CRON, MAX_UNDER_WAY)
        async with limits.batch(CRON, 0.01) as begin:
            await begin(1)
        while not waiting.done():
            if begun[WEB] > ended[WEB]:
                limits.ended(WEB, MAX_UNDER_WAY // 2)
                ended[WEB] += MAX_UNDER_WAY // 2
            await asyncio.sleep(0)
            assert begun[WEB] - ended[WEB] <= MAX_UNDER_WAY
        limits.ended(WEB, begun[WEB] - ended[WEB])

    ended = {WEB: 0}
    asyncio.run(many())
    assert begun[WEB] == 5 * MAX_UNDER_WAY
    assert not probe_server.has_batch(limits, WEB.who)
