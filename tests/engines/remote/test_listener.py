"""The stream of wake-ups: it moves with its client, comes back after every failure, and without it waiters poll."""

import gc
import json
import logging
import threading
import time
import weakref

import pytest

from leasehold import Client
from leasehold.engines.remote import listener as listener_module
from leasehold.model import Busy, Grant
from tests.support import probe, probe_remote
from tests.support.scripted_server import Raw, free_engine, response
from tests.support.timing import check_elapsed

BUSY = {"busy": [20.0, 0, 3, ["web-1", "h", 1, ""]], "heard": True}


def queued(call):
    return BUSY if call["do"] == "attempt" else free_engine(call)


def wait(driver, claim, seconds):
    began = driver.runtime.now()
    driver.run(driver.engine.wait(claim, Busy(20.0, 0), seconds))
    return driver.runtime.now() - began


def _streams_begun(server):
    return sum(head.startswith("GET") for head in server.heads)


def test_wakeup_ends_the_wait_of_its_claim(driver, start_server):
    server = start_server(queued)
    driver.open(server)
    mine, other = driver.claim(queue=True), driver.claim(queue=True)
    for claim in (mine, other):
        assert driver.attempt(claim) == Busy(20.0, 0, 3, driver.attempt(claim).holder)
    server.push({"wakeup": mine.id_hash, "namespace": "", "name": "job"})
    began = time.monotonic()
    wait(driver, mine, 60.0)
    check_elapsed(began, 2.0)
    assert not driver.registry.waiting[other.id_hash].woken


def test_wakeup_before_the_wait_is_remembered(driver, start_server, wait_until):
    server = start_server(queued)
    driver.open(server)
    claim = driver.claim(queue=True)
    driver.attempt(claim)
    server.push({"wakeup": claim.id_hash, "namespace": "", "name": "job"})
    wait_until(lambda: driver.registry.waiting[claim.id_hash].woken)
    assert wait(driver, claim, 60.0) < 30


def test_wakeup_of_an_unknown_claim_gives_its_reservation_up(driver, start_server, wait_until):
    server = start_server(queued)
    driver.open(server)
    driver.attempt(driver.claim(queue=True))
    stray = "ab" * 16
    server.push({"wakeup": stray, "namespace": "shop", "name": "other"})
    wait_until(lambda: stray in driver.registry.pending_releases)
    claim = driver.registry.pending_releases[stray].claim
    assert (claim.namespace, claim.name, claim.id) == ("shop", "other", "")
    driver.release(claim)
    assert server.calls[-1]["claim"]["id_hash"] == stray
    assert "id" not in server.calls[-1]["claim"]


@pytest.mark.parametrize("how", ["moved", "closed", "another answered"])
def test_stream_moves_with_its_client_and_every_waiter_attempts(driver, start_server, wait_until, how):
    """A wake-up may have been sent while no stream was open, and the new server must learn whom to wake."""
    servers = start_server(queued), start_server(queued)
    driver.open(*servers)
    claim = driver.claim(queue=True)
    driver.attempt(claim)
    wait_until(lambda: servers[0].streams == 1)
    waiter = driver.registry.waiting[claim.id_hash]
    if how == "moved":
        servers[0].push({"moved": True})
    elif how == "closed":
        servers[0].close()
    else:
        driver.servers.prefer(driver.servers.all[1])
    wait_until(lambda: servers[1].streams == 1 and driver.listener.active)
    assert driver.servers.current.index == 1
    wait_until(lambda: waiter.recheck_at is not None)
    began = time.monotonic()
    wait(driver, claim, 60.0)
    check_elapsed(began, 2.0)


def test_stream_comes_back_after_every_failure(driver, start_server, wait_until):
    server = start_server(queued)
    driver.open(server)
    claim = driver.claim(queue=True)
    driver.attempt(claim)
    for number in range(1, 4):
        wait_until(lambda count=number: driver.listener.active and _streams_begun(server) == count)
        server.hang_up()
    wait_until(lambda: driver.listener.active and _streams_begun(server) == 4)


