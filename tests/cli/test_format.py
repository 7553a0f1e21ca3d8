"""The pure parts: where options end, how durations are formatted, what counts as a change."""

import pytest

from leasehold.cli import render
from leasehold.cli.run.job import RunOptions
from leasehold.cli.watch import HoldingChange, compare
from leasehold.errors import NotAcquired
from leasehold.model import Holder, Holding
from tests.support import probe_cli


def holding(state="held", token=1, fingerprint="f", **overrides):
    facts = {"namespace": "", "name": "j", "mode": "exclusive", "kind": "lock", "limit": 1, "age": 1.0, "left": 2.0}
    return Holding(state=state, token=token, fingerprint=fingerprint, holder=Holder("web-3"), **{**facts, **overrides})


def snapshot(*holdings):
    return {(entry.name, entry.fingerprint): entry for entry in holdings}


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
def test_run_splits_options_from_the_command(words, head, command):
    assert probe_cli.split_arguments(words.split()) == (head.split(), command.split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (12.34, "12.3s"), (192, "3m12s"), (3600, "1h00m"), (18180, "5h03m"), (187_200, "2d04h")],
)
def test_duration_is_formatted_with_its_unit(seconds, text):
    assert render.duration(seconds) == text


def test_compare_reports_gone_holdings_before_new_ones():
    old, new, same = holding(token=1, fingerprint="a"), holding(token=2, fingerprint="b"), holding(fingerprint="c")
    later = holding(fingerprint="c", age=9.0, left=1.0)
    assert list(compare(snapshot(old, same), snapshot(new, later))) == [
        HoldingChange("gone", old),
        HoldingChange("appeared", new),
    ]


def test_compare_reports_granted_waiter_as_changed():
    waiting, held = holding("waiting", None), holding("held", 4)
    assert list(compare(snapshot(waiting), snapshot(held))) == [HoldingChange("changed", held)]
    assert list(compare(None, snapshot(held))) == [HoldingChange("present", held)]


@pytest.mark.parametrize(
    ("running", "granted", "grace"),
    [
        (RunOptions(30, None, "term", None), 30, 5),
        (RunOptions(6, None, "term", None), 6, 2),
        (RunOptions(30, None, "term", 10), 30, 10),
        (RunOptions(30, None, "term", 10), 15, 5),  # a session engine granted less than --ttl
        (RunOptions(30, 3, "term", None), 30, 1),
        (RunOptions(30, None, "term", 0), 30, 0),
    ],
)
def test_grace_between_term_and_kill_is_bounded_by_the_grant(running, granted, grace):
    assert running.grace(granted) == grace


def test_busy_text_has_all_known_details_of_the_holder():
    busy = NotAcquired("j", holder=Holder("web-3", "vm", 7, "nightly"), token=41, left=12.41)
    assert render.busy_text(busy) == "j is held by web-3 (pid 7 on vm, nightly, token 41, 12.4 s left unless renewed)"
    assert render.busy_text(NotAcquired("j")) == "j is not free"
