"""What a caller that waits reads in the log: after 10 seconds and then every minute, never more often."""

from __future__ import annotations

import logging

import pytest

from leasehold import Client, NotAcquired, Unavailable
from leasehold.engines.memory import MemoryEngine, MemoryServer
from leasehold.testing.clock import Clock, ClockThreads
from tests.support.client_fixtures import BreakableTransport


class Fleet:
    """Clients of one memory engine on one clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.transport = BreakableTransport(MemoryServer(ClockThreads(self.clock)))
        self.clients: list[Client] = []

    def client(self, holder: str) -> Client:
        def opener(_config, runtime, registry):
            return MemoryEngine(runtime, registry, self.transport)

        runtime = ClockThreads(self.clock)
        self.clients.append(Client("memory://", namespace="shop", holder=holder, engine=opener, runtime=runtime))
        return self.clients[-1]


@pytest.fixture
def fleet():
    fleet = Fleet()
    yield fleet
    fleet.transport.silent = False
    for client in fleet.clients:
        client.close()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="leasehold")
    return lambda: [record for record in caplog.records if record.name == "leasehold.waiting"]


def wait_in_vain(fleet, seconds: float, **options: object) -> None:
    with fleet.clock.skipping(), pytest.raises((NotAcquired, Unavailable)):
        fleet.client("web-4").lock("orders/42", **options).acquire(wait=seconds)


@pytest.mark.parametrize(("seconds", "count"), [(9.9, 0), (10.1, 1), (69, 1), (71, 2), (600, 10)])
def test_waiter_logs_after_ten_seconds_and_then_every_minute(fleet, lines, seconds, count):
    with fleet.client("web-3").lock("orders/42", ttl=30):
        wait_in_vain(fleet, seconds)
    assert len(lines()) == count
    for number, line in enumerate(lines()):
        assert line.leasehold["seconds"] == pytest.approx(10 + 60 * number, abs=0.5)


def test_line_of_a_waiter_names_holder_position_and_time(fleet, lines):
    with fleet.client("web-3").lock("orders/42", ttl=30) as lease:
        wait_in_vain(fleet, 11, group="checkout")
    (line,) = lines()
    assert line.levelno == logging.INFO
    text = line.getMessage()
    assert text.startswith("orders/42 is held by web-3 (")
    assert text.endswith("; waiting for 10 s, at position 0 in the queue (next)")
    assert f"token {lease.token}" in text
    fields = dict(line.leasehold)
    assert fields.pop("seconds") == pytest.approx(10, abs=0.5)
    assert len(fields.pop("fingerprint")) == 16
    assert fields == {
        "event": "waiting",
        "namespace": "shop",
        "lock": "orders/42",
        "group": "checkout",
        "engine": "memory",
        "holder": "web-3",
        "token": lease.token,
        "position": 0,
    }


def test_waiter_logs_that_the_engine_does_not_answer(fleet, lines):
    fleet.transport.silent = True
    wait_in_vain(fleet, 20, on_unavailable="wait")
    (line,) = lines()  # at the first try after 10 s; tries are at most 2 s apart
    seconds = line.leasehold["seconds"]
    assert 10 <= seconds <= 12.5
    assert line.getMessage() == f"orders/42: the engine does not answer; waiting for {seconds:.0f} s: silence"
    assert line.leasehold["error"] == "Unavailable"
