"""Log lines of locks: what is logged at which level, and their JSON."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from leasehold import Event, NotAcquired, StaleToken, fences, log_lines, tracing
from leasehold.events import EventKind
from leasehold.telemetry import JSONFormatter

LEASE = "0123456789abcdef"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def lines(caplog):
    """The lines of logger `leasehold`: (level, event, message)."""
    caplog.set_level(logging.DEBUG, logger="leasehold")

    def read():
        found = [record for record in caplog.records if hasattr(record, "leasehold")]
        return [(record.levelname, record.leasehold["event"], record.getMessage()) for record in found]

    return read


def test_acquire_and_release_are_logged_at_debug_without_a_hook(bench, lines):
    lease = bench.client(holder="web-3").lock("orders/42").acquire()
    with pytest.raises(NotAcquired):
        bench.client().lock("orders/42", wait=0).acquire()
    lease.release()
    found = lines()
    assert [(level, event) for level, event, _ in found] == [
        ("DEBUG", "attempted"),
        ("DEBUG", "granted"),
        ("DEBUG", "attempted"),
        ("DEBUG", "busy"),
        ("DEBUG", "released"),
    ]
    texts = [text for _, _, text in found]
    assert texts[0] == f"acquiring orders/42 ({lease.fingerprint})"
    assert texts[1] == f"acquired orders/42 (token {lease.token}, {lease.fingerprint}) after 0.000 s"
    assert texts[3] == "did not acquire orders/42 within 0.000 s: the holder is web-3"
    assert texts[4] == f"released orders/42 (token {lease.token}, {lease.fingerprint})"


def test_attempt_that_fails_is_logged_at_debug(bench, lines):
    client = bench.client()
    bench.transport.silent = True
    with pytest.raises(Exception, match="silence"):
        client.lock("a").acquire()
    level, _, text = next(line for line in lines() if line[1] == "failed")
    assert (level, text) == ("DEBUG", "acquiring a failed after 0.000 s: Unavailable: silence")


def test_renewals_and_a_lease_at_risk_and_lost_are_logged(bench, lines, wait_until):
    lease = bench.client().lock("a", ttl=30).acquire()
    bench.clock.advance(10)
    wait_until(lambda: "renewed" in [event for _, event, _ in lines()])
    bench.transport.silent = True
    bench.clock.advance(10)
    wait_until(lambda: "at_risk" in [event for _, event, _ in lines()])
    bench.clock.advance(30)
    wait_until(lambda: "lost" in [event for _, event, _ in lines()])
    levels = {event: level for level, event, _ in lines()}
    assert levels["renewed"] == levels["renew_failed"] == "DEBUG"
    assert levels["at_risk"] == levels["lost"] == "WARNING"
    text = next(text for _, event, text in lines() if event == "lost")
    assert text == f"the lease of a (token {lease.token}, {lease.fingerprint}) is lost: unreachable"


def test_lease_that_ends_by_max_hold_is_logged_at_info(bench, lines, wait_until):
    lease = bench.client().lock("a", max_hold=5).acquire()
    bench.clock.advance(6)
    wait_until(lambda: [level for level, event, _ in lines() if event == "lost"] == ["INFO"])
    assert not lease.held


def test_broken_lock_is_logged_with_actor_and_reason(bench, lines):
    lease = bench.client().lock("a").acquire()
    bench.client(holder="mira").break_lock("a", token=lease.token, why="its host is suspended")
    broken = next(line for line in lines() if line[1] == "broken")
    assert broken == ("INFO", "broken", f"mira broke the lock a (token {lease.token}): its host is suspended")


def test_refused_token_is_logged_once_with_and_without_a_lease(bench, lines):
    value = fences.Local("stock/7", 0)
    value.claim(2**53 - 1)
    lease = bench.client().lock("a").acquire()
    for token in (4, lease):
        with pytest.raises(StaleToken):
            value.write(token, 1)
    stale = [line for line in lines() if line[1] == "stale_token"]
    assert [level for level, _, _ in stale] == ["WARNING", "WARNING"]
    assert [f"refused token {token}:" in text for token, (_, _, text) in zip((4, lease.token), stale, strict=True)] == [
        1,
        1,
    ]
    lease.release()


def test_every_kind_of_event_has_a_line():
    fields = {"token": 3, "seconds": 0.5, "fingerprint": LEASE, "reason": "why", "actor": "mira", "why": "reason"}
    for kind in EventKind.__args__:
        record = captured(Event(kind, "redis", "shop", "orders/42", 1.0, **fields))
        assert record.getMessage()
        assert record.leasehold["event"] == kind


def captured(event: Event) -> logging.LogRecord:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append
    logger = logging.getLogger("leasehold")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        log_lines.log_event(event)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return found[0]


# ------------------------------------------------------------------- JSON


def test_json_line_of_a_lost_lease_is_this_to_the_letter():
    tracing.remember(LEASE, TRACE)
    try:
        record = captured(
            Event(
                *("lost", "etcd", "shop", "orders/42", 1.0, 48212, LEASE, "settler-7:214", 412.6, "stalled"),
            )
        )
    finally:
        tracing.forget(LEASE)
    record.created = 1794791564.913
    assert JSONFormatter().format(record) == (
        '{"at":"2026-11-16T01:12:44.913Z","level":"WARNING","logger":"leasehold",'
        f'"message":"the lease of orders/42 (token 48212, {LEASE}) is lost: stalled",'
        '"event":"lost","namespace":"shop","lock":"orders/42","group":"orders/*","token":48212,'
        f'"fingerprint":"{LEASE}","holder":"settler-7:214","engine":"etcd","reason":"stalled","seconds":412.6,'
        f'"trace":"{TRACE}"}}'
    )


def test_json_formatter_takes_any_record():
    try:
        raise ValueError("line\nbreak \u2028")
    except ValueError:
        record = logging.LogRecord("other", logging.ERROR, "f", 1, "it %s", ("broke\n",), sys.exc_info())
    line = JSONFormatter().format(record)
    assert "\n" not in line
    assert line.isascii()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("ERROR", "other", "it broke\n")
    assert "ValueError: line" in found["exception"]
    assert "event" not in found


def test_group_of_the_lock_is_in_its_line():
    record = captured(Event("granted", "redis", "", "orders/42", 1.0, 1, LEASE, "h", 0.1, group="checkout"))
    assert json.loads(JSONFormatter().format(record))["group"] == "checkout"


# ------------------------------------------------------------------ traces


@pytest.mark.parametrize(
    ("traceparent", "expected"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
        (f"01-{TRACE}-00f067aa0ba902b7-01-more", TRACE),
        (f"00-{TRACE}-00f067aa0ba902b7-01-more", None),
        (f"01-{TRACE}-00f067aa0ba902b7-01-more\r\nAuthorization: x", None),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", None),
        ("garbage", None),
        ("", None),
        (None, None),
    ],
)
def test_trace_id_is_read_from_a_well_formed_traceparent_only(traceparent, expected):
    assert tracing.trace_id(traceparent) == expected


def test_any_line_within_a_trace_has_its_id():
    record = logging.LogRecord("leasehold.redis", logging.INFO, "f", 1, "connected", (), None)
    token = tracing.current.set(f"00-{TRACE}-00f067aa0ba902b7-01")
    try:
        assert json.loads(JSONFormatter().format(record))["trace"] == TRACE
    finally:
        tracing.current.reset(token)
    assert "trace" not in json.loads(JSONFormatter().format(record))
