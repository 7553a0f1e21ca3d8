"""Schedules with cron expressions: time zones, the days on which clocks are changed, and wrong expressions."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import leasehold
from leasehold import Client, ConfigError
from leasehold.records.cron import make_cron_ticks
from tests.support import probe_records

BERLIN = "Europe/Berlin"
# A day before a change of the clocks: by an hour, by half an hour, at midnight, by a whole day.
CHANGES = {
    BERLIN: ["2026-03-28", "2026-10-24"],
    "Australia/Lord_Howe": ["2026-04-04", "2026-10-03"],
    "America/Sao_Paulo": ["2018-02-17", "2018-11-03"],
    "Pacific/Apia": ["2011-12-29"],
}


def make_ticks(cron, tz=None, missed="all", late=None, most=100):
    return make_cron_ticks(cron, tz, missed, late, most)


def moment(text: str, zone: str = BERLIN) -> int:
    """A local time; `b` at its end: when clocks show it for the second time."""
    return int(
        datetime.fromisoformat(text.removesuffix("b")).replace(tzinfo=ZoneInfo(zone), fold=text[-1] == "b").timestamp()
    )


def ticks_after(cron: str, zone: str, start: int, count: int) -> list[int]:
    return list(islice(probe_records.tick_times(make_ticks(cron, zone), start), count))


@pytest.mark.parametrize(
    ("cron", "zone", "begin", "expected"),
    [
        pytest.param(
            "0 0 * * *", BERLIN, "2026-03-28T12:00", ["2026-03-29T00:00", "2026-03-30T00:00"], id="midnight, 23 h"
        ),
        pytest.param(
            "0 0 * * *", BERLIN, "2026-10-24T12:00", ["2026-10-25T00:00", "2026-10-26T00:00"], id="midnight, 25 h"
        ),
        pytest.param("30 2 * * *", BERLIN, "2026-03-28T12:00", ["2026-03-29T03:00", "2026-03-30T02:30"], id="skipped"),
        pytest.param(
            "0,30 2,3 * * *",
            BERLIN,
            "2026-03-29T01:00",
            ["2026-03-29T03:00", "2026-03-29T03:30", "2026-03-30T02:00"],
            id="skipped and at the change",
        ),
        pytest.param("30 2 * * *", BERLIN, "2026-10-24T12:00", ["2026-10-25T02:30", "2026-10-26T02:30"], id="doubled"),
        pytest.param(
            "30 * * * *",
            BERLIN,
            "2026-03-29T00:45",
            ["2026-03-29T01:30", "2026-03-29T03:30"],
            id="hourly over the skipped hour",
        ),
        pytest.param(
            "30 * * * *",
            BERLIN,
            "2026-10-25T01:45",
            ["2026-10-25T02:30", "2026-10-25T02:30b", "2026-10-25T03:30"],
            id="hourly in the doubled hour",
        ),
        pytest.param(
            "*/30 2 * * *",
            BERLIN,
            "2026-03-28T12:00",
            ["2026-03-30T02:00", "2026-03-30T02:30"],
            id="repeated, hour skipped",
        ),
        pytest.param(
            "0 0 * * *",
            "America/Sao_Paulo",
            "2018-11-03T12:00",
            ["2018-11-04T01:00", "2018-11-05T00:00"],
            id="midnight skipped",
        ),
        pytest.param(
            "15 2 * * *",
            "Australia/Lord_Howe",
            "2026-10-03T12:00",
            ["2026-10-04T02:30", "2026-10-05T02:15"],
            id="half an hour",
        ),
        pytest.param(
            "0 9 * * *",
            "Pacific/Apia",
            "2011-12-29T12:00",
            ["2011-12-31T00:00", "2011-12-31T09:00"],
            id="a day skipped",
        ),
        pytest.param("0 9 29 2 *", BERLIN, "2026-01-01T00:00", ["2028-02-29T09:00", "2032-02-29T09:00"], id="leap day"),
        pytest.param(
            "0 9 * * 1#1", BERLIN, "2026-01-01T00:00", ["2026-01-05T09:00", "2026-02-02T09:00"], id="first Monday"
        ),
        pytest.param("@daily", "UTC", "2026-01-01T00:00", ["2026-01-02T00:00", "2026-01-03T00:00"], id="alias"),
    ],
)
def test_cron_ticks_follow_local_clocks(cron, zone, begin, expected):
    assert ticks_after(cron, zone, moment(begin, zone), len(expected)) == [moment(text, zone) for text in expected]


@cache
def local_minutes(zone: str, begin: datetime) -> list[tuple[int, datetime]]:
    """Every minute of three days, and what clocks show then."""
    first = int(begin.replace(tzinfo=ZoneInfo(zone)).timestamp())
    seconds = range(first, first + 3 * 86_400, 60)
    return [(at, datetime.fromtimestamp(at, ZoneInfo(zone)).replace(tzinfo=None, fold=0)) for at in seconds]


def expected_ticks(minutes: set[int], hours: set[int] | None, zone: str, begin: datetime) -> list[int]:
    """When clocks show a time that matches: without `hours` each time, otherwise once, also if they skip it."""
    found, reached = [], begin - timedelta(minutes=1)
    for second, local in local_minutes(zone, begin):
        passed = [local]
        if hours is not None:
            passed = [reached + timedelta(minutes=n + 1) for n in range((local - reached) // timedelta(minutes=1))]
            reached = max(reached, local)
        if any(time.minute in minutes and (hours is None or time.hour in hours) for time in passed):
            found.append(second)
    return found


@settings(max_examples=30)
@given(st.data())
def test_cron_ticks_match_a_search_of_every_minute(data):
    zone = data.draw(st.sampled_from(sorted(CHANGES)))
    begin = datetime.fromisoformat(data.draw(st.sampled_from(CHANGES[zone])))
    minutes = data.draw(st.sets(st.integers(0, 59), min_size=1, max_size=3))
    hours = data.draw(st.one_of(st.none(), st.sets(st.sampled_from([0, 1, 2, 3, 4, 12, 23]), min_size=1, max_size=4)))
    cron = f"{','.join(map(str, minutes))} {'*' if hours is None else ','.join(map(str, hours))} * * *"
    expected = expected_ticks(minutes, hours, zone, begin)
    ticks = make_ticks(cron, zone)
    first = int(begin.replace(tzinfo=ZoneInfo(zone)).timestamp())
    assert list(islice(probe_records.tick_times(ticks, first - 1), len(expected))) == expected
    index = data.draw(st.integers(1, len(expected) - 1))
    now = data.draw(st.integers(expected[index - 1], expected[index] - 1)) + data.draw(st.sampled_from([0.0, 0.5]))
    fresh = make_ticks(cron, zone, most=3)
    assert fresh.current_number(now) == expected[index - 1]
    assert fresh.next_time(now) == expected[index]
    assert list(fresh.latest(now, -1))[-index:] == expected[:index][-3:]


def test_catching_up_looks_back_no_further_than_needed():
    ticks = make_ticks("* * * * *", BERLIN, most=3)
    now = moment("2026-07-01T12:00:30")
    assert list(ticks.latest(now, 0)) == [now - 150, now - 90, now - 30]  # not through fifty years of minutes
    assert list(ticks.latest(now, now - 90)) == [now - 30]
    assert list(ticks.latest(now, now + 30)) == []  # another machine's clock is ahead


@pytest.mark.parametrize(
    ("cron", "missed", "days"), [("0 9 * * *", "skip", 1.5), ("0 9 * * *", "all", 101.5), ("0 9 1 1 *", "all", 3660)]
)
def test_records_of_ticks_outlive_the_time_they_are_due(cron, missed, days):
    due = make_ticks(cron, missed=missed).due_for(moment("2026-01-01T09:00", "UTC")) / 86_400
    assert days <= due < days * 1.3


def test_midnight_job_gets_its_tick_in_local_time(add_client):
    ran = []
    clients = [add_client(moment("2026-10-24T23:59:58") + skew) for skew in (2, -2, 0)]
    jobs = [client.schedule("job", cron="0 0 * * *", tz=BERLIN, store=store) for client, _, store in clients]
    for _ in range(50):
        for (_, clock, _), job in zip(clients, jobs, strict=True):
            job.run_due(lambda tick: ran.append(tick))
            clock.at += 3600
    assert [tick.isoformat() for tick in ran] == [
        "2026-10-25T00:00:00+02:00",
        "2026-10-26T00:00:00+01:00",
        "2026-10-27T00:00:00+01:00",
    ]
    assert repr(jobs[0]) == "<Schedule job at '0 0 * * *' (Europe/Berlin)>"


@pytest.mark.parametrize(("missed", "ran"), [("skip", []), ("last", [25]), ("all", [23, 24, 25])])
def test_missed_cron_ticks_run_according_to_missed_option(add_client, missed, ran):
    client, clock, store = add_client(moment("2026-10-22T00:00"))
    options = {"cron": "0 0 * * *", "tz": ZoneInfo(BERLIN), "missed": missed, "late": 3600, "store": store}
    assert len(client.schedule("job", **options).run_due(lambda: None)) == 1
    clock.at = moment("2026-10-25T18:00")
    assert [tick.day for tick in client.schedule("job", **options).run_due(lambda: None)] == ran


@pytest.mark.parametrize("before", [{"every": 60}, {"cron": "* * * * *"}, {"every": 86_400}, {"cron": "0 0 * * *"}])
@pytest.mark.parametrize("after", [{"every": 60}, {"cron": "* * * * *"}, {"every": 86_400}, {"cron": "0 0 * * *"}])
def test_schedule_with_changed_times_goes_on_from_its_last_tick(add_client, before, after):
    client, clock, store = add_client(moment("2026-10-22T00:00", "UTC"))
    assert len(client.schedule("job", **before, missed="all", most=5, store=store).run_due(lambda: None)) == 1
    changed = client.schedule("job", **after, missed="all", most=5, store=store)
    assert changed.run_due(lambda: None) == []
    clock.at += 2 * 86_400
    ran = changed.run_due(lambda: None)
    assert len(ran) == (2 if "0 0" in str(after) or "86" in str(after) else 5)
    assert ran[-1] == datetime(2026, 10, 24, tzinfo=UTC)


def test_async_schedule_takes_cron_expressions():
    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            job = client.schedule("job", cron="* * * * *", tz=BERLIN, missed="last", late=61)
            await asyncio.wait_for(job.run(lambda tick: (ran.append(tick), job.stop())), 120)

    ran = []
    asyncio.run(main())
    assert (len(ran), ran[0].second, ran[0].tzinfo) == (1, 0, ZoneInfo(BERLIN))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass either every=SECONDS or cron="),
        ({"every": 60, "cron": "0 0 * * *"}, "pass either every=SECONDS or cron="),
        ({"every": 60, "tz": BERLIN}, "tz goes with cron"),
        ({"cron": "0 0 * * *", "offset": 3600}, "offset goes with every"),
        ({"cron": "61 * * * *"}, "'61 .*' is not valid: Bad minute; write one such as"),
        ({"cron": "0 0 * *"}, "must have five fields"),
        ({"cron": "* * * * * *"}, "must have five fields"),
        ({"cron": "@reboot"}, "must have five fields"),
        ({"cron": 5}, "must be a string"),
        ({"cron": "0 0 31 2 *"}, "is not valid: Bad day-of-month"),
        ({"cron": "0 0 * * *", "tz": "Berlin"}, "time zone 'Berlin' is not known here: pass a name such as"),
        ({"cron": "0 0 * * *", "tz": "../passwd"}, "is not known here"),
        ({"cron": "0 0 * * *", "tz": 3}, "is not known here"),
        ({"cron": "0 0 * * *", "late": 0}, "late"),
    ],
)
def test_invalid_cron_options_are_refused_when_built(options, message):
    with Client("memory://") as client, pytest.raises(ConfigError, match=message):
        client.schedule("job", **options)


def test_cron_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    monkeypatch.delitem(sys.modules, "leasehold.records.cron")
    with Client("memory://") as client, pytest.raises(ConfigError, match=r'pip install "leasehold\[cron\]"'):
        client.schedule("job", cron="0 0 * * *")
