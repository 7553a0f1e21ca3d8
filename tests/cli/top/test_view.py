"""The screen of `leasehold top`, without a terminal: its lines for any size, name and key."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.cli.render import width_of
from leasehold.cli.top.source import Rates, Snapshot
from leasehold.cli.top.view import Style, View, fit, rows_of
from leasehold.core.deadlocks import deadlocks
from leasehold.model import Holder, Holding

SGR = re.compile(r"\x1b\[[0-9;]*m")
CLOCK = "01:13:04"


def holding(name: str, number: int = 0, state: str = "held", holder: str = "web-3", **more) -> Holding:
    fields = {"mode": "exclusive", "kind": "lock", "limit": 1, "age": 64.0, "left": 20.0, "owner": ""} | more
    fields |= {"token": 41 + number} if state == "held" and "token" not in more else {}
    return Holding("shop", name, state, fingerprint=f"{name}{number}", holder=Holder(holder, "vm", 9), **fields)


def waiter(name: str, position: int, **more) -> Holding:
    return holding(name, 100 + position, "waiting", f"worker-{position}", position=position, token=None, **more)


def snapshot(*holdings: Holding, **more) -> Snapshot:
    ttls = {each.fingerprint: 30.0 for each in holdings}
    fields = {"ttls": ttls, "at": 100.0, "seconds": 0.001, "deadlocks": tuple(deadlocks(holdings))} | more
    return Snapshot(tuple(holdings), **fields)


BUSY = snapshot(
    holding("orders/settlement", holder="settler-2", left=9.1),
    *(waiter("orders/settlement", position) for position in range(14)),
    holding("search/reindex", holder="indexer-1", age=2472.0),
    waiter("search/reindex", 0),
    holding("billing/close-day", state="cooling"),
    holding("config/日本語の名前", mode="shared"),
    holding("config/日本語の名前", 1, mode="shared"),
    *(holding("gpu", slot, kind="semaphore", limit=3, slot=slot) for slot in range(2)),
    rates=Rates(412.0, 0.0048, 3),
)


@pytest.fixture
def view() -> View:
    return View("etcd  shop", Style(colour=False))


def plain(lines: list[str]) -> str:
    return SGR.sub("", "\n".join(lines))


def show(view: View, found: Snapshot = BUSY, width: int = 120, height: int = 24, now: float = 100.0, **more) -> str:
    return plain(view.frame(found, (width, height), now, CLOCK, **more))


def names(text: str) -> list[str]:
    """The names of the list, from top to bottom."""
    found = [re.match(r"[▲●◇◐○] (?:AT RISK|HELD|COOLING|WAITING|RESERVED) +(\S+)", line) for line in text.splitlines()]
    return [match[1] for match in found if match]


def test_list_shows_state_holder_token_times_and_queue(view):
    text = show(view, status="3/3 members")
    first, numbers, head, *lines = text.splitlines()
    assert re.fullmatch(r"leasehold top  etcd  shop +1\.0ms · 3/3 members  01:13:04  live", first)
    assert numbers == ("held 6   waiting 15   at risk 1   deadlocks 0   412.0 acquires/s   p95 4.8ms   lost in 1 h 3")
    assert head.split() == ["STATE", "NAME", "HOLDER", "TOKEN", "HELD", "LEFT", "QUEUE", "OLDEST", "WAIT"]
    rows = [" ".join(line.split()) for line in lines]
    assert rows[0] == "▲ AT RISK orders/settlement settler-2 41 1m04s 9.1s ████░░░░░░░░ 14 1m04s"
    assert rows[1] == "● HELD search/reindex indexer-1 41 41m12s 20.0s ████████░░░░ 1 1m04s"
    assert "◐ COOLING  billing/close-day    (min hold)" in text
    assert "gpu                  web-3 +1 (2 of 3)" in text
    assert lines[-1].startswith(" s sort: queue   / filter   enter detail   b blocking   d deadlocks   p pause")


@pytest.mark.parametrize("mode", ["list", "detail", "deadlocks", "help"])
@pytest.mark.parametrize("style", [Style(), Style(colour=False), Style(unicode=False)])
def test_frame_has_the_size_of_the_terminal(mode, style):
    hostile = snapshot(
        *BUSY.holdings,
        holding("\x1b[2J\nevil\u202e" + "x" * 300, holder="h\r\n\x07" + "界" * 99, token=2**53 - 1),
        rates=Rates(10**6, 123.0, 10**6),
    )
    for width in (20, 40, 59, 60, 61, 72, 80, 99, 100, 120, 200):
        for height in (6, 7, 24, 60):
            view = View("redis+sentinel  a-namespace", style, mode=mode, selected=hostile.holdings[-1].name)
            lines = view.frame(hostile, (width, height), 101.0, CLOCK, "3/3 members")
            assert len(lines) == height
            for line in map(plain, ([line] for line in lines)):
                assert line.isprintable()
                if width >= 60:
                    assert width_of(line) <= width, (width, line)


def test_style_without_unicode_is_ascii_and_without_colour_has_no_codes(view):
    assert "".join(View("x", Style(unicode=False)).frame(snapshot(holding("a")), (80, 20), 100.0, CLOCK)).isascii()
    codes = set(SGR.findall("".join(view.frame(BUSY, (80, 20), 100.0, CLOCK))))
    assert codes == {"\x1b[7m", "\x1b[0m"}  # the selected line and the last one


def test_narrow_screen_gives_up_columns_and_never_the_name(view):
    heads = [show(view, width=width).splitlines()[2].split() for width in (120, 100, 80, 60)]
    assert heads[0][-2:] == ["OLDEST", "WAIT"]
    assert "TOKEN" not in heads[-1]
    assert [head[:3] for head in heads] == [["STATE", "NAME", "HOLDER"]] * 4
    assert "orders/sett" in show(view, width=60)


def test_keys_change_the_order(view):
    assert names(show(view))[:2] == ["orders/settlement", "search/reindex"]
    orders = []
    for _ in range(4):
        view.on_key("s")
        orders.append((view.sort, names(show(view))[0]))
    assert orders == [
        ("held", "search/reindex"),
        ("left", "orders/settlement"),
        ("name", "billing/close-day"),
        ("queue", "orders/settlement"),
    ]


def test_filter_finds_names_and_holders_and_escape_clears_it(view):
    for key in ["/", *"INDEX"]:
        view.on_key(key)
    assert "filter: INDEX_" in show(view)
    view.on_key("enter")
    assert names(show(view)) == ["search/reindex"]
    view.on_key("escape")
    assert len(names(show(view))) == 5
    for key in ["/", *"worker-13", "enter"]:
        view.on_key(key)
    assert names(show(view)) == ["orders/settlement"]
    view.filter = "nothing"
    assert "no name matches: escape clears the filter" in show(view)


def test_blocking_leaves_only_names_with_holder_and_waiters(view):
    view.on_key("b")
    assert names(show(view)) == ["orders/settlement", "search/reindex"]


def test_letters_are_text_while_the_filter_is_typed(view):
    for key in ["/", *"qsbdp?", "backspace"]:
        view.on_key(key)
    assert (view.filter, view.quits, view.mode, view.paused) == ("qsbdp", False, "list", False)


def test_detail_shows_holders_queue_and_the_command_that_ends_it(view):
    show(view)
    view.on_key("enter")
    text = show(view, now=101.0)
    assert "▲ AT RISK  token 41, held 1m05s, 8.1s left  ███░░░░░░░░░" in text
    assert "settler-2  (host vm, pid 9" in text
    assert "to end it: leasehold --namespace shop break orders/settlement --token 41" in text
    assert "queue: 14" in text
    assert re.search(r" 0    1m05s  worker-0  \(host vm", text)
    assert "more" in show(view, height=16)
    view.on_key("escape")
    assert view.mode == "list"


def test_detail_of_a_name_that_is_free_again_says_so(view):
    show(view)
    view.on_key("enter")
    assert "orders/settlement has no holders and no waiters now" in show(view, snapshot(holding("other")))


def test_deadlocks_are_counted_and_shown_with_the_grant_to_break(view):
    found = snapshot(
        holding("a", holder="alice", owner="1" * 8),
        waiter("a", 0, owner="2" * 8),
        holding("b", 5, holder="bob", owner="2" * 8, age=3.0),
        waiter("b", 0, owner="1" * 8),
    )
    assert "deadlocks 1" in show(view, found)
    view.on_key("d")
    text = show(view, found)
    assert "deadlock 1: 2 waiters in a cycle" in text
    assert "to resolve it: leasehold --namespace shop break b --token 46" in text
    assert "no deadlocks" in show(view)


def test_selection_stays_with_its_name_and_on_the_screen(view):
    many = snapshot(*(holding(f"n/{number:03}", age=number) for number in range(100)))
    view.sort = "name"
    show(view, many, height=10)
    for key, expected in (
        ("end", "n/099"),
        ("up", "n/098"),
        ("page up", "n/093"),
        ("home", "n/000"),
        ("down", "n/001"),
    ):
        view.on_key(key)
        text = show(view, many, height=10)
        assert view.selected == expected
        assert expected in names(text)
    view.on_key("s")  # by queue: all have none, so by name
    view.on_key("s")  # by time held
    assert "n/001" in names(show(view, many, height=10))
    assert view.selected == "n/001"
    without = replace(many, holdings=many.holdings[5:])
    show(view, without, height=10)
    assert view.selected == "n/099"


def test_lease_is_at_risk_by_what_the_engine_said_not_by_a_stale_answer(view):
    """After an answer that is 25 s old, nothing is known about renewals since."""
    found = snapshot(holding("a", left=20.0))
    text = show(view, found, now=125.0)
    assert "● HELD" in text
    assert "0.0s" in text
    assert "▲ AT RISK" in show(view, snapshot(holding("a", left=9.9)))


@pytest.mark.parametrize(
    ("changes", "now", "shown"),
    [
        ({}, 100.4, "live"),
        ({}, 104.0, "stale 4.0s"),
        ({"stale": True}, 100.4, "stale 0.4s"),
        ({"error": "no reply"}, 101.0, "stale 1.0s"),
        ({"error": "no reply", "seconds": None}, 101.0, "no answer"),
        ({"seconds": None}, 101.0, "connecting"),
    ],
)
def test_head_says_how_fresh_the_answer_is(view, changes, now, shown):
    text = show(view, replace(BUSY, **changes), now=now)
    assert text.splitlines()[0].endswith(f"  {shown}")
    if "error" in changes:
        assert text.splitlines()[1].strip() == "no reply"


def test_every_key_is_in_the_help(view):
    view.on_key("?")
    text = show(view)
    for key in ("up down", "enter", "  s ", "  / ", "  b ", "  d ", "  p ", "  q "):
        assert key in text
    view.on_key("p")
    assert show(view).splitlines()[0].endswith("paused")


@given(st.text(max_size=40), st.integers(1, 30), st.booleans())
def test_fitted_text_has_exactly_its_columns(text, width, right):
    fitted = fit(text, width, right)
    assert width_of(fitted) in (width, width - 1)  # a wide character may leave one column
    assert fitted.isprintable()


def test_ten_thousand_waiters_are_one_row(view):
    found = snapshot(holding("a"), *(waiter("a", position) for position in range(10_000)))
    (row,) = rows_of(found, 100.0)
    assert len(row.queue) == 10_000
    assert "10,000" in show(view, found)