def test_stream_that_ends_at_once_is_opened_ever_less_often(driver, start_server, wait_until):
    """Behind a proxy that cuts off streams, a client opened sixty a second, and its waiters attempted each time."""
    server = start_server(queued)
    event = b"data: " + json.dumps(server.stream_begin).encode() + b"\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(event)
    server.stream_begin = Raw(head + event)
    driver.open(server)
    driver.attempt(driver.claim(queue=True))
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 3)
    assert 3 < _streams_begun(server) < 30
    wait_until(lambda: driver.listener.failing)  # between two streams, no attempt waits for the next one


@pytest.mark.parametrize(
    "begin",
    [
        response(404, "x"),
        response(401, {"type": "x/unauthorized", "detail": "no"}),
        response(200, {}),
        Raw(b"SSH-2.0\r\n"),
        Raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {\n\n"),
        Raw(b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: [{"hello": 1}]\n\n'),
        Raw(b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: [{"wakeup": "x", "name": 7}]\n\n'),
    ],
    ids=range(7),
)
def test_waiters_poll_without_a_stream(driver, start_server, begin):
    server = start_server(queued)
    server.stream_begin = begin
    driver.open(server)
    claim = driver.claim(queue=True)
    for _ in range(3):
        assert isinstance(driver.attempt(claim), Busy)
        assert wait(driver, claim, 60.0) < 30
    server.script = free_engine
    assert isinstance(driver.attempt(claim), Grant)


def test_waiter_polls_if_its_server_cannot_wake_it(driver, start_server):
    """Behind a balancer without affinity, calls and stream meet different servers."""
    server = start_server(lambda call: {**BUSY, "heard": False} if call["do"] == "attempt" else free_engine(call))
    driver.open(server)
    claim = driver.claim(queue=True)
    driver.attempt(claim)
    assert driver.listener.active
    assert wait(driver, claim, 60.0) < 30
    server.script = queued
    driver.attempt(claim)
    assert claim.id_hash not in probe_remote.polling_waiters(driver.engine)


def test_waiters_far_back_poll_less_often(driver, start_server):
    server = start_server(lambda call: {"busy": [None, 20, None, None], "heard": False})
    driver.open(server)
    claim = driver.claim(queue=True)
    busy = driver.attempt(claim)
    began = driver.runtime.now()
    driver.run(driver.engine.wait(claim, busy, 60.0))
    assert driver.runtime.now() - began >= 2.0


def test_unexpected_error_does_not_end_the_listener(driver, start_server, wait_until, monkeypatch, caplog):
    server = start_server(queued)
    broken = [True]

    def fail(value):
        if broken:
            raise RuntimeError("planted")
        return read(value)

    read = listener_module.wire.notifications_from_json
    monkeypatch.setattr(listener_module.wire, "notifications_from_json", fail)
    driver.open(server)
    with caplog.at_level(logging.ERROR, "leasehold.remote"):
        driver.attempt(driver.claim(queue=True))
        wait_until(lambda: "planted" in caplog.text)
    broken.clear()
    wait_until(lambda: driver.listener.active)


def test_break_is_noticed_by_the_stream(start_server, wait_until):
    server = start_server()
    with Client(f"http://127.0.0.1:{server.port}") as client:
        lease = client.lock("job", ttl=600).acquire()
        server.push({"lost": probe.claim(lease).id_hash})
        wait_until(lambda: not lease.held)
        assert lease.lost_reason == "broken"


def listener_threads(earlier):
    """Those that were started since: a client of an earlier test may still be ending."""
    return [thread for thread in set(threading.enumerate()) - earlier if thread.name == "leasehold-remote"]


def test_listener_ends_with_its_client(start_server, wait_until):
    server, earlier_threads = start_server(), set(threading.enumerate())
    client = Client(f"http://127.0.0.1:{server.port}")
    client.lock("job").acquire().release()
    wait_until(lambda: server.streams == 1)
    gone = weakref.ref(probe.registry(client))
    del client

    def collected():
        gc.collect()
        return gone() is None

    wait_until(collected)
    wait_until(lambda: not listener_threads(earlier_threads))


def test_closed_client_has_no_thread(start_server, wait_until):
    server, earlier_threads = start_server(), set(threading.enumerate())
    with Client(f"http://127.0.0.1:{server.port}") as client:
        client.lock("job").acquire().release()
    wait_until(lambda: not listener_threads(earlier_threads))
