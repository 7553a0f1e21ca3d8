"""The pure parts: where options end, how seconds look, what counts as a change."""

import pytest

from leasehold.cli import show
from leasehold.cli.run import Running, run
from leasehold.cli.watch import Seen, compare
from leasehold.errors import NotAcquired
from leasehold.model import Holder, Holding


def holding(state="held", token=1, fingerprint="f", **more):
    facts = {"namespace": "", "name": "j", "mode": "exclusive", "kind": "lock", "limit": 1, "age": 1.0, "left": 2.0}
    return Holding(state=state, token=token, fingerprint=fingerprint, holder=Holder("web-3"), **{**facts, **more})


def picture(*holdings):
    return {(one.name, one.fingerprint): one for one in holdings}


@pytest.mark.parametrize(
    ("words", "head", "command"),
    [
        ("j cmd -n", "j", "cmd -n"),
        ("j -- -n", "j", "-n"),
        ("-w 5 j cmd", "-w 5 j", "cmd"),
        ("-nw 5 j cmd", "-nw 5 j", "cmd"),
        ("-w5 j cmd", "-w5 j", "cmd"),
        ("--wait 5 j cmd", "--wait 5 j", "cmd"),
        ("--wait=5 j cmd", "--wait=5 j", "cmd"),
        ("j -o json cmd", "j -o json", "cmd"),
        ("-vv j cmd", "-vv j", "cmd"),
        ("j", "j", ""),
        ("", "", ""),
    ],
)
def test_where_the_command_begins(words, head, command):
    assert run._split(words.split()) == (head.split(), command.split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (12.34, "12.3s"), (192, "3m12s"), (3600, "1h00m"), (18180, "5h03m"), (187_200, "2d04h")],
)
def test_seconds_for_people(seconds, text):
    assert show.duration(seconds) == text


def test_ends_are_told_before_beginnings():
    old, new, same = holding(token=1, fingerprint="a"), holding(token=2, fingerprint="b"), holding(fingerprint="c")
    later = holding(fingerprint="c", age=9.0, left=1.0)
    assert list(compare(picture(old, same), picture(new, later))) == [Seen("gone", old), Seen("appeared", new)]


def test_a_waiter_that_is_granted_has_changed():
    waiting, held = holding("waiting", None), holding("held", 4)
    assert list(compare(picture(waiting), picture(held))) == [Seen("changed", held)]
    assert list(compare(None, picture(held))) == [Seen("present", held)]


@pytest.mark.parametrize(
    ("running", "granted", "grace"),
    [
        (Running(30, None, "term", None), 30, 5),
        (Running(6, None, "term", None), 6, 2),
        (Running(30, None, "term", 10), 30, 10),
        (Running(30, None, "term", 10), 15, 5),  # a session engine granted less than was asked
        (Running(30, 3, "term", None), 30, 1),
        (Running(30, None, "term", 0), 30, 0),
    ],
)
def test_between_term_and_kill(running, granted, grace):
    assert running.grace(granted) == grace


def test_a_busy_name_tells_all_that_is_known():
    busy = NotAcquired("j", holder=Holder("web-3", "vm", 7, "nightly"), token=41, left=12.41)
    assert show.busy_text(busy) == "j is held by web-3 (pid 7 on vm, nightly, token 41, 12.4 s left)"
    assert show.busy_text(NotAcquired("j")) == "j is not free"
